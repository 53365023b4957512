"""Two streams share host memory: the pages of one, and what is kept of the other's forward sweep."""

from __future__ import annotations

import mmap
import re
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from oomb_accel import OombConfig
from oomb_accel.integrations import step_memory
from oomb_accel.integrations.attachment import attachment_of
from oomb_accel.offload import Offload, StreamRecords
from oomb_accel.pages import HostMover, PageRooms, PageShape
from oomb_accel.plan import sizes
from oomb_accel.progress import GIB
from tests.harness.batches import documents_of, padded
from tests.harness.models import tiny_model, with_lora
from tests.harness.parity import config, switched_on
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


def two_forwards(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
    """Outputs of the first are kept on the host; then the second's pages have to go there."""
    for name in ("_SMALLEST_SLAB_BYTES", "LARGEST_SLAB_BYTES"):
        monkeypatch.setattr(sizes, name, mmap.PAGESIZE)
    monkeypatch.setattr(step_memory, "_spare_bytes", lambda *_: STAGING)
    monkeypatch.setattr(step_memory, "_host_spare_bytes", lambda state, _: state.offload.spare_bytes())
    wanted: OombConfig = config(span_tokens=8, device_pages_gib=150 * KIB / GIB, **settings)
    with switched_on(with_lora(tiny_model(), lora_dropout=0.0), wanted) as model:
        first = model(**padded(documents_of(60)).batch).loss
        if wanted.keep_outputs:
            assert attachment_of(model).offload.host_bytes()["page_memory_used"] > 100 * KIB
        second = model(**padded(documents_of(200)).batch).loss
        first.backward()
        second.backward()


def test_a_refusal_names_the_outputs_that_fill_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for the second's pages, and not for them beside the first's outputs: the setting that it names will do."""
    with pytest.raises(ValueError, match="The pages of this document need more host memory") as caught:
        two_forwards(monkeypatch, host_memory_gib=192 * KIB / GIB)
    _, measured, remedy = str(caught.value).splitlines()
    assert re.search(r"of which [\d.]+ GiB hold outputs kept of a forward before its backward; the limit", measured)
    assert re.search(r"Set keep_outputs=False, with which 0.001 GiB are enough, or call backward", remedy)
    two_forwards(monkeypatch, host_memory_gib=192 * KIB / GIB, keep_outputs=False)


def test_a_refusal_of_more_than_there_may_be_without_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"Set keep_outputs=False and page_grad_dtype='bfloat16'"):
        two_forwards(monkeypatch, host_memory_gib=150 * KIB / GIB)
    with pytest.raises(ValueError, match=r"  Set page_grad_dtype='bfloat16'"):
        two_forwards(monkeypatch, host_memory_gib=150 * KIB / GIB, keep_outputs=False)


def test_a_machine_without_memory_for_pages_beside_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    offload = Offload()
    kept = offload.kept_on_host(100 * MIB, 0, torch.device("cpu"))
    assert kept is not None and offload.arena is not None
    kept._stack.take(90 * MIB)
    offload.arena._limits = lambda: machine(0)
    with pytest.raises(ValueError, match=r"too little.*\n.*\n.*\n  0.0\d+ GiB hold .*: keep_outputs=False frees them"):
        offload.reserve(500 * MIB, 1024, torch.device("cpu"))
    offload.close()
