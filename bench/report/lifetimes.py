"""The first call against faster steps: when compilation is repaid."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log10
from typing import Any

from bench.analysis.reading import View
from bench.record import DIFFERENT, Case, Metric
from bench.report.formatting import number
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


def lifetimes(view: View) -> list[Chart]:
    """Total time against the baseline's, over the number of steps: one chart a batch size."""
    return [chart for batch in view.rows if (chart := _lifetime(view, batch))]


@dataclass(frozen=True)
class _Life:
    """A variant's first call and ratio of steps beside its baseline's first call and step."""

    case: Case
    label: str
    first: float
    base_first: float
    base_step: float
    ratio: float

    def total(self, steps: float) -> float:
        """Time of so many steps, first call included, over the baseline's."""
        time = self.first + (steps - 1) * self.ratio * self.base_step
        return time / (self.base_first + (steps - 1) * self.base_step)

    @property
    def break_even(self) -> Metric:
        return self.case.metrics.get("break_even_steps") or Metric()


def _lives(view: View, batch: int) -> list[_Life]:
    lives = []
    for row in view.rows[batch]:
        for case in row.cases:
            comparison = view.with_baseline(case)
            if not comparison or comparison.verdict == DIFFERENT:
                continue
            base = view.cases[comparison.denominator]
            firsts = (each.value_of("cold_first_calls_s") for each in (case, base))
            known = (*firsts, base.timing.median_s, comparison.ratio)
            if all(value is not None and value > 0 for value in known):
                lives.append(_Life(case, row.label, *known))
    return lives


def _lifetime(view: View, batch: int) -> Chart | None:
    lives = _lives(view, batch)
    if not lives:
        return None
    evens = [each for life in lives for each in (life.break_even.value, *_bounds(life))]
    most = max([1e4, *(10 * even for even in evens if even is not None)])
    last = 10.0 ** min(7, ceil(log10(most)))
    counts = [last ** (n / 60) for n in range(61)]
    left, right, top, bottom = 14.0, 94.0, 10.0, 230.0
    axis = Scale(1, last, left, right, log=True)
    up = scale([1.0, *(life.total(n) for life in lives for n in counts)], bottom, top, log=True)
    shapes = [*up_and_across(axis, up), Line(left, up(1), right, up(1), "one")]
    ends, words = [], []
    for letter, life in zip(letters(len(lives)), lives, strict=True):
        side = life.case.framework
        name = f"{life.label}, {life.case.framework_title}"
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
        key=[(life.case.framework, text) for life, text in zip(lives, words, strict=True)],
    )


def _bounds(life: _Life) -> tuple[float | None, float | None]:
    """The interval of the break-even; it may have no upper end."""
    even = life.break_even
    return even.ci or (even.value, even.value)


def _even_words(life: _Life) -> str:
    value = life.break_even.value
    return "no break-even" if value is None else f"break-even after {number(value)} steps"


def _even_marks(life: _Life, axis: Scale, y: float, last: float, tip: str) -> list[Any]:
    """The break-even on the line where both are equal, with its interval."""
    value, side = life.break_even.value, life.case.framework
    if value is None or not 1 <= value <= last:
        return []
    ends = [axis(min(max(last if end is None else end, 1), last)) for end in _bounds(life)]
    return [
        Line(ends[0], y, ends[1], y, f"interval {side}"),
        Mark(axis(value), y, side, False, tip),
    ]
