"""Case 22: OombCallback under an unmodified Trainer: the same numbers as without it, and refusals before training."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments

import oomb_accel
from oomb_accel import loss
from oomb_accel.integrations import step
from oomb_accel.integrations.attachment import STATE, attachment_of
from oomb_accel.integrations.callback import OombCallback
from oomb_accel.integrations.trainer_checks import trainer_refusals
from tests.distributed.ranks import RanksFailed, run_ranks
from tests.harness.batches import Document, documents_of, packed, padded
from tests.harness.models import tiny_model, with_lora
from tests.harness.parity import config, reference
from tests.harness.tolerance import assert_same_bits, assert_same_gradients, assert_same_total, assert_twice_plain
from tests.harness.watch import Watch

LENGTHS = (60, 23, 41, 7, 52, 33, 60, 12)
RATE = 0.05


class Rows(Dataset[dict[str, Tensor]]):
    """One document per item, of unequal lengths, labelled from its first token on."""

    def __init__(self, *lengths: int) -> None:
        self.documents = documents_of(*lengths)

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.documents[index].ids, "labels": self.documents[index].labels}


def right_padded(rows: list[dict[str, Tensor]]) -> dict[str, Any]:
    return padded(_documents(rows)).batch


def left_padded(rows: list[dict[str, Tensor]]) -> dict[str, Any]:
    return padded(_documents(rows), side="left").batch


def one_packed_row(rows: list[dict[str, Tensor]]) -> dict[str, Any]:
    return packed(_documents(rows)).batch


def _documents(rows: list[dict[str, Tensor]]) -> list[Document]:
    return [Document(row["input_ids"], row["labels"]) for row in rows]


def make_trainer(model: nn.Module, folder: Path, *callbacks: TrainerCallback, **settings: Any) -> Trainer:
    """A Trainer as a user writes it: plain gradient descent, two rows per micro-batch, two micro-batches per step."""
    own = ("compute_metrics", "compute_loss_func", "preprocess_logits_for_metrics", "data_collator")
    special = {name: settings.pop(name) for name in own if name in settings}
    arguments: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 2,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "logging_steps": 1,
        "report_to": "none",
        "use_cpu": True,
        "save_strategy": "no",
        **settings,
    }
    return Trainer(
        model=model,
        args=TrainingArguments(**arguments),
        train_dataset=Rows(*LENGTHS),
        eval_dataset=Rows(40, 9, 55),
        callbacks=list(callbacks),
        **{"data_collator": right_padded, **special},
    )


@pytest.fixture(autouse=True)
def fresh_accelerator() -> None:
    """Accelerate keeps the mixed precision of the process's first Trainer."""
    AcceleratorState._reset_state(reset_partial_state=True)


