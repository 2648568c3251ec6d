"""Which cases leave a run early, because nothing about them is left to decide."""

from __future__ import annotations

from bench.analysis import analyse, comparisons
from bench.analysis.bounds import Looks
from bench.analysis.verdicts import compare_accuracy
from bench.record import DIFFERENT, Comparison, Record

WIDEST = 0.06  # half the interval of a ratio that is decided: who has a wider one plays on


def leaving(measured: Record) -> set[str]:
    """The ids of the cases whose comparisons with baseline and other framework are all decided.

    A program stays as long as one of its cases does. Baselines and controls stay. Nobody leaves a
    run with a fixed number of blocks.
    """
    if not measured.looks:
        return set()
    undecided, known = set(), set()
    for comparison in analyse.compared(measured):
        if not comparison.variant.startswith(comparisons.BEST):
            sides = {comparison.numerator, comparison.denominator}
            known |= sides
            if not _finished(comparison):
                undecided |= sides
    stay = {
        case.program_id
        for case in measured.cases
        if case.role != "variant" or case.id in undecided or case.id not in known
    }
    return {case.id for case in measured.cases if case.program_id not in stay}


def _finished(comparison: Comparison) -> bool:
    """Whether a verdict stands, with a ratio that is worth printing.

    An interval's width depends on noise alone, not on the ratio: it lets nobody leave by chance.
    """
    if comparison.verdict == DIFFERENT:
        return True
    if comparison.look is None:
        return False
    low, high = comparison.ci
    return (high / low) ** 0.5 <= 1 + WIDEST


def accuracy_decided(
    values: list[float],
    baseline: list[float],
    *,
    margin: float,
    more_is_better: bool,
    looks: Looks,
) -> bool:
    """Whether the verdict on accuracy is final at this number of seeds."""
    difference = compare_accuracy(
        values, baseline, margin=margin, more_is_better=more_is_better, looks=looks
    )
    return difference.verdict not in (None, "inconclusive")
