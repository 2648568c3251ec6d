"""Ratios and verdicts of a run, over all blocks or at looks, after which decided cases leave.

The intervals of all looks hold at once (see `bounds`), so what one of them excludes stays excluded.
A ratio's interval is their intersection, and no later look undoes a verdict. Without looks there is
one interval, over all blocks.

A variance from three blocks has two degrees of freedom and decides little. So comparisons of one
piece of work between the same frameworks share theirs: each has its variance and, as if from
`PRIOR` more degrees of freedom, the mean of the others' (Smyth, 2004). If they are fewer, as for
large models, each counts as one degree: most have the same baseline, and so its noise. `twinbench
validate replay` shows how often ratios of two runs then lie within their intervals. Both rules were
chosen on eight records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp

import numpy as np

from bench.analysis.bounds import Looks, confidence, taken
from bench.analysis.fit import Fit
from bench.analysis.verdicts import Interval, Ratio, quantile, verdict

PRIOR = 4.0  # degrees of freedom that the variance of the others counts for at most
DECIDED = ("faster", "slower", "equivalent")


@dataclass(frozen=True)
class Pair:
    """Two cases of one fit. Pairs of the same `kin` have the same kind of noise."""

    top: str
    bottom: str
    kin: object = None


def judge(
    fit: Fit, pairs: Sequence[Pair], looks: Looks, prior: float = PRIOR
) -> list[Ratio | None]:
    """The ratio of each pair with the verdict of all looks so far; None if no block has both.

    Without `looks` it is the verdict of all blocks.
    """
    last = {pair: max(fit.shared(pair.top, pair.bottom), default=-1) + 1 for pair in pairs}
    every = {look for blocks in last.values() if blocks > 1 for look in taken(looks, blocks)}
    at = {
        look: _at_look(fit.first(look), pairs, looks, prior) for look in sorted(every) if look > 1
    }
    ratios = []
    for pair in pairs:
        reached = {look: at[look].get(pair) for look in taken(looks, last[pair]) if look in at}
        reached = {look: interval for look, interval in reached.items() if interval}
        ratios.append(_ratio(fit, pair, reached))
    if looks:
        return ratios
    return [ratio and replace(ratio, look=None) for ratio in ratios]  # nobody could leave


@dataclass(frozen=True)
class _Look:
    """A pair's intervals at one look, and the deviation and degrees of freedom behind them."""

    wide: Interval
    narrow: Interval
    freedom: float


def _at_look(fit: Fit, pairs: Sequence[Pair], looks: Looks, prior: float) -> dict[Pair, _Look]:
    """Every pair that two blocks have, with variances that kin share as if from `prior` degrees."""
    by_pair = {pair: fit.log_ratios(pair.top, pair.bottom) for pair in pairs}
    by_pair = {pair: values for pair, values in by_pair.items() if len(values) > 1}
    squares = {pair: float(np.var(values)) * len(values) for pair, values in by_pair.items()}
    levels = [confidence(looks, overall) for overall in (0.95, 0.90)]
    sums: dict[object, tuple[float, int, int]] = {}
    for pair, values in by_pair.items():
        square, freedom, count = sums.get(pair.kin, (0.0, 0, 0))
        sums[pair.kin] = (square + squares[pair], freedom + len(values) - 1, count + 1)
    at_look = {}
    for pair, values in by_pair.items():
        square, others, count = sums[pair.kin]
        kin, others = count > 1, others - (len(values) - 1)
        counts = min(prior, float(count - 1))  # degrees of freedom of the others' variance
        lent = counts * max(0.0, square - squares[pair]) / others if kin else 0.0
        freedom = len(values) - 1 + counts
        mean, sd = float(np.mean(values)), ((squares[pair] + lent) / freedom) ** 0.5
        error = sd / len(values) ** 0.5
        halves = [quantile(level, freedom) * error for level in levels]
        wide, narrow = (Interval(mean, mean - h, mean + h, sd, len(values)) for h in halves)
        at_look[pair] = _Look(wide, narrow, freedom)
    return at_look


def _ratio(fit: Fit, pair: Pair, reached: dict[int, _Look]) -> Ratio | None:
    """What all looks together say of a pair."""
    values = fit.log_ratios(pair.top, pair.bottom)
    if not values:
        return None
    mean = float(np.mean(values))
    if not reached:
        return Ratio(exp(mean), None, None, len(values), None)
    wide = narrow = reached_verdict = decided = None
    for look, intervals in reached.items():
        wide, narrow = _both(wide, intervals.wide), _both(narrow, intervals.narrow)
        if decided is None:
            reached_verdict = verdict(wide, narrow)
            decided = look if reached_verdict in DECIDED else None
    low, high = min(wide.low, mean), max(wide.high, mean)
    freedom = reached[max(reached)].freedom
    return Ratio(
        exp(mean), (exp(low), exp(high)), wide.sd, len(values), reached_verdict, decided, freedom
    )


def _both(before: Interval | None, now: Interval) -> Interval:
    """What neither look excludes; where they exclude each other, the nearest that stood before."""
    if before is None:
        return now
    low, high = (min(max(edge, before.low), before.high) for edge in (now.low, now.high))
    return Interval(now.mean, low, high, now.sd, now.n)