def gradients_of_one_step(
    model: nn.Module, folder: Path, *callbacks: TrainerCallback, **settings: Any
) -> dict[str, Tensor]:
    """What one step of gradient descent took off each parameter, over the rate."""
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    trainer = make_trainer(model, folder, *callbacks, max_steps=1, max_grad_norm=0.0, learning_rate=1.0, **settings)
    trainer.train()
    return {name: before[name] - p.detach() for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_the_trainer_is_none_the_wiser(tmp_path: Path, lora: bool) -> None:
    """Losses, gradient norms (clipped), evaluation and weights are those of the same script without the callback."""
    watch = Watch()
    histories, weights = [], []
    for callbacks in ([], [OombCallback(config()), watch]):
        model = with_lora(tiny_model()) if lora else tiny_model()
        settings: dict[str, Any] = {"max_grad_norm": 0.5, "eval_strategy": "steps", "eval_steps": 1}
        trainer = make_trainer(model, tmp_path, *callbacks, **settings)
        trainer.train()
        histories.append([entry for entry in trainer.state.log_history if "train_runtime" not in entry])
        weights.append({name: p.detach() for name, p in model.named_parameters() if p.requires_grad})
    assert watch.chunks > 0
    plain, ours = histories
    ours = [{name: entry[name] for name in entry if not name.startswith("oomb_")} for entry in ours]
    assert [entry.keys() for entry in ours] == [entry.keys() for entry in plain]
    assert len(plain) == 4
    for a, b in zip(plain, ours, strict=True):
        for name in {"loss", "grad_norm", "eval_loss", "learning_rate"} & set(a):
            assert b[name] == pytest.approx(a[name], rel=1e-5), name
    assert_same_gradients(weights[1], weights[0])


@pytest.mark.parametrize("collator", [left_padded, one_packed_row])
def test_first_tokens_of_documents_are_not_counted(tmp_path: Path, collator: Any) -> None:
    """Trainer would count labels on them; the step is the mean over its targets, and so is the loss it reports."""
    model = with_lora(tiny_model())
    got = gradients_of_one_step(model, tmp_path, OombCallback(config()), data_collator=collator, seed=7)
    trained_on = _documents_of_first_step(tmp_path, seed=7)
    wanted = reference(with_lora(tiny_model()), trained_on)
    assert_same_gradients(got, wanted.gradients)


def _documents_of_first_step(folder: Path, *, seed: int) -> list[Document]:
    """In the order in which a Trainer with this seed draws them."""
    trainer = make_trainer(with_lora(tiny_model()), folder, seed=seed)
    batches = list(trainer.get_train_dataloader())[:2]
    rows = [
        (ids, mask) for batch in batches for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]
    return [Document(ids[mask == 1], ids[mask == 1]) for ids, mask in rows]


def test_evaluation_counts_targets_only(tmp_path: Path) -> None:
    trainer = make_trainer(
        with_lora(tiny_model()), tmp_path, OombCallback(config()), data_collator=left_padded, learning_rate=0.0
    )
    trainer.train()
    got = trainer.evaluate(Rows(40, 9))["eval_loss"]
    wanted = reference(with_lora(tiny_model()), documents_of(40, 9)).loss
    assert_same_total(torch.tensor(got), wanted)


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_bf16_by_autocast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lora: bool) -> None:
    """Accelerate wraps the forward before training begins. Its fp32 conversion must not reach a chunk's logits."""

    def make() -> nn.Module:
        return with_lora(tiny_model()) if lora else tiny_model()

    dtypes = []
    original = loss.target_log_probs

    def spy(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
        dtypes.append(logits_NV.dtype)
        return original(logits_NV, targets_N)

    exact = gradients_of_one_step(make(), tmp_path)
    AcceleratorState._reset_state(reset_partial_state=True)
    plain = gradients_of_one_step(make(), tmp_path, bf16=True)
    AcceleratorState._reset_state(reset_partial_state=True)
    for module in (step, loss):  # where the head is trained, and where it is not
        monkeypatch.setattr(module, "target_log_probs", spy)
    ours = gradients_of_one_step(make(), tmp_path, OombCallback(config()), bf16=True)
    assert set(dtypes) == {torch.bfloat16}
    assert_twice_plain(ours, plain, exact)
    worst = max((plain[name] - exact[name]).norm() / exact[name].norm() for name in exact)
    assert worst > 1e-3  # plain bf16 is really different, so there is something to compare with


def test_bf16_with_clipping_accumulation_and_evaluation(tmp_path: Path) -> None:
    watch = Watch()
    trainer = make_trainer(
        with_lora(tiny_model(), lora_dropout=0.05),
        tmp_path,
        OombCallback(config()),
        watch,
        bf16=True,
        bf16_full_eval=True,
        gradient_checkpointing=True,
        eval_strategy="steps",
        eval_steps=1,
    )
    trainer.train()
    values = [
        entry[name]
        for entry in trainer.state.log_history
        for name in ("loss", "eval_loss", "grad_norm")
        if name in entry
    ]
    assert watch.chunks > 0
    assert len(values) == 6
    assert all(0 < value < 20 for value in values)


def metrics_of_logits(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def loss_of_logits(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Tensor:
    return torch.nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1.*logits.*Set label_smoothing_factor=0.0"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0.*length.*Set neftune_noise_alpha=None"),
        ({"torch_compile": True}, "torch_compile=True.*Set torch_compile=False"),
        ({"compute_loss_func": loss_of_logits}, "compute_loss_func needs logits.*log_probs"),
        (
            {"compute_metrics": metrics_of_logits, "eval_strategy": "steps", "eval_steps": 1},
            "compute_metrics needs logits.*prediction_loss_only=True",
        ),
        (
            {"preprocess_logits_for_metrics": lambda logits, labels: logits, "eval_on_start": True},
            "preprocess_logits_for_metrics needs logits.*prediction_loss_only=True",
        ),
    ],
    ids=["label smoothing", "neftune", "compile", "loss function", "metrics", "preprocessing"],
)
def test_what_cannot_work_is_refused_when_the_trainer_is_made(
    tmp_path: Path, settings: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=rf"(?s)oomb_accel cannot work with this Trainer.*{text}"):
        make_trainer(tiny_model(), tmp_path, OombCallback(config()), **settings)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("fp16", True, "fp16=True.*Set bf16=True"),
        ("_n_gpu", 2, "DataParallel.*accelerate launch"),
        ("fsdp", True, "FSDP.*Use DDP, or DeepSpeed"),
        ("activation_offloading", True, "activation_offloading=True.*Set activation_offloading=False"),
    ],
)
def test_what_this_machine_cannot_switch_on_is_refused(tmp_path: Path, name: str, value: Any, text: str) -> None:
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    setattr(arguments, name, value)
    assert len(reasons := trainer_refusals(arguments, None)) == 1
    assert re.search(text, reasons[0])


