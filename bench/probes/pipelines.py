"""Measures an input pipeline epoch by epoch, each between two measurements of its limit.

The limit is what the cores do of the same work without a pipeline: one single-threaded process per
core, each with its part of the samples (the kit's `input_rates.py`). They live as long as the
pipeline is measured, and sleep while it runs.

The number of epochs follows the run's effort (`Work.repetitions`). Short epochs, which in memory
may take milliseconds, are repeated: rates and limits are measured over at least `SHORTEST_S`.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import ceil
from pathlib import Path
from statistics import harmonic_mean, mean

import numpy as np
import psutil

from bench.harness import machine, memory
from bench.harness.helpers import figure, plain
from bench.harness.machine import usable_threads
from bench.harness.plan import Work

SEED = 2026
SHORTEST_S = 0.3  # of a repetition
THREADS = Path("/proc/self/task")  # its threads, on Linux
STALL_STEPS = 10  # train steps whose waiting counts, after
WARM_STEPS = 3  # that many


def maker(module, work: Work, source: str, *, loader: str, **settings) -> Callable[[], Iterable]:
    """A function that makes a loader of `module` over `source`, by a row's settings."""
    if each := settings.pop("workers_a_core", None):
        settings["workers"] = round(each * usable_threads())
    make = getattr(module, f"{loader}_loader")
    return partial(make, source, batch_size=work.batch_size, seed=SEED, **settings)


def measure(
    impl, work: Work, make: Callable[[], Iterable], *, technique: str, source: str, **settings
) -> dict[str, dict]:
    """The figures of the loader that `make` makes, over the samples of the task.

    Its limit is that of `technique`; `source` and the settings determine the rest.

    Raises RuntimeError if an epoch does not have all samples.
    """
    with work_limit(impl.__name__, technique, source, **settings) as limit:
        start = time.perf_counter()
        loader = make()
        made = time.perf_counter() - start
        pipeline = Pipeline(loader, images=work.task.dataset.train_size)
        first = pipeline.epochs()
        second, peak = pipeline.peak_memory()
        count = ceil(SHORTEST_S / second.seconds)
        limits, repetitions = [limit()], []
        for _ in range(work.repetitions):
            repetitions.append(pipeline.epochs(count))
            limits.append(limit())
    rates = [epochs.rate for epochs in repetitions]
    around = map(mean, pairwise(limits))
    shares = [100 * rate / limit for rate, limit in zip(rates, around, strict=True)]
    starts = [epochs.first_batch_s for epochs in repetitions]
    cpu = [1000 * epochs.cpu_s / epochs.images for epochs in repetitions]
    return {
        "samples_per_s": figure("samples/s", rates),
        "work_limit": figure("samples/s", limits),
        "share_of_limit": figure("%", shares),
        "first_batch": figure("s", [made + first.first_batch_s]),
        "later_first_batch": figure("s", starts),
        "cpu_per_1000": figure("s", cpu),
        "data_stall": figure("%", [data_stall(impl, work, loader)]),
        "memory": figure("bytes", [peak]),
        "evidence": {"read": pipeline.read},
    }


# The pipeline -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Epochs:
    """The time of epochs: wall-clock and CPU seconds.

    `rate`: images per second, after as many batches as cores, at most half of them: until then the
    pipeline fills, and work in progress would not count. `first_batch_s`: the mean over epochs.
    """

    images: int
    rate: float
    first_batch_s: float
    seconds: float
    cpu_s: float


