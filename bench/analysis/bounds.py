"""How much wider intervals must be if a run may end early.

With plain 95% intervals at each look, one comparison in ten would be wrong at some look. Pocock's
bound (1977), the same at every look, makes all intervals hold at once in 95% of runs: they are
repeated confidence intervals (Jennison and Turnbull, 1989).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import numpy as np
from scipy import special

Looks = tuple[int, ...]
LOOKS = (3, 5, 8)  # blocks of a run after which it is decided who leaves
NODES = 96  # of the integration: exact to 1e-9


@cache
def bound(looks: Looks, error: float = 0.05) -> float:
    """Pocock's bound: |Z| stays below it at all `looks` with probability 1 - `error`."""
    from scipy import optimize  # most commands need none, and its import takes a second

    return float(optimize.brentq(lambda c: crossing(c, looks) - error, 1.0, 6.0, xtol=1e-10))


def crossing(limit: float, looks: Sequence[int]) -> float:
    """The probability that |Z| exceeds `limit` at some look although there is no difference.

    The density of sums that stayed inside at all earlier looks is carried from look to look by
    numerical integration (Armitage, McPherson and Rowe, 1969).
    """
    unit, weights = np.polynomial.legendre.leggauss(NODES)
    edge = limit * looks[0] ** 0.5
    sums, density = edge * unit, _normal(edge * unit, looks[0])
    for before, look in pairwise(looks):
        mass, wider = edge * weights * density, limit * look**0.5
        steps = (wider * unit)[:, None] - sums[None, :]
        density = _normal(steps, look - before) @ mass
        sums, edge = wider * unit, wider
    return 1.0 - float(edge * weights @ density)


def _normal(x: np.ndarray, variance: float) -> np.ndarray:
    """The density of a normal distribution around 0."""
    return np.exp(-(x**2) / (2 * variance)) / (2 * np.pi * variance) ** 0.5


@cache
def confidence(looks: Looks, overall: float = 0.95) -> float:
    """The confidence that each look's interval needs for all to hold at once with `overall`."""
    if not looks:
        return overall
    return float(1 - 2 * special.ndtr(-bound(looks, 1 - overall)))


def taken(looks: Sequence[int], blocks: int) -> list[int]:
    """The looks of a run of `blocks` blocks: its end replaces later looks."""
    return [look for look in looks if look < blocks] + [blocks]
