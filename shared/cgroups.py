"""Cores and memory that this process may use: what its control groups allow it, of either version.

A container's limits, and those of a service or a batch job. A group is held to the limits of those
around it, too; in a container its own group is what is mounted.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from math import floor, inf
from pathlib import Path

MOUNT, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
THREADS = Path("/proc/self/task")


def usable_threads() -> int:
    """Cores that this process may use: its affinity, cut to the groups' quota; at least one."""
    count = len(processors()) or os.cpu_count() or 1
    return max(1, floor(min(count, cpu_quota())))


def processors() -> set[int]:
    """The numbers of the processors that this process may run on; empty where none are told."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


@contextmanager
def one_processor() -> Iterator[None]:
    """All threads of this process run on one of its processors within it, and then as before.

    Raises NotImplementedError where the system binds no threads to processors.
    """
    if not hasattr(os, "sched_getaffinity") or not THREADS.exists():
        raise NotImplementedError("this system can't bind threads to processors")
    before = {thread: os.sched_getaffinity(thread) for thread in _threads()}
    one = {min(os.sched_getaffinity(0))}
    try:
        _bind(dict.fromkeys(before, one))
        yield
    finally:
        usual = before[os.getpid()]  # also of threads that began within
        _bind({thread: before.get(thread, usual) for thread in _threads()})


def _threads() -> list[int]:
    return [int(path.name) for path in THREADS.iterdir()]


def _bind(processors: dict[int, set[int]]) -> None:
    for thread, allowed in processors.items():
        with suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(thread, allowed)


def cpu_quota() -> float:
    """Cores that this process may fill, inf where nothing limits them."""
    return min(map(_quota, _groups("cpu")), default=inf)


def free_memory() -> float:
    """Bytes that are left of the memory that this process and its group may take, or inf."""
    return min(map(_free, _groups("memory")), default=inf)


def divisible(controller: str = "cpu") -> Path | None:
    """The group of this process, where it may make others inside that share out what it has."""
    for group in reversed(list(_groups(controller))):
        with suppress(OSError):
            controls = group / "cgroup.subtree_control"  # version 2
            shared = controller in controls.read_text() if controls.exists() else True
            if shared and (group / "cgroup.procs").exists() and os.access(group, os.W_OK):
                return group
    return None


def set_quota(group: Path, cores: float) -> None:
    """Let the processes of a group fill so many cores. Raises OSError where it may not be said."""
    period = 100_000
    if (group / "cpu.max").exists():
        (group / "cpu.max").write_text(f"{cores * period:.0f} {period}")
    else:
        (group / "cpu.cfs_quota_us").write_text(f"{cores * period:.0f}")


def _groups(controller: str) -> Iterator[Path]:
    """The folders of this process's group and of those around it."""
    lines = []
    with suppress(OSError):  # no Linux
        lines = OWN.read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = MOUNT / controller if controllers else MOUNT
        yield mount
        inside = mount
        for name in Path(path).parts[1:]:
            inside /= name
            yield inside


def _quota(group: Path) -> float:
    with suppress(OSError, ValueError):  # "max" is no number
        quota, period = (group / "cpu.max").read_text().split()
        return float(quota) / float(period)
    with suppress(OSError):
        quota, period = (int((group / f"cpu.cfs_{n}_us").read_text()) for n in ("quota", "period"))
        return quota / period if quota > 0 else inf
    return inf


def _free(group: Path) -> float:
    for most, used, cached in (
        ("memory.max", "memory.current", "inactive_file "),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file "),
    ):
        with suppress(OSError, ValueError):
            limit, taken = (int((group / name).read_text()) for name in (most, used))
            # Pages of files that nobody used lately go where memory is wanted.
            lines = (group / "memory.stat").read_text().splitlines()
            cache = sum(int(line.removeprefix(cached)) for line in lines if line.startswith(cached))
            return max(0, limit - taken + cache)
    return inf
