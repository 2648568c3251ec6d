"""What a training shows of itself: the rate over its steps, a loss over rates."""

from __future__ import annotations

from typing import Any

from bench.analysis.reading import View, framework_title
from bench.analysis.values import at, is_pair
from bench.report.figures import compact
from bench.report.svg_shapes import Chart, Curve, Mark, Scale, scale, side_of, up_and_across

LEFT, RIGHT, TOP, BOTTOM = 14.0, 94.0, 10.0, 130.0


def curves(found: View) -> list[Chart]:
    """A chart of each variant whose evidence has a `curve` (`bench.harness.stages.curve`)."""
    rows = [row for rows in found.rows.values() for row in rows]
    drawn = {}
    for row in rows:
        cases = [case for case in row.cases if len(_points(case)) > 1]
        if cases and row.label not in drawn:  # it is the same at each batch size
            drawn[row.label] = _chart(row.label, cases)
    return [chart for chart in drawn.values() if chart]


def _points(case: dict) -> list[list[float]]:
    points = at(case, "evidence", "curve", "points")
    return [point for point in points if is_pair(point)] if isinstance(points, list) else []


def _chart(label: str, cases: list[dict]) -> Chart | None:
    """The curves of both frameworks, one over the other: TensorFlow's is dashed."""
    names = [at(cases[0], "evidence", "curve", axis) for axis in ("x", "y")]
    x_name, y_name = (name if isinstance(name, str) else "?" for name in names)
    points = [point for case in cases for point in _points(case)]
    xs, ys = ([point[axis] for point in points] for axis in (0, 1))
    log = at(cases[0], "evidence", "curve", "log") is True and min(xs) > 0
    if min(xs) == max(xs):
        return None
    axis, up = Scale(min(xs), max(xs), LEFT, RIGHT, log=log), scale(ys, BOTTOM, TOP)
    shapes: list[Any] = up_and_across(axis, up)
    words = []
    for case in cases:
        side, own = side_of(case), _points(case)
        shapes.append(Curve([(axis(x), up(y)) for x, y in own], f"life {side}"))
        first, last, most = own[0][1], own[-1][1], max(y for _, y in own)
        said = f"{framework_title(case)}: from {first:g} to {last:g}, at most {most:g}"
        mark = at(case, "evidence", "curve", "mark")
        if is_pair(mark) and axis.low <= mark[0] <= axis.high and up.low <= mark[1] <= up.high:
            tip = f"{framework_title(case)}: {x_name} {mark[0]:g}"
            shapes.append(Mark(axis(mark[0]), up(mark[1]), side, False, tip))
            said += f", marked at {x_name} {mark[0]:g}"
        words.append(said)
    return Chart(
        title=f"{compact(label)}: {y_name} over {x_name}",
        description="; ".join(words) + ".",
        height=BOTTOM + 24,
        shapes=shapes,
        key=[(side_of(case), text) for case, text in zip(cases, words, strict=True)],
    )
