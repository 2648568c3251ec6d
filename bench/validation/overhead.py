"""The overhead of the suite's code if it has nothing to do, and over hand-written code.

The same work differs by some percent between processes, depending on where their memory lies.
Contenders in separate processes would need hundreds of blocks to show one percent. So both steps
run in one process and take turns, and which is built first changes from process to process. The
interval is that of the ratio over processes.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys
import time
from collections.abc import Callable
from math import ceil, exp, log
from pathlib import Path
from statistics import median

import bench.train_step
from bench.analysis.verdicts import Interval, t_interval
from bench.harness.folders import replace_file
from bench.harness.plan import FRAMEWORKS, Case
from bench.harness.processes import ROOT
from bench.harness.selection import cases_of
from bench.harness.worker import Operations
from bench.report.formatting import MISSING, ratio
from bench.report.names import called
from bench.report.tables import markdown_table
from bench.report.technique_tables import Table, of_figures, of_words
from bench.validation import attacked
from bench.validation.new_processes import answers
from shared import datasets
from shared.specs import TASKS

RECORD, PAGE = ROOT / "docs" / "overhead.json", ROOT / "docs" / "overhead.md"
PROMISED = 1.02
TASK = "digits-cnn"
TURN_S, TURNS = 0.010, 200  # how long a step is repeated before the other's turn, and the turns
WARM = 20  # steps


def pairs(framework: str, only: str) -> dict[str, tuple[Case, Case]]:
    """What is compared, for example a row that does nothing and the plain step.

    only: the name of a technique; empty for all.
    """
    compared, side = {}, (framework, FRAMEWORKS[framework].flavours[0])
    for file in pkgutil.iter_modules(bench.train_step.__path__, "bench.train_step."):
        technique = importlib.import_module(file.name).TECHNIQUE
        cases = [
            case
            for case in cases_of(technique, file.name, "full")
            if case.timed and case.side == side and case.workload.task == TASK
        ]
        for case in cases if only in ("", technique.name) else []:
            baseline = next(c for c in cases if c.is_baseline and c.work == case.work)
            name = f"{technique.name}, batch {case.workload.batch_size}"
            if case.variant.name == "neutral":
                compared[f"{name}: nothing to do ÷ plain step"] = case, baseline
            elif case.variant.name == "hand_written":
                compared[f"{name}: plain step ÷ hand-written"] = baseline, case
    return compared


def report(
    frameworks: list[str], only: str, processes: int, results: Path, *, publish: bool = False
) -> int:
    """Measure and print every pair; returns 1 if an interval exceeds what is promised.

    publish: keep the figures in docs/overhead.json, and make docs/overhead.md.
    """
    data = str(datasets.materialise(TASKS[TASK].dataset, results / "data"))
    logs: dict[tuple[str, str], list[float]] = {}
    measured = answers(__name__, frameworks, processes, data, only, allocator="tuned")
    for framework, ratios in measured:
        for name, value in ratios.items():
            logs.setdefault((framework, name), []).append(log(value))
    intervals = {pair: t_interval(values) for pair, values in logs.items()}
    print(f"time ratios over {processes} processes, promised: {PROMISED} at most")
    for (framework, name), interval in intervals.items():
        print(f"{framework} {name:72} {_words(interval)}")
    if publish:
        rows = [
            {"framework": framework, "pair": name, "ratio": exp(interval.mean)}
            | {"ci": [exp(interval.low), exp(interval.high)]}
            for (framework, name), interval in intervals.items()
        ]
        record = attacked.on_this_machine() | {"processes": processes, "rows": rows}
        replace_file(RECORD, json.dumps(record, indent=1) + "\n")
        replace_file(PAGE, page(record))
    return int(any(exp(interval.high) > PROMISED for interval in intervals.values()))


_HEAD = """# What the suite's own code costs

Each technique at the setting that does nothing is timed against the plain step, and the plain step
against one written by hand: {processes} processes a framework, on {cpu}, {threads} threads.
Brackets are 95% intervals of time ratios. The promise is an upper bound of at most {promised}:
{kept} of {count} keep that{others}. Made by `twinbench validate overhead --publish`.
"""


def page(record: dict) -> str:
    """The page, from docs/overhead.json only."""
    rows = record["rows"]
    over = [row for row in rows if row["ci"][1] > PROMISED]
    broken = sum(row["ci"][0] > PROMISED for row in over)
    others = f", {len(over) - broken} can't be told, {broken} break it" if over else ""
    counts = {"kept": len(rows) - len(over), "count": len(rows), "others": others}
    head = _HEAD.format(**record, promised=PROMISED, **counts)
    table = Table(
        "",
        [*of_words(f"pair, batch of {called(TASK)}"), *of_figures("PyTorch", "TensorFlow")],
        [[pair, *_both(rows, pair)] for pair in dict.fromkeys(row["pair"] for row in rows)],
    )
    return f"{head}\n{markdown_table(table).strip()}\n"


def _both(rows: list[dict], pair: str) -> list[str]:
    ratios = {
        row["framework"]: ratio(row["ratio"], row["ci"]) for row in rows if row["pair"] == pair
    }
    return [ratios.get(framework, MISSING) for framework in FRAMEWORKS]


def _words(interval: Interval) -> str:
    low, high = exp(interval.low), exp(interval.high)
    broken = "" if high <= PROMISED else "  not shown" if low <= PROMISED else "  broken"
    return f"{exp(interval.mean):.3f} ({low:.3f}–{high:.3f}){broken}"


# In the process -----------------------------------------------------------------------------------


def measure(framework: str, only: str, number: int, threads: int, data: str) -> dict[str, float]:
    """The time ratio of each pair in this process; `number` decides which is built first."""
    worker = Operations()
    package, preload = FRAMEWORKS[framework].package, FRAMEWORKS[framework].preload
    worker._op_configure(package, threads, seed=number, imports=list(preload))
    ratios, order = {}, -1 if number % 2 else 1
    for name, pair in pairs(framework, only).items():
        steps = [_step(worker, case, data, number) for case in pair[::order]]
        ratios[name] = _ratio(*steps, worker.kit.runtime.synchronize) ** order
    return ratios


def _step(configured: Operations, case: Case, data: str, seed: int) -> Callable[[], None]:
    """The prepared case's step on its first batch."""
    worker = Operations()
    worker.__dict__ |= configured.__dict__
    worker._op_build(case.message(), data, seed)
    step, batch = worker.call, worker.batches[0]
    return lambda: step(*batch)


def _ratio(top: Callable, bottom: Callable, synchronize: Callable) -> float:
    """The median ratio of two turns that follow each other; each of them is the first in turn."""

    def seconds(step: Callable, count: int) -> float:
        synchronize()
        start = time.perf_counter()
        for _ in range(count):
            step()
        synchronize()
        return time.perf_counter() - start

    shortest = min(min(seconds(step, 1) for _ in range(WARM)) for step in (top, bottom))
    count, ratios = ceil(TURN_S / shortest), []
    for turn in range(TURNS):
        order = (top, bottom) if turn % 2 else (bottom, top)
        taken = {step: seconds(step, count) for step in order}
        ratios.append(taken[top] / taken[bottom])
    return median(ratios)


if __name__ == "__main__":
    framework, threads, number, data, only = sys.argv[1:]
    print(json.dumps(measure(framework, only, int(number), int(threads), data)))
