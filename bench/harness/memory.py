"""Memory of the calling process, as the kernel counts it, and where glibc keeps it.

On Linux: the resident peak (`VmHWM`), which `/proc/self/clear_refs` sets back to the present size,
so that each phase has a peak of its own. Elsewhere, and where the kernel refuses the reset, the
figures are None: never a wrong number.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def resident() -> int | None:
    """Resident bytes now."""
    return _status("VmRSS")


def peak() -> int | None:
    """Highest resident bytes since the start or the last `reset_peak`."""
    return _status("VmHWM")


def reset_peak() -> bool:
    """Set the peak back to the present size (proc(5): writing 5); False where that is refused."""
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
    """Give freed memory back to the system, where the C allocator can (glibc)."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def keeps_freed_memory() -> bool | None:
    """Whether the C allocator keeps a freed block of 64 MiB: the effect of the tuned settings.

    The block is touched, freed, and the resident size compared. None where it can't be seen.
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


def proportional(pids: Iterable[int]) -> int | None:
    """Proportional set size of processes together, in bytes: shared pages count once among them.

    None where the kernel does not tell. A process that has ended counts nothing.
    """
    found = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except ProcessLookupError:
            continue
        except FileNotFoundError:
            if Path("/proc/self/smaps_rollup").exists():
                continue
            return None
        except OSError:
            return None
        found += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return found
