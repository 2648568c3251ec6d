"""Choose a framework and a technique from a run's results.

    twinbench choose results/latest
    twinbench choose results/latest --task digits-cnn --goal latency

Without --goal, each task is ranked by its main figure. A technique is advised
if it gains over plain code in the same framework and keeps accuracy: it does
the same work, or the worse end of its 95% interval is within the task's margin
(or --max-accuracy-drop). If none does, plain code is advised. Brackets hold
95% intervals.
"""

from __future__ import annotations

import sys
from math import isfinite
from pathlib import Path

from bench.analysis.ranking import GOALS, Limits, Ranking, rank, works
from bench.analysis.reading import load
from bench.analysis.table import TIME
from bench.quantities import size
from bench.record import Record
from bench.report import parsers
from bench.report.answer import text
from bench.report.content import warnings
from bench.report.text import plain, wrap
from shared.choices import unknown


def advise(
    record: Record, goal: str | None, limits: Limits, task: str | None = None
) -> list[Ranking]:
    """The rankings for a goal, or for the main goal of each piece of work.

    Raises ValueError if no row has one.
    """
    made = []
    for work in works(record):
        wanted = work.goals[:1] if goal is None else [GOALS[goal]]
        if task in (None, work.task):
            made += [rank(work, each, limits) for each in wanted if each in work.goals]
    made = list(filter(None, made))
    if not made:
        raise ValueError(_nothing(goal, limits))
    return made


def _nothing(goal: str | None, limits: Limits) -> str:
    """Why there is no answer."""
    measured = "a figure to choose by" if goal is None else GOALS[goal].title
    plural = goal is None or goal in ("throughput", "accuracy", "convergence")
    measured = measured if plural else f"a {measured}"
    more = "; it may have timed no predictions" if goal == "latency" else ""
    limited = (limits.accuracy_drop, limits.memory) != (None, None)
    within = " within the limits" if limited else " that keeps accuracy"
    return f"no row of this run has {measured}{within}{more}"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status (2: an error)."""
    parser = parsers.described("twinbench choose", __doc__)
    parser.add_argument("path", type=Path, help="a results.json, or its folder")
    parser.add_argument(
        "--goal", choices=GOALS, metavar="GOAL", help=f"rank by one of: {', '.join(GOALS)}"
    )
    parser.add_argument("--task", help="only this task")
    parser.add_argument(
        "--steps", type=int, metavar="N", help="rank by the time of N steps, first call included"
    )
    parser.add_argument(
        "--max-accuracy-drop", type=float, metavar="P", help="accept a loss of P points"
    )
    parser.add_argument(
        "--memory-budget", type=size, metavar="SIZE", help="only what fits into SIZE, such as 2GB"
    )
    parser.add_argument(
        "--all", action="store_true", help="show every row, and why it was not chosen"
    )
    given = parser.parse_args(arguments)
    if given.steps is not None and given.steps < 1:
        parser.error(f"--steps: give 1 or more, not {given.steps}")
    if given.steps is not None and given.goal and GOALS[given.goal].figure != TIME:
        parser.error(f"--steps ranks by time, --goal {given.goal} does not: leave one out")
    if given.memory_budget is not None and given.goal == "batch":
        parser.error(
            "--goal batch was measured within the run's budget: set that one, with "
            "pytest bench/ --memory-budget"
        )
    if given.max_accuracy_drop is not None and not isfinite(given.max_accuracy_drop):
        parser.error(f"--max-accuracy-drop: give a number, not {given.max_accuracy_drop}")
    limits = Limits(given.max_accuracy_drop, given.memory_budget, given.steps)
    try:
        record = load(given.path)
        known = sorted({case.task for case in record.cases})
        if given.task and given.task not in known:
            raise ValueError(f"--task: {unknown(given.task, known)}")
        answers = advise(record, given.goal, limits, given.task)
        for warning in warnings(record):
            print("\n".join(wrap(plain(warning), 80)), file=sys.stderr)
        print("\n".join(text(answers, 80, every=given.all)))
    except ValueError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    return 0
