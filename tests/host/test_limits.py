"""What a machine has: both versions of cgroups, nested, in containers; and the budget of a process."""

import dataclasses
import re
from pathlib import Path

import pytest

from oomb_accel.host import HostLimits, MemoryGroup, host_budget, host_limits
from oomb_accel.plan.sizes import gib_above, gib_text
from tests.host.machines import GIB, MIB, machine

V1_NONE = "9223372036854771712"


def put(root: Path, files: dict[str, object]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def system(root: Path, cgroup: str, mounts: str, files: dict[str, object]) -> HostLimits:
    """A machine of 64 GiB, 48 of them available."""
    sizes = {"MemTotal": f"{64 << 20} kB", "MemFree": "1 kB", "MemAvailable": f"{48 << 20} kB", "HugePages_Total": "0"}
    meminfo = "\n".join(f"{name}:   {size}" for name, size in sizes.items())
    names = {"proc/meminfo": meminfo, "proc/self/cgroup": cgroup, "proc/self/mountinfo": mounts}
    return host_limits(put(root, {**names, **files}))


def mount(kind: str, mounted: str = "/", place: str = "/sys/fs/cgroup", options: str = "rw") -> str:
    return f"29 23 0:26 {mounted} {place} rw,nosuid shared:4 - {kind} cgroup {options}"


V1 = mount("cgroup", "/", "/sys/fs/cgroup/memory", "rw,memory")


def test_without_cgroups(tmp_path: Path) -> None:
    limits = system(tmp_path, "0::/", "22 27 0:21 / /proc rw - proc proc rw", {})
    assert (limits.total_bytes, limits.available_bytes) == (64 * GIB, 48 * GIB)
    assert limits.groups == () and limits.limit_bytes is None
    assert "64 GiB" in limits.scarce


def test_version_2_looks_at_every_level(tmp_path: Path) -> None:
    limits = system(
        tmp_path,
        "0::/pod/box",
        mount("cgroup2"),
        {
            "sys/fs/cgroup/memory.stat": "anon 5",  # the top has no limit files
            "sys/fs/cgroup/pod/memory.max": 24 * GIB,
            "sys/fs/cgroup/pod/memory.high": "max",
            "sys/fs/cgroup/pod/memory.current": 20 * GIB,
            "sys/fs/cgroup/pod/memory.stat": f"anon 1\ninactive_file {2 * GIB}\nactive_file {GIB}",
            "sys/fs/cgroup/pod/box/memory.max": 16 * GIB,
            "sys/fs/cgroup/pod/box/memory.high": "max",
            "sys/fs/cgroup/pod/box/memory.current": 4 * GIB,
            "sys/fs/cgroup/pod/box/memory.stat": "inactive_file 0",
        },
    )
    assert [group.limit_bytes for group in limits.groups] == [16 * GIB, 24 * GIB]
    # The pod is nearer to its limit, although the limit of the box is lower; inactive cache does not count as used.
    assert limits.available_bytes == 6 * GIB
    assert limits.limit_bytes == 16 * GIB
    assert "/sys/fs/cgroup/pod)" in limits.scarce and "18 GiB are in use" in limits.scarce


def test_version_2_soft_limit(tmp_path: Path) -> None:
    limits = system(
        tmp_path,
        "0::/",
        mount("cgroup2"),
        {
            "sys/fs/cgroup/memory.max": 16 * GIB,
            "sys/fs/cgroup/memory.high": 12 * GIB,
            "sys/fs/cgroup/memory.current": 13 * GIB,
            "sys/fs/cgroup/memory.stat": "",
        },
    )
    assert limits.limit_bytes == 12 * GIB
    assert limits.available_bytes == 0


def test_version_1(tmp_path: Path) -> None:
    limits = system(
        tmp_path,
        "12:cpu,cpuacct:/slurm/job\n4:memory:/slurm/job\n0::/",
        "\n".join(
            [mount("cgroup", "/", "/sys/fs/cgroup/cpu", "rw,cpu,cpuacct"), V1, mount("cgroup2", "/", "/sys/fs/2")]
        ),
        {
            "sys/fs/cgroup/cpu/slurm/job/memory.limit_in_bytes": 1,  # no memory controller there
            "sys/fs/cgroup/cpu/slurm/job/memory.usage_in_bytes": 1,
            "sys/fs/cgroup/memory/memory.limit_in_bytes": V1_NONE,
            "sys/fs/cgroup/memory/memory.usage_in_bytes": 9 * GIB,
            "sys/fs/cgroup/memory/slurm/job/memory.limit_in_bytes": 32 * GIB,
            "sys/fs/cgroup/memory/slurm/job/memory.usage_in_bytes": 9 * GIB,
            "sys/fs/cgroup/memory/slurm/job/memory.stat": f"inactive_file 7\ntotal_inactive_file {3 * GIB}",
        },
    )
    assert [group.limit_bytes for group in limits.groups] == [32 * GIB]
    assert limits.available_bytes == 26 * GIB


def test_version_1_limit_of_a_parent_that_is_not_mounted(tmp_path: Path) -> None:
    limits = system(
        tmp_path,
        "4:memory:/docker/abc",
        mount("cgroup", "/docker/abc", "/sys/fs/cgroup/memory", "rw,memory"),
        {
            "sys/fs/cgroup/memory/memory.limit_in_bytes": V1_NONE,
            "sys/fs/cgroup/memory/memory.usage_in_bytes": GIB,
            "sys/fs/cgroup/memory/memory.stat": f"hierarchical_memory_limit {8 * GIB}\ntotal_inactive_file 0",
        },
    )
    assert limits.available_bytes == 7 * GIB


@pytest.mark.parametrize(
    ("path", "mounted"),
    [("/docker/abc", "/docker/abc"), ("/", "/"), ("/../../other", "/"), ("/docker/abcd", "/docker/abc")],
    ids=["own one is mounted", "cgroup namespace", "outside of the namespace", "mount of another"],
)
def test_views_of_a_container(tmp_path: Path, path: str, mounted: str) -> None:
    limits = system(
        tmp_path,
        f"0::{path}",
        mount("cgroup2", mounted, "/sys/fs/c\\040group"),
        {
            "sys/fs/c group/memory.max": 8 * GIB,
            "sys/fs/c group/memory.current": GIB,
            "sys/fs/c group/d/memory.max": 1,
            "sys/fs/c group/d/memory.current": 1,
        },
    )
    assert [group.limit_bytes for group in limits.groups] == [8 * GIB]
    assert limits.available_bytes == 7 * GIB


def test_the_machine_may_be_scarcer_than_the_container(tmp_path: Path) -> None:
    files: dict[str, object] = {"sys/fs/cgroup/memory.max": 60 * GIB, "sys/fs/cgroup/memory.current": GIB}
    limits = system(tmp_path, "0::/", mount("cgroup2"), files)
    assert limits.available_bytes == 48 * GIB
    assert "machine" in limits.scarce


def test_this_machine() -> None:
    limits = host_limits()
    assert 0 < limits.available_bytes <= limits.total_bytes
    assert limits.available_bytes <= limits.system_available_bytes


def test_without_proc(tmp_path: Path) -> None:
    limits = host_limits(tmp_path)
    assert limits.total_bytes == host_limits().total_bytes and limits.available_bytes > 0


def test_margin_follows_the_container() -> None:
    group = MemoryGroup(name="/", limit_bytes=8 * GIB, used_bytes=0)
    assert machine(100 * GIB).margin_bytes == 4 * GIB
    assert dataclasses.replace(machine(100 * GIB), groups=(group,)).margin_bytes == GIB // 2


def test_budget_of_what_is_there() -> None:
    limits = machine(100 * GIB)
    assert host_budget("auto", limits) == 96 * GIB
    assert host_budget("auto", limits, ranks_on_host=4) == 24 * GIB
    assert host_budget("auto", machine(3 * GIB)) == 0
    assert host_budget(96, limits) == 96 * GIB
    assert host_budget(0.5, limits) == GIB // 2
    assert host_budget(0, machine(0)) == 0
    assert host_budget(24.0, limits, ranks_on_host=4) == 24 * GIB


@pytest.mark.parametrize(("setting", "ranks"), [(97, 1), (25, 4), (200.5, 8), (96.001, 1), (33, 3)])
def test_budget_says_what_fits(setting: float, ranks: int) -> None:
    limits = machine(100 * GIB)
    with pytest.raises(ValueError) as caught:
        host_budget(setting, limits, ranks_on_host=ranks)
    first, second, third = str(caught.value).splitlines()
    assert "host_memory_gib" in first
    assert f"{setting:g} GiB" in second and "100 GiB are available" in second
    assert (f"{ranks} x" in second) == (ranks > 1)
    found = re.search(r"host_memory_gib=([\d.]+) or less", third)
    assert found is not None
    fits = float(found[1])
    assert fits > 0.95 * 96 / ranks
    assert host_budget(fits, limits, ranks_on_host=ranks) == int(fits * GIB)


def test_budget_where_nothing_fits() -> None:
    with pytest.raises(ValueError, match="no setting fits"):
        host_budget(1, machine(2 * GIB))


@pytest.mark.parametrize("setting", [-1, float("nan"), float("inf")])
def test_budget_that_is_no_size(setting: float) -> None:
    with pytest.raises(ValueError, match=r"Got host_memory_gib=.*\n.*up to 96"):
        host_budget(setting, machine(100 * GIB))


@pytest.mark.parametrize("num_bytes", [0, 1, MIB, 300 * MIB, GIB - 1, GIB, 100 * GIB + 1, 2000 * GIB - 1])
def test_text_is_rounded_to_the_safe_side(num_bytes: int) -> None:
    assert int(float(gib_text(num_bytes)) * GIB) <= num_bytes <= int(float(gib_above(num_bytes)) * GIB)
