"""One chart of every technique's gain in both frameworks, with intervals and verdicts.

A line is a technique at a piece of work. Of its variants each framework shows the one that takes
least of its own baseline's time within the accuracy margin, or, where none keeps it, the least of
all. What is not timed (input pipelines, batch sizes) is compared by its samples per second.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bench.analysis.decisions import NAMES, Option, Work
from bench.analysis.reading import FRAMEWORKS
from bench.analysis.values import at, is_pair
from bench.analysis.verdicts import DELTA, shown_less, shown_more
from bench.report.answer import accuracy_of, gain_of, name_of
from bench.report.figures import number
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
    sides: dict[str, Option]

    @property
    def best(self) -> float:
        """The least share of its baseline's time."""
        return min(option.gain for option in self.sides.values())


def gains(works: list[Work]) -> list[Gain]:
    """Each technique that has a ratio to its own baseline, the largest gain first."""
    found: dict[tuple[str, int], dict[str, list[Option]]] = {}
    for place, work in enumerate(works):
        for option in work.options:
            side = option.case["framework"]
            if option.gain and not option.is_baseline and side in FRAMEWORKS:
                sides = found.setdefault((option.case["technique"], place), {})
                sides.setdefault(side, []).append(option)
    listed = [
        Gain(
            technique,
            _label(technique, works[place], [works[n] for name, n in found if name == technique]),
            works[place],
            {side: _shown(options) for side, options in sides.items()},
        )
        for (technique, place), sides in found.items()
        if technique != "baseline"
    ]
    return sorted(listed, key=lambda gain: gain.best)


def _label(technique: str, work: Work, works: list[Work]) -> str:
    """The technique, and of its pieces of work what tells this one from the others."""
    words = technique.replace("_", " ")
    for told in (lambda w: w.task, lambda w: NAMES[w.kind], lambda w: f"batch {w.batch_size}"):
        if len({told(each) for each in works}) > 1:
            words += f", {told(work)}"
            works = [each for each in works if told(each) == told(work)]
    return words


def _shown(options: list[Option]) -> Option:
    """The least time within the margin, else the least of all."""
    return min(options, key=lambda o: (not o.accuracy.kept, o.gain))


def chart(works: list[Work]) -> Chart | None:
    """All gains on one log axis; None where there is none."""
    listed = gains(works)
    if not listed:
        return None
    options = [option for gain in listed for option in gain.sides.values()]
    values = [v for o in options for v in (o.gain, *(_interval(o) or []))]
    axis = scale([*values, 1 / (1 + DELTA), 1 + DELTA], LEFT, RIGHT, log=True)
    shapes: list[Any] = [
        Label(PLACES[side], 11, short, "heading", "end")
        for side, short in (("pt", "PT"), ("tf", "TF"))
    ]
    y, line = 16.0, max(LEAST_LINE, min(LINE, TALL / len(listed)))
    for gain in listed:
        y += line
        shapes.append(Label(0, y, _fitting(gain.label), "label-line"))
        for side, option in gain.sides.items():
            shapes += _mark(axis, y, line / 4, side, option)
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


def _interval(option: Option) -> list[float] | None:
    """The interval of a ratio that was compared; rates have none."""
    ci = at(option.own, "ci")
    compared = is_pair(ci) and min(ci) > 0 and at(option.own, "ratio") == option.gain
    return list(ci) if compared else None


def _mark(axis: Scale, y: float, aside: float, side: str, option: Option) -> list[Any]:
    """A row's mark with its interval, PyTorch's above TensorFlow's, and its figure."""
    kept, ci = option.accuracy.kept, _interval(option)
    faster, slower = kept and shown_less(ci), kept and shown_more(ci)
    middle = y - 4 - aside if side == "pt" else y - 4 + aside
    shapes: list[Any] = []
    if ci:
        low, high = map(axis, ci)
        shapes.append(Line(low, middle, high, middle, f"interval {side}"))
    tip = f"{name_of(option)}: {_said(option)}"
    shapes.append(Mark(axis(option.gain), middle, side, not (faster or slower), tip))
    style = "good" if faster else "bad" if slower else "even"
    text = number(option.gain, places=2 if option.gain < 10 else 1) + ("" if kept else "*")
    shapes.append(Label(PLACES[side], y, text, f"figure {style}", "end"))
    return shapes


def _said(option: Option) -> str:
    return ", ".join(filter(None, (gain_of(option), accuracy_of(option.accuracy))))


def _in_words(listed: list[Gain]) -> str:
    """Every line of the chart as a sentence."""
    return " ".join(
        f"{gain.label}: "
        + ", ".join(f"{name_of(option)} {_said(option)}" for option in gain.sides.values())
        + "."
        for gain in listed
    )
