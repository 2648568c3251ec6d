"""Verdicts on rows that were not trained to their metric: a short training's loss, or predictions.

Both are tested for equivalence. "kept": the 90% interval lies within the margin (two one-sided
tests at 5%, Schuirmann, 1987), or shows an improvement. "lost": the 95% interval is worse.
Otherwise it can't be told. The margin is 0.05 bits for a loss, and the task's margin of accuracy
for predictions.
"""

from __future__ import annotations

from math import sqrt

from bench.analysis.verdicts import Interval, compare_accuracy, quantile
from bench.record import (
    KEPT,
    LOST,
    UNTOLD,
    AccuracyDifference,
    Case,
    Fidelity,
    LossCheck,
    TaskFacts,
)
from shared.specs import LOSS_MARGIN

LEARNED = 5 * LOSS_MARGIN  # a baseline whose loss falls by less has learned too little to tell
WORDS = {"equivalent": KEPT, "better": KEPT, "worse": LOST}


def raw(check: LossCheck | Fidelity | None) -> LossCheck | Fidelity | None:
    """A check with its measurements only."""
    if check is None:
        return None
    derived = ("difference", "verdict") if isinstance(check, LossCheck) else DERIVED
    return check.but(**dict.fromkeys(derived))


DERIVED = ("loss", "points", "verdict")


# The loss of a short training ---------------------------------------------------------------------


def of_loss(case: Case, base: Case | None) -> LossCheck | None:
    """The check of a case against its baseline's, seed by seed.

    A baseline has no verdict, nor has a row whose baseline was not checked.
    """
    check, other = case.loss_check, base and base.loss_check
    if check is None or other is None:
        return check
    seeds = min(len(check.per_seed), len(other.per_seed))
    values, plain = check.per_seed[:seeds], other.per_seed[:seeds]
    if not seeds or None in plain or not _learned(other):
        return check.but(verdict=UNTOLD)
    if None in values:  # it diverged, and the baseline did not
        return check.but(verdict=LOST)
    difference = compare_accuracy(values, plain, margin=LOSS_MARGIN, more_is_better=False)
    return check.but(difference=difference, verdict=WORDS.get(difference.verdict, UNTOLD))


def _learned(base: LossCheck) -> bool:
    """Whether a baseline's loss fell so far, at every seed, that there was something to lose."""
    falls = zip(base.first, base.per_seed, strict=False)
    return all(first is not None and first - last >= LEARNED for first, last in falls)


# Predictions --------------------------------------------------------------------------------------


def of_predictions(case: Case, tasks: dict[str, TaskFacts]) -> Fidelity | None:
    """Predictions of a case judged by their loss and by how many are correct."""
    fidelity = case.fidelity
    if fidelity is None:
        return None
    margin = (tasks.get(case.task) or TaskFacts()).margin
    points = newcombe(fidelity)
    if fidelity.loss_more is None or fidelity.loss_sd is None:  # not all its outputs are finite
        return fidelity.but(points=points[0], verdict=LOST)
    loss = [_mean(fidelity, level) for level in (0.95, 0.90)]
    right = _told(*points, 1.0 if margin is None else margin, more_is_better=True)
    verdicts = {right, _told(*loss, LOSS_MARGIN, more_is_better=False)}
    verdict = LOST if LOST in verdicts else UNTOLD if UNTOLD in verdicts else KEPT
    return fidelity.but(loss=loss[0], points=points[0], verdict=verdict)


def _mean(fidelity: Fidelity, level: float) -> AccuracyDifference:
    """The mean difference of the samples' losses with its t-interval."""
    half = quantile(level, max(fidelity.samples - 1, 1)) * fidelity.loss_sd / sqrt(fidelity.samples)
    mean = fidelity.loss_more
    return AccuracyDifference(mean=mean, ci=(mean - half, mean + half))


def newcombe(fidelity: Fidelity) -> tuple[AccuracyDifference, AccuracyDifference]:
    """How many points predictions gain over the float model, with 95% and 90% intervals.

    These are Newcombe's for paired shares (1998, method 10): Wilson's intervals of both shares,
    combined by their correlation. They have a width even if no prediction changed.
    """
    n, lost, gained = fidelity.samples, fidelity.lost, fidelity.gained
    both = fidelity.right - lost
    neither = n - both - lost - gained
    sums = (both + lost) * (gained + neither) * (both + gained) * (lost + neither)
    together = both * neither - lost * gained
    together = max(together - n / 2, 0) if together > 0 else together
    correlation = together / sqrt(sums) if sums else 0.0

    def interval(level: float) -> AccuracyDifference:
        ours, theirs = (_wilson(count, n, level) for count in (both + gained, both + lost))
        mean = ours.mean - theirs.mean
        down = _joined(ours.mean - ours.low, theirs.high - theirs.mean, correlation)
        up = _joined(ours.high - ours.mean, theirs.mean - theirs.low, correlation)
        return AccuracyDifference(mean=100 * mean, ci=(100 * (mean - down), 100 * (mean + up)))

    return interval(0.95), interval(0.90)


def _joined(one: float, other: float, correlation: float) -> float:
    return sqrt(max(0.0, one**2 - 2 * correlation * one * other + other**2))


def _wilson(count: int, n: int, level: float) -> Interval:
    from scipy.stats import binomtest  # few runs need it, and its import takes a second

    ci = binomtest(count, n).proportion_ci(level, method="wilson")
    return Interval(count / n, ci.low, ci.high, None, n)


def _told(
    wide: AccuracyDifference, narrow: AccuracyDifference, margin: float, *, more_is_better: bool
) -> str:
    """Kept, lost, or not to be told."""
    if -margin < narrow.ci[0] and narrow.ci[1] < margin:
        return KEPT
    if wide.ci[0] <= 0 <= wide.ci[1]:
        return UNTOLD
    return KEPT if (wide.mean > 0) == more_is_better else LOST
