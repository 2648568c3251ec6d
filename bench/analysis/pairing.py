"""Which case each case is compared with, and whose measurements it shows."""

from __future__ import annotations

from collections.abc import Sequence

from bench.record import Case

SHOWN = ("timing", "blocks", "cold_starts", "loss_check", "fidelity")  # a program's


def resolved(cases: Sequence[Case]) -> list[Case]:
    """The cases with the times and memory of the program that was measured for them.

    Training belongs to the case, not to the program. So does a probe's result, unless nothing is
    timed.
    """
    by_id = {case.id: case for case in cases}
    return [_shown(case, by_id.get(case.program_id, case)) for case in cases]


def _shown(case: Case, program: Case) -> Case:
    """The case with what was measured of `program`."""
    if program is case:
        return case
    changes = {name: getattr(program, name) for name in SHOWN}
    if not program.timed:
        changes["probed"] = program.probed
    if case.status == "OK" and program.status != "OK":
        changes |= {"status": program.status, "reason": program.reason}
    return case.but(**changes)


def compared_with(case: Case, cases: Sequence[Case]) -> Case | None:
    """The case that time, memory and size are compared with: the baseline, or `against`.

    None for a baseline, and if that case did not run.
    """
    if case.against is None:
        return baseline(case, cases)
    return variant_of(case, case.against, cases)


def variant_of(case: Case, variant: str, cases: Sequence[Case]) -> Case | None:
    """Another variant of its technique and framework at the same work; None if it did not run."""
    same = (case.technique, case.work, case.side, "OK")
    named = (other for other in cases if other.variant == variant)  # the others cost more
    return next((o for o in named if (o.technique, o.work, o.side, o.status) == same), None)


def baseline(case: Case, cases: Sequence[Case]) -> Case | None:
    """The baseline of its technique and framework, also for accuracy; None for a baseline."""
    for other in cases:
        if other.role != "baseline" or other.technique != case.technique:
            continue  # most of them, told by what costs least
        if other.work == case.work and other.side == case.side:
            return None if other.id == case.id else other
    return None
