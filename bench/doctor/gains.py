"""What a technique gains, by a record."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from bench.analysis.machine_class import words
from bench.analysis.questions import Remedy
from bench.analysis.ranking import GOALS, INPUT, PREDICT, PROBE, TRAIN, UPDATE, works
from bench.analysis.reading import load, results_file
from bench.analysis.table import level
from bench.doctor.findings import Finding
from bench.record import FRAMEWORKS, Record
from bench.report.answer import accuracy_of, full_name, gain_of

DOCS = Path(__file__).resolve().parents[2] / "docs"
# The goal that a technique serves where it is advised, and at which kinds of work.
SERVES = {
    "in_memory": ("throughput", (INPUT,)),
    "mixed_precision": ("train-speed", (TRAIN, UPDATE)),
    "export": ("latency", (PREDICT,)),
    "serving_threads": ("throughput", (PROBE,)),
    "varying_lengths": ("throughput", (PROBE,)),
}
MEASURES = "pytest bench/ --benchmark-only --technique"


def newest() -> dict[str, Record]:
    """The newest record with gains: of the last run here, or the published one.

    A record of one block has no intervals, and shows no gain.
    """
    for place in (Path("results/latest"), DOCS):
        if results_file(place).is_file():
            record = load(place)
            if any(comparison.ci for comparison in record.comparisons):
                return {shown(place): record}
    return {}


def shown(place: Path) -> str:
    """A record's path as it was given; "docs" for the published one."""
    return DOCS.name if place.resolve() == DOCS else str(place)


def sentence(remedy: Remedy) -> str:
    """A remedy and the gain of its row."""
    row, gain = remedy.row, gain_of(remedy.gain, remedy.goal.figure)
    kept = "" if row.accuracy.kept else accuracy_of(row.accuracy)
    what = ", ".join(filter(None, (gain, kept, remedy.work.title)))
    return f"{row.case.technique}, {full_name(row)}: {what}"


def with_gain(finding: Finding, records: dict[str, Record]) -> Finding:
    """A finding with the gain of its technique by the records, or that it has none."""
    technique = finding.technique
    if technique not in SERVES:
        return finding
    machines = [f"{name}: {words(one.environment)}" for name, one in records.items()]
    places = "; ".join(machines) or "no record"
    sides = [finding.framework] if finding.framework else list(FRAMEWORKS)
    best = [one for side in sides if (one := _best(records, side, technique))]
    told = [f"{FRAMEWORKS[one.row.case.framework]}: {sentence(one)}" for one in best]
    gain = "; ".join(told) or f"no row of {technique} gains"
    if not any(case.technique == technique for one in records.values() for case in one.cases):
        gain = f"{technique} was not measured; measure it with {MEASURES} {technique}"
    return replace(finding, gain=f"{gain} ({places})")


def _best(records: dict[str, Record], framework: str, technique: str) -> Remedy | None:
    """The row of a technique that gains most; one that keeps accuracy, where there is one."""
    name, kinds = SERVES[technique]
    goal = GOALS[name]
    gaining = [
        Remedy(work, goal, row)
        for record in records.values()
        for work in works(record)
        for row in work.members
        if work.kind in kinds
        and (row.case.technique, row.case.framework) == (technique, framework)
        and row.improves(goal.figure)
    ]
    return min(
        gaining,
        key=lambda one: (not one.row.accuracy.kept, level(goal.figure, one.gain)),
        default=None,
    )
