"""Memory of this process as the kernel counts it, and how glibc keeps it.

On Linux, `/proc/self/clear_refs` resets the resident peak (`VmHWM`) to the current size, so that
each phase has its peak. Elsewhere, or if the kernel refuses, figures are None rather than wrong.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import numpy as np

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_POPULATE_READ = 22  # of madvise(2), Linux 5.14 and later
PAGE = mmap.PAGESIZE


def resident() -> int | None:
    """Resident bytes now."""
    return _status("VmRSS")


def peak() -> int | None:
    """Highest resident bytes since the start or the last `reset_peak`."""
    return _status("VmHWM")


def proportional_peak() -> int | None:
    """The peak memory of this process; shared pages count by their share."""
    now, most, own = resident(), peak(), proportional([os.getpid()])
    return None if None in (now, most, own) else own + max(0, most - now)


def reset_peak() -> bool:
    """Reset the peak to the current size (proc(5), writing 5); False if that is refused."""
    try:
        _CLEAR.write_text("5")
    except OSError:
        return False
    return True


def _status(key: str) -> int | None:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return None


def trim() -> None:
    """Return freed memory to the system, if the C allocator can (glibc)."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def keeps_freed_memory() -> bool | None:
    """Whether the C allocator keeps a freed block of 64 MiB, as the tuned settings make it do.

    The block is touched and freed, and resident sizes are compared. None if that can't be seen.
    """
    size = 64 << 20
    try:
        libc = ctypes.CDLL(None)
        libc.malloc.restype = ctypes.c_void_p
        libc.malloc.argtypes = [ctypes.c_size_t]
        libc.free.argtypes = [ctypes.c_void_p]
    except (OSError, AttributeError, TypeError):
        return None
    block = libc.malloc(size)
    if not block or resident() is None:
        return None
    ctypes.memset(block, 1, size)
    held = resident()
    libc.free(block)
    return held - resident() < size // 2


@cache
def adopts_pages() -> bool:
    """Whether `adopt_pages` works here: on Linux 5.14 or later with a readable /proc."""
    return sys.platform == "linux" and adopt_pages(os.getpid())


def adopt_pages(parent: int) -> bool:
    """Map the file pages that a forked process's `parent` has mapped; False if that fails.

    A fork inherits memory pages, but maps pages of libraries only when it touches them. These would
    count as memory that it needs beyond its imports.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    try:
        with open(f"/proc/{parent}/pagemap", "rb", buffering=0) as pagemap:
            for start, end in _files(parent):
                pagemap.seek(start // PAGE * 8)
                pages = np.frombuffer(pagemap.read((end - start) // PAGE * 8), np.uint64)
                for first, last in _runs(pages >> np.uint64(63) == 1):  # present in memory
                    address, size = start + int(first) * PAGE, int(last - first) * PAGE
                    if libc.madvise(address, size, _POPULATE_READ):
                        return False
    except OSError:
        return False
    return True


def _files(process: int) -> Iterator[tuple[int, int]]:
    """Where a process has mapped files."""
    for line in Path(f"/proc/{process}/maps").read_text().splitlines():
        addresses, rights, _, _, inode, *_ = line.split()
        if inode != "0" and rights.startswith("r"):
            start, _, end = addresses.partition("-")
            yield int(start, 16), int(end, 16)


def _runs(flags: np.ndarray) -> np.ndarray:
    """Beginnings and ends of what is true in a row."""
    edges = np.flatnonzero(np.diff(flags.astype(np.int8), prepend=0, append=0))
    return edges.reshape(-1, 2)


def together(process: int, *forked: int) -> int | None:
    """Resident bytes of a process, and the additional bytes of its forked children.

    None if the kernel does not tell. A process that has ended counts as nothing.
    """
    private = ("Private_Clean:", "Private_Dirty:")
    found = [_counted(process, "Rss:"), *(_counted(pid, *private) for pid in forked)]
    return None if None in found else sum(found)


def proportional(pids: Iterable[int]) -> int | None:
    """Proportional set size of several processes, in bytes: pages that they share count once.

    None if the kernel does not tell. A process that has ended counts as nothing.
    """
    found = [_counted(pid, "Pss:") for pid in pids]
    return None if None in found else sum(found)


def _counted(pid: int, *names: str) -> int | None:
    """Bytes of a process in lines of its `smaps_rollup`: 0 where it has ended, None without any."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except ProcessLookupError:
        return 0
    except FileNotFoundError:
        return 0 if Path("/proc/self/smaps_rollup").exists() else None
    except OSError:
        return None
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(names))
