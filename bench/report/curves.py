"""What a training shows of itself: the rate over its steps, a loss over rates."""

from __future__ import annotations

from typing import Any

from bench.analysis.reading import View
from bench.analysis.values import is_number
from bench.record import Case
from bench.report.formatting import compact
from bench.report.svg_shapes import Chart, Curve, Mark, Scale, scale, side_of, up_and_across

LEFT, RIGHT, TOP, BOTTOM = 14.0, 94.0, 10.0, 130.0


def curves(view: View) -> list[Chart]:
    """A chart of each variant whose evidence has a `curve` (`bench.harness.stages.curve`)."""
    drawn = {}
    for row in (row for rows in view.rows.values() for row in rows):
        cases = [case for case in row.cases if len(_points(case)) > 1]
        if cases and row.label not in drawn:  # it is the same at each batch size
            drawn[row.label] = _chart(row.label, cases)
    return [chart for chart in drawn.values() if chart]


def _curve(case: Case) -> dict[str, Any]:
    curve = (case.evidence or {}).get("curve")
    return curve if isinstance(curve, dict) else {}


def _points(case: Case) -> list[list[float]]:
    points = _curve(case).get("points")
    return [point for point in points if _is_point(point)] if isinstance(points, list) else []


def _is_point(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(is_number, value))


def _chart(label: str, cases: list[Case]) -> Chart | None:
    """The curves of both frameworks, one over the other: TensorFlow's is dashed."""
    first = _curve(cases[0])
    x_name, y_name = (compact(first.get(axis)) for axis in ("x", "y"))
    points = [point for case in cases for point in _points(case)]
    xs, ys = ([point[axis] for point in points] for axis in (0, 1))
    log = first.get("log") is True and min(xs) > 0
    if min(xs) == max(xs):
        return None
    axis, up = Scale(min(xs), max(xs), LEFT, RIGHT, log=log), scale(ys, BOTTOM, TOP)
    shapes: list[Any] = up_and_across(axis, up)
    words = []
    for case in cases:
        side, title, points = side_of(case), case.framework_title, _points(case)
        shapes.append(Curve([(axis(x), up(y)) for x, y in points], f"life {side}"))
        start, last, most = points[0][1], points[-1][1], max(y for _, y in points)
        said = f"{title}: from {start:g} to {last:g}, at most {most:g}"
        mark = _curve(case).get("mark")
        if _is_point(mark) and axis.low <= mark[0] <= axis.high and up.low <= mark[1] <= up.high:
            tip = f"{title}: {x_name} {mark[0]:g}"
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
