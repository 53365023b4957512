"""``save_adapter`` and ``check_adapter``: plain PEFT's files under every ZeRO stage, whole or not at all."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import oomb_accel
from oomb_accel import OombConfig
from oomb_accel.deepspeed import check_adapter, save_adapter
from oomb_accel.integrations import saving
from oomb_accel.integrations.saving import CONFIG, WEIGHTS
from tests.distributed.ranks import needs_deepspeed, run_ranks
from tests.harness.models import tiny_model, with_lora
from tests.harness.tolerance import assert_same_bits
from tests.integrations.setups import BLOCK, batch, deepspeed_config, optimizer

KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "dora": {"use_dora": True},
    "lora on the head": {"target_modules": ["q_proj", "lm_head"]},
    "lora on embeddings": {"target_modules": ["q_proj", "embed_tokens"]},
}


def adapted(**settings: Any) -> nn.Module:
    return with_lora(tiny_model(), **settings)


@pytest.mark.parametrize("settings", KINDS.values(), ids=list(KINDS))
def test_files_are_those_of_plain_peft(settings: dict[str, Any], tmp_path: Path) -> None:
    model = adapted(**settings)
    oomb_accel.enable(model, OombConfig(**BLOCK))
    save_adapter(model, tmp_path / "ours")
    oomb_accel.disable(model)
    model.save_pretrained(str(tmp_path / "plain"))  # type: ignore[operator]
    assert_same_bits(load_file(tmp_path / "ours" / WEIGHTS), load_file(tmp_path / "plain" / WEIGHTS))
    assert json.loads((tmp_path / "ours" / CONFIG).read_text()) == json.loads((tmp_path / "plain" / CONFIG).read_text())
    again = PeftModel.from_pretrained(tiny_model(), str(tmp_path / "ours"))
    inputs = {"input_ids": batch()["input_ids"]}
    with torch.no_grad():
        assert_same_bits(again.eval()(**inputs).logits, model.eval()(**inputs).logits)
    check_adapter(tmp_path / "ours", model)


def _trained_and_saved(rank: int, stage: int, settings: dict[str, Any], folder: str) -> dict[str, Tensor]:
    model = adapted(**settings)
    config = deepspeed_config(stage, {**BLOCK, "self_test": False})
    engine, *_ = oomb_accel.deepspeed.initialize(model=model, optimizer=optimizer(model), config=config)
    engine.backward(engine(**batch()).loss)
    engine.step()
    save_adapter(engine, folder)
    check_adapter(folder, engine)
    from deepspeed.utils import safe_get_full_fp32_param

    whole = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            value = safe_get_full_fp32_param(parameter) if stage else parameter.detach()
            whole[name.replace(".default", "")] = value.clone()
    return whole


@needs_deepspeed
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("kind", ["lora", "modules_to_save"])
def test_two_ranks_save_what_they_have_trained(stage: int, kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    ranks = run_ranks(_trained_and_saved, stage, KINDS[kind], str(folder), folder=tmp_path)
    saved = load_file(folder / WEIGHTS)
    expected = {name.replace(".modules_to_save", ""): value for name, value in ranks[0].items()}
    assert_same_bits(saved, expected)
    assert all(value.numel() for value in saved.values())


def test_a_file_that_lost_the_gathered_values_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="parameters were not gathered"):
        _save_with(tmp_path, lambda state: {name: value[:0] for name, value in state.items()})
    with pytest.raises(RuntimeError, match="does not hold what was written: base_model"):
        _save_with(tmp_path, lambda state: {name: value + 1 for name, value in state.items()})
    with pytest.raises(RuntimeError, match="does not hold what was written"):
        _save_with(tmp_path, lambda state: dict(list(state.items())[1:]))
    assert [item.name for item in tmp_path.iterdir()] == []


def _save_with(folder: Path, change: Any) -> None:
    """Save, with a file that holds something else than PEFT was given."""
    model = adapted()
    plain = model.save_pretrained

    def spoilt(path: str, **kwargs: Any) -> None:
        plain(path, **kwargs)  # type: ignore[operator]
        file = Path(path) / WEIGHTS
        save_file(change(load_file(file)), file)

    model.save_pretrained = spoilt  # type: ignore[assignment]
    save_adapter(model, folder)


def test_a_failed_save_leaves_what_was_there(tmp_path: Path) -> None:
    model = adapted()
    save_adapter(model, tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    before = {item.name: item.read_bytes() for item in tmp_path.iterdir()}
    for parameter in model.parameters():
        parameter.data += 1

    def full(*arguments: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    model.save_pretrained = full  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match=r"(?s)could not be saved.*No space left.*untouched"):
        save_adapter(model, tmp_path)
    assert {item.name: item.read_bytes() for item in tmp_path.iterdir()} == before


def _one_rank_cannot_write(rank: int, folder: str) -> str:
    torch.distributed.init_process_group("gloo")
    Path(folder).write_text("a file")
    try:
        save_adapter(adapted(), folder)
    except RuntimeError as error:
        return str(error)
    return "saved"


def test_every_rank_hears_of_a_failure(tmp_path: Path) -> None:
    for text in run_ranks(_one_rank_cannot_write, str(tmp_path / "adapter"), folder=tmp_path):
        assert "FileExistsError" in text and "choose another folder" in text


def _killed_in_save(rank: int, folder: str, moves: int) -> None:
    model = adapted()
    save_adapter(model, folder)
    for parameter in model.parameters():
        parameter.data += 1
    plain, left = os.replace, moves

    def replace(*arguments: Any) -> None:
        nonlocal left
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        plain(*arguments)

    saving.os.replace = replace  # type: ignore[assignment]
    pid = os.fork()
    if pid == 0:
        save_adapter(model, folder)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL


@pytest.mark.parametrize("moves", [0, 1, 2])
def test_a_kill_in_the_save_leaves_the_old_adapter(moves: int, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    run_ranks(_killed_in_save, str(folder), moves, folder=tmp_path, ranks=1)
    model = adapted()
    check_adapter(folder, model)
    save_adapter(model, tmp_path / "wanted")
    assert_same_bits(load_file(folder / WEIGHTS), load_file(tmp_path / "wanted" / WEIGHTS))
    save_adapter(model, folder)
    assert not list(folder.glob(".saving-*"))


def test_a_model_without_adapter_is_refused(tmp_path: Path) -> None:
    for call in (save_adapter, lambda model, folder: check_adapter(folder, model)):
        with pytest.raises(ValueError, match=r"(?s)Qwen2ForCausalLM has no adapter.*accelerator\.save_model"):
            call(tiny_model(), tmp_path)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: adapted(r=8), r"r=4; this run has r=8"),
        (lambda: adapted(lora_alpha=16), "lora_alpha=8; this run has lora_alpha=16"),
        (lambda: adapted(use_rslora=True), "use_rslora=False; this run has use_rslora=True"),
        (lambda: adapted(target_modules=["q_proj"]), r"lora_A.weight of shape \[4, 96\]; this run has no"),
        (lambda: with_lora(tiny_model(num_hidden_layers=4)), r"has no .*layers\.3\..*; this run has .*layers\.3"),
        (lambda: with_lora(tiny_model(hidden_size=32)), r"\[64, 4\]; this run has .*\[32, 4\]"),
    ],
)
def test_an_adapter_of_another_model_or_with_other_settings_is_refused(
    make: Any, expected: str, tmp_path: Path
) -> None:
    save_adapter(adapted(), tmp_path)
    check_adapter(tmp_path, adapted())
    with pytest.raises(ValueError, match=f"(?s)belongs to another model or adapter.*{expected}"):
        check_adapter(tmp_path, make())


def test_an_adapter_of_another_base_is_refused_even_if_it_fits(tmp_path: Path) -> None:
    def of(name: str) -> PeftModel:
        base = tiny_model()
        base.name_or_path = base.config._name_or_path = name
        return with_lora(base)

    save_adapter(of("org/first"), tmp_path)
    check_adapter(tmp_path, of("/elsewhere/first"))  # the same model in another folder
    with pytest.raises(ValueError, match="base model 'org/first'; this run has base model 'org/second'"):
        check_adapter(tmp_path, of("org/second"))


def test_an_incomplete_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"(?s)adapter_config\.json is missing.*no folder"):
        check_adapter(tmp_path / "nowhere", adapted())
    save_adapter(adapted(), tmp_path)
    (tmp_path / WEIGHTS).unlink()
    with pytest.raises(ValueError, match=r"(?s)adapter_model\.safetensors is missing.*Found: README\.md"):
        check_adapter(tmp_path, adapted())
