"""How much host memory there is, and how much of it this process may pin. No torch: a planner runs it anywhere.

In a container the figures of the machine mislead: ``MemAvailable`` knows nothing of the container's limit. So every
memory cgroup on the way from this process to the top is looked at, in both versions of the interface
(Linux, ``Documentation/admin-guide/cgroup-v2.rst`` and ``cgroup-v1/memory.rst``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from oomb_accel.plan.limits import check_host_memory, host_share
from oomb_accel.plan.sizes import gib_text, host_margin
from oomb_accel.progress import GIB


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryGroup:
    """A cgroup that limits memory."""

    name: str
    """Its folder, as seen from here."""

    limit_bytes: int
    """The hard limit, or the soft one (``memory.high``) where that is lower: beyond it the kernel only reclaims, and
    pinned memory cannot be reclaimed."""

    used_bytes: int
    """Without the inactive file cache, which the kernel gives up before it refuses memory."""

    @property
    def available_bytes(self) -> int:
        """What may still be taken in this group."""
        return max(0, self.limit_bytes - self.used_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class HostLimits:
    """Host memory as it was when it was looked at."""

    total_bytes: int
    """Of the machine."""

    system_available_bytes: int
    """What the machine can still give without swapping, whatever the container may have: ``MemAvailable``."""

    groups: tuple[MemoryGroup, ...] = ()
    """Those with a limit, from this process's own one upwards."""

    memlock_bytes: int | None = None
    """Most memory that this process may lock; None is no limit. CUDA's driver does not ask, but some containers do."""

    @property
    def limit_bytes(self) -> int | None:
        """The lowest limit of a cgroup; None where there is none."""
        return min((group.limit_bytes for group in self.groups), default=None)

    @property
    def available_bytes(self) -> int:
        """What this process and its neighbours can still take: the least of the machine and its cgroups."""
        return min([self.system_available_bytes, *(group.available_bytes for group in self.groups)])

    @property
    def margin_bytes(self) -> int:
        """What is never planned for: other programs, data loading, saving."""
        whole = self.total_bytes if self.limit_bytes is None else min(self.total_bytes, self.limit_bytes)
        return host_margin(whole)

    @property
    def scarce(self) -> str:
        """What decides over ``available_bytes``, in words."""
        for group in self.groups:
            if group.available_bytes == self.available_bytes:
                limit, used = gib_text(group.limit_bytes), gib_text(group.used_bytes)
                return f"the container's limit is {limit} GiB ({group.name}), of which {used} GiB are in use"
        return f"the machine has {gib_text(self.total_bytes)} GiB"


def host_limits(root: Path = Path("/")) -> HostLimits:
    """Look at the memory of this machine and at the limits of this process.

    Args:
        root: where ``/proc`` and the cgroup file systems are found; another one in tests.
    """
    total, available = _machine(root)
    # A limit beyond the machine is none; version 1 writes one near 2^63.
    groups = tuple(group for group in _groups(root) if group.limit_bytes <= total)
    return HostLimits(
        total_bytes=total, system_available_bytes=available, groups=groups, memlock_bytes=_memlock_bytes()
    )


def host_budget(setting_gib: float | Literal["auto"], limits: HostLimits, *, ranks_on_host: int = 1) -> int:
    """The most host memory that this process may pin, in bytes.

    Look at the limits before any rank pins memory: what is pinned already is no longer available.

    Args:
        setting_gib: ``host_memory_gib``, per process; ``"auto"`` takes an equal share of what is there.
        limits: of this machine.
        ranks_on_host: processes on this machine that each have such a budget.

    Returns:
        The setting, or this rank's share of what is available less a margin. It may be 0.

    Raises:
        ValueError: the setting is not a size, or all ranks together would take more than there is.
    """
    share = host_share(limits.available_bytes, limits.margin_bytes, ranks_on_host)
    if setting_gib == "auto":
        return share
    if not 0 <= setting_gib < math.inf:
        raise ValueError(
            f"host_memory_gib must be a size in GiB.\n  Got host_memory_gib={setting_gib}.\n"
            f"  Set host_memory_gib='auto', or a number up to {gib_text(share)}."
        )
    asked = int(setting_gib * GIB)
    check_host_memory(
        asked,
        available_bytes=limits.available_bytes,
        margin_bytes=limits.margin_bytes,
        ranks_on_host=ranks_on_host,
        scarce=limits.scarce,
    )
    return asked


