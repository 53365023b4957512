"""`oomb train` from end to end, on a tiny model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from oomb_accel.cli import main
from oomb_accel.sources import gather, resolve
from oomb_accel.training import Recipe, dry_run, loop, setup, train

Write = Callable[[dict[str, Any]], Path]


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def recipe_of(settings: dict[str, Any], write_recipe: Write, **changes: Any) -> Recipe:
    return Recipe.from_yaml(write_recipe(settings | changes))


def test_a_run_leaves_what_it_promises(
    settings: dict[str, Any], write_recipe: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_recipe(settings | {"eval_last_tokens": 32, "save_steps": 2, "max_steps": 6})
    assert main(["train", str(path), "--seed", "7"]) == 0
    out = Path(settings["output_dir"])
    rows = metrics(out)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    tokens = len(AutoTokenizer.from_pretrained(out)(Path(settings["data_path"]).read_text())["input_ids"]) + 1
    assert all(row["tokens"] == tokens and row["trained_tokens"] == tokens - 1 for row in rows)
    assert rows[-1]["num_input_tokens_seen"] == 6 * tokens
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.3  # the text repeats itself
    assert all(row["grad_norm"] > 0 and row["seconds"] > 0 and row["learning_rate"] == 0.02 for row in rows)
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["steps"], summary["first_loss"], summary["last_loss"]) == (
        6,
        rows[0]["loss"],
        rows[-1]["loss"],
    )
    assert summary["last_tokens_loss_after"] < summary["last_tokens_loss_before"]
    assert yaml.safe_load((out / "config.yaml").read_text())["seed"] == 7
    assert {item.name for item in out.glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-4", "checkpoint-6"}
    assert not list(out.glob(".*"))
    printed = capsys.readouterr().out
    for words in (
        "LlamaForCausalLM",
        "step 6/6 | loss",
        "PeftModel.from_pretrained",
        "on the last 32 tokens",
    ):
        assert words in printed


@pytest.mark.parametrize(
    "changes",
    [{}, {"use_dora": True, "use_rslora": True}, {"lora_modules_to_save": ["lm_head"], "lora_dropout": 0.1}],
    ids=str,
)
def test_plain_peft_loads_the_adapter(
    settings: dict[str, Any], write_recipe: Write, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    trained: list[Any] = []
    switch_on = setup.switch_on

    def remember(model: Any, *rest: Any, **named: Any) -> Any:
        trained.append(model)
        return switch_on(model, *rest, **named)

    monkeypatch.setattr(setup, "switch_on", remember)
    train(recipe_of(settings, write_recipe, **changes))
    base = AutoModelForCausalLM.from_pretrained(settings["model_name_or_path"])
    loaded = PeftModel.from_pretrained(base, settings["output_dir"]).eval()
    ids = torch.arange(40)[None]
    with torch.no_grad():
        ours, theirs = trained[0].eval()(input_ids=ids).logits, loaded(input_ids=ids).logits
        with loaded.disable_adapter():
            plain = loaded(input_ids=ids).logits
    assert (ours - theirs).abs().max() < 1e-5
    assert (ours - plain).abs().max() > 1e-2


def test_full_fine_tuning(settings: dict[str, Any], write_recipe: Write) -> None:
    summary = train(recipe_of(settings, write_recipe, lora_r=0, learning_rate=0.01))
    assert summary.last_loss < summary.first_loss
    AutoModelForCausalLM.from_pretrained(settings["output_dir"])


def test_chunks_do_not_change_the_run(settings: dict[str, Any], write_recipe: Write) -> None:
    """Chunked, in one chunk, and switched off: three ways to the same losses."""
    losses = []
    for name, block in (
        ("a", settings["oomb"]),
        ("b", {"chunk_tokens": 512, "page_tokens": 16}),
        ("c", {"enabled": False}),
    ):
        out = Path(settings["output_dir"]) / name
        train(recipe_of(settings, write_recipe, output_dir=str(out), oomb=block))
        losses.append([row["loss"] for row in metrics(out)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0] == pytest.approx(losses[2], rel=1e-4)


def test_accumulation_weighs_every_target_the_same(
    settings: dict[str, Any], write_recipe: Write, tmp_path: Path
) -> None:
    """Documents of unlike lengths: one batch of three equals three micro-batches of one."""
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(json.dumps({"text": "abc def " * times}) for times in (1, 30, 7)))
    results = []
    for name, batch, accumulation in (("a", 3, 1), ("b", 1, 3)):
        out = Path(settings["output_dir"]) / name
        recipe = recipe_of(
            settings,
            write_recipe,
            data_path=str(data),
            output_dir=str(out),
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulation,
        )
        train(recipe)
        results.append([(row["loss"], row["grad_norm"], row["trained_tokens"]) for row in metrics(out)])
    for ours, theirs in zip(*results, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


def test_the_same_seed_gives_the_same_run(settings: dict[str, Any], write_recipe: Write, tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(json.dumps({"text": word * 9}) for word in ("one ", "two ", "three ", "four ")))
    runs = []
    for name in ("a", "b"):
        out = Path(settings["output_dir"]) / name
        changes = {"data_path": str(data), "output_dir": str(out), "lora_dropout": 0.1, "max_steps": None}
        train(recipe_of(settings, write_recipe, num_train_epochs=2, **changes))
        runs.append([(row["loss"], row["epoch"], row["tokens"]) for row in metrics(out)])
    assert runs[0] == runs[1]
    assert [epoch for _, epoch, _ in runs[0]] == [0] * 4 + [1] * 4


@pytest.mark.parametrize("save_steps", [0, 1])
@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt, 130), (ZeroDivisionError, 1)])
def test_a_stopped_run_keeps_its_finished_steps(
    settings: dict[str, Any],
    write_recipe: Write,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: type[BaseException],
    code: int,
    save_steps: int,
) -> None:
    one_step = loop._one_step

    def stop(run: Any, step: int, *rest: Any) -> None:
        if step == 3:
            raise error
        one_step(run, step, *rest)

    monkeypatch.setattr(loop, "_one_step", stop)
    assert main(["train", str(write_recipe(settings)), "--save_steps", str(save_steps)]) == code
    out = Path(settings["output_dir"])
    printed = capsys.readouterr().out
    assert f"stopped after step 2 of 3 ({'Ctrl-C' if code == 130 else 'ZeroDivisionError'})" in printed
    where = f"the last save is {out / 'checkpoint-2'}; go on with: oomb train {out / 'config.yaml'} --resume"
    assert f"{where}; losses are in" in printed
    assert len(metrics(out)) == 2
    base = AutoModelForCausalLM.from_pretrained(settings["model_name_or_path"])
    PeftModel.from_pretrained(base, out / "checkpoint-2")


def test_a_save_that_fails_leaves_no_half_folder(
    settings: dict[str, Any], write_recipe: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = PeftModel.save_pretrained

    def fail(self: Any, folder: Any, **named: Any) -> None:
        save(self, folder, **named)
        raise OSError("no space left")

    monkeypatch.setattr(PeftModel, "save_pretrained", fail)
    with pytest.raises(RuntimeError, match="no space"):
        train(recipe_of(settings, write_recipe, save_steps=1))
    left = {item.name for item in Path(settings["output_dir"]).iterdir()}
    assert left == {"metrics.jsonl", "memory.jsonl", "config.yaml"}


def test_a_document_beyond_the_range_is_refused_before_the_first_step(
    settings: dict[str, Any], write_recipe: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also when it is not the first one: hours of training would be lost otherwise."""
    rows = [{"text": "short"}, {"text": "long " * 2000}]
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(json.dumps(row) for row in rows))
    path = write_recipe(settings | {"data_path": str(data), "max_length": None})
    assert main(["train", str(path)]) == 2
    said = capsys.readouterr()
    assert "rope_parameters: {rope_type: yarn" in said.err and "step 1" not in said.out
    assert not Path(settings["output_dir"]).exists()