@pytest.mark.parametrize("name", ["sp_size", "cp_size", "tp_size"])
def test_splitting_a_document_or_a_layer_is_refused(tmp_path: Path, name: str) -> None:
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    arguments.parallelism_config = SimpleNamespace(**{"sp_size": 1, "cp_size": 1, "tp_size": None, name: 2})
    assert len(reasons := trainer_refusals(arguments, None)) == 1
    assert re.search(f"{name}=2.*Set {name}=1", reasons[0])


def test_an_ordinary_trainer_is_not_refused(tmp_path: Path) -> None:
    """Also with metrics that are never asked for, or that get the loss only."""
    make_trainer(tiny_model(), tmp_path, OombCallback(config()), compute_metrics=metrics_of_logits)
    settings: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "prediction_loss_only": True}
    trainer = make_trainer(
        tiny_model(), tmp_path, OombCallback(config()), compute_metrics=metrics_of_logits, **settings
    )
    trainer.train()
    assert "eval_loss" in trainer.evaluate()


def test_predictions_are_refused_while_the_model_is_on(tmp_path: Path) -> None:
    """They would be log-probabilities where a metric expects logits."""
    model = tiny_model()
    trainer = make_trainer(model, tmp_path, OombCallback(config()), compute_metrics=metrics_of_logits)
    trainer.train()
    for ask in (trainer.evaluate, lambda: trainer.predict(Rows(20, 9))):
        with pytest.raises(ValueError, match=r"(?s)Predictions were asked for.*prediction_loss_only.*disable"):
            ask()
    oomb_accel.disable(model)
    predictions: Any = trainer.predict(Rows(20, 9)).predictions
    assert predictions.shape == (2, 20, 128)
    assert "eval_accuracy" in trainer.evaluate()