def _machine(root: Path) -> tuple[int, int]:
    """Total and available bytes."""
    sizes = {}
    for line in _read(root / "proc/meminfo").splitlines():
        name, _, size = line.partition(":")
        sizes[name] = int(size.split()[0]) * 1024
    if "MemTotal" in sizes and "MemAvailable" in sizes:
        return sizes["MemTotal"], sizes["MemAvailable"]
    import psutil  # a system without /proc

    memory = psutil.virtual_memory()
    return int(memory.total), int(memory.available)


def _memlock_bytes() -> int | None:
    try:
        import resource
    except ImportError:  # not a Unix
        return None
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _groups(root: Path) -> Iterator[MemoryGroup]:
    """Every memory cgroup that this process is in and can see, with a number for a limit."""
    own: dict[str, str] = {}
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            own["cgroup" if controllers else "cgroup2"] = path
    for line in _read(root / "proc/self/mountinfo").splitlines():
        fields, _, rest = line.partition(" - ")
        kind, _, options = rest.split(" ", 2)
        if kind not in own or (kind == "cgroup" and "memory" not in options.split(",")):
            continue
        mounted, place = (field.encode().decode("unicode_escape") for field in fields.split(" ")[3:5])
        for folder in _upwards(root / place.lstrip("/"), mounted, own[kind]):
            group = _version_2(folder, root) if kind == "cgroup2" else _version_1(folder, root)
            if group is not None:
                yield group


def _upwards(mount: Path, mounted: str, path: str) -> Iterator[Path]:
    """Folders from a cgroup up to the mount point.

    Args:
        mount: the mount point.
        mounted: which cgroup is mounted there; a container often sees its own one only.
        path: of the cgroup, in the same hierarchy. One that is not below ``mounted`` was written for another view of
            the hierarchy, as in a container that has the files of the host: then the mount point is all there is.
    """
    below = path.removeprefix(mounted.rstrip("/")).strip("/") if _is_below(path, mounted) else ""
    parts = [] if ".." in below.split("/") else [part for part in below.split("/") if part]
    for length in range(len(parts), -1, -1):
        yield mount.joinpath(*parts[:length])


def _is_below(path: str, parent: str) -> bool:
    return path == parent or path.startswith(parent.rstrip("/") + "/")


def _version_2(folder: Path, root: Path) -> MemoryGroup | None:
    limits = [_number(_read(folder / name)) for name in ("memory.max", "memory.high")]
    return _group(folder, root, limits, "memory.current", "inactive_file")


def _version_1(folder: Path, root: Path) -> MemoryGroup | None:
    # The second counts parents that a container does not see.
    limits = [_number(_read(folder / "memory.limit_in_bytes")), _statistics(folder).get("hierarchical_memory_limit")]
    return _group(folder, root, limits, "memory.usage_in_bytes", "total_inactive_file")


def _group(folder: Path, root: Path, limits: list[int | None], usage: str, cache: str) -> MemoryGroup | None:
    numbers = [limit for limit in limits if limit is not None]
    used = _number(_read(folder / usage))
    if not numbers or used is None:
        return None
    reclaimable = _statistics(folder).get(cache, 0)
    name = f"/{folder.relative_to(root).as_posix()}"
    return MemoryGroup(name=name, limit_bytes=min(numbers), used_bytes=max(0, used - reclaimable))


def _statistics(folder: Path) -> dict[str, int]:
    """``memory.stat``: a name and a number per line."""
    pairs = (line.split() for line in _read(folder / "memory.stat").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _number(text: str) -> int | None:
    """``max`` is no number, and no limit."""
    return int(text) if text.strip().isdigit() else None


def _read(path: Path) -> str:
    """Text of the file, or nothing where it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
