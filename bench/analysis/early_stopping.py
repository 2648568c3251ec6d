"""Who leaves a run after a look at it: those about whom nothing more is to be decided."""

from __future__ import annotations

from bench.analysis import analyse, comparisons
from bench.analysis.pairing import program
from bench.analysis.reading import DIFFERENT
from bench.analysis.verdicts import compare_accuracy

WIDEST = 0.06  # half the interval of a ratio that is decided: who has a wider one plays on


def leaving(measured: dict) -> set[str]:
    """The cases all of whose comparisons, with the own baseline and the twin, are decided.

    A program stays for as long as one of the cases that show it does. Baselines and controls stay,
    and everyone in a run whose blocks were fixed.
    """
    if not measured.get("looks"):
        return set()
    made = analyse.compared(measured)
    open_, known = set(), set()
    for each in made:
        if not each["variant"].startswith(comparisons.BEST):
            sides = {each["numerator"], each["denominator"]}
            known |= sides
            if not _finished(each):
                open_ |= sides
    stay = {
        program(case)
        for case in measured["cases"]
        if case["role"] != "variant" or case["id"] in open_ or case["id"] not in known
    }
    return {case["id"] for case in measured["cases"] if program(case) not in stay}


def _finished(comparison: dict) -> bool:
    """Whether a verdict stands, with a ratio that is worth printing.

    An interval's width depends on noise alone, not on the ratio: it lets nobody leave by chance.
    """
    if comparison["verdict"] == DIFFERENT:
        return True
    ci = comparison["ci"]
    return comparison["look"] is not None and (ci[1] / ci[0]) ** 0.5 <= 1 + WIDEST


def accuracy_decided(
    values: list[float],
    baseline: list[float],
    *,
    margin: float,
    more_is_better: bool,
    looks: tuple[int, ...],
) -> bool:
    """Whether more seeds would decide nothing: the verdict on accuracy stands at this look."""
    found = compare_accuracy(
        values, baseline, margin=margin, more_is_better=more_is_better, looks=looks
    )
    return found["verdict"] not in (None, "inconclusive")
