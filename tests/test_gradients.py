"""Both ways from passes to parameters, and dummy passes, in one process: the same numbers as full attention."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from typing import Any

import pytest
import torch

import oomb_accel
from oomb_accel.gradients import DeferredGradients, Deliveries, ReturnedGradients
from oomb_accel.hooks import first_hooks
from oomb_accel.integrations import agreement, step
from oomb_accel.keep import ActivationMeter
from oomb_accel.progress import ChunkEvent
from tests.harness.batches import documents_of, padded
from tests.harness.models import tiny_model, twin, with_lora
from tests.harness.parity import assert_same_result, check_parity, chunked, config, reference


@pytest.fixture
def as_under_zero3(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters are whole here, but the step takes the way that partitioned ones need, with two dummy passes."""
    monkeypatch.setattr(step, "is_partitioned", lambda model: True)
    monkeypatch.setattr(step, "agree_on_passes", lambda num_passes, device: num_passes + 2)


@pytest.mark.parametrize("settings", [{}, {"keep_outputs": True}, {"deterministic": True}])
@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_deferred_with_dummy_passes(as_under_zero3: None, lora: bool, settings: dict[str, bool]) -> None:
    model = with_lora(tiny_model()) if lora else tiny_model()
    check_parity(model, padded(documents_of(70, 21)), config(**settings), embeds=True)


def test_deferred_where_the_first_chunk_has_no_targets(as_under_zero3: None) -> None:
    """The head belongs to every pass: its LoRA gets the gradients of later chunks from the last pass."""
    model = with_lora(tiny_model(), target_modules=["q_proj", "v_proj", "lm_head"])
    (document,) = documents_of(60)
    document.labels[:40] = -100
    check_parity(model, padded((document,)))


def test_a_stream_without_targets_runs_dummy_passes_only(as_under_zero3: None) -> None:
    model = tiny_model()
    events: list[ChunkEvent] = []
    oomb_accel.enable(model, config(), on_progress=events.append)
    one = torch.zeros(1, 1, dtype=torch.long)
    loss = model(input_ids=one, attention_mask=one, labels=one - 100).loss
    loss.backward()
    assert loss.item() == 0.0
    assert Counter(event.sweep for event in events) == {"forward": 2, "backward": 2}
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_dummy_passes_leave_random_numbers_alone(as_under_zero3: None) -> None:
    def after_a_step() -> torch.Tensor:
        torch.manual_seed(3)
        chunked(with_lora(tiny_model(), lora_dropout=0.5), padded(documents_of(70)))
        return torch.rand(3)

    with_dummies = after_a_step()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "agree_on_passes", lambda num_passes, device: num_passes)
        assert torch.equal(after_a_step(), with_dummies)


def test_hooks_see_the_complete_gradient_once(as_under_zero3: None) -> None:
    model = tiny_model()
    seen: list[torch.Tensor] = []
    documents = documents_of(70)
    wanted = reference(twin(model), documents)
    weight = model.model.layers[0].mlp.up_proj.weight

    def double(grad: torch.Tensor) -> torch.Tensor:
        seen.append(grad.clone())
        return grad * 2

    weight.register_hook(double)
    got = chunked(model, padded(documents))
    assert len(seen) == 1
    name = "model.layers.0.mlp.up_proj.weight"
    doubled = {**wanted.gradients, name: wanted.gradients[name] * 2}
    assert_same_result(got, type(wanted)(wanted.loss, wanted.log_probs, doubled))


def test_a_gradient_that_the_last_pass_does_not_deliver_is_an_error() -> None:
    used, skipped = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    gradients = DeferredGradients([used, skipped], torch.device("cpu"), Deliveries())
    gradients.add(used * skipped, torch.ones(2), None, last=False)
    with pytest.raises(RuntimeError, match="1 parameters took part in a chunk, but not in the first one"):
        gradients.add(used * 2, torch.ones(2), None, last=True)


