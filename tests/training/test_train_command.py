"""`oomb train` around the run: dry runs, the resolved configuration, going on by one flag, signals, JSON."""

from __future__ import annotations

import errno
import json
import os
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from oomb_accel.cli import main
from oomb_accel.cli.train import _split
from oomb_accel.plan.sizes import DTYPE_BYTES
from oomb_accel.training import loop
from oomb_accel.training.dry_run import plan_training
from oomb_accel.training.interrupt import SAME_SECONDS, Stopped, StopSignals, reason
from oomb_accel.training.recipe import Recipe
from oomb_accel.training.resolved import resolved_yaml
from tests.distributed.ranks import needs_deepspeed
from tests.training.ranks_train import launched

Write = Callable[[dict[str, Any]], Path]


def losses(out: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("words", "settings", "switches"),
    [
        (["--resume"], ["--resume_from_checkpoint=latest"], {}),
        (["--resume", "a/checkpoint-2"], ["--resume_from_checkpoint=a/checkpoint-2"], {}),
        (["--resume=x", "--seed", "1"], ["--resume_from_checkpoint=x", "--seed", "1"], {}),
        (["--seed", "1", "--dry-run", "--json"], ["--seed", "1"], {"dry_run": True, "json": True}),
        (["--dry_run", "--gpus", "8", "--gpu=a100"], [], {"dry_run": True, "gpus": 8, "gpu": "a100"}),
        (["--use_dora", "--json"], ["--use_dora"], {"json": True}),
    ],
    ids=str,
)
def test_switches_are_no_settings(words: list[str], settings: list[str], switches: dict[str, Any]) -> None:
    found, rest = _split(words)
    assert rest == settings
    assert {
        name: getattr(found, name) for name in ("dry_run", "json", "gpu", "gpus") if getattr(found, name)
    } == switches


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpu", "h100"], "are for a dry run"),
        (["--dry_run", "--gpus", "none"], "Write --gpus 8"),
        (["--dry_run", "--gpus", "0"], "Got '0'"),
        (["--dry_run", "--gpu"], "has no value"),
        (["--dry_run", "--gpu", "h1000"], "Did you mean"),
        (["--dri_run", "true"], "Did you mean '--dry_run'?"),
        (["--dryrun"], "Did you mean '--dry_run'?"),
        (["--dryRun", "--data_path", "x"], "Did you mean '--dry_run'?"),
        (["--dry"], "Did you mean '--dry_run'?"),
        (["--resum", "x"], "Did you mean '--resume'?"),
        (["--jsn"], "Did you mean '--json'?"),
        (["--dry_run", "--gpu_s=2"], "Did you mean '--gpus'?"),
        (["--lora_rr", "8"], "Did you mean '--lora_r'?"),
    ],
    ids=str,
)
def test_wrong_switches(
    settings: dict[str, Any], write_recipe: Write, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(write_recipe(settings)), *words]) == 2
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error


def rows(tmp_path: Path, lengths: list[int]) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"text": "x" * (length - 1)}) for length in lengths))
    return str(path)


def test_a_dry_run_writes_nothing(
    settings: dict[str, Any],
    write_recipe: Write,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop, "train", lambda recipe: pytest.fail("it trained"))
    monkeypatch.setattr("oomb_accel.training.model.AutoModelForCausalLM.from_pretrained", lambda *_, **__: 1 / 0)
    changed = settings | {"data_path": rows(tmp_path, [40, 100, 300]), "max_steps": None, "num_train_epochs": 4}
    path = write_recipe(changed | {"gradient_accumulation_steps": 2})
    before = sorted(tmp_path.rglob("*"))
    assert main(["train", str(path), "--dry-run", "--json"]) == 0
    said = capsys.readouterr()
    plan = json.loads(said.out)
    assert (plan["documents"], plan["tokens"], plan["longest"]) == (3, 440, 300)
    assert (plan["steps"], plan["steps_per_epoch"], plan["documents_per_step"]) == (8, 2, 2)
    assert plan["trained_tokens"] == 437 and plan["tokens_per_step"] == 220
    assert plan["estimate"]["tokens"] == 300 and plan["config"]["oomb"]["chunk_tokens"] == 64
    assert plan["seconds"] > 0 and plan["fits"] is True
    assert main(["train", str(path), "--dry_run", "--gpus", "2"]) == 0
    text = capsys.readouterr().out
    for words in ("3 documents, 440 tokens, 437 of them trained", "4 of 4 documents", "It fits.", "no GPU here"):
        assert words in text
    assert "no GPU here" in text.splitlines()[1] and " 0:00" not in text and "time    about " in text
    assert sorted(tmp_path.rglob("*")) == before


