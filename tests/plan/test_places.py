"""The rule by which results are kept on device and host."""

from __future__ import annotations

import random

import pytest

from oomb_accel.plan.places import Run, place


@pytest.mark.parametrize("seed", range(200))
def test_runs_are_their_chunks(seed: int) -> None:
    chance = random.Random(seed)
    counts = [chance.randrange(1, 6) for _ in range(chance.randrange(1, 4))]
    kinds = [[Run(n, size := chance.randrange(10, 90), size + 10) for n in counts] for _ in range(3)]
    singles = [[run._replace(num_chunks=1) for run in runs for _ in range(run.num_chunks)] for runs in kinds]
    room = chance.randrange(-50, 1200), chance.randrange(-50, 1200), chance.randrange(100)
    found = place(kinds, *room)
    assert found == place(singles, *room)
    for places, chunks in zip(found.kinds, singles, strict=True):
        assert places.on_device.stop == len(chunks) and places.on_host.stop == places.on_device.start
        assert places.device_bytes == sum(chunks[n].device_bytes for n in places.on_device)
        assert places.host_bytes == sum(chunks[n].host_bytes for n in places.on_host)
        assert len(places.chunks) == len(places.on_device) + len(places.on_host)
    assert sum(places.device_bytes for places in found.kinds) + found.staging_bytes <= max(0, room[0])
    assert sum(places.host_bytes for places in found.kinds) <= max(0, room[1])
    assert bool(found.staging_bytes) <= any(places.on_host for places in found.kinds)


def test_a_million_chunks_take_no_time() -> None:
    found = place([[Run(10**6, 7, 8), Run(1, 3, 4)]], 7 * 10**5 + 8, 8 * 10**5, 5)
    assert found.kinds[0].on_device == range(900_000, 1_000_001) and len(found.kinds[0].on_host) == 10**5
