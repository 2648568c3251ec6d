"""What a record shows that a technique gains."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from bench.analysis.machine_class import words
from bench.analysis.questions import Remedy
from bench.analysis.ranking import GOALS, INPUT, PREDICT, TRAIN, UPDATE, rank, works
from bench.analysis.reading import load, results_file
from bench.analysis.table import level
from bench.doctor.findings import Finding
from bench.record import FRAMEWORKS, Record
from bench.report.answer import full_name, share

DOCS = Path(__file__).resolve().parents[2] / "docs"
# The goal that a technique serves where it is advised, and at which kinds of work.
SERVES = {
    "in_memory": ("throughput", (INPUT,)),
    "mixed_precision": ("train-speed", (TRAIN, UPDATE)),
    "export": ("latency", (PREDICT,)),
}


def newest() -> dict[str, Record]:
    """The newest record that shows what gains: of the last run here, or the published one.

    One block has no intervals, and shows nothing.
    """
    for place in (Path("results/latest"), DOCS):
        if results_file(place).is_file():
            record = load(place)
            if any(comparison.ci for comparison in record.comparisons):
                return {shown(place): record}
    return {}


def shown(place: Path) -> str:
    """A record's place as it was given; the published one's as its folder."""
    return DOCS.name if place.resolve() == DOCS else str(place)


def sentence(remedy: Remedy) -> str:
    """A remedy with what its row leaves of its baseline's figure."""
    gain = share(remedy.gain, remedy.goal.figure)
    return f"{remedy.row.case.technique}, {full_name(remedy.row)}: {gain}, {remedy.work.title}"


def with_gain(finding: Finding, records: dict[str, Record]) -> Finding:
    """A finding with what the records show that its technique gains, or that none does."""
    if finding.technique not in SERVES:
        return finding
    machines = [f"{name}: {words(one.environment)}" for name, one in records.items()]
    places = "; ".join(machines) or "no record"
    sides = [finding.framework] if finding.framework else list(FRAMEWORKS)
    best = [one for side in sides if (one := _best(records, side, finding.technique))]
    told = [f"{FRAMEWORKS[one.row.case.framework]}: {sentence(one)}" for one in best]
    nothing = f"no row of {finding.technique} gains ({places})"
    return replace(finding, gain=f"{'; '.join(told)} ({places})" if told else nothing)


def _best(records: dict[str, Record], framework: str, technique: str) -> Remedy | None:
    """The row of a technique that gains most, over all pieces of work."""
    name, kinds = SERVES[technique]
    gaining = []
    for work in [work for record in records.values() for work in works(record)]:
        ranking = rank(work, GOALS[name], framework=framework) if work.kind in kinds else None
        for row in ranking.gaining if ranking else ():
            if row.case.technique == technique and row.ratios[ranking.goal.figure].bounds:
                gaining.append(Remedy(work, ranking.goal, row))
    return min(gaining, key=lambda one: level(one.goal.figure, one.gain), default=None)
