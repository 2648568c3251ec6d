"""The advice of `bench.choose` for every goal, in words for a report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bench.analysis.record import above_import
from bench.analysis.values import at, is_number
from bench.choose import GOALS, Advice, Candidate, Limits, advise, figure_of, measure
from bench.report.figures import number, plus_minus, scaled

UNLIMITED = Limits()


@dataclass(frozen=True)
class Pick:
    """For one piece of work: the best, what cannot be told from it, and what it rests on.

    `price` has the best's other figures: memory, first call, accuracy. `other` is the best of the
    other framework where that was shown to be worse, `worse` all that was.
    """

    work: str
    best: str
    figure: str
    price: str
    equal: list[str]
    other: str | None
    worse: list[str]
    rows: list[str]


@dataclass(frozen=True)
class Goal:
    """The picks for one aim; without any, `nothing` says why."""

    name: str
    measure: str
    picks: list[Pick]
    nothing: str | None


def goals(results: dict[str, Any]) -> list[Goal]:
    """What to use for each goal, without limits."""
    return [_goal(results, name) for name in GOALS]


def _goal(results: dict[str, Any], name: str) -> Goal:
    what = measure(name, UNLIMITED)[0]
    try:
        picks = [_pick(advice, name) for advice in advise(results, name, UNLIMITED)]
    except ValueError as error:
        return Goal(name, what, [], str(error))
    return Goal(name, what, picks, None)


def _pick(advice: Advice, goal: str) -> Pick:
    best, side = advice.best, advice.best.case["framework"]
    others = [c for c in (*advice.equal, *advice.rest) if c.case["framework"] != side]
    other = others[0] if others and others[0] in advice.rest else None

    def words(candidate: Candidate) -> str:
        return f"{candidate.name}: {figure_of(candidate, goal, UNLIMITED)}"

    def worse(candidate: Candidate) -> str:
        return f"{words(candidate)}, {candidate.value / best.value:.2f} times the best"

    return Pick(
        work=advice.work,
        best=best.name,
        figure=figure_of(best, goal, UNLIMITED),
        price=_price(best.case, goal),
        equal=list(map(words, advice.equal)),
        other=worse(other) if other else None,
        worse=list(map(worse, advice.rest)),
        rows=[candidate.case["id"] for candidate in (best, *advice.equal)],
    )


def _price(case: dict, goal: str) -> str:
    """The case's other figures, as far as they were measured and are not the goal itself."""
    parts = []
    peak, first = above_import(case.get("memory")), at(case, "timing", "cold_first_call_s")
    if goal != "memory" and is_number(peak):
        parts.append(f"{number(scaled(peak, 1e-6))} MB of memory")
    if goal != "cold-start" and is_number(first):
        parts.append(f"first call {number(first)} s")
    difference = at(case, "accuracy", "difference")
    if is_number(at(difference, "mean")):
        change = plus_minus(difference["mean"], at(difference, "ci"), signed=True)
        verdict = at(difference, "verdict")
        parts.append(f"accuracy to baseline {change}" + (f", {verdict}" if verdict else ""))
    return "; ".join(parts)
