"""Leaks of known size: how small a leak `watch_memory` finds, and whether it reports others.

Every process of a framework watches the plain step once for each size, in an order that changes
from process to process. Kept memory is released between two watches.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from bench.diagnosis.bench_memory_growth import ROUNDS, TECHNIQUE
from bench.harness.plan import FRAMEWORKS
from bench.harness.selection import cases_of
from bench.harness.worker import Operations
from bench.validation import attacked
from bench.validation.new_processes import answers
from shared import datasets
from shared.growth import LEAK
from shared.specs import TASKS

SIZES = (0.0, 0.1, 0.2, 0.3, 0.5, 1.0)  # megabytes that a round keeps


def report(frameworks: list[str], processes: int, results: Path, *, publish: bool = False) -> int:
    """Watch and print; returns 1 if a leak was reported without any.

    publish: keep the counts in docs/attacked.json, and make docs/attacked.md.
    """
    data = str(datasets.materialise(TASKS[TECHNIQUE.workloads[0].task].dataset, results / "data"))
    rows = [
        {"framework": framework, "size": float(size), "verdict": verdict}
        for framework, answer in answers(__name__, frameworks, processes, data, allocator="plain")
        for size, verdict in answer
    ]
    print(f"called a leak, of {processes} processes each, by megabytes kept in a round")
    for framework in frameworks:
        counts = (f"{size:g}: {called_leaks(rows, framework, size)}" for size in SIZES)
        print(f"{framework}  {'  '.join(counts)}")
    if publish:
        attacked.keep("leaks", attacked.on_this_machine() | {"rounds": ROUNDS, "rows": rows})
    return int(any(called_leaks(rows, framework, 0.0) for framework in frameworks))


def called_leaks(rows: list[dict], framework: str, size: float) -> int:
    """How often a leak of this size was reported."""
    return sum(
        row["verdict"] == LEAK
        for row in rows
        if (row["framework"], row["size"]) == (framework, size)
    )


# In the process -----------------------------------------------------------------------------------


def measure(framework: str, number: int, threads: int, data: str) -> list[tuple[float, str]]:
    """The verdict on each size in this process."""
    worker = Operations()
    package, preload = FRAMEWORKS[framework].package, FRAMEWORKS[framework].preload
    worker._op_configure(package, threads, seed=number, imports=list(preload))
    side = (framework, FRAMEWORKS[framework].flavours[0])
    cases = cases_of(TECHNIQUE, "bench.diagnosis.bench_memory_growth", "full")
    plain = next(case for case in cases if case.side == side and case.is_baseline)
    worker._op_build(plain.message(), data, number)
    watch = importlib.import_module(f"{package}.diagnosis.memory_growth").watch_memory
    shift = number % len(SIZES)
    return [
        (size, watch(_keeping(worker.call, size, []), worker.batches[:1], rounds=ROUNDS).verdict)
        for size in SIZES[shift:] + SIZES[:shift]
    ]


def _keeping(step: Callable, size: float, kept: list[np.ndarray]) -> Callable:
    """The step, which keeps so many megabytes with every round."""

    def keeping(*batch):
        kept.append(np.ones(int(size * 1e6), np.uint8))
        return step(*batch)

    return keeping


if __name__ == "__main__":
    framework, threads, number, data = sys.argv[1:]
    print(json.dumps(measure(framework, int(number), int(threads), data)))
