"""Under ZeRO 3, what is gathered is freed when the layer has run: in the forward sweep, the recompute, the backward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from oomb_accel.gradients import DeferredGradients
from oomb_accel.integrations import step
from oomb_accel.integrations.support import gathered_bytes, whole_numel
from oomb_accel.plan import sizes
from tests.distributed.ranks import needs_deepspeed, run_ranks
from tests.distributed.training import Job, Outcome, check_outcomes, steps_of, train, train_alone
from tests.harness.tolerance import assert_same_bits

pytestmark = needs_deepspeed

LAYERS = 6
# Nothing on its way, nothing kept for later: what is alive is what somebody holds.
JOB = Job(
    steps=steps_of(((70,), (20,)), ((20,), (70,))),
    stage=3,
    lora={},
    model={"num_hidden_layers": LAYERS},
    zero={"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0, "stage3_max_live_parameters": 0},
)
JOBS = {
    "lora": JOB,
    "full": replace(JOB, lora=None),
    "tied": replace(JOB, model={**JOB.model, "tie_word_embeddings": True}),
    "experts": replace(JOB, model_type="qwen3_moe", lora={"target_modules": ["q_proj", "o_proj"]}),
    "experts, full": replace(JOB, model_type="qwen3_moe", lora=None),
}


@dataclass
class Held:
    """Bytes of gathered parameters."""

    at_backward: list[int] = field(default_factory=list)
    """When the backward of a chunk begins: what its graph holds."""
    peak: int = 0
    """At any time, with the buffer in which they arrive."""
    largest: int = 0
    """Of the largest layer, embeddings or head."""
    reckoned: int = 0
    """By `gathered_bytes`, nothing kept for later."""


def _train_and_watch(rank: int, job: Job, release: bool) -> tuple[Outcome, Held]:
    from deepspeed.runtime.zero import partition_parameters as zero

    held = Held()
    gathered: list[tuple[StorageWeakRef, int]] = []

    def alive() -> int:
        gathered[:] = [(storage, size) for storage, size in gathered if not storage.expired()]
        return sum(size for _, size in gathered)

    def note(tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        gathered.append((StorageWeakRef(storage), storage.nbytes()))

    def wait(plain: Callable[..., Any], handle: Any, **kwargs: Any) -> None:
        arrived = handle.complete
        plain(handle, **kwargs)
        if not arrived:
            for parameter in handle.params:
                note(parameter)
            # The buffer that they came in is not watched itself: gloo's thread may keep it for a moment longer.
            buffer = sum(parameter.untyped_storage().nbytes() for parameter in handle.params)
            held.peak = max(held.peak, alive() + buffer)

    def add(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        held.at_backward.append(alive())
        return plain(*args, **kwargs)

    def size_up(engine: nn.Module, batch: dict[str, Tensor]) -> None:
        layers = [m for m in engine.modules() if type(m).__name__.endswith("DecoderLayer")]
        held.largest = max(sum(whole_numel(p) * p.element_size() for p in layer.parameters()) for layer in layers)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sizes, "_ZERO3_LIVE_NUMBERS", 0)
            held.reckoned = gathered_bytes(engine)

    _wrap(zero.AllGatherCoalescedHandle, "wait", wait)
    _wrap(DeferredGradients, "add", add)
    if not release:
        step.released_after_use = lambda model: nullcontext
    return train(rank, job, before_training=size_up), held


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Only in this process, which ends with the test."""
    plain = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: around(plain, *args, **kwargs))


@pytest.mark.parametrize("name", JOBS)
def test_a_pass_holds_the_layer_at_work_alone(name: str, tmp_path: Path) -> None:
    job = JOBS[name]
    results = run_ranks(_train_and_watch, job, True, folder=tmp_path)
    for _, held in results:
        assert len(held.at_backward) == 2 * 5  # chunks of 16 tokens, two steps
        assert max(held.at_backward) <= held.largest, f"of {LAYERS} layers of {held.largest} bytes"
        assert held.largest < held.peak <= 2 * held.largest == held.reckoned
    check_outcomes([outcome for outcome, _ in results], train_alone(job), job)


@pytest.mark.parametrize("name", ["lora", "experts", "experts, full"])
def test_releasing_changes_no_bit(name: str, tmp_path: Path) -> None:
    """And without it, the graph holds the frozen model, or all experts."""
    (ours, _), (before, held) = (
        run_ranks(_train_and_watch, JOBS[name], release, folder=tmp_path)[0] for release in (True, False)
    )
    assert max(held.at_backward) > 3 * held.largest
    assert_same_bits(ours.weights, before.weights)
    assert all(torch.equal(a, b) for a, b in zip(ours.losses, before.losses, strict=True))