def test_a_loss_of_ones_own_that_reads_logits_is_refused(tmp_path: Path) -> None:
    class Own(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return loss_of_logits(model(**inputs), inputs["labels"])

    made = make_trainer(tiny_model(), tmp_path)
    own = Own(made.model, made.args, right_padded, Rows(*LENGTHS), callbacks=[OombCallback(config())])
    with pytest.raises(AttributeError, match=r"(?s)Full logits are not kept.*log_probs"):
        own.train()


def test_a_second_train_goes_on(tmp_path: Path) -> None:
    watch = Watch()
    trainer = make_trainer(with_lora(tiny_model()), tmp_path, OombCallback(config()), watch, bf16=True)
    trainer.train()
    first, watch.chunks = watch.chunks, 0
    trainer.train()
    assert watch.chunks == first > 0


def test_settings_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OOMB_CHUNK_TOKENS", "16")
    monkeypatch.setenv("OOMB_PROGRESS", "false")
    model = tiny_model()
    make_trainer(model, tmp_path, OombCallback({"page_tokens": 4})).train()
    assert attachment_of(model).config == config()
    assert any("OOMB_CHUNK_TOKENS" in note for note in attachment_of(model).notes)


def test_a_contradiction_is_found_when_the_trainer_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OOMB_CHUNK_TOKENS", "32")
    with pytest.raises(ValueError, match=r"(?s)chunk_tokens=16 in OombCallback.*chunk_tokens=32 in OOMB_CHUNK_TOKENS"):
        make_trainer(tiny_model(), tmp_path, OombCallback(config()))


def test_two_callbacks_are_one_with_the_settings_of_both(tmp_path: Path) -> None:
    """As when ``oomb run`` adds one to a script that has its own."""
    model = tiny_model()
    make_trainer(model, tmp_path, OombCallback(), OombCallback(config())).train()
    assert attachment_of(model).config == config()
    with pytest.raises(ValueError, match=r"(?s)chunk_tokens=.*OombCallback.*chunk_tokens=.*OombCallback"):
        make_trainer(tiny_model(), tmp_path, OombCallback(config(32)), OombCallback(config()))


def test_a_misspelt_setting_is_found_when_the_callback_is_made() -> None:
    with pytest.raises(ValueError, match=r"(?s)chunk_token'.*Did you mean 'chunk_tokens'"):
        OombCallback({"chunk_token": 16})


def test_a_model_that_is_on_stays_on_with_its_settings(tmp_path: Path) -> None:
    model = oomb_accel.enable(tiny_model(), config())
    trainer = make_trainer(model, tmp_path, OombCallback())
    trainer.train()
    assert attachment_of(model).config == config()
    other = make_trainer(model, tmp_path, OombCallback(config(32)))
    with pytest.raises(ValueError, match=r"(?s)chunk_tokens=.*chunk_tokens=") as refused:
        other.train()
    assert "chunk_tokens=16 in enable(model, ...)" in str(refused.value)
    assert "chunk_tokens=32 in OombCallback(...)" in str(refused.value)


def test_a_model_inside_of_a_peft_model_is_switched_on_anew(tmp_path: Path) -> None:
    """PEFT wraps a model that is on already: as the callback finds it, only the inner one is."""
    watch = Watch()
    model = with_lora(oomb_accel.enable(tiny_model(), config()))
    got = gradients_of_one_step(model, tmp_path, OombCallback(), watch, seed=7)
    assert watch.chunks > 0
    assert attachment_of(model).config == config()
    assert_same_gradients(got, reference(with_lora(tiny_model()), _documents_of_first_step(tmp_path, seed=7)).gradients)


def test_enabled_false_leaves_the_trainer_alone(tmp_path: Path) -> None:
    model = tiny_model()
    trainer = make_trainer(model, tmp_path, OombCallback({"enabled": False}), label_smoothing_factor=0.1)
    trainer.train()
    assert getattr(model, STATE, None) is None


def test_a_tracker_gets_the_usual_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "tracked"))
    trainer = make_trainer(
        with_lora(tiny_model()),
        tmp_path,
        OombCallback(config()),
        report_to="tensorboard",
        include_num_input_tokens_seen="non_padding",
        eval_strategy="steps",
        eval_steps=1,
    )
    trainer.train()
    events = event_accumulator.EventAccumulator(str(tmp_path / "tracked"))
    events.Reload()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    for name in ("loss", "grad_norm", "learning_rate"):
        assert [e.value for e in events.Scalars(f"train/{name}")] == pytest.approx([e[name] for e in logged])
    assert len(events.Scalars("eval/loss")) == 2
    assert trainer.state.num_input_tokens_seen == sum(LENGTHS)


