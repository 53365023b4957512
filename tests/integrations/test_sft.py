"""Case 22: OombCallback under an unmodified SFTTrainer: packing, assistant-only loss, metrics, the fused LM head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from torch import nn
from transformers import TrainerCallback

import oomb_accel
from oomb_accel.integrations.attachment import attachment_of
from oomb_accel.integrations.callback import OombCallback
from oomb_accel.integrations.trainer_checks import trl_refusals
from oomb_accel.integrations.trl import TargetStatistics
from tests.harness.batches import documents_of, only_targets, padded
from tests.harness.folders import BYTES, byte_tokenizer
from tests.harness.models import tiny_model, with_lora
from tests.harness.parity import config
from tests.harness.tolerance import assert_same_gradients, assert_same_values, assert_twice_plain
from tests.harness.watch import Watch

datasets = pytest.importorskip("datasets")
trl = pytest.importorskip("trl")

METRICS = ("loss", "grad_norm", "learning_rate", "entropy", "mean_token_accuracy", "num_tokens")
CHAT = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}"
    "{% endgeneration %}{% else %}[{{ message['content'] }}]{% endif %}{% endfor %}"
)


def texts(*lengths: int) -> Any:
    """Text of unequal lengths: one token per letter, and an end token that TRL adds."""
    letters = "abcdefghijklmnopqrstuvwxyz "
    return datasets.Dataset.from_list(
        [{"text": "".join(letters[(7 * i * n + i * i) % 27] for i in range(n))} for n in lengths]
    )


def conversations(*turns: tuple[int, int]) -> Any:
    rows = []
    for asked, answered in turns:
        messages = [{"role": "user", "content": "q" * asked}, {"role": "assistant", "content": "answer " * answered}]
        rows.append({"messages": [*messages, *messages]})
    return datasets.Dataset.from_list(rows)


@pytest.fixture(autouse=True)
def fresh_accelerator() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)


def make_trainer(model: nn.Module, folder: Path, *callbacks: TrainerCallback, **settings: Any) -> Any:
    """An SFTTrainer as a user writes it."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT
    special = {
        name: settings.pop(name) for name in ("train_dataset", "eval_dataset", "peft_config") if name in settings
    }
    arguments: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 2,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 0.05,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "logging_steps": 1,
        "report_to": "none",
        "use_cpu": True,
        "save_strategy": "no",
        "bf16": False,
        "gradient_checkpointing": False,
        "max_length": 64,
        "max_grad_norm": 0.5,
        **settings,
    }
    return trl.SFTTrainer(
        model=model,
        args=trl.SFTConfig(**arguments),
        processing_class=tokenizer,
        callbacks=list(callbacks),
        **{"train_dataset": texts(60, 23, 41, 7, 52, 33, 60, 12), "eval_dataset": texts(40, 9, 55), **special},
    )


def base_model(model_type: str = "qwen2") -> Any:
    return tiny_model(model_type, vocab_size=BYTES, pad_token_id=None, bos_token_id=None, eos_token_id=256)


def compare(folder: Path, lora: bool, **settings: Any) -> None:
    """Every number that SFTTrainer reports, and the weights, with the callback and without."""
    watch = Watch()
    histories, weights = [], []
    for callbacks in ([], [OombCallback(config()), watch]):
        model = with_lora(base_model()) if lora else base_model()
        trainer = make_trainer(model, folder, *callbacks, eval_strategy="steps", eval_steps=1, **settings)
        trainer.train()
        histories.append([entry for entry in trainer.state.log_history if "train_runtime" not in entry])
        weights.append({name: p.detach() for name, p in model.named_parameters() if p.requires_grad})
    assert watch.chunks > 0
    plain, ours = histories
    names = {*METRICS, *(f"eval_{name}" for name in METRICS)}
    assert len(plain) == len(ours) == 4
    for a, b in zip(plain, ours, strict=True):
        assert {name for name in b if not name.startswith("oomb_")} == a.keys()
        assert len(names & set(a)) >= 4
        for name in names & set(a):
            assert b[name] == pytest.approx(a[name], rel=2e-5), name
    assert_same_gradients(weights[1], weights[0])


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_rows(tmp_path: Path, lora: bool) -> None:
    compare(tmp_path, lora)


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_packing(tmp_path: Path, lora: bool) -> None:
    compare(tmp_path, lora, packing=True)