def test_an_output_folder_that_cannot_be_written_is_refused_at_once(
    settings: dict[str, Any], write_recipe: Write, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("tempfile.TemporaryDirectory", full)
    assert main(["train", str(write_recipe(settings))]) == 2
    said = capsys.readouterr()
    assert "cannot be written" in said.err and "No space left" in said.err and "step 1" not in said.out


def test_a_loss_that_is_no_number_stops_the_run(
    settings: dict[str, Any], write_recipe: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_recipe(settings | {"learning_rate": 1e30, "max_grad_norm": 0.0})
    assert main(["train", str(path)]) == 1
    assert "gave no finite number" in capsys.readouterr().err


def test_output_folder_is_respected(
    settings: dict[str, Any], write_recipe: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    out = Path(settings["output_dir"])
    out.mkdir()
    (out / "thesis.txt").write_text("mine")
    path = str(write_recipe(settings | {"max_steps": 1}))
    assert main(["train", path]) == 2
    assert "holds files of something else" in capsys.readouterr().err
    (out / "thesis.txt").unlink()
    assert main(["train", path]) == 0
    assert main(["train", path]) == 2
    assert "--overwrite_output_dir" in capsys.readouterr().err
    (out / "thesis.txt").write_text("mine")
    assert main(["train", path, "--overwrite_output_dir"]) == 0
    assert len(metrics(out)) == 1
    assert (out / "thesis.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_name_or_path": "./nowhere"}, "is not a folder"),
        ({"lora_target_modules": ["q_prj"]}, "Did you mean 'q_proj'? Set lora_target_modules to"),
        ({"lora_modules_to_save": ["lm_hed"]}, "Did you mean 'lm_head'? Set lora_modules_to_save to"),
        ({"use_liger": True}, "Liger cannot run here"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters does not fit"),
        ({"rope_parameters": {"rope_type": "foo"}}, "rope_type that transformers does not know"),
        ({"rope_parameters": {"rope_type:yarn": None, "factor": 2.0}}, "Did you mean 'rope_type'?"),
        ({"rope_parameters": {"type": "yarn", "factor": 2.0}}, "Did you mean 'rope_type'?"),
        ({"rope_parameters": {"rope_type": "yarn", "factr": 2.0}}, "Did you mean 'factor'?"),
        ({"rope_parameters": {"factor": 2.0}}, "scales nothing"),
        ({"oomb": {"backend": "cudnn"}}, "cudnn: it needs a CUDA device"),
        ({"oomb": {"chunk_tokens": 4, "page_tokens": 8}}, "at least one page"),
        ({"data_path": "long.txt"}, "longer than the range"),
    ],
    ids=str,
)
def test_bad_input_writes_nothing(
    settings: dict[str, Any],
    write_recipe: Write,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "long.txt").write_text("x" * 600)
    assert main(["train", str(write_recipe(settings | changes))]) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert "Traceback" not in captured.err
    assert not Path(settings["output_dir"]).exists()


def test_rope_scaling_reaches_longer_documents(
    settings: dict[str, Any], write_recipe: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = tmp_path / "long.txt"
    long.write_text("x" * 600)
    rope = {"rope_type": "yarn", "factor": 2.0}
    train(recipe_of(settings, write_recipe, data_path=str(long), rope_parameters=rope, max_steps=1))
    assert "yarn x2, good for 1,024 tokens" in capsys.readouterr().out


@pytest.mark.gpu
def test_on_a_gpu(settings: dict[str, Any], write_recipe: Write) -> None:
    summary = train(recipe_of(settings, write_recipe, max_steps=6, eval_last_tokens=32, torch_dtype="bfloat16"))
    assert summary.last_loss < summary.first_loss
    assert summary.peak_gpu_gib is not None and summary.peak_gpu_gib > 0


@pytest.mark.parametrize("stage", [None, 3])
def test_weights_in_8_bits_are_refused_before_anything_is_loaded(
    settings: dict[str, Any], write_recipe: Write, monkeypatch: pytest.MonkeyPatch, stage: int | None
) -> None:
    """With the words of the dry run: they must be frozen, and whole."""

    def load(*_: Any) -> None:
        pytest.fail("loaded")

    monkeypatch.setattr(setup, "load_tokenizer", load)
    monkeypatch.setattr(dry_run, "load_tokenizer", load)
    monkeypatch.setattr(setup, "_settings", lambda recipe, _: resolve(*gather(None, *recipe.oomb_sources())))
    monkeypatch.setattr(setup, "zero_stage", lambda _: stage)
    recipe = recipe_of(settings, write_recipe, lora_r=4 if stage else 0, oomb={"base_dtype": "float8"})
    with pytest.raises(ValueError, match=r"must be frozen[^$]*ZeRO 3" if stage else "all weights trained"):
        train(recipe)
    if stage is None:
        with pytest.raises(ValueError, match="all weights trained"):
            dry_run.plan_training(recipe)


def test_a_run_that_fails_at_once_has_no_losses(
    settings: dict[str, Any], write_recipe: Write, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where an earlier run left some."""
    train(recipe_of(settings, write_recipe, max_steps=1))

    def fail(*_: Any, **named: Any) -> None:
        raise ValueError("no step")

    monkeypatch.setattr(loop, "run_step", fail)
    with pytest.raises(ValueError, match="no step"):
        train(recipe_of(settings, write_recipe, overwrite_output_dir=True))
    assert "nothing was saved\n" in capsys.readouterr().out


def test_no_more_last_tokens_than_there_are(
    settings: dict[str, Any], write_recipe: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    train(recipe_of(settings, write_recipe, max_steps=1, eval_last_tokens=100_000))
    most = json.loads((Path(settings["output_dir"]) / "metrics.jsonl").read_text())["tokens"] - 1
    printed = capsys.readouterr().out
    assert f"eval_last_tokens={most} instead of 100000" in printed and "last 100000" not in printed
    assert printed.count(f"loss on the last {most} tokens") == 3
    assert yaml.safe_load((Path(settings["output_dir"]) / "config.yaml").read_text())["eval_last_tokens"] == most


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tiny", " (did you mean 'tiny-model'?), and ids of the hub are ORGANISATION/NAME"),
        ("owner/name", ", and the hub was not reached: "),
    ],
)
def test_a_model_that_is_neither_here_nor_on_the_hub(
    settings: dict[str, Any],
    write_recipe: Write,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    said: str,
) -> None:
    (tmp_path / "tiny-model").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError) as caught:
        train(recipe_of(settings, write_recipe, model_name_or_path=name))
    second = str(caught.value).splitlines()[1].strip()
    assert second.startswith(f"There is no folder {name!r} in {tmp_path}{said}")
