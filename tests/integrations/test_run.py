"""``oomb run SCRIPT``: unmodified scripts train in chunks, and a run that switched nothing on fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from oomb_accel import cli
from oomb_accel.cli import run
from oomb_accel.sources import LAUNCHED_CONFIG, surroundings
from tests.distributed.ranks import ROOT, needs_deepspeed, run_ranks
from tests.harness.batches import documents_of
from tests.harness.models import sgd_step, tiny_model
from tests.harness.parity import reference
from tests.harness.tolerance import assert_same_gradients, assert_same_total
from tests.integrations.setups import BLOCK, deepspeed_config

RATE = 1.0
LENGTHS = (50, 50)
OPTIONS = ["--oomb.chunk_tokens", "16", "--oomb.page-tokens=4", "--oomb.self_test", "no"]

DATA = """
import os, sys, torch
from accelerate import PartialState
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM
folder = sys.argv[1]
rows = [{"input_ids": ids, "labels": ids} for ids in torch.load(folder + "/data.pt")]
rank = int(os.environ.get("RANK", 0))
def load():
    return AutoModelForCausalLM.from_pretrained(folder + "/model").train()
def save(model):
    state = {name: p.detach().clone() for name, p in model.named_parameters()}
    ranks = PartialState().num_processes
    torch.save({"after": state, "ranks": ranks}, f"{folder}/result{rank}.pt")
"""

LOOP = (
    DATA
    + """
from accelerate import Accelerator
model = load()
accelerator = Accelerator()
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
loader = DataLoader(rows, batch_size=2 // accelerator.num_processes)
prepared, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    loss = prepared(**batch).loss
    accelerator.backward(loss)
    optimizer.step()
save(model)
"""
)

TRAINER = (
    DATA
    + """
from transformers import Trainer, TrainingArguments
model = load()
arguments = TrainingArguments(
    folder + "/out", max_steps=1, learning_rate=1.0, optim="sgd", lr_scheduler_type="constant", max_grad_norm=0,
    per_device_train_batch_size=2 // int(os.environ.get("WORLD_SIZE", 1)), report_to="none", disable_tqdm=True,
    logging_steps=1, save_strategy="no", deepspeed=sys.argv[2] if len(sys.argv) > 2 else None)
trainer = Trainer(model=model, args=arguments, train_dataset=rows)
trainer.train()
save(model)
"""
)

LOGGED_LOSS = """
import os, pathlib, sys
(loss,) = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
pathlib.Path(sys.argv[1], f'loss of rank {os.environ["RANK"]}').write_text(repr(loss))
"""

DEEPSPEED = (
    DATA
    + """
import deepspeed
model = load()
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=sys.argv[2])
loss = engine(**{name: torch.stack([row[name] for row in rows]) for name in rows[0]}).loss
engine.backward(loss)
engine.step()
save(model)
"""
)

EVALUATION = (
    DATA
    + """
from accelerate import Accelerator
model = Accelerator(cpu=True).prepare(load())
with torch.no_grad():
    model(**{name: value[None] for name, value in rows[0].items()})
"""
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a model, documents and the scripts of this file."""
    tiny_model().save_pretrained(tmp_path / "model")
    torch.save([document.ids for document in documents_of(*LENGTHS)], tmp_path / "data.pt")
    for name, text in {
        "loop": LOOP,
        "trainer": TRAINER,
        "engine": DEEPSPEED,
        "evaluation": EVALUATION,
        "nothing": "print('nothing')",
        "leaves": "import sys; sys.exit(int(sys.argv[1]))",
        "says": "import sys; sys.exit('this is why')",
        "raises": "raise KeyError('from the script')",
        "arguments": "import sys; assert sys.argv[1:] == ['--oomb.chunk_tokens', '--x=1'], sys.argv; import beside",
        "beside": "print('found the module beside the script')",
    }.items():
        (tmp_path / f"{name}.py").write_text(text)
    return tmp_path