def test_the_mark_for_deepspeed_never_stays_behind() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    marks = []

    def fail(grad: torch.Tensor) -> None:
        marks.append(parameter.ds_grad_is_ready)  # type: ignore[attr-defined]
        raise ZeroDivisionError

    gradients = DeferredGradients([parameter], torch.device("cpu"), Deliveries())
    middle = parameter * 2
    middle.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        gradients.add(middle * 1, torch.ones(2), None, last=False)
    assert marks == [False]
    assert not hasattr(parameter, "ds_grad_is_ready")


def test_a_failed_pass_leaves_nothing_for_the_next_step() -> None:
    first, second = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    gradients = DeferredGradients([first, second], torch.device("cpu"), Deliveries())
    gradients.add(first * second, torch.ones(2), None, last=False)

    def fail(grad: torch.Tensor) -> None:
        raise torch.OutOfMemoryError

    middle = second * 2
    middle.register_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        gradients.add(first * 3 + middle, torch.ones(2), None, last=False)
    assert first.grad is None and second.grad is None
    gradients.add(first * second, torch.ones(2), None, last=True)
    assert torch.equal(first.grad, torch.ones(2))  # type: ignore[arg-type]


def test_sums_do_not_outlive_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller's loss may: 28 GB for a 7B model."""
    alive: list[weakref.ref[ReturnedGradients]] = []
    plain = step.ReturnedGradients

    def watched(*arguments: Any) -> ReturnedGradients:
        gradients = plain(*arguments)
        alive.append(weakref.ref(gradients))
        return gradients

    monkeypatch.setattr(step, "ReturnedGradients", watched)
    model = oomb_accel.enable(tiny_model(), config())
    loss = model(**padded(documents_of(60)).batch).loss
    loss.backward()
    gc.collect()
    assert alive[0]() is None and loss.grad_fn is not None


def test_an_ordinary_step_and_one_of_many_chunks_before_one_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "is_partitioned", lambda model: True)
    model = oomb_accel.enable(tiny_model(), config())
    long, short, brief = (padded((document,)).batch for document in documents_of(60, 12, 9))
    for batches in ((long, short), (short, long)):
        with pytest.raises(RuntimeError, match="Two forwards before one backward"):
            sum(model(**batch).loss for batch in batches).backward()
        model.zero_grad()
    sum(model(**batch).loss for batch in (short, brief)).backward()  # as in plain DeepSpeed


def test_two_forwards_before_one_backward_are_refused(as_under_zero3: None) -> None:
    model = oomb_accel.enable(tiny_model(), config())
    first, second = (padded((document,)).batch for document in documents_of(60, 40))
    with pytest.raises(RuntimeError, match="Two forwards before one backward"):
        (model(**first).loss + model(**second).loss).backward()
    model.zero_grad()
    losses = [model(**first).loss, model(**second).loss]
    for loss in losses:  # two backwards are two deliveries, as DeepSpeed knows them
        loss.backward()


def test_first_hooks_come_before_those_of_the_caller() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    seen: list[float] = []

    def note(grad: torch.Tensor) -> torch.Tensor:
        seen.append(grad[0].item())
        return grad + 1

    parameter.register_hook(note)
    parameter.register_hook(note)
    with first_hooks([parameter], lambda _, grad: grad * 10):
        parameter.sum().backward()
    assert seen == [10.0, 11.0]
    parameter.sum().backward()
    assert seen == [10.0, 11.0, 1.0, 2.0]


def test_one_process_agrees_with_itself() -> None:
    assert agreement.agree_on_passes(5, torch.device("cpu")) == 5
    assert agreement.agree_on_passes(0, torch.device("cpu")) == 1


def test_the_meter_is_not_misled_by_short_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a pass holds whatever its length, such as gathered parameters, says nothing about its tokens."""
    held = iter([0, 1000 * 8192, 0, 10**9, 10**9, 0, 0, 900 * 8192])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: next(held))
    meter, device = ActivationMeter(5.0), torch.device("cuda")
    for num_tokens, wanted in ((8192, 1000.0), (128, 1000.0), (64, 1000.0), (8192, 1000.0)):
        if num_tokens < 8192:
            next(held), next(held)
        with meter.measure(num_tokens, device):
            pass
        assert meter.bytes_per_token == wanted
