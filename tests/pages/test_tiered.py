"""TieredPages against a plain dictionary of contents, with all three streams running at random times."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from oomb_accel.pages import DeviceRoom, HostRoom, PageShape, TieredPages
from oomb_accel.pages.table import NO_SLOT
from oomb_accel.schedule import PageRange
from tests.harness.late import Addresses, LateMover
from tests.harness.slabs import plain_store

LAYERS, HEADS, PAGES = 3, 2, 8
AT_ONCE = 3
"""Most pages that a layer uses between two times that it settles."""
SHAPE = PageShape(LAYERS, HEADS, head_dim=2, page_tokens=1, grad_dtype=torch.float32, windows=(None,) * LAYERS)
RECORD_BYTES = SHAPE.slot_bytes(torch.float32)

Key: TypeAlias = tuple[int, int, int]
"""Layer, page, head."""
RANGES = st.tuples(st.integers(0, PAGES - 1), st.integers(1, AT_ONCE)).map(
    lambda pair: PageRange(pair[0], min(PAGES, pair[0] + pair[1]))
)
Mask: TypeAlias = npt.NDArray[np.bool_]
"""Records of a range of pages, ``[n, G]``."""
MASKS = st.lists(st.booleans(), min_size=AT_ONCE * HEADS, max_size=AT_ONCE * HEADS)


def masked(pages: PageRange, mask: list[bool] | None) -> Mask:
    """Which records of these pages."""
    whole = np.ones(AT_ONCE * HEADS, bool) if mask is None else np.array(mask)
    return whole[: len(pages) * HEADS].reshape(len(pages), HEADS)


def places(mask: Mask) -> npt.NDArray[np.int64]:
    return np.flatnonzero(mask)


def keys(layer: int, pages: PageRange, wanted: Mask) -> list[Key]:
    return [(layer, pages.first + int(page), int(head)) for page, head in np.argwhere(wanted)]


class WatchedMover(LateMover):
    """Tells of downloads."""

    on_download: Callable[[Addresses], None]

    def download(self, sources: Addresses, *rest: Any, **names: Any) -> Any:
        self.on_download(sources)
        return super().download(sources, *rest, **names)


class Tiers(RuleBasedStateMachine):
    """One layer at a time uses records, as in a model; others are expected, settled and freed."""

    @initialize(
        quotas=st.tuples(*[st.integers(0, 4)] * LAYERS),
        seed=st.integers(0, 1000),
        haste=st.sampled_from([0.0, 0.02, 0.2]),
        scarce=st.booleans(),
    )
    def begin(self, quotas: tuple[int, ...], seed: int, haste: float, scarce: bool) -> None:
        self.room = DeviceRoom(quotas, AT_ONCE * HEADS)
        self.mover = WatchedMover(seed, haste)
        self.mover.on_download = self.downloaded
        # As much host memory as a step gets: for what the device does not keep, and what a use has in its hands.
        least = LAYERS * PAGES * HEADS - sum(quotas) + AT_ONCE * HEADS
        self.store = plain_store(RECORD_BYTES, records_per_slab=1, most_slabs=least if scarce else 1 << 30)
        self.worths = np.random.default_rng(seed).random((LAYERS, PAGES, HEADS), np.float32)
        self.records = TieredPages(
            SHAPE,
            PAGES,
            self.room,
            torch.float32,
            torch.device("cpu"),
            HostRoom(self.store),
            self.mover,
            lambda layer, places: self.worths[layer].reshape(-1)[places],
        )
        self._give_up = self.records.give_up_copies
        self.records.give_up_copies = self.gave_up  # type: ignore[method-assign]
        self.contents: dict[Key, float] = {}
        self.unsaved: set[Key] = set()
        """Records that the host has not as they are."""
        self.expected: Counter[Key] = Counter()
        """Uses ahead of which records were brought; more than the records know, where they had to leave."""
        self.layer, self.in_use, self.number = 0, set[Key](), 0

    @rule(pages=RANGES, mask=MASKS, by_kernel=st.booleans())
    def add(self, pages: PageRange, mask: list[bool], by_kernel: bool) -> None:
        exists = self.records.exists(self.layer, pages)
        some = masked(pages, mask)
        assert self.records.lacking(self.layer, pages, lambda: places(some)).tolist() == places(some & ~exists).tolist()
        new = masked(pages, mask) & ~exists
        chosen = keys(self.layer, pages, new)
        if not chosen or not self.takes(chosen):
            return
        self.records.add(self.layer, pages, places(new))
        if by_kernel:
            slots = self.records.use(self.layer, pages, wanted=lambda: places(new), write=True)
            self.write(slots, pages, new)
        else:
            while self.mover.is_computing:  # it fills the slots at once, so everything before must be over
                self.mover.synchronize()
            self.records.clear(self.layer, pages, places(new))
            self.contents |= dict.fromkeys(chosen, 0.0)
        self.unsaved |= set(chosen)

    @rule(pages=RANGES, mask=st.none() | MASKS, write=st.booleans(), twice=st.booleans())
    def use(self, pages: PageRange, mask: list[bool] | None, write: bool, twice: bool) -> None:
        wanted = masked(pages, mask)
        chosen = [key for key in keys(self.layer, pages, wanted) if key in self.contents]
        if not self.takes(chosen):
            return
        if mask is None:
            ranges = (pages, pages) if twice else (pages,)
            slots = self.records.use(self.layer, *ranges, write=write)
            assert slots.shape == (HEADS, len(ranges) * len(pages))
            slots = slots[:, -len(pages) :]
        else:
            slots = self.records.use(self.layer, pages, wanted=lambda: places(wanted), write=write)
        assert slots.dtype == torch.int32
        for layer, page, head in keys(self.layer, pages, wanted):
            slot = int(slots[head, page - pages.first])
            assert (slot != NO_SLOT) == ((layer, page, head) in self.contents)
        self.read(slots, pages, chosen)
        self.expected -= Counter(chosen * (2 if twice and mask is None else 1))
        if write:
            self.write(slots, pages, wanted & self.records.exists(self.layer, pages))
            self.unsaved |= set(chosen)

    @rule(layer=st.integers(0, LAYERS - 1))
    def settle(self, layer: int) -> None:
        before = self.records._slots[self.layer] != NO_SLOT
        self.records.settle(self.layer)
        stayed = self.records._slots[self.layer] != NO_SLOT
        free_to_go = stayed.copy()
        for key in self.expected:  # all counts are above zero
            if key[0] == self.layer:
                free_to_go[key[1:]] = False
        assert free_to_go.sum() <= self.room.quotas[self.layer]
        assert (before & ~stayed).sum() <= max(0, before.sum() - self.room.quotas[self.layer]), "no more than must"
        worth = self.worths[self.layer]
        assert worth[free_to_go].min(initial=2) >= worth[before & ~stayed].max(initial=-1), "the least worth leave"
        self.layer, self.in_use = layer, set()

    @rule(layer=st.integers(0, LAYERS - 1), uses=st.lists(st.tuples(RANGES, st.none() | MASKS), max_size=3))
    def expect(self, layer: int, uses: list[tuple[PageRange, list[bool] | None]]) -> None:
        told = [(pages, None if mask is None else places(masked(pages, mask))) for pages, mask in uses]
        for pages, mask in uses[: self.records.expect(layer, told)]:
            there = [key for key in keys(layer, pages, masked(pages, mask)) if key in self.contents]
            assert all(self.records._slots[key] != NO_SLOT for key in there), "what is expected is on its way"
            self.expected += Counter(there)

    @rule(pages=RANGES)
    def free(self, pages: PageRange) -> None:
        self.settle(self.layer)
        self.records.free(pages)
        for layer in range(LAYERS):
            for key in keys(layer, pages, masked(pages, None)):
                self.contents.pop(key, None)
                self.unsaved.discard(key)
                self.expected.pop(key, None)
            assert not self.records.exists(layer, pages).any()

    @rule()
    def forget_expected(self) -> None:
        self.records.forget_expected()
        self.expected.clear()

    @precondition(lambda self: self.mover.num_copies)
    @rule()
    def wait(self) -> None:
        self.mover.synchronize()

    @invariant()
    def every_slot_has_one_owner(self) -> None:
        if not hasattr(self, "records"):
            return
        on_device, on_host = self.records._slots != NO_SLOT, self.records._host_slots != NO_SLOT
        slots = self.records._slots[on_device]
        assert len(set(slots.tolist())) == len(slots) == self.room.num_slots - len(self.records._free)
        assert on_device.sum((1, 2)).tolist() == self.records._resident
        assert (~on_device & on_host).sum((1, 2)).tolist() == self.records._away
        assert (on_device | on_host).sum() == len(self.contents)
        assert all((on_device | on_host)[key] for key in self.contents)
        assert self.store.num_records == on_host.sum()

    def teardown(self) -> None:
        if not hasattr(self, "records"):
            return
        for layer in range(LAYERS):
            self.settle(layer)
            for page in range(PAGES):
                pages = PageRange(page, page + 1)
                there = [key for key in keys(layer, pages, masked(pages, None)) if key in self.contents]
                self.read(self.records.use(layer, pages), pages, there)
                self.records.settle(layer)
        self.records.free(PageRange(0, PAGES))
        self.mover.synchronize()
        assert len(self.records._free) == self.room.num_slots
        assert self.store.num_records == self.store.num_bytes == 0
        assert not self.records._uploads or max(self.records._uploads) > self.records._uploads_seen

    def takes(self, chosen: list[Key]) -> bool:
        """Note what the layer has in use; False where that would be too much at once."""
        in_use = self.in_use | set(chosen)
        if len(in_use) > AT_ONCE * HEADS:
            return False
        self.in_use = in_use
        return True

    def write(self, slots: Tensor, pages: PageRange, wanted: Mask) -> None:
        """A kernel that fills these records."""
        for layer, page, head in keys(self.layer, pages, wanted):
            self.number += 1
            self.contents[layer, page, head] = self.number
            record = self.records.pool.storage[int(slots[head, page - pages.first])]
            self.mover.compute(functools.partial(record.fill_, self.number))

    def read(self, slots: Tensor, pages: PageRange, chosen: list[Key]) -> None:
        """A kernel that must find what these records hold."""
        for layer, page, head in chosen:
            slot, wanted = int(slots[head, page - pages.first]), self.contents[layer, page, head]

            def check(slot: int = slot, wanted: float = wanted, key: Key = (layer, page, head)) -> None:
                found = self.records.pool.storage[slot]
                assert (found == wanted).all(), f"{key}: {found.flatten().tolist()} instead of {wanted}"

            self.mover.compute(check)

    def gave_up(self, count: int) -> int:
        """The device alone has some records from now on."""
        before = self.records._host_slots != NO_SLOT
        given = self._give_up(count)
        lost = before & (self.records._host_slots == NO_SLOT)
        assert given == lost.sum() and (self.records._slots[lost] != NO_SLOT).all()
        self.unsaved |= {(int(layer), int(page), int(head)) for layer, page, head in np.argwhere(lost)}
        return given

    def downloaded(self, addresses: Addresses) -> None:
        """Only what the host has not is copied to it."""
        for address in addresses.tolist():
            slot = (address - self.records.pool.storage.data_ptr()) // RECORD_BYTES
            (key,) = np.argwhere(self.records._slots == slot)
            self.unsaved.remove((int(key[0]), int(key[1]), int(key[2])))


TestTiers = Tiers.TestCase
TestTiers.settings = settings(max_examples=60, stateful_step_count=50)