def check_result(folder: Path, rank: int, ranks: int = 1) -> None:
    """One step of gradient descent on both documents, by ranks that worked together."""
    got = torch.load(folder / f"result{rank}.pt")
    assert got["ranks"] == ranks
    model = tiny_model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    wanted = reference(model, documents_of(*LENGTHS))
    sgd_step(model, RATE)
    updates = {name: (before[name] - got["after"][name]) / RATE for name in before}
    assert_same_gradients(updates, wanted.gradients)


def _oomb(rank: int, words: list[str]) -> int:
    return cli.main(words)


def run_script(
    folder: Path, *words: str, options: list[str] | None = None, ranks: int = 1, **environment: str
) -> tuple[list[int], str]:
    """``oomb run`` on ranks; returns exit codes, and what rank 0 has written."""
    script, *rest = words
    command = ["run", *(OPTIONS if options is None else options), str(folder / f"{script}.py"), *rest]
    codes = run_ranks(_oomb, command, folder=folder, ranks=ranks, environment=environment)
    return codes, (folder / "rank0.log").read_text()


def test_an_accelerate_loop(folder: Path) -> None:
    assert run_script(folder, "loop", str(folder))[0] == [0]
    check_result(folder, 0)


def test_an_accelerate_loop_on_two_ranks_without_a_gpu(folder: Path) -> None:
    assert run_script(folder, "loop", str(folder), ranks=2)[0] == [0, 0]
    for rank in range(2):
        check_result(folder, rank, ranks=2)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_trainer(folder: Path, ranks: int) -> None:
    codes, text = run_script(folder, "trainer", str(folder), ranks=ranks)
    assert codes == [0] * ranks
    for rank in range(ranks):
        check_result(folder, rank, ranks)
    assert "chunks     16 tokens" in text


@needs_deepspeed
@pytest.mark.parametrize("script", ["loop", "trainer"])
def test_two_ranks_under_deepspeed_with_the_block_of_the_launch(folder: Path, script: str) -> None:
    path = folder / "ds.json"
    path.write_text(json.dumps(deepspeed_config(2, {**BLOCK, "keep_outputs": "auto"})))
    environment = {LAUNCHED_CONFIG: str(path), "ACCELERATE_USE_DEEPSPEED": "true"}
    codes, _ = run_script(folder, script, str(folder), options=[], ranks=2, **environment)
    assert codes == [0, 0]
    for rank in range(2):
        check_result(folder, rank, ranks=2)


@needs_deepspeed
@pytest.mark.parametrize("script", ["trainer", "engine"])
def test_a_config_among_the_arguments_of_the_script_is_found(folder: Path, script: str) -> None:
    path = folder / "ds.json"
    path.write_text(json.dumps(deepspeed_config(2, BLOCK) | {"train_micro_batch_size_per_gpu": 2}))
    assert run_script(folder, script, str(folder), str(path), options=[])[0] == [0]
    check_result(folder, 0)


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (["nothing"], 1, "nothing.py ended without a training step in chunks"),
        (["evaluation", "FOLDER"], 1, "ended without a training step in chunks"),
        (["leaves", "7"], 7, ""),
        (["leaves", "0"], 1, "ended without a training step in chunks"),
        (["says"], 1, "this is why"),
        (["raises"], 1, "KeyError: 'from the script'"),
        (["arguments", "--oomb.chunk_tokens", "--x=1"], 1, "found the module beside the script"),
    ],
)
def test_exit_codes(folder: Path, words: list[str], code: int, expected: str) -> None:
    codes, text = run_script(folder, *(str(folder) if word == "FOLDER" else word for word in words))
    assert codes == [code] and expected in text


