"""Case 16, as far as pages are moved already: where a page lies, and that it leaves its slot between uses, changes no
bit. A mover that evicts at every layer stands in for the offload to host memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from oomb_accel.pages import PagedKVCache, PagePool, PageTable
from oomb_accel.schedule import PageRange
from tests.harness.batches import documents_of, packed
from tests.harness.models import tiny_model, twin
from tests.harness.parity import Result, chunked, config
from tests.harness.sparse import sparse
from tests.harness.tolerance import assert_same_bits

SETTINGS: dict[str, Any] = {
    "dense": config(),
    "sparse": sparse(),
    "causal, shared, recomputed": sparse(
        causal_selection=True, select_per="layer", keep_outputs=False, keep_last_graph=False
    ),
    "bf16 page gradients": sparse(page_grad_dtype="bfloat16"),
}


class Evictor:
    """Takes the pages of a layer out of their slots as soon as another layer is used; they come back when fetched."""

    cache: PagedKVCache

    def __init__(self) -> None:
        self.away: dict[tuple[int, int], Tensor] = {}
        """Contents of pages that are not in their slots, by (layer, page)."""
        self.present: set[tuple[int, int]] = set()
        self.num_evicted = 0

    def written(self, layer: int, pages: PageRange) -> None:
        self._evict_all_but(layer)
        self.present |= {(layer, page) for page in range(pages.first, pages.end)}

    def fetch(self, layer: int, pages: PageRange) -> None:
        self._evict_all_but(layer)
        for page in range(pages.first, pages.end):
            if (layer, page) in self.away:
                self._record(layer, page, self.away.pop((layer, page)))
                self.present.add((layer, page))

    def _evict_all_but(self, layer: int) -> None:
        for key in [key for key in self.present if key[0] != layer]:
            self.present.remove(key)
            slots = self._slots(*key)
            if (slots < 0).any():
                continue  # released
            self.away[key] = self.cache.value_pool[slots].clone()
            self._record(*key, torch.full_like(self.away[key], torch.nan))
            self.num_evicted += 1

    def _record(self, layer: int, page: int, values: Tensor) -> None:
        self.cache.value_pool[self._slots(layer, page)] = values

    def _slots(self, layer: int, page: int) -> Tensor:
        assert self.cache._values is not None
        return torch.from_numpy(self.cache._values.table.slots(layer, PageRange(page, page + 1))[0].astype("int64"))


def run(settings: str) -> Result:
    return chunked(twin(tiny_model()), packed(documents_of(100, 21, 70)), SETTINGS[settings], embeds=True)


def assert_same(ours: Result, wanted: Result) -> None:
    assert_same_bits(ours.loss, wanted.loss)
    assert_same_bits(torch.cat(ours.log_probs), torch.cat(wanted.log_probs))
    assert_same_bits(ours.gradients, wanted.gradients)


@pytest.mark.parametrize("settings", SETTINGS)
def test_pages_that_are_fetched_for_every_use(settings: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that is used without being fetched is NaN."""
    wanted = run(settings)
    movers: list[Evictor] = []
    original = PagedKVCache.__init__

    def init(self: PagedKVCache, *args: Any) -> None:
        mover = Evictor()
        mover.cache = self
        movers.append(mover)
        shape, schedule, device = args
        original(self, shape, schedule, device, mover)

    monkeypatch.setattr(PagedKVCache, "__init__", init)
    assert_same(run(settings), wanted)
    assert max(mover.num_evicted for mover in movers) > 50


@pytest.mark.parametrize("settings", SETTINGS)
def test_pools_that_start_from_nan(settings: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = run(settings)
    original = PagePool.__init__

    def init(self: PagePool, *args: Any) -> None:
        original(self, *args)
        self.storage.fill_(torch.nan)

    monkeypatch.setattr(PagePool, "__init__", init)
    assert_same(run(settings), wanted)


@pytest.mark.parametrize("settings", SETTINGS)
def test_slots_in_another_order(settings: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists hold pages, not slots, and the random bits that round bf16 gradients belong to a page too."""
    wanted = run(settings)
    original = PageTable.__init__

    def init(self: PageTable, *args: Any) -> None:
        original(self, *args)
        generator = torch.Generator().manual_seed(3)
        self._free = self._free[torch.randperm(len(self._free), generator=generator).numpy()]

    monkeypatch.setattr(PageTable, "__init__", init)
    assert_same(run(settings), wanted)