class Pipeline:
    """A loader, and the processes that it starts."""

    def __init__(self, loader: Iterable, *, images: int) -> None:
        self._loader, self._images = loader, images
        self._own = psutil.Process()
        self._others = {child.pid for child in self._own.children(recursive=True)}
        self.read: list[dict] = []  # of each call of `epochs`: its last epoch

    def epochs(self, count: int = 1) -> Epochs:
        """Take all batches of the next epochs."""
        cpu, begin = self._cpu_s(), time.perf_counter()
        images, filled_s, first_s = 0, 0.0, 0.0
        for _ in range(count):
            start, times, labels = time.perf_counter(), [], []
            for _, some in self._loader:
                times.append(time.perf_counter())
                labels.append(some)
            sizes = [len(some) for some in labels]
            if sum(sizes) != self._images:
                raise RuntimeError(f"an epoch had {sum(sizes)} of {self._images} images")
            filling = min(usable_threads(), len(sizes) // 2)
            images += sum(sizes[filling:])
            filled_s += times[-1] - times[filling - 1]
            first_s += times[0] - start
        seconds, cpu = time.perf_counter() - begin, self._cpu_s() - cpu
        self.read.append(_read(count, labels))
        return Epochs(count * self._images, images / filled_s, first_s / count, seconds, cpu)

    def peak_memory(self) -> tuple[Epochs, int | None]:
        """Take an epoch; returns the peak memory of its processes together, in bytes.

        It is slow: for each figure the kernel walks through all pages.
        """
        seen, done = [], threading.Event()

        def watch() -> None:
            while not seen or not done.wait(0.05):
                seen.append(memory.together(*(process.pid for process in self._processes())))

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            epoch = self.epochs()
        finally:
            done.set()
            watcher.join()
        return epoch, None if None in seen else max(seen)

    def _processes(self) -> list[psutil.Process]:
        children = self._own.children(recursive=True)
        return [self._own, *(child for child in children if child.pid not in self._others)]

    def _cpu_s(self) -> float:
        own = self._own.cpu_times()
        found = own.children_user + own.children_system  # of those that have ended
        for process in self._processes():
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                found += times.user + times.system
        return found


def _read(epochs: int, labels: list) -> dict:
    """What an epoch read: how many samples of each label, and a hash of the labels in their order.

    Another order has another hash. `epochs`: how many were read in a row.
    """
    seen = np.concatenate([np.asarray(some) for some in labels]).astype(np.int64)
    return {
        "epochs": epochs,
        "samples_a_label": np.bincount(seen).tolist(),
        "order_sha256": hashlib.sha256(seen.tobytes()).hexdigest(),
    }


def data_stall(impl, work: Work, loader: Iterable) -> float:
    """The percentage of real train steps' time that is spent waiting for batches."""
    step, waited, total = plain(impl, work).step, 0.0, 0.0
    batches = iter(loader)
    for number in range(WARM_STEPS + STALL_STEPS):
        start = time.perf_counter()
        batch = next(batches)
        there = time.perf_counter()
        step(*batch)
        impl.kit.runtime.synchronize()
        if number >= WARM_STEPS:
            waited += there - start
            total += time.perf_counter() - start
    return 100 * waited / total


# The limit --------------------------------------------------------------------------------------


@contextlib.contextmanager
def work_limit(
    package: str, technique: str, source: str, **settings
) -> Iterator[Callable[[], float]]:
    """A function that measures the limit in samples/s, with one process per core.

    It is that of the technique in a framework's package: `kit.input_rates` gets the settings.

    The processes are forks of this one if that is safe: while it has one thread, or with PyTorch,
    whose DataLoader also forks workers of a process that has set its threads. Otherwise they are
    new, and import the framework. RuntimeError if one ends early.
    """
    forks = THREADS.exists() and (package == "pt_impl" or len(list(THREADS.iterdir())) == 1)
    context = multiprocessing.get_context("fork" if forks else "spawn")
    cores = usable_threads()
    pipes, processes = [], []

    def ask(request: str) -> list:
        try:
            for pipe in pipes:
                pipe.send(request)
            return [pipe.recv() for pipe in pipes]
        except (EOFError, OSError):
            raise RuntimeError("a process of the work limit ended early, see the log") from None

    try:
        for part in range(cores):
            pipe, theirs = context.Pipe()
            share = settings | {"seed": SEED, "part": part, "parts": cores}
            arguments = (theirs, package, technique, source, share)
            process = context.Process(target=_work, args=arguments, daemon=True)
            process.start()
            theirs.close()  # so that the end of the process is the end of the pipe
            pipes.append(pipe)
            processes.append(process)
        ask("are you there")
        yield lambda: sum(ask("work"))
    finally:
        for process in processes:
            process.kill()
            process.join()


def _work(pipe, package: str, technique: str, source: str, settings: dict) -> None:
    """A process of the limit: answers the first request when it is ready, others with its rate."""
    machine.end_with_parent()
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # pipelines work on the CPU
    importlib.import_module(f"{package}.kit.runtime").configure(threads=1, seed=SEED)
    rates = importlib.import_module(f"{package}.kit.input_rates")
    rate = getattr(rates, f"{technique}_limit")(source, **settings)
    with contextlib.suppress(EOFError):
        pipe.recv()
        pipe.send(None)
        while True:
            pipe.recv()
            end = time.perf_counter() + SHORTEST_S
            rates = [rate()]
            while time.perf_counter() < end:
                rates.append(rate())
            pipe.send(harmonic_mean(rates))