@pytest.mark.parametrize(("workers", "chunk", "dropout"), [(0, 16, 0.1), (1, 16, 0.1), (0, 24, 0.0)])
def test_resume_gives_the_same_numbers(tmp_path: Path, workers: int, chunk: int, dropout: float) -> None:
    """In the middle of an epoch, where Trainer makes a new loader; also with another chunk size."""

    def run(folder: Path, resume: str | None, chunk: int) -> list[float]:
        trainer = make_trainer(
            with_lora(tiny_model(), lora_dropout=dropout),
            folder,
            OombCallback(config(chunk)),
            max_steps=4,
            data_collator=left_padded,
            gradient_accumulation_steps=1,
            dataloader_num_workers=workers,
            save_strategy="steps",
            save_steps=2,
            optim="adamw_torch",
            lr_scheduler_type="cosine",
        )
        trainer.train(resume_from_checkpoint=resume)
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    whole = run(tmp_path / "whole", None, 16)
    again = run(tmp_path / "again", str(tmp_path / "whole" / "checkpoint-2"), chunk)
    assert len(whole) == 4
    assert again == (whole if chunk == 16 else pytest.approx(whole, rel=1e-5))


def saving_trainer(folder: Path, **settings: Any) -> Trainer:
    """Saves after each of four steps."""
    lora = settings.pop("lora", {})
    arguments = {"max_steps": 4, "gradient_accumulation_steps": 1, "save_strategy": "steps", "save_steps": 1}
    model = with_lora(tiny_model(), **lora)
    return make_trainer(model, folder, OombCallback(config()), **{**arguments, "optim": "adamw_torch", **settings})


