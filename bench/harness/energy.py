"""Energy by the machine's counters: processor packages and memory (RAPL), and GPUs (NVML).

It is never estimated: without a readable counter there is no figure. Since 2020 only root may read
RAPL on Linux (CVE-2020-8694), and most virtual machines have none. A counter covers a whole package
or GPU, so the other contenders of a match sleep while one is sampled.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")
COUNTED = ("package", "dram")  # zones that hold no other: cores are part of a package

Counter = tuple[Callable[[], float], float]  # joules so far, and where it begins again at 0


class Meter:
    """Every counter that this process can read, from `start` to `stop`."""

    def __init__(self, powercap: Path = POWERCAP) -> None:
        found = _rapl(powercap) | _nvml()
        self._counters = {name: counter for name, counter in found.items() if _reads(counter)}
        self._before: dict[str, float] | None = None

    @property
    def names(self) -> list[str]:
        """The names of the counters."""
        return sorted(self._counters)

    def start(self) -> None:
        """Start counting."""
        self._before = self._read()

    def stop(self) -> float | None:
        """Joules since `start`, over all counters; None if there are none."""
        now = self._read()
        if not now or not self._before:
            return None
        parts = ((now[name] - self._before[name]) for name in now)
        ends = (end for _, end in self._counters.values())
        return sum(part if part >= 0 else part + end for part, end in zip(parts, ends, strict=True))

    def _read(self) -> dict[str, float] | None:
        try:
            return {name: read() for name, (read, _) in self._counters.items()}
        except (OSError, ValueError):
            return None


def _reads(counter: Counter) -> bool:
    try:
        return counter[0]() >= 0
    except (OSError, ValueError):
        return False


def _rapl(powercap: Path) -> dict[str, Counter]:
    """Zones of the processors. `intel-rapl-mmio` counts the same packages once more."""
    counters = {}
    for zone in sorted(powercap.glob("intel-rapl:*")):
        try:
            name = (zone / "name").read_text().strip()
            end = int((zone / "max_energy_range_uj").read_text()) / 1e6
        except (OSError, ValueError):
            continue
        if name.startswith(COUNTED):
            counters[f"RAPL {zone.name} {name}"] = (_file(zone / "energy_uj"), end)
    return counters


def _file(path: Path) -> Callable[[], float]:
    return lambda: int(path.read_text()) / 1e6


def _nvml() -> dict[str, Counter]:
    """GPUs that count their energy: Volta and later."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return {}
    count = ctypes.c_uint()
    if library.nvmlInit_v2() or library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return {}
    counters = {}
    for number in range(count.value):
        handle = ctypes.c_void_p()
        if not library.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(handle)):
            counters[f"NVML GPU {number}"] = (_gpu(library, handle), float("inf"))
    return counters


def _gpu(library: ctypes.CDLL, handle: ctypes.c_void_p) -> Callable[[], float]:
    def read() -> float:
        millijoules = ctypes.c_ulonglong()
        if status := library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules)):
            raise OSError(status, "the GPU counts no energy")
        return millijoules.value / 1e3

    return read
