"""Models that cannot be loaded, or must not be."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from oomb_accel.cli import main
from tests.robustness.bad_inputs import Bad, Place, check, refused

WEIGHTS = "model.safetensors"


def model(spoil: Callable[[Path], object], *flags: str) -> Callable[[Place], list[str]]:
    """``oomb train`` of a copy of the model that something was done to."""

    def words(place: Place) -> list[str]:
        folder = place.folder / "model"
        shutil.copytree(place.model, folder)
        spoil(folder)
        return ["train", place.recipe(model_name_or_path=str(folder)), *flags]

    return words


def config(**changes: Any) -> Callable[[Path], object]:
    def spoil(folder: Path) -> None:
        values = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps(values))

    return spoil


def cut(name: str, keep: float) -> Callable[[Path], object]:
    """Cut a file off behind a share of it."""

    def spoil(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: int(keep * len(content))])

    return spoil


def weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    def spoil(folder: Path) -> None:
        values = load_file(folder / WEIGHTS)
        change(values)
        save_file(values, folder / WEIGHTS, metadata={"format": "pt"})

    return spoil


def without_a_shard(folder: Path) -> None:
    names = list(load_file(folder / WEIGHTS))
    files = {name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(names)}
    (folder / WEIGHTS).rename(folder / "model-00001-of-00002.safetensors")
    index = {"metadata": {"total_size": 1}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()


class _Touch:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def malicious(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(_Touch(folder / "ran")))
    (folder / WEIGHTS).unlink()


def with_code(folder: Path) -> None:
    """A config that names code in the folder, for the class of the config as well as of the model."""
    names = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    config(model_type="my_own", architectures=["Model"], auto_map=names)(folder)
    (folder / "code.py").write_text(
        "import pathlib\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "pathlib.Path(__file__).with_name('ran').touch()\n"
        f"pathlib.Path({str(folder / 'ran')!r}).touch()\n"
        "class Config(LlamaConfig):\n    model_type = 'my_own'\n"
        "class Model(LlamaForCausalLM):\n    config_class = Config\n"
    )


def tokenizer_code(folder: Path) -> None:
    values = json.loads((folder / "tokenizer_config.json").read_text())
    values["auto_map"] = {"AutoTokenizer": ["code.Tokenizer", None]}
    values["tokenizer_class"] = "Tokenizer"
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    (folder / "code.py").write_text(f"import pathlib\npathlib.Path({str(folder / 'ran')!r}).touch()\n")


def no_tokenizer(folder: Path) -> None:
    for path in folder.glob("*token*"):
        path.unlink()


NAME = "model_name_or_path"
CASES = [
    Bad("no folder", lambda place: ["train", place.recipe(model_name_or_path="./nowhere")], ("nowhere", NAME)),
    Bad("no hub id", lambda place: ["train", place.recipe(model_name_or_path="no body/no model")], ("no body", NAME)),
    Bad("not on the hub", lambda place: ["train", place.recipe(model_name_or_path="nobody/none")], ("nobody/none",)),
    Bad("a file", lambda place: ["train", place.recipe(model_name_or_path=place.write("m", "x"))], ("folder", NAME)),
    Bad("no config", model(lambda folder: (folder / "config.json").unlink()), ("no config.json", NAME)),
    Bad("broken config", model(cut("config.json", 0.5)), ("config.json", NAME)),
    Bad("binary config", model(lambda f: (f / "config.json").write_bytes(b"\xff\0")), ("model", NAME)),
    Bad("config is a list", model(lambda f: (f / "config.json").write_text("[1]")), ("model", NAME)),
    Bad("text for a size", model(config(hidden_size="wide")), ("model", "hidden_size")),
    Bad("a negative size", model(config(num_hidden_layers=-2)), ("model", "num_hidden_layers")),
    Bad("no heads", model(config(num_attention_heads=0)), ("model", NAME)),
    Bad("an unknown architecture", model(config(model_type="foo", architectures=["Foo"])), ("model", "foo")),
    Bad("no language model", model(config(model_type="vit", architectures=["ViT"])), ("model", "ViT")),
    Bad("cut off weights", model(cut(WEIGHTS, 0.7)), (WEIGHTS, NAME)),
    Bad("cut off header", model(cut(WEIGHTS, 0.001)), (WEIGHTS, NAME)),
    Bad("empty weights", model(cut(WEIGHTS, 0)), (WEIGHTS, NAME)),
    Bad("no weights", model(lambda folder: (folder / WEIGHTS).unlink()), ("safetensors", NAME)),
    Bad("a missing shard", model(without_a_shard), ("model-00002-of-00002.safetensors", NAME)),
    Bad("pickled weights", model(pickled), ("safetensors", NAME)),
    Bad("weights that run code", model(malicious), ("safetensors", NAME)),
    Bad("another shape", model(config(intermediate_size=48)), ("mlp", "[32, 64]", "[32, 48]", NAME)),
    Bad("a weight is missing", model(weights(lambda w: w.pop("model.norm.weight"))), ("model.norm.weight", NAME)),
    Bad("NaN in the weights", model(weights(lambda w: w["model.norm.weight"].fill_(float("nan")))), ("finite",), 1),
    Bad("remote code", model(with_code), ("trust_remote_code",)),
    Bad("remote code of a tokenizer", model(tokenizer_code), ("trust_remote_code",)),
    Bad("no tokenizer", model(no_tokenizer), ("tokenizer", "save_pretrained")),
    Bad("broken tokenizer", model(cut("tokenizer.json", 0.5)), ("tokenizer", "save_pretrained")),
    Bad("broken tokenizer config", model(cut("tokenizer_config.json", 0.5)), ("tokenizer", "save_pretrained")),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_refused(case: Bad, place: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place.folder)
    check(case, place, capsys)
    assert not (place.folder / "model" / "ran").exists()


def test_remote_code_runs_when_asked_for(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = model(with_code, "--dry_run")(place)
    message = refused(words, 2, ("trust_remote_code",), capsys)
    assert "trust_remote_code: true" in message and not (place.folder / "model" / "ran").exists()
    main([*words, "--trust_remote_code=true"])
    assert (place.folder / "model" / "ran").exists()


@pytest.mark.parametrize("command", ["verify", "eval", "merge"])
def test_commands_without_a_recipe_run_remote_code_when_asked_for(
    command: str, place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place.folder)
    folder, text = place.folder / "model", place.write("t.txt", "some words " * 99)
    model(with_code)(place)
    words = {
        "verify": ["verify", str(folder), "--chunk_tokens", "64", "--tokens", "100"],
        "eval": ["eval", str(folder), "--data", text, "--parts", "position", "--tokens", "200"],
        "merge": ["merge", str(place.run / "out"), "--model", str(folder), "--output_dir", "merged"],
    }[command]
    message = refused(words, 2, ("comes with Python code",), capsys)
    assert "add --trust_remote_code;" in message and not (folder / "ran").exists()
    assert main([*words, "--trust_remote_code"]) == 0, capsys.readouterr().err
    assert (folder / "ran").exists()
