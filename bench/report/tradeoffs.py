"""What accuracy costs in time and in size: the Pareto front of the trained cases of a task."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise, zip_longest

from bench.analysis.reading import FRAMEWORKS, View, framework_title
from bench.analysis.values import at, is_number, is_pair
from bench.report.blocks import Table, of_figures, of_words, unit_of
from bench.report.figures import compact, number, plus_minus, scaled
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
from shared.specs import more_is_better

# what accuracy is set against -> where it stands in a case, and its unit's factor
COSTS = {
    "step time [ms]": (("timing", "median_s"), 1e3),
    "size on disk [MB]": (("artifact_bytes",), 1e-6),
    # What pruning buys: zeros take as much room as other numbers until they are compressed.
    "size compressed [MB]": (("metrics", "compressed_artifact", "value"), 1e-6),
}


@dataclass(frozen=True)
class Point:
    """A trained case: its letter in the picture, what it costs, how accurate it is."""

    letter: str
    label: str
    case: dict
    cost: float
    accuracy: float
    ci: list[float] | None
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


def tradeoffs(found: View, task: dict) -> list[tuple[Table, list[Chart]]]:
    """Accuracy over step time, and over size where there is one: a table for each batch size."""
    tables = []
    for batch, rows in found.rows.items():
        trained = [
            (row.label, case)
            for row in rows
            for case in row.cases
            if case["status"] == "OK" and is_number(at(case, "accuracy", "mean"))
        ]
        ids = [case["id"] for _, case in trained]
        lettered = dict(zip(ids, letters(len(ids)), strict=True))
        pictures = {
            cost: points
            for cost in COSTS
            if len(points := _points(trained, cost, lettered, task)) > 1
        }
        if pictures:
            metric = task.get("metric")
            more = {"metric": unit_of(metric), "more_is_better": more_is_better(metric)}
            drawn = [scatter(points, cost=cost, **more) for cost, points in pictures.items()]
            drawn = [replace(c, title=f"{c.title}, batch {batch}") for c in drawn]
            tables.append((_table(batch, trained, lettered, pictures, task), drawn))
    return tables


def _cost(case: dict, cost: str) -> float | None:
    path, factor = COSTS[cost]
    return scaled(at(case, *path), factor)


def _points(trained: list, cost: str, lettered: dict[str, str], task: dict) -> list[Point]:
    """The cases that have the cost, those on the Pareto front marked."""
    points = []
    for label, case in trained:
        value, ci = _cost(case, cost), at(case, "accuracy", "ci")
        if is_number(value) and value > 0:
            name = f"{label}, {framework_title(case)}"
            mean = at(case, "accuracy", "mean")
            bounds = list(ci) if is_pair(ci) else None
            points.append(Point(lettered[case["id"]], name, case, value, mean, bounds))
    places = [(point.cost, point.accuracy) for point in points]
    front = on_front(places, more_is_better=more_is_better(task.get("metric")))
    return [replace(point, front=on) for point, on in zip(points, front, strict=True)]


def _table(
    batch: int, trained: list, lettered: dict, pictures: dict[str, list[Point]], task: dict
) -> Table:
    """The cases by their letters, and on which front each is."""
    fronts = {cost: {p.letter for p in points if p.front} for cost, points in pictures.items()}
    rows = []
    for label, case in trained:
        letter, trained_to = lettered[case["id"]], case["accuracy"]
        on = [cost.split(" [")[0] for cost, front in fronts.items() if letter in front]
        costs = [number(_cost(case, cost)) for cost in pictures]
        mean = plus_minus(trained_to["mean"], at(trained_to, "ci"))
        rows.append([letter, label, framework_title(case), *costs, mean, ", ".join(on) or "no"])
    columns = of_words("point", "variant", "framework")
    columns += of_figures(*pictures, unit_of(task.get("metric")))
    columns += of_words("on the\nPareto front")
    heading = [f"batch {batch}", *[""] * (len(columns) - 1)]
    title = f"{compact(task.get('metric'))} against what it costs".replace("_", " ")
    title = title if title.startswith("mAP") else title[0].upper() + title[1:]
    return Table(title, columns, [heading, *rows])
