"""A range test: losses while the learning rate rises, and the rate at which they fall most steeply.

Neither framework is known here: a step is a function of the rate and the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median


@dataclass(frozen=True)
class RangeTest:
    """What a range test found: a rate, a loss and a smoothed loss of each step that was taken."""

    rates: list[float]
    losses: list[float]
    smoothed: list[float]
    suggestion: float


def check_settings(
    lowest: float, highest: float, steps: int, window: int, divergence: float
) -> None:
    """Raise ValueError for settings of `run` that are out of range."""
    if not 0 < lowest < highest or divergence <= 0:
        raise ValueError(
            "a range test needs 0 < lowest < highest and divergence above 0, "
            f"not {lowest}, {highest}, {divergence}"
        )
    if window < 3 or window % 2 == 0 or steps < 2 * window:
        raise ValueError(
            "a range test needs an odd window of 3 or more and steps of twice that or more, "
            f"not window={window}, steps={steps}"
        )


def run(
    step: Callable,
    batches: Iterable,
    *,
    lowest: float,
    highest: float,
    steps: int,
    window: int,
    divergence: float,
) -> RangeTest:
    """Train with one rate after the other, each by the same factor higher; suggest one of them.

    step: `step(rate, batch) -> loss`, a float. batches: begun again when they run out. It ends
    early where the mean loss of half a window (a whole one would stop late) is `divergence` times
    the first above the lowest, or a loss is not finite.

    Raises ValueError for no batches, a first loss that is not finite, and where the loss never
    falls by more than its noise.
    """
    rates = [lowest * (highest / lowest) ** (at / (steps - 1)) for at in range(steps)]
    losses, means = [], []
    for rate, batch in zip(rates, _endless(batches), strict=False):
        loss = step(rate, batch)
        if not math.isfinite(loss):
            break
        losses.append(loss)
        means.append(fmean(losses[-((window + 1) // 2) :]))
        if means[-1] - min(means) > divergence * abs(means[0]):
            break
    if not losses:
        raise ValueError(f"the first loss is no finite number, at a rate of {lowest}")
    suggestion, smoothed = _suggest(rates, losses, window)
    return RangeTest(rates[: len(losses)], losses, smoothed, suggestion)


def _endless(batches: Iterable) -> Iterator:
    """The batches, again and again."""
    while True:
        any_batch = False
        for batch in batches:
            any_batch = True
            yield batch
        if not any_batch:
            raise ValueError("there are no batches (or no more of an iterator: give a list)")


def _suggest(rates: list[float], losses: list[float], window: int) -> tuple[float, list[float]]:
    """The rate of the steepest fall, and the smoothed losses.

    A running mean lags behind, and over rising rates the lag is a factor: nine steps of a hundred
    over six decades are 3.5 times the rate. So mean and slope are those of a centred window.
    """
    reach = window // 2
    near = [
        range(max(0, at - reach), min(len(losses), at + reach + 1)) for at in range(len(losses))
    ]
    smoothed = [fmean(losses[i] for i in steps) for steps in near]
    lowest = smoothed.index(min(smoothed))
    fallen = smoothed[0] - smoothed[lowest]
    # Half of the differences between neighbours are below 0.954 standard deviations of the noise; a
    # mean over a window has 1 / sqrt(window) of it. The lowest of many means lies some below.
    noise = median(abs(a - b) for a, b in pairwise(losses)) / 0.954 if lowest else 0.0
    if fallen <= 4 * noise / math.sqrt(window):
        raise ValueError(
            f"the loss never falls: {smoothed[0]:.4g} at a rate of {rates[0]:.3g}, at best "
            f"{smoothed[lowest]:.4g} at {rates[lowest]:.3g} with noise of {noise:.2g}; begin "
            "lower, take larger batches or more steps, or look for a fault in labels and loss"
        )
    slopes = [_slope(losses, near[at]) for at in range(lowest + 1)]
    return rates[slopes.index(min(slopes))], smoothed


def _slope(losses: list[float], steps: range) -> float:
    """The slope of the straight line through these losses, by least squares, in loss a step."""
    middle = fmean(steps)
    spread = sum((at - middle) ** 2 for at in steps)
    return sum((at - middle) * losses[at] for at in steps) / spread
