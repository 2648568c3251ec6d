"""What a program uses while it runs: time and memory of each GPU (NVML), CPU time of each thread.

    with watch_utilization() as found:
        train()
    print(found)

GPUs are those of the machine, whoever uses them, and need the package nvidia-ml-py. "Busy" is the
share of time in which any kernel ran, as NVML counts it over its own last fraction of a second.
Threads are those of this process: of Python by the name that Python gives them, of a framework's
pools by the system's.

Run it around a program: `python -m shared.utilization train.py`, or `-m module`.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, pstdev

import psutil

SHOWN = 10  # threads


@dataclass(frozen=True)
class Gpu:
    """A GPU: shares of time in which it was busy, and bytes in use. None: NVML does not tell.

    `sd`: the standard deviation of those shares, by which they fluctuate.
    """

    name: str
    mean: float | None
    most: float | None
    sd: float | None
    mean_bytes: float | None
    most_bytes: int | None
    whole_bytes: int | None


@dataclass(frozen=True)
class Thread:
    """A thread: shares of a core, over the whole time and in the busiest sample."""

    name: str
    mean: float
    most: float


@dataclass
class Utilization:
    """What was used while a `with` block of `watch_utilization` ran; filled in at its end.

    `without`: why there is no GPU. `threads`: the busiest first.
    """

    seconds: float = 0.0
    gpus: tuple[Gpu, ...] = ()
    without: str = ""
    threads: tuple[Thread, ...] = ()

    def __str__(self) -> str:
        """A table of the GPUs, or why there are none, and one of the busiest threads."""
        rows = [f"{'GPU':30}{'busy':>8}{'most':>8}{'memory':>12}{'most':>10}{'of':>10}"]
        rows += [
            f"{gpu.name[:29]:30}{_percent(gpu.mean)}{_percent(gpu.most)}"
            f"{_gigabytes(gpu.mean_bytes, 9)}{_gigabytes(gpu.most_bytes, 7)}"
            f"{_gigabytes(gpu.whole_bytes, 7, digits=1)}"
            for gpu in self.gpus
        ]
        rows = rows if self.gpus else [f"no GPU: {self.without}"]
        rows.append(f"\n{'thread':30}{'mean':>8}{'most':>8}   of a core, in {self.seconds:.1f} s")
        for one in self.threads[:SHOWN]:
            rows.append(f"{one.name[:29]:30}{_percent(one.mean)}{_percent(one.most)}")
        if rest := self.threads[SHOWN:]:
            rows.append(f"{f'{len(rest)} others':30}{_percent(sum(one.mean for one in rest))}")
        return "\n".join(rows)


def _percent(share: float | None) -> str:
    return f"{'?' if share is None else f'{share:.0%}':>8}"


def _gigabytes(size: float | None, width: int, digits: int = 2) -> str:
    return f"{'?' if size is None else f'{size / 1e9:.{digits}f}':>{width}} GB"


@contextmanager
def watch_utilization(*, interval: float = 0.25) -> Iterator[Utilization]:
    """Sample GPUs and threads every `interval` seconds while the block runs.

    What it yields is filled in at the end of the block. Raises ValueError for an interval of 0.
    """
    if interval <= 0:
        raise ValueError(f"samples need an interval above 0 s, not {interval}")
    used, gpus, threads = Utilization(), _Gpus(), _Threads(interval)
    done = threading.Event()

    def sample() -> None:
        while not done.wait(interval):
            gpus.sample()
            threads.sample()

    sampler = threading.Thread(target=sample, daemon=True)
    threads.sample()
    sampler.start()
    try:
        yield used
    finally:
        done.set()
        sampler.join()
        gpus.sample()
        threads.sample()
        used.gpus, used.without = gpus.figures(), gpus.without
        used.seconds, used.threads = threads.seconds, threads.figures(but=sampler.native_id)


class _Threads:
    """Samples of the CPU seconds of this process's threads, by the system's number of each."""

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._samples: list[tuple[float, dict[int, tuple[float, float]]]] = []
        self._names: dict[int, str] = {}

    @property
    def seconds(self) -> float:
        return self._samples[-1][0] - self._samples[0][0]

    def sample(self) -> None:
        by_number = {thread.native_id: thread.name for thread in threading.enumerate()}
        used = _cpu_seconds()
        self._samples.append((time.perf_counter(), used))
        for number in used:
            if number in by_number or number not in self._names:
                self._names[number] = by_number.get(number) or _system_name(number)

    def figures(self, *, but: int | None) -> tuple[Thread, ...]:
        """The threads that a sample met after the first, without the one that sampled."""
        total, most = defaultdict(float), defaultdict(float)
        for (begin, before), (_, after) in pairwise(self._samples):
            for number, (end, used) in after.items():
                # One that began in between began at 0, and so did one with an older one's number.
                since, had = before.get(number, (begin, 0.0))
                more = used - had if used >= had else used
                total[number] += more
                if end - since >= self._interval / 2 or len(self._samples) == 2:  # or too short
                    # More than one core is the clock, which was read late.
                    most[number] = max(most[number], min(1.0, more / (end - since)))
        # The last sample may be too short to count: no mean is above the most.
        means = {number: used / self.seconds for number, used in total.items() if number != but}
        threads = [
            Thread(self._names[number], mean, max(mean, most[number]))
            for number, mean in means.items()
        ]
        return tuple(sorted(threads, key=lambda one: -one.mean))


def _cpu_seconds() -> dict[int, tuple[float, float]]:
    """Of each thread of this process: when it was read, and the CPU seconds it had used by then."""
    if sys.platform != "linux":
        threads = psutil.Process().threads()
        now = time.perf_counter()
        return {one.id: (now, one.user_time + one.system_time) for one in threads}
    seconds = {}
    for number in map(int, os.listdir("/proc/self/task")):
        # The thread's own clock, numbered as Linux's posix-timers.h does. Reading a thread's file
        # waits for the interpreter's lock: beside a busy thread, up to a second for all of them.
        with suppress(OSError):  # it has ended
            seconds[number] = (time.perf_counter(), time.clock_gettime(~number << 3 | 0b110))
    return seconds


def _system_name(number: int) -> str:
    try:
        return Path(f"/proc/self/task/{number}/comm").read_text("utf-8").strip()
    except OSError:  # it has ended, or this is no Linux
        return f"thread {number}"


class _Gpus:
    """Samples of all GPUs that NVML knows; where there are none, `without` says why."""

    def __init__(self) -> None:
        self.without, self._gpus = "", []
        try:
            import pynvml
        except ImportError:
            self.without = "nvidia-ml-py is not installed, which asks the driver for its figures"
            return
        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
            numbers = range(pynvml.nvmlDeviceGetCount())
            self._gpus = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in numbers]
            self.without = "" if numbers else "NVML knows none"
        except pynvml.NVMLError as error:
            self.without = f"NVML says: {error}"
        self._busy: list[list[int]] = [[] for _ in self._gpus]
        self._memory: list[list] = [[] for _ in self._gpus]

    def sample(self) -> None:
        for number, gpu in enumerate(self._gpus):
            with suppress(self._nvml.NVMLError):  # one that has the host's memory tells none
                self._memory[number].append(self._nvml.nvmlDeviceGetMemoryInfo(gpu))
            with suppress(self._nvml.NVMLError):  # a part of a GPU (MIG) is not told to be busy
                self._busy[number].append(self._nvml.nvmlDeviceGetUtilizationRates(gpu).gpu)

    def figures(self) -> tuple[Gpu, ...]:
        """Each GPU's figures. Ends the use of NVML."""
        figures = []
        for number, gpu in enumerate(self._gpus):
            used = [memory.used for memory in self._memory[number]]
            busy = [percent / 100 for percent in self._busy[number]]
            figures.append(
                Gpu(
                    f"{number} {self._nvml.nvmlDeviceGetName(gpu)}",
                    fmean(busy) if busy else None,
                    max(busy, default=None),
                    pstdev(busy) if busy else None,
                    fmean(used) if used else None,
                    max(used, default=None),
                    self._memory[number][-1].total if used else None,
                )
            )
        if self._gpus:
            self._nvml.nvmlShutdown()
        return tuple(figures)


def main() -> None:
    """Run a program, and print what it used even where it fails."""
    given = sys.argv[1:]
    if given[:1] == ["-m"] and len(given) > 1:
        sys.argv = given[1:]
        run, what, known = runpy.run_module, given[1], importlib.util.find_spec(given[1])
    elif given and not given[0].startswith("-"):
        sys.argv = given
        run, what, known = runpy.run_path, given[0], Path(given[0]).is_file()
        sys.path[0] = str(Path(what).resolve().parent)
    else:
        raise SystemExit("usage: python -m shared.utilization FILE|-m MODULE [ARGUMENT ...]")
    if not known:
        raise SystemExit(f"{what}: there is no such program")
    try:
        with watch_utilization() as used:
            run(what, run_name="__main__")
    finally:
        print(f"\n{used}")


if __name__ == "__main__":
    main()
