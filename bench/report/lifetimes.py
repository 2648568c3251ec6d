"""The first call against faster steps: when compilation is repaid."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log10
from typing import Any

from bench.analysis.reading import DIFFERENT, View, framework_title
from bench.analysis.values import at, is_number
from bench.report.figures import number
from bench.report.svg_shapes import (
    Chart,
    Curve,
    Line,
    Mark,
    Scale,
    letters,
    scale,
    spread_letters,
    up_and_across,
)


def lifetimes(found: View) -> list[Chart]:
    """Total time against the own baseline's, over the number of steps: one chart a batch size."""
    return [chart for batch in found.rows if (chart := _lifetime(found, batch))]


@dataclass(frozen=True)
class _Life:
    """A variant's first call and ratio of steps beside its baseline's first call and step."""

    case: dict
    label: str
    first: float
    base_first: float
    base_step: float
    ratio: float

    def total(self, steps: float) -> float:
        """Time of so many steps, first call included, over the baseline's."""
        ours = self.first + (steps - 1) * self.ratio * self.base_step
        return ours / (self.base_first + (steps - 1) * self.base_step)

    @property
    def break_even(self) -> tuple[float | None, Any]:
        metric = at(self.case, "metrics", "break_even_steps")
        return at(metric, "value"), at(metric, "ci")


def _lives(found: View, batch: int) -> list[_Life]:
    lives = []
    for row in found.rows[batch]:
        for case in row.cases:
            own = found.own(case)
            base = found.cases.get(at(own, "denominator"))
            firsts = (at(c, "metrics", "cold_first_calls_s", "value") for c in (case, base))
            known = (*firsts, at(base, "timing", "median_s"), at(own, "ratio"))
            if all(is_number(v) and v > 0 for v in known) and at(own, "verdict") != DIFFERENT:
                lives.append(_Life(case, row.label, *known))
    return lives


def _lifetime(found: View, batch: int) -> Chart | None:
    lives = _lives(found, batch)
    if not lives:
        return None
    evens = [v for life in lives for v in (life.break_even[0], *(life.break_even[1] or []))]
    most = max([1e4, *(10 * v for v in evens if is_number(v))])
    last = 10.0 ** min(7, ceil(log10(most)))
    counts = [last ** (n / 60) for n in range(61)]
    left, right, top, bottom = 14.0, 94.0, 10.0, 230.0
    axis = Scale(1, last, left, right, log=True)
    up = scale([1.0, *(life.total(n) for life in lives for n in counts)], bottom, top, log=True)
    shapes = [*up_and_across(axis, up), Line(left, up(1), right, up(1), "one")]
    ends, words = [], []
    for letter, life in zip(letters(len(lives)), lives, strict=True):
        side = life.case["framework"]
        name = f"{life.label}, {framework_title(life.case)}"
        even = _even_words(life)
        shapes.append(Curve([(axis(n), up(life.total(n))) for n in counts], f"life {side}"))
        shapes += _even_marks(life, axis, up(1), last, f"{letter}: {name}, {even}")
        ends.append((right, up(life.total(last)), letter))
        words.append(f"{letter}: {name}: {even}")
    shapes += spread_letters(ends)
    return Chart(
        title=f"Time of all steps and the first call ÷ own baseline's, over steps, batch {batch}",
        description="; ".join(words) + ". Below 1 the first call is repaid.",
        height=bottom + 24,
        shapes=shapes,
        key=[(life.case["framework"], text) for life, text in zip(lives, words, strict=True)],
    )


def _even_words(life: _Life) -> str:
    value, _ = life.break_even
    return f"break-even after {number(value)} steps" if is_number(value) else "no break-even"


def _even_marks(life: _Life, axis: Scale, y: float, last: float, tip: str) -> list[Any]:
    """The break-even on the line where both are equal, with its interval."""
    value, bounds = life.break_even
    if not is_number(value) or not 1 <= value <= last:
        return []
    side = life.case["framework"]
    low, high = bounds if isinstance(bounds, list) and len(bounds) == 2 else (value, value)
    ends = [axis(min(max(v if is_number(v) else last, 1), last)) for v in (low, high)]
    return [
        Line(ends[0], y, ends[1], y, f"interval {side}"),
        Mark(axis(value), y, side, False, tip),
    ]
