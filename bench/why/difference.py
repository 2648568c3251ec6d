"""The difference of two sides, in seconds of a step: by kind of work, and by layer.

A layer that one side alone has counts for the nearest around it that both have, by its name:
`block0.gelu` for `block0`. What `a` spends more than `b` is positive.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import expm1, log
from statistics import fmean, stdev

from scipy import stats

from bench.why import measured as m
from shared import step_events as kinds

LEAST = 0.05  # of the faster step: two processes that run the same differ by up to this
CONFIDENCE = 0.99
FARTHEST = 50.0  # a logarithm of a ratio


@dataclass(frozen=True)
class Line:
    """What both spend on one thing, in seconds a step."""

    what: str
    a: float
    b: float

    @property
    def more(self) -> float:
        """What `a` spends more."""
        return self.a - self.b


@dataclass(frozen=True)
class Difference:
    """Of two steps. interval: of the difference, by the rounds, which took turns."""

    a: m.Side
    b: m.Side
    interval: tuple[float, float]
    kinds: list[Line]
    layers: list[Line]

    @property
    def seconds(self) -> float:
        """What a step of `a` takes more than one of `b`."""
        return self.a.step - self.b.step

    @property
    def is_noise(self) -> bool:
        """Whether equal programs may differ as much."""
        low, high = self.interval
        least = LEAST * min(self.a.step, self.b.step)
        return low <= 0 <= high or abs(self.seconds) < least

    def line(self, kind: str) -> Line:
        """What both spend on a kind of work."""
        return next((one for one in self.kinds if one.what == kind), Line(kind, 0.0, 0.0))

    def where(self, kind: str) -> list[Line]:
        """The layers of a kind of work, those that differ most first."""
        return _lines(self.a, self.b, lambda side, piece: _layer(self, side, piece), kind)


def compare(a: m.Side, b: m.Side) -> Difference:
    """The difference of two sides whose rounds took turns; its interval is that of their ratio."""
    ratios = [log(x / y) for x, y in zip(a.rounds, b.rounds, strict=False)]
    half = float("inf")
    if len(ratios) > 1:
        half = stats.t.ppf((1 + CONFIDENCE) / 2, len(ratios) - 1) * stdev(ratios)
        half /= len(ratios) ** 0.5
    low, high = (b.step * expm1(min(fmean(ratios) + end, FARTHEST)) for end in (-half, half))
    both = Difference(a, b, (low, high), [], [])
    both.kinds.extend(_lines(a, b, lambda side, piece: piece.kind))
    both.layers.extend(_lines(a, b, lambda side, piece: _place(both, side, piece)))
    return both


def _lines(
    a: m.Side, b: m.Side, name: Callable[[m.Side, m.Piece], str], kind: str | None = None
) -> list[Line]:
    sums = []
    for side in (a, b):
        seconds: Counter = Counter()
        for piece in side.parts():
            if kind in (None, piece.kind):
                seconds[name(side, piece)] += piece.seconds
        sums.append(seconds)
    every = [Line(what, sums[0][what], sums[1][what]) for what in sums[0] | sums[1]]
    return sorted(every, key=lambda line: -abs(line.more))


def _place(both: Difference, side: m.Side, piece: m.Piece) -> str:
    """A layer and its pass; what belongs to none, by its kind."""
    layer = _layer(both, side, piece)
    if piece.phase == kinds.OPTIMIZER or not layer:
        return f"({piece.kind})"
    return f"{layer}, {piece.phase}" if piece.phase else f"{layer}, between operators"


def _layer(both: Difference, side: m.Side, piece: m.Piece) -> str:
    other = both.b if side is both.a else both.a
    return common(piece.layer, side.layers, other.layers)


def common(layer: str, ours: list[str], others: list[str]) -> str:
    """The nearest name around a layer that both sides have; its own where they share none."""
    known = _with_prefixes(others) & _with_prefixes(ours)
    if not known:
        return layer
    while layer and layer not in known:
        layer = layer.rpartition(".")[0]
    return layer


def _with_prefixes(names: list[str]) -> set[str]:
    every = set(names)
    for name in names:
        while name := name.rpartition(".")[0]:
            every.add(name)
    return every
