"""What accuracy costs in time and in size: the Pareto front of the trained cases of a task."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise, zip_longest

from bench.analysis.reading import View
from bench.record import FRAMEWORKS, Case, TaskFacts
from bench.report.formatting import compact, number, plus_minus, scaled
from bench.report.svg_shapes import (
    Chart,
    Curve,
    Line,
    Mark,
    letters,
    scale,
    side_of,
    spread_letters,
    up_and_across,
)
from bench.report.technique_tables import Table, of_figures, of_words, unit_of
from shared.specs import more_is_better

STEP_TIME, SIZE, COMPRESSED = "step time [ms]", "size on disk [MB]", "size compressed [MB]"
COSTS = (STEP_TIME, SIZE, COMPRESSED)  # what accuracy is set against


@dataclass(frozen=True)
class Point:
    """A trained case: its letter in the picture, what it costs, how accurate it is."""

    letter: str
    label: str
    case: Case
    cost: float
    accuracy: float
    ci: tuple[float, float] | None
    front: bool = False


def on_front(points: list[tuple[float, float]], *, more_is_better: bool) -> list[bool]:
    """Whether no other point costs no more and is as good, and better in one of the two."""
    sign = 1 if more_is_better else -1

    def beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
        cheaper, better = other[0] - one[0], sign * (one[1] - other[1])
        return min(cheaper, better) >= 0 and max(cheaper, better) > 0

    return [not any(beats(other, point) for other in points) for point in points]


def scatter(points: list[Point], *, cost: str, metric: str, more_is_better: bool) -> Chart:
    """Accuracy over cost, up and left is better; the front is joined by a line."""
    left, right, top, bottom = 14.0, 97.0, 10.0, 250.0
    axis = scale([point.cost for point in points], left, right, log=True)
    bounds = [v for p in points for v in (p.accuracy, *(p.ci or []))]
    ends = (bottom, top) if more_is_better else (top, bottom)
    up = scale(bounds, *ends)
    shapes = up_and_across(axis, up)
    front = sorted((p for p in points if p.front), key=lambda p: p.cost)
    steps = [(axis(p.cost), up(p.accuracy)) for p in front]
    corners = [(after[0], before[1]) for before, after in pairwise(steps)]
    joined = [place for both in zip_longest(steps, corners) for place in both if place]
    shapes += [Curve(joined, "front")] if corners else []
    for point in points:
        side, x, y = side_of(point.case), axis(point.cost), up(point.accuracy)
        if point.ci:
            low, high = (up(bound) for bound in point.ci)
            shapes.append(Line(x, low, x, high, f"interval {side}"))
        shapes.append(Mark(x, y, side, not point.front, f"{point.letter}: {point.label}"))
    shapes += spread_letters([(axis(p.cost), up(p.accuracy), p.letter) for p in points])
    names = ", ".join(f"{p.letter} ({p.label})" for p in front)
    return Chart(
        title=f"{metric} over {cost}, with 95% intervals (log axis)",
        description=f"{len(points)} cases; up and left is better. On the Pareto front: {names}.",
        height=bottom + 24,
        shapes=shapes,
        key=[
            *((name, title) for name, title in FRAMEWORKS.items()),
            ("told", "filled, joined: on the Pareto front (by the means)"),
            ("open", "open: another costs no more and is no worse"),
        ],
    )


Trained = list[tuple[str, Case]]  # cases with their labels


def tradeoffs(view: View, task: TaskFacts) -> list[tuple[Table, list[Chart]]]:
    """Accuracy over step time, and over size where there is one: a table for each batch size."""
    tables = []
    for batch, rows in view.rows.items():
        trained = [
            (row.label, case)
            for row in rows
            for case in row.cases
            if case.status == "OK" and case.accuracy and case.accuracy.mean is not None
        ]
        ids = [case.id for _, case in trained]
        lettered = dict(zip(ids, letters(len(ids)), strict=True))
        pictures = {
            cost: points
            for cost in COSTS
            if len(points := _points(trained, cost, lettered, task)) > 1
        }
        if pictures:
            more = {"metric": unit_of(task.metric), "more_is_better": more_is_better(task.metric)}
            drawn = [scatter(points, cost=cost, **more) for cost, points in pictures.items()]
            drawn = [replace(c, title=f"{c.title}, batch {batch}") for c in drawn]
            tables.append((_table(batch, trained, lettered, pictures, task), drawn))
    return tables


def _cost(case: Case, cost: str) -> float | None:
    if cost == STEP_TIME:
        return scaled(case.timing.median_s, 1e3)
    if cost == SIZE:
        return scaled(case.artifact_bytes, 1e-6)
    # What pruning buys: zeros take as much room as other numbers until they are compressed.
    compressed = case.metrics.get("compressed_artifact")
    return scaled(compressed.value if compressed else None, 1e-6)


def _points(trained: Trained, cost: str, lettered: dict[str, str], task: TaskFacts) -> list[Point]:
    """The cases that have the cost, those on the Pareto front marked."""
    points = [
        Point(
            lettered[case.id],
            f"{label}, {case.framework_title}",
            case,
            value,
            case.accuracy.mean,
            case.accuracy.ci,
        )
        for label, case in trained
        if (value := _cost(case, cost)) and value > 0
    ]
    places = [(point.cost, point.accuracy) for point in points]
    front = on_front(places, more_is_better=more_is_better(task.metric))
    return [replace(point, front=on) for point, on in zip(points, front, strict=True)]


def _table(
    batch: int,
    trained: Trained,
    lettered: dict[str, str],
    pictures: dict[str, list[Point]],
    task: TaskFacts,
) -> Table:
    """The cases by their letters, and on which front each is."""
    fronts = {cost: {p.letter for p in points if p.front} for cost, points in pictures.items()}
    rows = []
    for label, case in trained:
        letter = lettered[case.id]
        on = [cost.split(" [")[0] for cost, front in fronts.items() if letter in front]
        costs = [number(_cost(case, cost)) for cost in pictures]
        mean = plus_minus(case.accuracy.mean, case.accuracy.ci)
        rows.append([letter, label, case.framework_title, *costs, mean, ", ".join(on) or "no"])
    columns = of_words("point", "variant", "framework")
    columns += of_figures(*pictures, unit_of(task.metric))
    columns += of_words("on the\nPareto front")
    heading = [f"batch {batch}", *[""] * (len(columns) - 1)]
    title = f"{compact(task.metric)} against what it costs".replace("_", " ")
    title = title if title.startswith("mAP") else title[0].upper() + title[1:]
    return Table(title, columns, [heading, *rows])
