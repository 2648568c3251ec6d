"""What it takes to get a row, besides its first call: calibration, training, a teacher."""

from __future__ import annotations

from dataclasses import dataclass, fields

from bench.analysis.values import at, is_number

# How much work a price is, cheaper ones first: training is its epochs more than calibrating, a
# teacher that has to be trained first as much as ten of them.
FREE, COMPILE, CALIBRATE, TEACHER = 0, 1, 2, 10
# Where predictions are compiled, the baselines are too: their first call takes so many seconds.
COMPILES = 2.0


@dataclass(frozen=True)
class Price:
    """What a row takes that is more than a setting, as its benchmark file declares it.

    `epochs`: of training. `teacher`: which has to be trained first. `calibration`: a few batches
    that set ranges. `compiled`: a compiler that runs before the first step.
    """

    epochs: int = 0
    teacher: bool = False
    calibration: bool = False
    compiled: bool = False


def price(case: dict) -> tuple[int, str]:
    """How much work it is to get a row, and what it takes in words ("" where nothing does)."""
    told = case.get("price") or {}
    declared = Price(**{one.name: told[one.name] for one in fields(Price) if one.name in told})
    if declared.epochs:
        trained = "a trained teacher, " if declared.teacher else ""
        work = CALIBRATE + declared.epochs + TEACHER * declared.teacher
        return work, f"{trained}{declared.epochs} epochs of training"
    if declared.calibration:
        return CALIBRATE, "calibration"
    return (COMPILE, "compiling") if _compiles(case, declared) else (FREE, "")


def _compiles(case: dict, declared: Price) -> bool:
    if case.get("mode") == "predict":
        first = at(case, "timing", "cold_first_call_s")
        return is_number(first) and first > COMPILES
    if case["role"] != "variant":
        return False
    return declared.compiled or at(case, "settings", "compiled") is True
