"""From blocks to intervals and verdicts.

The unit of replication is the process. Each block gives one estimate of a log ratio (see `fit`).
The interval is Student's t over these. The margin was fixed before anything was measured, and is
never tuned to a result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import exp, log

import numpy as np
from scipy import special

from bench.analysis.bounds import Looks, confidence
from bench.record import AccuracyDifference

FEWEST_SEEDS = 3  # differences of two can be equal to the sample, which would leave no width
DELTA = 0.03  # a ratio within 1 / 1.03 … 1.03 counts as no difference
# The sd of the log of a ratio of step times from run to run of a machine, beyond what its blocks
# scatter by, as docs/reproducibility.json has it. Its degrees of freedom, more than matter.
BETWEEN_RUNS, BETWEEN_FREEDOM = 0.012, 1000.0


@dataclass(frozen=True)
class Interval:
    """A mean with its two-sided t-interval; `low` and `high` are None for fewer than two values."""

    mean: float
    low: float | None
    high: float | None
    sd: float | None
    n: int

    @property
    def ci(self) -> tuple[float, float] | None:
        """Both bounds, if there are any."""
        return None if self.low is None else (self.low, self.high)


def t_interval(values: list[float], level: float = 0.95) -> Interval:
    """Student's t-interval of the mean of independent `values`."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return Interval(mean, None, None, None, len(values))
    sd = float(np.std(values, ddof=1))
    half = quantile(level, len(values) - 1) * sd / len(values) ** 0.5
    return Interval(mean, mean - half, mean + half, sd, len(values))


@cache
def quantile(level: float, freedom: float) -> float:
    """The quantile of Student's t for a two-sided interval at `level`; cached."""
    return float(special.stdtrit(freedom, 0.5 + level / 2))


@dataclass(frozen=True)
class Ratio:
    """A time ratio over blocks: geometric mean, 95% interval, sd of the log ratio, verdict.

    `look`: after how many blocks it was decided, if a run ends early. `freedom`: of the sd, if it
    is not only from the `n` blocks.
    """

    ratio: float
    ci: tuple[float, float] | None
    sd: float | None
    n: int
    verdict: str | None
    look: int | None = None
    freedom: float | None = None


def compare(log_ratios: list[float]) -> Ratio:
    """Judge a ratio from its blocks' log ratios (one block: a ratio without interval or verdict).

    "faster" or "slower": the 95% interval lies wholly beyond `DELTA`. "equivalent": the 90%
    interval lies inside it, that is two one-sided tests at 5% (Schuirmann, 1987). "slightly faster"
    or "slightly slower": the 95% interval excludes 1. Else "inconclusive".
    """
    wide = t_interval(log_ratios)
    if wide.sd is None:
        return Ratio(exp(wide.mean), None, None, wide.n, None)
    said = verdict(wide, t_interval(log_ratios, 0.90))
    return Ratio(exp(wide.mean), (exp(wide.low), exp(wide.high)), wide.sd, wide.n, said)


def verdict(wide: Interval, narrow: Interval) -> str:
    """The verdict of a log ratio's 95% and 90% intervals."""
    bound = log(1 + DELTA)
    if wide.high < -bound:
        return "faster"
    if wide.low > bound:
        return "slower"
    if -bound < narrow.low and narrow.high < bound:
        return "equivalent"
    if wide.high < 0:
        return "slightly faster"
    if wide.low > 0:
        return "slightly slower"
    return "inconclusive"


def shown_less(bounds: Sequence[float] | None) -> bool:
    """Whether a ratio's whole interval lies below the margin; False without an interval."""
    return bounds is not None and bounds[1] < 1 / (1 + DELTA)


def shown_more(bounds: Sequence[float] | None) -> bool:
    """Whether a ratio's whole interval lies above the margin; False without an interval."""
    return bounds is not None and bounds[0] > 1 + DELTA


def summed(parts: list[tuple[float, float]]) -> tuple[float, float]:
    """The standard deviation of a sum and its degrees of freedom (Welch and Satterthwaite).

    `parts`: the variance of each summand with its degrees of freedom.
    """
    variance = sum(part for part, _ in parts)
    # Without any scatter an interval has no width, whatever the degrees of freedom.
    freedom = variance**2 / sum(part**2 / degrees for part, degrees in parts) if variance else 1.0
    return variance**0.5, freedom


def half_width(within: tuple[float, float], between: float) -> float:
    """Half a 95% interval, from the variance within a run and that from run to run.

    `within`: a variance with its degrees of freedom.
    """
    sd, freedom = summed([within, (between, BETWEEN_FREEDOM)])
    return quantile(0.95, freedom) * sd


def compare_runs(new: Ratio, old: Ratio, between: float = BETWEEN_RUNS) -> Ratio:
    """Judge how a ratio changed between two runs, new over old, by Welch's interval (1947).

    The blocks of two runs are independent and may have different noise. `between`: the sd of a log
    ratio from run to run, which one run can't show. Raises ValueError for a run of one block.
    """
    if new.sd is None or old.sd is None:
        raise ValueError("a run of one block has no noise to compare with")
    runs = [(run.sd**2 / run.n, run.freedom or run.n - 1) for run in (new, old)]
    runs.append((2 * between**2, BETWEEN_FREEDOM))
    mean, (sd, freedom) = log(new.ratio / old.ratio), summed(runs)

    def interval(level: float) -> Interval:
        half = quantile(level, freedom) * sd
        return Interval(mean, mean - half, mean + half, sd, min(new.n, old.n))

    wide = interval(0.95)
    said = verdict(wide, interval(0.90))
    return Ratio(exp(mean), (exp(wide.low), exp(wide.high)), sd, wide.n, said)


def compare_accuracy(
    values: list[float],
    baseline: list[float],
    *,
    margin: float,
    more_is_better: bool,
    looks: Looks = (),
) -> AccuracyDifference:
    """Judge `values` against `baseline`, paired by seed, by two one-sided tests at `margin`.

    `looks`: numbers of seeds after which training ends if the verdict is final.

    Returns the mean difference, its 95% interval and a verdict: "equivalent" (the 90% interval lies
    inside the margin), "better" or "worse" (the 95% interval excludes zero), or "inconclusive".
    There is no interval and no verdict for fewer than FEWEST_SEEDS.
    """
    differences = [value - base for value, base in zip(values, baseline, strict=True)]
    wide, narrow = (t_interval(differences, confidence(looks, p)) for p in (0.95, 0.90))
    if len(differences) < FEWEST_SEEDS:
        return AccuracyDifference(mean=wide.mean)
    if -margin < narrow.low and narrow.high < margin:
        verdict = "equivalent"
    elif wide.low <= 0 <= wide.high:
        verdict = "inconclusive"
    else:
        verdict = "better" if (wide.mean > 0) == more_is_better else "worse"
    return AccuracyDifference(mean=wide.mean, ci=wide.ci, verdict=verdict)
