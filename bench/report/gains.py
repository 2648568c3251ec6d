"""One chart of every technique's gain in both frameworks, with intervals and verdicts.

A line is a technique at a piece of work. Of its variants each framework shows the one that takes
least of its own baseline's time within the accuracy margin, or, where none keeps it, the least of
all. What is not timed (input pipelines, batch sizes) is compared by its samples per second.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bench.analysis.ranking import NAMES, Work
from bench.analysis.table import TIME, Row
from bench.analysis.verdicts import DELTA, shown_less, shown_more
from bench.record import FRAMEWORKS
from bench.report.answer import accuracy_of, full_name, ratio_of
from bench.report.formatting import number
from bench.report.svg_shapes import Box, Chart, Label, Line, Mark, Scale, across, scale

LEFT, RIGHT = 47.0, 76.0  # percents between which the axis runs: names left of it, figures right
LINE, LEAST_LINE, TALL = 18, 12, 440  # pixels: a line, at least, and all of them if they can
LONGEST = 44  # characters of a label
PLACES = {"pt": 89.0, "tf": 99.5}  # where each framework's figures end


@dataclass(frozen=True)
class Gain:
    """A technique at a piece of work, and in each framework the row that gains most."""

    technique: str
    label: str
    work: Work
    sides: dict[str, Row]

    @property
    def best(self) -> float:
        """The least share of its baseline's time."""
        return min(row.time_ratio.value for row in self.sides.values())


def gains(works: list[Work]) -> list[Gain]:
    """Each technique that has a ratio to its own baseline, the largest gain first."""
    grouped: dict[tuple[str, int], dict[str, list[Row]]] = {}
    for place, work in enumerate(works):
        for row in work.rows:
            if row.time_ratio and row.case.technique != "baseline":
                sides = grouped.setdefault((row.case.technique, place), {})
                sides.setdefault(row.case.framework, []).append(row)
    listed = [
        Gain(
            technique,
            _label(technique, works[place], [works[n] for name, n in grouped if name == technique]),
            works[place],
            {side: min(sides[side], key=_order) for side in FRAMEWORKS if side in sides},
        )
        for (technique, place), sides in grouped.items()
    ]
    return sorted(listed, key=lambda gain: gain.best)


def _order(row: Row) -> tuple[bool, float]:
    """The least time within the margin, else the least of all."""
    return not row.accuracy.kept, row.time_ratio.value


def _label(technique: str, work: Work, works: list[Work]) -> str:
    """The technique, and of its pieces of work what tells this one from the others."""
    words = technique.replace("_", " ")
    for told in (lambda w: w.task, lambda w: NAMES[w.kind], lambda w: f"batch {w.batch_size}"):
        if len({told(each) for each in works}) > 1:
            words += f", {told(work)}"
            works = [each for each in works if told(each) == told(work)]
    return words


def chart(works: list[Work]) -> Chart | None:
    """All gains on one log axis; None where there is none."""
    listed = gains(works)
    if not listed:
        return None
    rows = [row for gain in listed for row in gain.sides.values()]
    values = [v for row in rows for v in (row.time_ratio.value, *(_interval(row) or ()))]
    axis = scale([*values, 1 / (1 + DELTA), 1 + DELTA], LEFT, RIGHT, log=True)
    shapes: list[Any] = [
        Label(PLACES[side], 11, short, "heading", "end")
        for side, short in (("pt", "PT"), ("tf", "TF"))
    ]
    y, line = 16.0, max(LEAST_LINE, min(LINE, TALL / len(listed)))
    for gain in listed:
        y += line
        shapes.append(Label(0, y, _fitting(gain.label), "label-line"))
        for side, row in gain.sides.items():
            shapes += _mark(axis, y, line / 4, side, row)
    bottom = y + 7
    band = Box(axis(1 / (1 + DELTA)), 16, axis(1 + DELTA) - axis(1 / (1 + DELTA)), bottom - 16,
               "band")  # fmt: skip
    middle = Line(axis(1), 16, axis(1), bottom, "one")
    return Chart(
        title="Time ÷ own baseline's, 95% intervals (left of 1 is faster)",
        description=_in_words(listed),
        height=bottom + 20,
        shapes=[band, *across(axis, 16, bottom), middle, *shapes],
        key=[
            *FRAMEWORKS.items(),
            ("told", "a difference was shown"),
            ("open", "none was, or accuracy was not kept or not measured (*)"),
        ],
    )


def _fitting(label: str) -> str:
    return label if len(label) <= LONGEST else f"{label[: LONGEST - 1]}…"


def _interval(row: Row) -> tuple[float, float] | None:
    """The interval of a ratio that was compared; rates have none."""
    return row.time_ratio.bounds if TIME in row.ratios else None


def _mark(axis: Scale, y: float, aside: float, side: str, row: Row) -> list[Any]:
    """A row's mark with its interval, PyTorch's above TensorFlow's, and its figure."""
    kept, ci, value = row.accuracy.kept, _interval(row), row.time_ratio.value
    faster, slower = (kept and ci and shown(ci) for shown in (shown_less, shown_more))
    middle = y - 4 - aside if side == "pt" else y - 4 + aside
    shapes: list[Any] = []
    if ci:
        low, high = map(axis, ci)
        shapes.append(Line(low, middle, high, middle, f"interval {side}"))
    shapes.append(Mark(axis(value), middle, side, not (faster or slower), _said(row)))
    style = "good" if faster else "bad" if slower else "even"
    text = number(value, places=2 if value < 10 else 1) + ("" if kept else "*")
    shapes.append(Label(PLACES[side], y, text, f"figure {style}", "end"))
    return shapes


def _said(row: Row) -> str:
    """A row with the share of its baseline's time."""
    of = "time" if TIME in row.ratios else "time a sample"
    words = [f"{ratio_of(row.time_ratio)} of its baseline's {of}", row.verdict]
    return f"{full_name(row)}: {', '.join(filter(None, [*words, accuracy_of(row.accuracy)]))}"


def _in_words(listed: list[Gain]) -> str:
    """Every line of the chart as a sentence."""
    return " ".join(
        f"{gain.label}: {', '.join(map(_said, gain.sides.values()))}." for gain in listed
    )
