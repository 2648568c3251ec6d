"""Measures a step in the process of its framework: rounds without the profiler, then with it.

It imports no framework that the program does not.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import mmap
import resource
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import fmean, median
from types import ModuleType
from typing import Any

import numpy as np

from bench.why import measured as m
from bench.why.sweep import sweep, without_profiler
from shared import step_events as kinds
from shared.cgroups import usable_threads
from shared.profiles import endless, in_order

WARM_STEPS = 3
ROUND_S, LEAST_STEPS, MOST_STEPS = 0.3, 2, 100  # of a round
PROFILED_ROUNDS, MOST_PROFILED = 5, 20  # as long as so many rounds; steps at most
PAGES = 2000  # that are touched to see what a fault costs
FLUSHED_STEPS = 3
ALONE_S = 0.3


class Program:
    """A step and its batches, in the process that runs them. impl: `pt_impl` or `tf_impl`.

    of_file: whether a file is run, in a runtime that the profiler does not see.
    """

    def __init__(
        self,
        name: str,
        impl: ModuleType,
        step: Callable,
        batches: Iterable,
        model: Any = None,
        *,
        round_s: float = ROUND_S,
        of_file: bool = False,
    ) -> None:
        self.round_s, self._of_file = round_s, of_file
        self.name, self.impl, self.step, self.model = name, impl, step, model
        self.framework = impl.__name__.removesuffix("_impl")
        self._kit = importlib.import_module(f"{impl.__name__}.kit.step_events")
        self.batches: Iterator = endless(batches)
        self.rounds: list[float] = []
        self._taken: list[tuple[float, int]] = []  # seconds, and graphs that were made meanwhile
        self._used: list[tuple[float, ...]] = []
        self._graphs: Callable[[], int | None] = lambda: None
        self._warm = False

    def round(self) -> float:
        """Take steps without the profiler; returns their mean seconds."""
        if not self._warm:
            for _ in range(WARM_STEPS):
                self._timed()
            self._taken.clear()
            self._graphs = self.impl.kit.runtime.trace_counter(self.step)
            self._warm = True
        delays = _delays()
        before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        count = 0
        while count < LEAST_STEPS or (
            count < MOST_STEPS and time.perf_counter() - start < self.round_s
        ):
            self._timed()
            count += 1
        whole = time.perf_counter() - start
        after = resource.getrusage(resource.RUSAGE_SELF)
        user, system = after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime
        faults = after.ru_minflt - before.ru_minflt
        delayed = sum(end - delays.get(task, 0.0) for task, end in _delays().items())
        self._used.append((whole, user + system, system, delayed, faults))
        self.rounds.append(whole / count)
        return self.rounds[-1]

    def take(self) -> None:
        """Take one step that is not counted."""
        self._timed()
        self._taken.pop()

    def alone(self) -> float:
        """Seconds of the fastest of some steps that are not counted."""
        before = len(self._taken)
        for _ in range(3):
            self._timed()
        seconds = min(one for one, _ in self._taken[before:])
        del self._taken[before:]
        return seconds

    def side(self) -> m.Side:
        """All measurements, with a profile that is taken now."""
        count = max(
            2, min(MOST_PROFILED, math.ceil(PROFILED_ROUNDS * self.round_s / median(self.rounds)))
        )
        seen, steps, taken = self._kit.profile(self.step, self.batches, self.model, count=count)
        swept = sweep(seen, steps, taken)
        profiled = fmean(one.waiting + one.step for one in taken)
        return m.Side(
            name=self.name,
            framework=self.framework,
            rounds=self.rounds,
            profiled=profiled,
            pieces=self._pieces(swept.pieces, profiled),
            products=swept.products,
            layers=self._kit.layers(self.model),
            trains=any(one.phase == kinds.BACKWARD for one in swept.pieces),
            facts=self._facts({one.dtype for one in swept.products} | {"float32"}),
        )

    def compute(
        self,
        kind: str,
        shape: tuple[int, ...],
        dtype: str,
        *,
        train: bool = False,
        seconds: float = ALONE_S,
    ) -> float:
        """Seconds of one product, convolution or attention: the fastest that fits into `seconds`.

        train: with its gradients; never for a product. shape: see `measured.Product`.
        """
        if kind == kinds.PRODUCTS:
            rows, inner, columns = shape
            draw = np.random.default_rng(0).standard_normal
            a, b = (draw(size, dtype=np.float32) for size in ((rows, inner), (inner, columns)))
            return self._kit.product_seconds(a, b, dtype=dtype, seconds=seconds)
        convolves = kind == kinds.CONVOLUTIONS
        call = self._kit.convolution_seconds if convolves else self._kit.attention_seconds
        return call(shape, dtype=dtype, train=train, seconds=seconds)

    def _pieces(self, pieces: list[m.Piece], profiled: float) -> list[m.Piece]:
        """Without the profiler's cost. What passes between operators, where each step compiles, is
        compiling; where a file runs, its runtime."""
        pieces = without_profiler(pieces, median(self.rounds), profiled)
        again = {"kind": kinds.RECOMPILATION, "layer": "", "phase": ""}
        if self._of_file:
            again["kind"] = kinds.RUNTIME
        elif not all(graphs for _, graphs in self._taken):
            return pieces
        between = (kinds.DISPATCH, kinds.WAITING)
        return [m.replaced(one, **again) if one.kind in between else one for one in pieces]

    def _timed(self) -> None:
        before, start = self._graphs() or 0, time.perf_counter()
        self.step(*in_order(next(self.batches)))
        self.impl.kit.runtime.synchronize()
        seconds = time.perf_counter() - start
        self._taken.append((seconds, (self._graphs() or 0) - before))

    def _facts(self, dtypes: set[str]) -> m.Facts:
        whole, *used = map(sum, zip(*self._used, strict=True))
        # Of all rounds, as shares of their time: in one of them others may have had the processors.
        cpu, system, delayed, faults = (one / whole * median(self.rounds) for one in used)
        usual = [seconds for seconds, graphs in self._taken if not graphs]
        compiled = [seconds for seconds, graphs in self._taken if graphs]
        more = sum(max(0.0, seconds - median(usual)) for seconds in compiled) if usual else 0.0
        runtime = self.impl.kit.runtime
        peaks = {}
        for dtype in sorted(dtypes & {"float32", "bfloat16", "float16", "float64"}):
            # What a CPU lacks is computed by loops: a large product would take minutes.
            size = 1024 if dtype in ("float32", "float64") else 256
            peaks[dtype] = runtime.matmul_flops(size=size, dtype=dtype, seconds=self.round_s)
        return m.Facts(
            threads=self._kit.threads(),
            processors=usable_threads(),
            cpu_s=cpu,
            system_s=system,
            delayed=delayed,
            faults=faults,
            fault_s=seconds_of_a_fault(),
            graphs=sum(graphs for _, graphs in self._taken) / len(self._taken),
            compiling_s=more / len(self._taken),
            denormal=self._denormal(),
            flushed=self._flushed(),
            peaks=peaks,
            onednn=self._of_file or runtime.onednn(),
        )

    def _denormal(self) -> float:
        """The share of denormal numbers among the weights in float32."""
        weights = [one for one in self._kit.weights(self.model) if one.dtype == np.float32]
        sizes = [np.abs(one) for one in weights]
        smallest = np.finfo(np.float32).tiny
        denormal = sum(int(((size > 0) & (size < smallest)).sum()) for size in sizes)
        return denormal / (sum(size.size for size in sizes) or 1)

    def _flushed(self) -> float | None:
        """The time of steps with denormals flushed to zero, over that of steps in turns without.

        None where the framework flushes them anyway.
        """
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(FLUSHED_STEPS):
            for flush in (False, True):
                if not self._kit.flush_denormals(on=flush):
                    return None
                self._timed()
                seconds[flush].append(self._taken.pop()[0])
        self._kit.flush_denormals(on=False)
        return min(seconds[True]) / min(seconds[False])


def _delays() -> dict[str, float]:
    """Seconds that each thread was ready and had no processor, where the system tells."""
    delays = {}
    for task in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # a thread that ended
            delays[task.parent.name] = int(task.read_text().split()[1]) / 1e9
    return delays


def seconds_of_a_fault() -> float:
    """The cost of the first access to a page of memory, as the median of some."""
    page, costs = mmap.PAGESIZE, []
    for _ in range(3):
        with contextlib.closing(mmap.mmap(-1, PAGES * page)) as memory:
            start = time.perf_counter()
            for place in range(0, PAGES * page, page):
                memory[place] = 1
            fresh = time.perf_counter() - start
            start = time.perf_counter()
            for place in range(0, PAGES * page, page):
                memory[place] = 1
            costs.append((fresh - (time.perf_counter() - start)) / PAGES)
    return max(0.0, median(costs))