def losses_of(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("lora", [{"target_modules": ["o_proj"]}, {"r": 8}, {"lora_alpha": 16}], ids=str)
def test_an_adapter_of_another_run_is_not_resumed(tmp_path: Path, lora: dict[str, Any]) -> None:
    saving_trainer(tmp_path, max_steps=1, lora={"target_modules": ["q_proj"]}).train()
    other = saving_trainer(tmp_path, lora={"target_modules": ["q_proj"], **lora})
    before = {name: p.detach().clone() for name, p in other.model.named_parameters()}  # type: ignore[union-attr]
    for resume in (True, str(tmp_path / "checkpoint-1")):
        with pytest.raises(ValueError, match="belongs to another model or adapter"):
            other.train(resume_from_checkpoint=resume)
    assert_same_bits({name: p.detach() for name, p in other.model.named_parameters()}, before)  # type: ignore[union-attr]


def _killed_in_save(rank: int, folder: str, file: str, settings: dict[str, Any]) -> None:
    """Killed when the third checkpoint's ``file`` is half written."""
    plain_save, plain_json = torch.save, TrainerState.save_to_json

    def kill(path: Path) -> None:
        if path.name == file and path.parent.name == "checkpoint-3":
            path.write_bytes(b"{")
            os.kill(os.getpid(), signal.SIGKILL)

    def save(what: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        kill(Path(str(path)))
        plain_save(what, path, *args, **kwargs)

    def save_to_json(self: Any, path: str) -> None:
        kill(Path(path))
        plain_json(self, path)

    setattr(torch, "save", save)  # noqa: B010
    setattr(TrainerState, "save_to_json", save_to_json)  # noqa: B010
    saving_trainer(Path(folder), **settings).train()


@pytest.mark.parametrize("file", ["training_args.bin", "optimizer.pt", "trainer_state.json"])
def test_a_save_that_is_killed_is_not_resumed(tmp_path: Path, file: str, caplog: pytest.LogCaptureFixture) -> None:
    """The last whole checkpoint is, also when only one may be kept, and the next save replaces the half one."""
    settings = {"save_total_limit": 1}
    whole = saving_trainer(tmp_path / "whole", **settings)
    whole.train()
    folder = tmp_path / "killed"
    with pytest.raises(RanksFailed, match="SIGKILL"):
        run_ranks(_killed_in_save, str(folder), file, settings, folder=tmp_path, ranks=1)
    assert (folder / "checkpoint-3").is_dir()
    with pytest.raises(ValueError, match=r"(?s)checkpoint-3' is not whole.*did not end.*Resume from .*checkpoint-2'"):
        saving_trainer(folder, **settings).train(resume_from_checkpoint=str(folder / "checkpoint-3"))
    again = saving_trainer(folder, **settings)
    with caplog.at_level(logging.WARNING, "oomb_accel"):
        again.train(resume_from_checkpoint=True)
    assert re.search(r"resumes from .*checkpoint-2\. Not whole: checkpoint-3 \(", caplog.text)
    assert losses_of(again) == losses_of(whole)
    assert [item.name for item in folder.iterdir()] == ["checkpoint-4"]


@pytest.mark.parametrize("content", [None, "{"], ids=["missing", "cut short"])
def test_a_folder_without_the_trainer_state_is_skipped(tmp_path: Path, content: str | None) -> None:
    """Also when it was saved without the callback, so that nothing marks it."""
    trainer = saving_trainer(tmp_path, max_steps=2)
    trainer.train()
    for number in (2, 1):
        state = tmp_path / f"checkpoint-{number}" / "trainer_state.json"
        state.unlink() if content is None else state.write_text(content)
        again = saving_trainer(tmp_path, max_steps=2, save_strategy="no")
        if number == 2:
            again.train(resume_from_checkpoint=True)
            assert losses_of(again) == losses_of(trainer)
    with pytest.raises(ValueError, match=r"(?s)No checkpoint in .*checkpoint-2.*trainer_state\.json.*checkpoint-1"):
        again.train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match=r"(?s)checkpoint-2' is not whole.*trainer_state\.json.*without resume"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_checkpoints_are_those_of_a_plain_trainer(tmp_path: Path) -> None:
    """The same files, the same old ones deleted, and the best one known by its path."""
    settings: dict[str, Any] = {
        "save_total_limit": 2,
        "load_best_model_at_end": True,
        "eval_strategy": "steps",
        "eval_steps": 1,
    }
    listed, states = [], []
    for name, callbacks in (("plain", []), ("ours", [OombCallback(config())])):
        folder = tmp_path / name
        arguments = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1, **settings}
        trainer = make_trainer(with_lora(tiny_model()), folder, *callbacks, **arguments)
        trainer.train()
        listed.append(sorted(str(path.relative_to(folder)) for path in folder.rglob("*")))
        states.append(json.loads((folder / "checkpoint-4" / "trainer_state.json").read_text()))
        assert Path(states[-1]["best_model_checkpoint"]).parent == folder
        assert torch.load(folder / "checkpoint-4" / "training_args.bin", weights_only=False).save_total_limit == 2
    assert listed[0] == listed[1]
    assert states[0]["best_global_step"] == states[1]["best_global_step"]


def test_the_callback_reports_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two trainings into one folder leave the lines of the second; one that goes on keeps those of before."""

    def steps_of(**more: Any) -> list[int]:
        loud = OombCallback(config(progress="auto"), memory_report=True)
        trainer = make_trainer(with_lora(tiny_model()), tmp_path, loud, save_strategy="steps", save_steps=1)
        trainer.train(**more)
        lines = [json.loads(line) for line in (tmp_path / "memory.jsonl").read_text().splitlines()]
        assert {"forward", "backward", "update"} <= {line["sweep"] for line in lines}
        assert lines[-1]["device"]["weights"] > 0
        return [line["step"] for line in lines]

    steps = steps_of()
    assert set(steps) == {1, 2} and steps == sorted(steps)
    said = capsys.readouterr().err
    assert "peak memory, GiB" in said and "kept outputs" in said
    assert steps_of() == steps
    assert steps_of(resume_from_checkpoint=str(tmp_path / "checkpoint-1")) == steps
