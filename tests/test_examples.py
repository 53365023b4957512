"""Every example of launch/examples runs on a tiny model, its loss falls, and plain PEFT loads what it saves."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.configs.launching import run_script
from tests.distributed.ranks import run_ranks
from tests.harness.folders import byte_tokenizer, save_tiny_model

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "launch" / "examples"
TEXT = "the quick brown fox jumps over the lazy dog. " * 20
CHUNK, STEPS, RATE = 256, 6, 0.005  # four chunks of the text
LOSS = re.compile(r"(?:'loss': '?|\bloss )([0-9.]+)")


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model and a document."""
    folder = tmp_path_factory.mktemp("examples")
    save_tiny_model(folder / "model", "llama", max_position_embeddings=2048)
    (folder / "text.txt").write_text(TEXT)
    return folder


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate keeps device and precision for the whole process; each example starts without."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    AcceleratorState._reset_state(reset_partial_state=True)


def run_here(name: str, *arguments: object) -> None:
    """Run an example in this process: importing torch and transformers again would take most of the time."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main([str(argument) for argument in arguments])


def check(printed: str, material: Path, output: Path) -> None:
    """The printed losses fall, and the adapter gives plain full attention the loss that training had reached."""
    losses = [float(number) for number in LOSS.findall(printed)]
    assert len(losses) >= STEPS and losses[-1] < losses[0] / 2, printed
    ids = torch.tensor([byte_tokenizer()(TEXT)["input_ids"]])
    base = AutoModelForCausalLM.from_pretrained(material / "model")
    with torch.no_grad():
        before = float(base(input_ids=ids, labels=ids).loss)
        after = float(PeftModel.from_pretrained(base, str(output)).eval()(input_ids=ids, labels=ids).loss)
    assert before == pytest.approx(losses[0], abs=0.02)  # DeepSpeed's is in bf16, SFTTrainer adds an end token
    assert after < losses[-1]  # the last one was printed before the last update


@pytest.mark.parametrize("name", ["plain_pytorch", "accelerate_loop", "trainer", "sft_trainer"])
def test_example(name: str, material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if name == "sft_trainer":
        pytest.importorskip("trl", reason="the example needs trl: pip install 'oomb_accel[trl]'")
    count = "--epochs" if name == "accelerate_loop" else "--steps"
    options = ("--output_dir", tmp_path / "out", "--chunk_tokens", CHUNK, count, STEPS, "--learning_rate", RATE)
    run_here(name, material / "model", material / "text.txt", *options)
    check(capsys.readouterr().out, material, tmp_path / "out")


def test_deepspeed_example(material: Path, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed", reason="the example needs deepspeed: pip install 'oomb_accel[deepspeed]'")
    config = json.loads((EXAMPLES / "deepspeed_json.json").read_text())
    config["oomb"]["chunk_tokens"] = CHUNK
    (tmp_path / "ds.json").write_text(json.dumps(config))
    words = [str(material / "model"), str(material / "text.txt"), "--config", str(tmp_path / "ds.json")]
    words += ["--output_dir", str(tmp_path / "out"), "--epochs", str(STEPS), "--learning_rate", str(RATE)]
    run_ranks(run_script, str(EXAMPLES / "deepspeed_json.py"), words, folder=tmp_path / "ranks", ranks=1)
    check((tmp_path / "ranks" / "rank0.log").read_text(), material, tmp_path / "out")


def test_examples_are_short_and_listed() -> None:
    listed = (EXAMPLES / "README.md").read_text()
    for path in sorted(EXAMPLES.glob("*.py")):
        assert len(path.read_text().splitlines()) < 80, path.name
        assert f"({path.name})" in listed
        command = path.read_text().split('"""')[1].strip().splitlines()[2].rstrip("\\").strip()
        assert f"launch/examples/{path.name}" in listed and command.split()[0] in listed