def test_a_run_that_is_switched_off_is_a_plain_run(folder: Path) -> None:
    codes, text = run_script(folder, "nothing", options=["--oomb.enabled", "false"])
    assert codes == [0] and "without a training step" not in text


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A script that must not be reached; nothing may be installed either."""
    for variable in [name for name in os.environ if name.startswith("OOMB_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setattr(run, "_run", lambda words: pytest.fail("the script was started"))
    before = dict(os.environ)
    path = tmp_path / "script.py"
    path.write_text("")
    yield str(path)
    for variable in set(os.environ) - set(before):
        del os.environ[variable]


def refusal(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(["run", *words]) in (cli.FAILED, cli.MISUSED)
    return capsys.readouterr().err


def test_without_settings_the_defaults_hold(script: str, tmp_path: Path) -> None:
    other = tmp_path / "data.json"
    other.write_text('{"oomb": {"chunk_tokens": 1}}')  # no DeepSpeed config
    assert run._check_requested(["--data", str(other)])
    assert surroundings(os.environ)[0].values == {"enabled": True}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--oomb.chunk_token", "16"], "Did you mean '--oomb.chunk_tokens'"),
        (["--oomb_conf", "x"], "Did you mean '--oomb_config'"),
        (["--jsn"], "Did you mean '--json'"),
        (["--oomb.chunk_tokens", "many"], "In --oomb.chunk_tokens: chunk_tokens has a value that is not allowed."),
        (["--oomb.page-tokens", "many"], "In --oomb.page_tokens: "),
        (["--oomb.chunk_tokens", "64"], "In --oomb.chunk_tokens: A chunk must"),
        (["--oomb_config", "nowhere.yaml"], "'nowhere.yaml' cannot be read"),
    ],
)
def test_wrong_options(words: list[str], expected: str, script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert expected in refusal([*words, script], capsys)


def test_the_banner_names_what_was_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    environment: dict[str, str] = {}
    run._into_environment([("oomb.chunk_tokens", "512")], environment)
    places = [source.place_of("chunk_tokens") for source in surroundings(environment)]
    assert places == ["--oomb.chunk_tokens"]
    environment["OOMB_CHUNK_TOKENS"] = "1024"  # somebody else's
    assert [source.place_of("chunk_tokens") for source in surroundings(environment)] == ["OOMB_CHUNK_TOKENS"]


def test_calls_without_a_script(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "give the path of a script" in refusal(["--oomb.chunk_tokens", "512"], capsys)
    assert "has no value" in refusal(["--oomb.chunk_tokens"], capsys)
    assert "does not exist" in refusal(["--oomb.chunk_tokens", "512", "nowhere.py"], capsys)
    assert cli.main(["run", "--help"]) == 0 and "--oomb_config" in capsys.readouterr().out


def test_an_option_against_the_environment_names_both(
    script: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OOMB_CHUNK_TOKENS", "1024")
    text = refusal(["--oomb.chunk_tokens", "512", script], capsys)
    assert "--oomb.chunk_tokens 512 on the command line, and OOMB_CHUNK_TOKENS=1024" in text


def test_a_preset_against_the_block_names_both(
    script: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config, preset = tmp_path / "ds.json", tmp_path / "preset.yaml"
    config.write_text(json.dumps(deepspeed_config(2, {"chunk_tokens": 512})))
    preset.write_text("chunk_tokens: 1024\n")
    monkeypatch.setenv(LAUNCHED_CONFIG, str(config))
    text = refusal(["--oomb_config", str(preset), script], capsys)
    assert f"chunk_tokens=1024 in {preset}" in text and f"chunk_tokens=512 in {config}" in text


@needs_deepspeed
@pytest.mark.timeout(240)
def test_by_accelerate_launch_on_two_ranks_under_zero_3(folder: Path) -> None:
    """The command of the manual, as a user types it."""
    path = folder / "ds.json"
    path.write_text(json.dumps(deepspeed_config(3, {"page_tokens": 4}, gradient_clipping=0)))
    launch = ["-m", "accelerate.commands.launch", "--use_deepspeed", "--deepspeed_config_file", str(path)]
    launch += ["--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    launch += ["--main_process_port", "0", "-m", "oomb_accel", "run", *OPTIONS]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")]),
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "LOCAL_SIZE": "2",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    (folder / "trainer.py").write_text(TRAINER.replace("\nsave(model)", LOGGED_LOSS))
    done = subprocess.run(
        [sys.executable, *launch, str(folder / "trainer.py"), str(folder)],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (said,) = {(folder / f"loss of rank {rank}").read_text() for rank in range(2)}
    assert_same_total(torch.tensor(float(said)), reference(tiny_model(), documents_of(*LENGTHS)).loss)
    assert "chunks     16 tokens" in done.stdout + done.stderr
