"""Charts as plain geometry: shapes at percents of the width and pixels of the height.

A page draws them as SVG (`parts.html.j2`) whose text keeps its size on any screen, and colours them
by the names of their styles. Each chart shows figures of a table that stands beside it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import ceil, floor, log10
from typing import Any

from rich.text import Text

from bench.record import FRAMEWORKS, Case, Control
from bench.report.text import plain

LONGEST_LABEL = 46  # cells; the whole of it stands in the table
MOST_TICKS = 7


# Shapes ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """A straight line."""

    kind = "line"
    x1: float
    y1: float
    x2: float
    y2: float
    style: str


@dataclass(frozen=True)
class Box:
    """A filled rectangle; `width` in percent."""

    kind = "box"
    x: float
    y: float
    width: float
    height: float
    style: str


@dataclass(frozen=True)
class Label:
    """A line of text; `anchor` is start, middle or end. `link`: where on the page it leads."""

    kind = "label"
    x: float
    y: float
    text: str
    style: str = ""
    anchor: str = "start"
    link: str = ""


@dataclass(frozen=True)
class Mark:
    """A symbol of a framework (circle, square; diamond for both), filled or open."""

    kind = "mark"
    x: float
    y: float
    symbol: str
    open: bool
    tip: str


@dataclass(frozen=True)
class Curve:
    """A polyline: `points` in percent of the width and pixels."""

    kind = "curve"
    points: list[tuple[float, float]]
    style: str


@dataclass(frozen=True)
class Chart:
    """What is drawn, what it says in words, and the key to its symbols (symbol, meaning)."""

    title: str
    description: str
    height: float
    shapes: list[Any]
    key: list[tuple[str, str]] = field(default_factory=list)


# Scales ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scale:
    """From values between `low` and `high` to places between `start` and `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Where `value` stands."""
        low, high, value = (log10(v) if self.log else v for v in (self.low, self.high, value))
        share = (value - low) / (high - low)
        return round(self.start + share * (self.end - self.start), 2)

    def ticks(self) -> list[float]:
        """Round values along the scale, `MOST_TICKS` at most."""
        if self.log and self.high > 3 * self.low:
            return _log_ticks(self.low, self.high)
        return _even_ticks(self.low, self.high)


def scale(values: Iterable[float], start: float, end: float, *, log: bool = False) -> Scale:
    """A scale that holds all values with some room at both ends."""
    values = list(values)
    low, high = min(values), max(values)
    if log:
        room = max((high / low) ** 0.03, 1.01)
        return Scale(low / room, high * room, start, end, log=True)
    room = 0.06 * (high - low) or abs(high) * 0.01 or 1.0
    return Scale(low - room, high + room, start, end)


def _even_ticks(low: float, high: float) -> list[float]:
    size = 10.0 ** floor(log10((high - low) / MOST_TICKS))
    for times in (1, 2, 5, 10, 20):
        step = times * size
        ticks = [step * n for n in range(ceil(low / step), floor(high / step) + 1)]
        if len(ticks) <= MOST_TICKS:
            break
    return ticks


def _log_ticks(low: float, high: float) -> list[float]:
    decades = range(floor(log10(low)), ceil(log10(high)) + 1)
    for digits in ((1, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
        ticks = [d * 10.0**n for n in decades for d in digits if low <= d * 10.0**n <= high]
        if len(ticks) <= MOST_TICKS:
            return ticks
    return ticks[:: ceil(len(ticks) / MOST_TICKS)]


def tick_text(value: float) -> str:
    """A tick as it is written: 0.95, 1,500, 20k, 10M."""
    for size, sign, least in ((1e6, "M", 1e6), (1e3, "k", 1e4)):
        if least <= abs(value) < 1e9:
            return f"{value / size:.4g}{sign}"
    return f"{value:,.4g}"


def short(text: str) -> str:
    """A label's beginning where it is too long."""
    label = Text(plain(text))
    label.truncate(LONGEST_LABEL, overflow="ellipsis")
    return label.plain


def across(axis: Scale, top: float, bottom: float) -> list[Any]:
    """Vertical grid lines with their values below."""
    shapes: list[Any] = []
    for tick in axis.ticks():
        x = axis(tick)
        shapes.append(Line(x, top, x, bottom, "rule"))
        shapes.append(Label(x, bottom + 15, tick_text(tick), "tick", "middle"))
    return shapes


def up_and_across(axis: Scale, up: Scale) -> list[Any]:
    """The grid of a plane: vertical lines with values below, horizontal ones with values left."""
    top, bottom = min(up.start, up.end), max(up.start, up.end)
    shapes = across(axis, top, bottom)
    for tick in up.ticks():
        shapes.append(Line(axis.start, up(tick), axis.end, up(tick), "rule"))
        shapes.append(Label(axis.start - 1.5, up(tick) + 4, tick_text(tick), "tick", "end"))
    return shapes


def side_of(case: Case | Control) -> str:
    """The symbol of a case's framework."""
    return case.framework if case.framework in FRAMEWORKS else "both"


def letters(count: int) -> list[str]:
    """A, B, … Z, A1, B1, …."""
    return [f"{chr(65 + n % 26)}{n // 26 or ''}" for n in range(count)]


def spread_letters(places: list[tuple[float, float, str]]) -> list[Label]:
    """A letter right of each point, moved down where it would cover one before it."""
    taken: list[tuple[float, float]] = []
    drawn = []
    for point, y, letter in sorted(places):
        x = min(point + 1.8, 98.0)  # within the chart
        while any(abs(x - a) < 4 and abs(y - b) < 12 for a, b in taken):
            y += 12
        taken.append((x, y))
        drawn.append(Label(x, y - 6, letter, "letter"))
    return drawn