def test_padding_free(tmp_path: Path) -> None:
    compare(tmp_path, True, padding_free=True, max_length=None)


def test_assistant_only_loss(tmp_path: Path) -> None:
    turns = conversations((9, 3), (20, 1), (3, 2), (40, 2), (1, 4), (2, 2), (30, 3), (8, 8))
    settings = {"train_dataset": turns, "eval_dataset": conversations((5, 5), (30, 1)), "max_length": 200}
    compare(tmp_path, True, assistant_only_loss=True, **settings)
    compare(tmp_path, True, assistant_only_loss=True, packing=True, **settings)


def test_a_loss_of_trls_own(tmp_path: Path) -> None:
    """It weights each target by its probability, so gradients enter at the log-probabilities."""
    compare(tmp_path, True, loss_type="dft")


def test_the_default_gradient_checkpointing(tmp_path: Path) -> None:
    compare(tmp_path, True, gradient_checkpointing=True)


def test_bf16_by_autocast(tmp_path: Path) -> None:
    def gradients(*callbacks: TrainerCallback, **settings: Any) -> dict[str, torch.Tensor]:
        AcceleratorState._reset_state(reset_partial_state=True)
        model = with_lora(base_model())
        before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
        settings = {"max_steps": 1, "max_grad_norm": 0.0, "learning_rate": 1.0, **settings}
        make_trainer(model, tmp_path, *callbacks, **settings).train()
        return {name: before[name] - p.detach() for name, p in model.named_parameters() if p.requires_grad}

    watch = Watch()
    exact, plain = gradients(), gradients(bf16=True)
    ours = gradients(OombCallback(config()), watch, bf16=True)
    assert watch.chunks > 0
    assert_twice_plain(ours, plain, exact)


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_a_model_that_was_on_before_is_not_bypassed(tmp_path: Path, lora: bool) -> None:
    """SFTTrainer replaces the forward of the model that it gets, ours too."""
    watch = Watch()
    model = oomb_accel.enable(with_lora(base_model()) if lora else base_model(), config())
    trainer = make_trainer(model, tmp_path, OombCallback(), watch)
    trainer.train()
    assert watch.chunks > 0
    assert attachment_of(model).config == config()


