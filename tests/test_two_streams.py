"""Two streams share host memory: the pages of one, and what is kept of the other's forward sweep."""

from __future__ import annotations

import mmap
import re
from collections.abc import Hashable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from oomb_accel import OombConfig
from oomb_accel.integrations import step_memory
from oomb_accel.integrations.attachment import attachment_of
from oomb_accel.kept_on_host import ChunkOnHost
from oomb_accel.offload import Offload, StreamRecords
from oomb_accel.pages import HostMover, PageRooms, PageShape
from oomb_accel.plan import sizes
from oomb_accel.progress import GIB
from tests.harness.batches import documents_of, padded
from tests.harness.late import LateMover
from tests.harness.models import tiny_model, twin, with_lora
from tests.harness.parity import config, parameter_gradients, switched_on
from tests.harness.tolerance import assert_same_bits
from tests.host.machines import MIB, FakeCuda, machine
from tests.test_kept_products import STAGING

DEVICE = torch.device("cuda", 0)


def offload_with(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Offload:
    """Host memory of a process with a GPU."""
    monkeypatch.setattr("oomb_accel.offload.cuda_pinner", lambda device: cuda.pinner)
    monkeypatch.setattr("oomb_accel.offload.CudaMover", lambda device, pinned: HostMover())
    return Offload()


def awaiting(offload: Offload, num_bytes: int) -> StreamRecords:
    """A stream before its backward, whose values are on the device and whose gradients will be on the host."""
    shape = PageShape(
        num_layers=1, num_kv_heads=1, head_dim=8, page_tokens=4, grad_dtype=torch.float32, windows=(None,)
    )
    offload.reserve(num_bytes, shape.slot_bytes(torch.float32), DEVICE)
    rooms = PageRooms(None, Mock(), num_bytes, {}, {})
    return StreamRecords(offload, shape, Mock(), rooms, Mock(), DEVICE)


@pytest.mark.parametrize("refused", [True, False], ids=["pinning is refused", "larger slabs would do"])
def test_host_memory_that_pages_await_stays(refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where none of it is in use yet, too."""

    def refuse(number: int) -> None:
        if refused and number >= 3:
            raise RuntimeError("CUDA error 2: out of memory")

    offload = offload_with(FakeCuda(refuse), monkeypatch)
    first = awaiting(offload, 3 * MIB)
    arena = offload.arena
    assert arena is not None and not offload.host_bytes()["page_memory_used"]
    if refused:
        with pytest.warns(RuntimeWarning, match="no outputs are kept there"):
            assert offload.kept_on_host(100 * MIB, 0, DEVICE) is None
        assert offload.spare_bytes() == 0
    else:
        assert offload.kept_on_host(100 * MIB, 0, DEVICE) is not None
    assert offload.arena is arena
    room = first._host_room(torch.float32)
    room.allocate(2 * MIB // room.store.record_bytes, room.store.record_bytes)
    offload.close()


def test_without_pages_that_await_it_refused_memory_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(Mock(side_effect=RuntimeError("CUDA error 2")))
    offload = offload_with(cuda, monkeypatch)
    with pytest.warns(RuntimeWarning, match="Pinning"):
        assert offload.kept_on_host(100 * MIB, 0, DEVICE) is None
    assert offload.arena is None


KIB = 1024


def two_forwards(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch, lengths: Any, *, evaluates: bool = False, **settings: Any
) -> dict[str, Tensor]:
    """Outputs of the first are kept on the host; then the last one's pages have to go there. Returns gradients.

    Args:
        evaluates: the last forward is an evaluation.
    """
    for name in ("_SMALLEST_SLAB_BYTES", "LARGEST_SLAB_BYTES"):
        monkeypatch.setattr(sizes, name, mmap.PAGESIZE)
    monkeypatch.setattr(step_memory, "_spare_bytes", lambda *_: STAGING)
    monkeypatch.setattr(step_memory, "_host_spare_bytes", lambda state, _: state.offload.spare_bytes())
    wanted: OombConfig = config(span_tokens=8, device_pages_gib=150 * KIB / GIB, **settings)
    with switched_on(twin(model), wanted) as ours:
        *first, last = (padded(documents_of(length)).batch for length in lengths)
        losses = [ours(**batch).loss for batch in first]
        offload = attachment_of(ours).offload
        if wanted.keep_outputs:
            assert offload.host_bytes()["page_memory_used"] > 100 * KIB
        if evaluates:
            with torch.no_grad():
                ours(**last)
        else:
            losses.append(ours(**last).loss)
        for loss in losses:
            loss.backward()
        assert offload.arena is not None and offload.arena.free_bytes == offload.arena.num_bytes
        return parameter_gradients(ours)


@pytest.fixture
def model() -> nn.Module:
    return with_lora(tiny_model(), lora_dropout=0.0)


@pytest.mark.parametrize(
    ("lengths", "kib", "evaluates"),
    [((60, 200), 192, False), ((200, 60, 200), 384, False), ((60, 30, 200), 192, False), ((60, 400), 192, True)],
)
def test_kept_outputs_give_way_to_the_pages_of_another_stream(
    lengths: Any, kib: int, evaluates: bool, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for all pages, and not for them beside kept outputs, which are made again; copies are late."""
    settings: dict[str, Any] = {"host_memory_gib": kib * KIB / GIB, "evaluates": evaluates}
    late, taken = LateMover(seed=5), list[bool]()
    monkeypatch.setattr("oomb_accel.offload.HostMover", lambda: late)
    take = ChunkOnHost.take

    def noted(self: ChunkOnHost, key: Hashable) -> Any:
        found = take(self, key)
        taken.append(found is not None)
        return found

    monkeypatch.setattr(ChunkOnHost, "take", noted)
    found = two_forwards(model, monkeypatch, lengths, **settings)
    assert not all(taken)
    assert_same_bits(found, two_forwards(model, monkeypatch, lengths, **settings, keep_outputs=False))


@pytest.mark.parametrize("keep", ["auto", False])
def test_a_refusal_where_pages_have_no_room_without_outputs(
    keep: Any, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same with and without: the number that it names will do for both."""
    with pytest.raises(ValueError, match="The pages of this document need more host memory") as caught:
        two_forwards(model, monkeypatch, (60, 200), host_memory_gib=150 * KIB / GIB, keep_outputs=keep)
    assert "keep_outputs" not in str(caught.value)
    (named,) = re.findall(r"host_memory_gib=([\d.]+) or 'auto'", str(caught.value))
    two_forwards(model, monkeypatch, (60, 200), host_memory_gib=float(named), keep_outputs=keep)


def test_outputs_give_way_where_the_machine_has_nothing_left() -> None:
    """Others took it meanwhile. What was made for outputs will do for pages; where it will not, there is a message."""
    offload = Offload()
    kept = offload.kept_on_host(100 * MIB, 0, torch.device("cpu"))
    assert kept is not None and offload.arena is not None
    kept._stack.take(80 * MIB)
    offload.arena.take()  # of pages that wait, so that nothing is made anew
    offload.arena._limits = lambda: machine(0)
    offload.reserve(50 * MIB, KIB, torch.device("cpu"))
    assert kept.taken_bytes == kept.host_bytes == 0
    with pytest.raises(ValueError, match="This machine has too little host memory left for pages"):
        offload.reserve(500 * MIB, KIB, torch.device("cpu"))
    offload.close()


def test_outputs_stay_where_there_is_room() -> None:
    offload = Offload(host_memory_gib=0.5)
    kept = offload.kept_on_host(100 * MIB, 0, torch.device("cpu"))
    assert kept is not None
    kept._stack.take(90 * MIB)
    taken = kept.taken_bytes
    offload.check(450 * MIB, KIB)  # what would fit if they gave way takes nothing yet
    offload.reserve(200 * MIB, KIB, torch.device("cpu"))
    assert kept.taken_bytes == taken > 0
    offload.close()
