"""The difference of two steps in seconds, by kind of work and by layer.

Layers with different names are paired by their weights: see `partners`. A layer that only one side
has counts for the nearest enclosing one that both have: `block0.gelu` counts for `block0`. Positive
means that `a` spends more than `b`.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import expm1, log
from statistics import fmean, stdev

from scipy import special

from bench.why import measured as m
from shared import step_events as kinds

LEAST = 0.05  # of the faster step: two processes that run the same differ by up to this
CONFIDENCE = 0.99
FARTHEST = 50.0  # a logarithm of a ratio


@dataclass(frozen=True)
class Line:
    """What both spend on one thing, in seconds per step."""

    what: str
    a: float
    b: float

    @property
    def more(self) -> float:
        """What `a` spends more."""
        return self.a - self.b


@dataclass(frozen=True)
class Difference:
    """The difference of two steps. interval: over rounds, in which the two took turns."""

    a: m.Side
    b: m.Side
    interval: tuple[float, float]
    kinds: list[Line]
    layers: list[Line]

    @property
    def unpaired(self) -> tuple[list[str], list[str]]:
        """The layers with weights that the other side lacks."""
        a, b = self.a.layers, self.b.layers
        return _alone(a, b), _alone(b, a)

    @property
    def seconds(self) -> float:
        """By how much a step of `a` is longer than one of `b`."""
        return self.a.step - self.b.step

    @property
    def profiled(self) -> float:
        """The same with both profilers on."""
        return self.a.profiled - self.b.profiled

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
    b = _renamed(b, partners(a.layers, b.layers))
    ratios = [log(x / y) for x, y in zip(a.rounds, b.rounds, strict=False)]
    half = float("inf")
    if len(ratios) > 1:
        half = special.stdtrit(len(ratios) - 1, (1 + CONFIDENCE) / 2) * stdev(ratios)
        half /= len(ratios) ** 0.5
    low, high = (b.step * expm1(min(fmean(ratios) + end, FARTHEST)) for end in (-half, half))
    both = Difference(a, b, (low, high), [], [])
    both.kinds.extend(_lines(a, b, lambda side, piece: piece.kind))
    both.layers.extend(_lines(a, b, lambda side, piece: _place(both, side, piece)))
    return both


def partners(ours: dict[str, list[int]], theirs: dict[str, list[int]]) -> dict[str, str]:
    """Layers of `theirs` that have another name in `ours`, with that name.

    Layers with weights that only one side has are matched by name without punctuation. If both have
    as many layers left whose first weights have the same lengths, they are matched in order.
    """
    known = {}
    plain = {_plain(name): name for name in _alone(ours, theirs)}
    for name in _alone(theirs, ours):
        if same := plain.pop(_plain(name), None):
            known[name] = same
    groups: dict[tuple, tuple[list, list]] = defaultdict(lambda: ([], []))
    for place, (layers, others) in enumerate(((ours, theirs), (theirs, ours))):
        for name in _alone(layers, others):
            if name not in known and name not in known.values():
                groups[tuple(layers[name])][place].append(name)
    for a, b in groups.values():
        if len(a) == len(b):
            known |= dict(zip(b, a, strict=True))
    return known


def _alone(layers: dict[str, list[int]], others: dict[str, list[int]]) -> list[str]:
    return [name for name, lengths in layers.items() if lengths and not others.get(name)]


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _renamed(side: m.Side, names: dict[str, str]) -> m.Side:
    def one(part: m.Piece | m.Product) -> m.Piece | m.Product:
        return m.replaced(part, layer=names.get(part.layer, part.layer))

    layers = {names.get(name, name): lengths for name, lengths in side.layers.items()}
    pieces, products = (list(map(one, every)) for every in (side.pieces, side.products))
    return m.replaced(side, pieces=pieces, products=products, layers=layers)


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


def common(layer: str, ours: Iterable[str], others: Iterable[str]) -> str:
    """The nearest enclosing layer that both sides have; the layer's name if there is none."""
    known = _with_prefixes(others) & _with_prefixes(ours)
    if not known:
        return layer
    while layer and layer not in known:
        layer = layer.rpartition(".")[0]
    return layer


def _with_prefixes(names: Iterable[str]) -> set[str]:
    every = set(names)
    for name in names:
        while name := name.rpartition(".")[0]:
            every.add(name)
    return every
