"""Which changes of a train step are combined: the settings of all rows that were faster.

Gains don't multiply, so the combination is measured like any row.
"""

from __future__ import annotations

from typing import Any

from bench.record import Case, Record

FASTER = ("faster", "slightly faster")
Settings = dict[str, Any]


def winners(record: Record, framework: str, task: str) -> Settings:
    """The settings of all rows of a framework on a task that were shown to be faster."""
    cases, settings = {case.id: case for case in record.cases}, {}
    for comparison in record.comparisons:
        case = cases.get(comparison.numerator)
        if comparison.kind != "baseline" or case is None or comparison.verdict not in FASTER:
            continue
        if (case.framework, case.task, case.mode) == (framework, task, "train"):
            settings |= case.stacking or {}
    return settings


def stacked(record: Record, case: Case) -> tuple[Settings, str | None]:
    """The settings to combine, or the reason why there are none."""
    if not any(comparison.verdict for comparison in record.comparisons):
        return {}, "one block shows of nothing that it is faster: give it time for several"
    settings = winners(record, case.framework, case.task)
    exact = {name: value for name, value in settings.items() if name != "dtype"}
    if not case.changes_math:
        settings = exact
    elif settings == exact:
        return {}, "nothing that rounds is faster: see the row that keeps the mathematics"
    if len(settings) < 2:
        only = f"only {next(iter(settings))} was shown to be faster" if settings else ""
        return {}, f"{only or 'nothing was faster'}: there is nothing to stack"
    return settings, None