def test_a_peft_model_that_trl_makes(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    watch = Watch()
    lora = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = make_trainer(base_model(), tmp_path, OombCallback(config()), watch, peft_config=lora)
    trainer.train()
    assert watch.chunks > 0
    assert trainer.evaluate()["eval_loss"] > 0


def test_resume_gives_the_same_numbers(tmp_path: Path) -> None:
    def run(folder: Path, resume: str | None) -> list[dict[str, float]]:
        saving: dict[str, Any] = {"max_steps": 4, "gradient_accumulation_steps": 1, "save_strategy": "steps"}
        model = with_lora(base_model(), lora_dropout=0.1)
        trainer = make_trainer(model, folder, OombCallback(config()), save_steps=2, optim="adamw_torch", **saving)
        trainer.train(resume_from_checkpoint=resume)
        return [{name: entry[name] for name in METRICS[:5]} for entry in trainer.state.log_history if "loss" in entry]

    whole = run(tmp_path / "whole", None)
    assert len(whole) == 4
    assert run(tmp_path / "again", str(tmp_path / "whole" / "checkpoint-2")) == whole


def test_generation_after_training(tmp_path: Path) -> None:
    trainer = make_trainer(with_lora(base_model()), tmp_path, OombCallback(config()))
    trainer.train()
    ids = torch.tensor([[5, 6, 7]])
    assert trainer.model.generate(input_ids=ids, max_new_tokens=3, do_sample=False).shape[1] > 3


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor"),
        ({"activation_offloading": True}, "activation_offloading"),
        ({"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}, "Reentrant"),
    ],
    ids=["label smoothing", "offloading", "reentrant"],
)
def test_what_cannot_work_is_refused(tmp_path: Path, settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=rf"(?s)oomb_accel cannot work with this Trainer.*{text}"):
        make_trainer(with_lora(base_model()), tmp_path, OombCallback(config()), **settings)


def test_the_auxiliary_loss_of_a_router_is_refused_when_training_begins(tmp_path: Path) -> None:
    trainer = make_trainer(base_model("qwen3_moe"), tmp_path, OombCallback(config()))
    with pytest.raises(ValueError, match=r"(?s)auxiliary loss.*router_aux_loss_coef=0.0"):
        trainer.train()
    watch = Watch()
    make_trainer(base_model("qwen3_moe"), tmp_path, OombCallback(config()), watch, router_aux_loss_coef=0.0).train()
    assert watch.chunks > 0


def test_other_trainers_of_trl_are_refused_by_name() -> None:
    trainer = object.__new__(trl.DPOTrainer)
    assert "DPOTrainer" in trl_refusals(trainer, base_model())[0]
    assert not trl_refusals(object.__new__(trl.SFTTrainer), base_model())


def fused_model(**settings: Any) -> Any:
    from trl.trainer.utils import add_fused_lm_head

    model = base_model()
    add_fused_lm_head(model, **{"outputs": ("log_probs", "entropy", "is_top1"), **settings})
    return model


@pytest.mark.parametrize("shifted", [False, True], ids=["labels", "shift_labels"])
def test_the_fields_are_those_of_trls_own_head(shifted: bool) -> None:
    documents = documents_of(50, 21)
    documents[1] = only_targets(documents[1], [3, 4, 20])
    batch = dict(padded(documents).batch)
    if shifted:
        labels = batch.pop("labels")
        batch["shift_labels"] = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    model = fused_model()
    wanted = model(**batch, fused_lm_head=True)
    got = oomb_accel.enable(model, config())(**batch, fused_lm_head=True)
    for name in ("log_probs", "entropy", "loss"):
        assert_same_values(getattr(got, name).detach(), getattr(wanted, name).detach(), name)
    assert torch.equal(got.is_top1, wanted.is_top1)
    assert torch.equal(got.label_mask, wanted.label_mask)
    assert got.label_mask.sum() == 49 + 3


def test_a_batch_without_targets_has_zeros_everywhere() -> None:
    batch = dict(padded([only_targets(d, []) for d in documents_of(50, 21)]).batch)
    model = oomb_accel.enable(fused_model(), config())
    with pytest.warns(UserWarning, match="No target"):
        got = model(**batch, fused_lm_head=True)
    assert got.log_probs.shape == got.entropy.shape == got.is_top1.shape == got.label_mask.shape == (2, 49)
    assert not got.label_mask.any() and not got.entropy.any() and not got.is_top1.any() and got.loss == 0
    got.loss.backward()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"temperature": 0.7}, "temperature=0.7"),
        ({"cast_lm_head_to_fp32": True}, "cast_lm_head_to_fp32=True"),
        ({"outputs": ("log_probs", "mean_logits")}, "mean_logits"),
    ],
)
def test_a_fused_head_for_something_else_is_refused(settings: dict[str, Any], text: str) -> None:
    model = oomb_accel.enable(fused_model(**settings), config())
    with pytest.raises(ValueError, match=rf"(?s)chunks do not compute.*{text}"):
        model(**padded(documents_of(50)).batch, fused_lm_head=True)


def test_statistics_are_made_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of three rows give what one block gives; they see bf16 logits in fp32."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(10, 16, generator=generator).bfloat16()
    targets = logits.float().argmax(-1)
    targets[::2] = 0
    monkeypatch.setattr("oomb_accel.integrations.trl._BLOCK_BYTES", 3 * 4 * 16)
    statistics = TargetStatistics(12, logits.device)
    statistics.record(logits, targets, 2)
    output: Any = statistics.output(torch.zeros(()), torch.zeros(1, 13), torch.arange(12), shifted=False)
    entropy = torch.distributions.Categorical(logits=logits.float()).entropy()
    assert_same_values(output.entropy[0], torch.cat([torch.zeros(2), entropy]), "entropy")
    assert torch.equal(output.is_top1[0, 2:], logits.float().argmax(-1) == targets)