def test_a_dry_run_over_a_finished_run(
    settings: dict[str, Any], write_recipe: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    """It writes nothing, so it says what a run would be refused for and goes on."""
    path = str(write_recipe(settings | {"max_steps": 1}))
    assert main(["train", path]) == 0
    before = {item: item.stat().st_mtime_ns for item in Path(settings["output_dir"]).rglob("*")}
    capsys.readouterr()
    assert main(["train", path, "--dry_run"]) == 0
    said = " ".join(capsys.readouterr().out.split())  # lines are folded, by the length of paths
    assert "a run would be refused: output_dir" in said and "holds another run" in said and "It fits." in said
    assert {item: item.stat().st_mtime_ns for item in Path(settings["output_dir"]).rglob("*")} == before
    assert main(["train", path]) == 2


@pytest.mark.parametrize(
    ("changes", "gpu", "dtype"),
    [
        ({"torch_dtype": "float32"}, None, "float32"),
        ({"torch_dtype": "float32", "mixed_precision": "no"}, None, "float32"),
        ({"torch_dtype": "float32", "mixed_precision": "no"}, "h100", "float32"),
        ({"torch_dtype": "float32"}, "h100", "bfloat16"),
        ({"torch_dtype": "bfloat16"}, None, "bfloat16"),
    ],
    ids=str,
)
def test_a_dry_run_counts_pages_in_the_dtype_of_the_run(
    settings: dict[str, Any],
    write_recipe: Write,
    changes: dict[str, Any],
    gpu: str | None,
    dtype: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write_recipe(settings | changes)
    plan = plan_training(Recipe.from_yaml(path), gpu=gpu)
    assert plan.cost is not None and plan.cost.estimate.job.pages.value_dtype == dtype
    assert main(["train", str(path), "--dry_run", *(["--gpu", gpu] if gpu else [])]) == 0
    assert f"pages {dtype}, their gradients" in capsys.readouterr().out


def test_a_dry_run_that_does_not_fit(
    settings: dict[str, Any], write_recipe: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A large model on a small GPU: exit code 1, and what to change."""
    model = tmp_path / "large"
    model.mkdir()
    for file in Path(settings["model_name_or_path"]).iterdir():
        if file.suffix == ".json":
            (model / file.name).write_bytes(file.read_bytes())
    config = json.loads((model / "config.json").read_text())
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    (model / "config.json").write_text(json.dumps(config | sizes | {"head_dim": 128, "num_key_value_heads": 8}))
    path = write_recipe(settings | {"model_name_or_path": str(model)})
    assert main(["train", str(path), "--dry_run", "--gpu", "rtx4090", "--json"]) == 1
    plan = json.loads(capsys.readouterr().out)
    assert not plan["fits"] and "does not fit" in plan["estimate"]["refusal"]
    assert main(["train", str(path), "--dry_run", "--gpu", "rtx4090"]) == 1
    text = capsys.readouterr().out
    assert "It does not fit. The model does not fit on the GPU." in text
    assert plan["seconds"] is None and plan["estimate"]["seconds"] is None
    assert "time    none: a step with the longest stream does not fit" in text and "linear layers" not in text


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_name_or_path": "./nowhere"}, "is not a folder"),
        ({"revision": "v1"}, "A folder has no revisions."),
        ({"data_path": "nowhere.txt"}, "no data"),
        ({"rope_parameters": {"rope_type": "foo"}}, "rope_type"),
    ],
    ids=str,
)
def test_a_dry_run_refuses_what_a_run_would(
    settings: dict[str, Any],
    write_recipe: Write,
    changes: dict[str, Any],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", str(write_recipe(settings | changes)), "--dry_run"]) == 2
    assert said in capsys.readouterr().err


def launch(monkeypatch: pytest.MonkeyPatch, environment: Mapping[str, str]) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


@needs_deepspeed
@pytest.mark.parametrize(
    ("written", "stage", "offload"),
    [
        (None, 3, False),
        ({}, 3, False),
        ({"stage": 0}, 0, False),
        ({"stage": "auto", "offload_optimizer": {"device": "auto"}}, 3, False),
        ({"stage": 1, "offload_optimizer": {"device": "cpu"}}, 1, True),
    ],
    ids=str,
)
def test_a_dry_run_plans_the_stage_of_the_launch(
    settings: dict[str, Any],
    write_recipe: Write,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    written: dict[str, Any] | None,
    stage: int,
    offload: bool,
) -> None:
    """What Accelerate makes of an "auto", or of no file at all, which it calls none."""
    launch(monkeypatch, launched(3, None if written is None else tmp_path, zero_optimization=written or {}))
    if written is None:
        monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    machine = plan_training(Recipe.from_yaml(write_recipe(settings))).machine
    assert (machine.zero_stage, machine.zero_offload) == (stage, offload)


@needs_deepspeed
def test_a_dry_run_has_the_settings_of_the_launch(
    settings: dict[str, Any],
    write_recipe: Write,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    launch(monkeypatch, launched(2, tmp_path, oomb={"page_dtype": "float8", "chunk_tokens": "auto"}))
    path = write_recipe(settings | {"oomb": {"page_tokens": 16}})
    assert main(["train", str(path), "--dry_run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert {name: plan["config"]["oomb"][name] for name in ("page_dtype", "chunk_tokens", "page_tokens")} == {
        "page_dtype": "float8",
        "chunk_tokens": "auto",
        "page_tokens": 16,
    }
    assert any("chunk_tokens=" in reason for reason in plan["chosen"])


@needs_deepspeed
@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"oomb": {"chunk_tokens": 32}}, "chunk_tokens is set in two places"),
        ({"oomb": {"chunk_tokns": 32}}, "'chunk_tokens'"),
        ({"gradient_clipping": 0.3}, "max_grad_norm=1.0 in the recipe"),
        ({"train_batch_size": 7}, "batch size x accumulation x ranks=4"),
        ({"fp16": {"enabled": True}}, "fp16 is not supported"),
        ({"bf16": {"enabled": False}}, "mixed_precision=bf16 in the recipe"),
    ],
    ids=str,
)
def test_a_dry_run_refuses_a_launch_that_the_run_would(
    settings: dict[str, Any],
    write_recipe: Write,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    config: dict[str, Any],
    said: str,
) -> None:
    launch(monkeypatch, launched(2, tmp_path, **config))
    path = write_recipe(settings | {"mixed_precision": "bf16"})
    assert main(["train", str(path), "--dry_run", "--gpus", "4"]) == 2
    assert said in capsys.readouterr().err


@needs_deepspeed
@pytest.mark.parametrize(("bf16", "itemsize"), [(True, 2), (False, 4)])
def test_a_dry_run_knows_the_precision_of_the_launch(
    settings: dict[str, Any],
    write_recipe: Write,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    bf16: bool,
    itemsize: int,
) -> None:
    launch(monkeypatch, launched(1, tmp_path, bf16={"enabled": bf16}))
    plan = plan_training(Recipe.from_yaml(write_recipe(settings | {"lora_r": 0})))
    assert plan.cost is not None
    job = plan.cost.estimate.job
    assert (DTYPE_BYTES[job.weights_dtype], DTYPE_BYTES[job.compute_dtype]) == (itemsize, itemsize)


def test_the_command_line_replaces_a_preset(
    settings: dict[str, Any],
    write_recipe: Write,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    preset = tmp_path / "preset.yaml"
    preset.write_text("span_tokens: 64\n")
    monkeypatch.setenv("OOMB_CONFIG", str(preset))
    assert main(["train", str(write_recipe(settings)), "--oomb.span_tokens", "32"]) == 0, capsys.readouterr().err
    text = (Path(settings["output_dir"]) / "config.yaml").read_text()
    assert "span_tokens: 32  # flag" in text


def test_the_resolved_configuration(
    settings: dict[str, Any],
    write_recipe: Write,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """Every setting with its source; it starts the same run again, goes on, and refuses to overwrite by itself."""
    monkeypatch.setenv("OOMB_SPAN_TOKENS", "32")
    out = Path(settings["output_dir"])
    path = write_recipe(settings | {"lora_target_modules": ["q_proj", "v_proj"], "overwrite_output_dir": True})
    assert main(["train", str(path), "--learning-rate", "0.01", "--oomb.page_tokens=32", "--json"]) == 0
    said = capsys.readouterr()
    summary = json.loads(said.out)
    assert summary["steps"] == 3 and "step 3/3" in said.err
    text = (out / "config.yaml").read_text()
    lines = text.splitlines()
    for line in (
        "learning_rate: 0.01  # flag",
        "max_steps: 3  # recipe",
        "weight_decay: 0.0  # default",
        "lora_target_modules:  # recipe",
        "  chunk_tokens: 64  # recipe",
        "  page_tokens: 32  # flag",
        "  span_tokens: 32  # OOMB_SPAN_TOKENS",
        "  top_k: 64  # default",
    ):
        assert line in lines, line
    assert "overwrite_output_dir" not in yaml.safe_load(text) and "resume_from_checkpoint" not in yaml.safe_load(text)
    monkeypatch.delenv("OOMB_SPAN_TOKENS")
    first = losses(out)
    assert main(["train", str(out / "config.yaml")]) == 2
    assert "holds another run" in capsys.readouterr().err
    assert main(["train", str(out / "config.yaml"), "--output_dir", str(tmp_path / "again")]) == 0
    assert losses(tmp_path / "again") == first
    assert main(["train", str(out / "config.yaml"), "--resume"]) == 0
    assert "is done: 3 of 3 steps" in capsys.readouterr().out


def signal_in(monkeypatch: pytest.MonkeyPatch, number: int, step: int, where: str) -> None:
    """Send a signal to this process in a step: within its sweeps, or within its update."""
    from oomb_accel.pages import PagedKVCache
    from oomb_accel.training import step as steps

    plain_step = loop.run_step
    plain: Any = PagedKVCache.add_gradients if where == "backward" else steps._check_finite
    armed = {"on": False}

    def run_step(*args: Any, **named: Any) -> Any:
        armed["on"] = named["number"] == step
        return plain_step(*args, **named)

    def sending(*args: Any, **named: Any) -> Any:
        if armed["on"] and (where == "backward" or args[2] == "gradient norm"):
            armed["on"] = False
            if where == "update":
                args[0].updating = True
            os.kill(os.getpid(), number)
        return plain(*args, **named)

    monkeypatch.setattr(loop, "run_step", run_step)
    if where == "backward":
        monkeypatch.setattr(PagedKVCache, "add_gradients", sending)
    else:
        monkeypatch.setattr(steps, "_check_finite", sending)


@pytest.mark.parametrize(
    ("number", "where", "code", "done"),
    [
        (signal.SIGINT, "backward", 130, 2),
        (signal.SIGTERM, "backward", 143, 2),
        (signal.SIGINT, "update", 130, 3),  # what has begun to change is finished first
    ],
    ids=str,
)
def test_a_signal_stops_and_saves(
    settings: dict[str, Any],
    write_recipe: Write,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: int,
    where: str,
    code: int,
    done: int,
) -> None:
    whole = str(tmp_path / "whole")
    path = write_recipe(settings | {"max_steps": 4})
    assert main(["train", str(path), "--output_dir", whole]) == 0
    before = [signal.getsignal(item) for item in (signal.SIGINT, signal.SIGTERM)]
    capsys.readouterr()
    out = Path(settings["output_dir"])
    with monkeypatch.context() as patch:
        signal_in(patch, number, 3, where)
        assert main(["train", str(path)]) == code
    assert [signal.getsignal(item) for item in (signal.SIGINT, signal.SIGTERM)] == before
    said = capsys.readouterr()
    assert f"stopped after step {done} of 4" in said.out and "Traceback" not in said.err
    line = next(text for text in said.out.splitlines() if "the last save is" in text)
    assert (
        f"the last save is {out / f'checkpoint-{done}'}; go on with: oomb train {out / 'config.yaml'} --resume" in line
    )
    assert not list(out.glob(".*"))
    words = line.split("go on with: oomb ")[1].split(";")[0].split()
    assert main(words) == 0
    assert losses(out) == losses(Path(whole))


def test_signals_that_only_another_thread_can_see() -> None:
    """The main thread may wait in autograd, where no handler is called."""
    seen: list[type[BaseException]] = []

    def worker() -> None:
        try:
            while not seen:
                stop.check()
        except Stopped as error:
            seen.append(type(error))

    with StopSignals(lambda: False) as stop:
        handler = signal.getsignal(signal.SIGINT)
        assert callable(handler)
        stop._note(None)
        thread = threading.Thread(target=worker)
        signal.pthread_sigmask(signal.SIG_BLOCK, ())
        os.write(stop._pipe[1], bytes([signal.SIGINT]))  # type: ignore[index]  # as the interpreter does
        thread.start()
        thread.join(10)
        assert seen == [Stopped]
        handler(signal.SIGINT, None)  # when the main thread runs again: the same signal, said already
        stop.check()


def test_the_second_signal_stops_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    now = [0.0]
    monkeypatch.setattr("oomb_accel.training.interrupt.time.monotonic", lambda: now[0])
    with StopSignals(lambda: False) as stop:
        with pytest.raises(Stopped) as caught:
            os.kill(os.getpid(), signal.SIGINT)
        assert caught.value.exit_code == 130
        monkeypatch.setattr("oomb_accel.training.interrupt.os.kill", lambda _, number: sent.append(number))
        stop._handle(signal.SIGINT, None)  # the launcher passes on the same one
        stop._handle(signal.SIGTERM, None)
        assert sent == []
        now[0] += 2 * SAME_SECONDS
        stop._handle(signal.SIGINT, None)
        assert sent == [signal.SIGINT] and signal.getsignal(signal.SIGINT) == signal.SIG_DFL


def test_a_handler_that_python_did_not_set_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = signal.getsignal
    before = plain(signal.SIGTERM)
    monkeypatch.setattr(signal, "getsignal", lambda number: None if number == signal.SIGTERM else plain(number))
    with StopSignals(lambda: False) as stop:
        assert plain(signal.SIGTERM) is before
        assert plain(signal.SIGINT) == stop._handle
    assert plain(signal.SIGTERM) is before


def test_output_is_plain_where_nobody_looks(
    settings: dict[str, Any], write_recipe: Write, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(write_recipe(settings | {"max_steps": 1}))]) == 0
    said = capfd.readouterr()
    assert "\x1b" not in said.out + said.err and "\r" not in said.out


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_cpu_is_better_off_without_bf16(
    settings: dict[str, Any], write_recipe: Write, dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(write_recipe(settings | {"max_steps": 1, "torch_dtype": dtype}))]) == 0
    assert capsys.readouterr().out.count("torch_dtype: float32 is faster") == (dtype == "bfloat16")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (Stopped(signal.SIGINT), "Ctrl-C"),
        (Stopped(signal.SIGTERM), "SIGTERM"),
        (KeyboardInterrupt(), "Ctrl-C"),
        (OSError(errno.ENOSPC, "No space left on device"), "the disk is full"),
        (ValueError("The loss is no number.\n  Got nan.\n  Lower learning_rate."), "The loss is no number"),
        (ZeroDivisionError(), "ZeroDivisionError"),
    ],
)
def test_why_a_run_stopped(error: BaseException, words: str) -> None:
    assert reason(error) == words


def test_the_command_to_go_on_with_is_quoted() -> None:
    recipe = Recipe(model_name_or_path="model", data_path="text", output_dir="my run")
    assert "oomb train 'my run/config.yaml' --resume" in resolved_yaml(recipe, {})
