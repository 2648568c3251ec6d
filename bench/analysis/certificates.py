"""Did two cases do the same work? Their losses and initial weights, block by block."""

from __future__ import annotations

from math import inf, isfinite

from bench.analysis.values import SMALLEST_LOSS, is_number

MOST_FLIPPED = 100  # a flipped ReLU was seen to move a loss by 4.5e-4, 45 of its tolerances


def same_side(one: dict, other: dict) -> bool:
    """Whether two cases have the same framework and flavour."""
    return all(one.get(name) == other.get(name) for name in ("framework", "flavour"))


def difference(one: dict, other: dict) -> str | None:
    """Why two cases did not do the same work, from their certificates; None if they did.

    Of slow steps one may have fewer losses: those that both have count. The first one, from equal
    weights, agrees in every block. Of the later ones, the median over
    the blocks of the largest difference is held to the tolerance: now and then rounding flips a
    ReLU, which moves the later losses of one block, while different work shows in every block. No
    block may differ by `MOST_FLIPPED` tolerances.
    """
    tolerance, same_weights, largest = _tolerance(one, other), _same_weights(one, other), []
    for ours, theirs in _pairs(one, other):
        if same_weights and ours["weights_sha256"] != theirs["weights_sha256"]:
            return "initial weights differ"
        apart = _steps(ours, theirs)
        if apart[0][0] > tolerance:
            return _too_far(*apart[0], tolerance)
        largest.append(max(apart))
    largest.sort()
    for found, step, allowed in (
        (*largest[len(largest) // 2], tolerance),
        (*largest[-1], MOST_FLIPPED * tolerance),
    ):
        if found > allowed:
            return _too_far(found, step, allowed)
    return None


def largest_difference(one: dict, other: dict) -> float:
    """The largest relative difference of any two losses, over all blocks of both; 0 of none."""
    pairs = _pairs(one, other)
    return max((apart for pair in pairs for apart, _ in _steps(*pair)), default=0.0)


def _pairs(one: dict, other: dict) -> list[tuple[dict, dict]]:
    """The first block of each number of both: blocks of a number start from the same weights."""
    ours, theirs = ({b["block"]: b for b in reversed(c["blocks"])} for c in (one, other))
    return [(ours[number], theirs[number]) for number in sorted(ours) if number in theirs]


def _tolerance(one: dict, other: dict) -> float:
    """The relative difference of losses that two certificates may show.

    Any where one of two different variants computes something else by design.
    """
    own = one["variant"] != other["variant"]
    if own and (one["changes_math"] or other["changes_math"]):
        return inf
    return max(one["loss_tolerance"], other["loss_tolerance"])


def _same_weights(one: dict, other: dict) -> bool:
    """Whether two cases must start from equal weights: twins, and rows that change none."""
    own = same_side(one, other) and one["variant"] != other["variant"]
    return not (own and (one["changes_weights"] or other["changes_weights"]))


def _steps(ours: dict, theirs: dict) -> list[tuple[float, int]]:
    """How far apart the losses of two blocks are, each with its step."""
    least = SMALLEST_LOSS * max((abs(loss) for loss in theirs["losses"] if loss), default=0.0)
    pairs = zip(ours["losses"], theirs["losses"], strict=False)
    return [(_apart(a, b, least), step) for step, (a, b) in enumerate(pairs, 1)]


def _apart(one: float | None, other: float | None, least: float) -> float:
    """The relative difference of two losses; infinite where one is no number (null).

    Relative to `least` where the loss is smaller: it may come to 0.
    """
    if not is_number(one) or not is_number(other):
        return inf
    found = abs(one - other) / max(abs(other), least, 1e-12)
    return found if isfinite(found) else inf


def _too_far(found: float, step: int, allowed: float) -> str:
    return f"loss of step {step} differs by {found:.1e}, allowed {allowed:.0e}"
