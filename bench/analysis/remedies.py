"""From what holds a step back to the techniques whose measured rows address it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bench.analysis.decisions import DEVICES, INPUT, TRAIN, Option, Work, works
from bench.analysis.values import is_pair
from bench.analysis.verdicts import shown_less

# Bottleneck -> the kinds of work whose rows count, and the figure that has to be less than the
# baseline's. Which techniques do something about it, each benchmark file says of its own.
REMEDIES = {
    "input": ((INPUT,), "gain"),
    "overhead": ((TRAIN,), "gain"),
    "arithmetic": ((TRAIN,), "gain"),
    "memory bandwidth": ((TRAIN,), "gain"),
    "memory size": ((TRAIN,), "memory"),
    "communication": ((DEVICES,), "gain"),
}


@dataclass(frozen=True)
class Remedy:
    """A measured row that was better than its baseline: what of its figure was left."""

    technique: str
    row: str
    work: str
    figure: str
    left: float
    ci: tuple[float, float] | None

    def __str__(self) -> str:
        """One line."""
        interval = f" ({self.ci[0]:.3f}–{self.ci[1]:.3f})" if self.ci else ""
        return (
            f"{self.technique}, {self.row}: {self.left:.3f}{interval} of its baseline's "
            f"{self.figure}, {self.work}"
        )


def remedies(record: dict[str, Any], framework: str, bottleneck: str) -> list[Remedy]:
    """Rows of a framework that address a bottleneck and keep accuracy, the best gain first.

    A row of a technique is the best one for each piece of work. Its gain is shown by the whole
    interval: one block has none, and shows no gain.
    """
    kinds, figure = REMEDIES[bottleneck]
    found: dict[tuple[str, str], Remedy] = {}
    for work in works(record):
        for option in work.options if work.kind in kinds else ():
            for each in (option, *option.repeats):
                case = each.case
                if bottleneck not in (case.get("remedies") or ()) or case["framework"] != framework:
                    continue
                remedy = _remedy(each, work, figure)
                if remedy is None:
                    continue
                key = case["technique"], work.title
                if key not in found or remedy.left < found[key].left:
                    found[key] = remedy
    return sorted(found.values(), key=lambda one: one.left)


def _remedy(option: Option, work: Work, figure: str) -> Remedy | None:
    """What of the baseline's figure a row leaves; None where it is no gain."""
    if option.is_baseline or not option.accuracy.kept:
        return None
    if figure == "memory":
        return _less_memory(option, work)
    ci = option.own.get("ci") if option.own else None
    if option.gain is None or option.gain >= 1 or (option.own and not shown_less(ci)):
        return None
    pair = tuple(ci) if is_pair(ci) else None
    measure = "time" if option.own else "time a sample"
    return Remedy(option.case["technique"], option.name, work.title, measure, option.gain, pair)


def _less_memory(option: Option, work: Work) -> Remedy | None:
    """By the baselines of the same framework and flavour that do the same work."""
    ours = option.figures.get("memory")
    keys = ("framework", "flavour")
    bases = [
        other
        for other in work.options
        if other.is_baseline
        and "memory" in other.figures
        and all(other.case.get(key) == option.case.get(key) for key in keys)
    ]
    if ours is None or not bases:
        return None
    base = min(bases, key=lambda one: one.figures["memory"].value)
    bounds = work.bounds("memory", option, base)
    if not shown_less(bounds):
        return None
    left, words = ours.value / base.figures["memory"].value, "memory above import"
    pair = None if ours.kind == "exact" else bounds
    return Remedy(option.case["technique"], option.name, work.title, words, left, pair)
