"""Whether two cases did the same work, by their losses and initial weights, block by block."""

from __future__ import annotations

from math import inf, isfinite

from bench.analysis.values import SMALLEST_LOSS
from bench.record import Block, Case

MOST_FLIPPED = 100  # a flipped ReLU was seen to move a loss by 4.5e-4, 45 of its tolerances


def difference(one: Case, other: Case) -> str | None:
    """Why two cases did not do the same work, from their certificates; None if they did.

    Of slow steps one may have fewer losses: those that both have count. The first one, from equal
    weights, agrees in every block. Of the later ones, the median over
    the blocks of the largest difference is held to the tolerance: now and then rounding flips a
    ReLU, which moves the later losses of one block, while different work shows in every block. No
    block may differ by `MOST_FLIPPED` tolerances.
    """
    tolerance, same_weights, largest = _tolerance(one, other), _same_weights(one, other), []
    for block, twin in _block_pairs(one, other):
        if same_weights and block.weights_sha256 != twin.weights_sha256:
            return "initial weights differ"
        differences = _loss_differences(block, twin)
        if differences[0][0] > tolerance:
            return _too_far(*differences[0], tolerance)
        largest.append(max(differences))
    largest.sort()
    for relative, step, allowed in (
        (*largest[len(largest) // 2], tolerance),
        (*largest[-1], MOST_FLIPPED * tolerance),
    ):
        if relative > allowed:
            return _too_far(relative, step, allowed)
    return None


def largest_difference(one: Case, other: Case) -> float:
    """The largest relative difference of any two losses, over all blocks of both; 0 of none."""
    pairs = _block_pairs(one, other)
    relative = (each for pair in pairs for each, _ in _loss_differences(*pair))
    return max(relative, default=0.0)


def _block_pairs(one: Case, other: Case) -> list[tuple[Block, Block]]:
    """The first block of each number of both: blocks of a number start from the same weights."""
    first, second = ({b.block: b for b in reversed(case.blocks)} for case in (one, other))
    return [(first[number], second[number]) for number in sorted(first) if number in second]


def _tolerance(one: Case, other: Case) -> float:
    """The relative difference of losses that two certificates may show.

    Any where one of two different variants computes something else by design.
    """
    if one.variant != other.variant and (one.changes_math or other.changes_math):
        return inf
    return max(one.loss_tolerance, other.loss_tolerance)


def _same_weights(one: Case, other: Case) -> bool:
    """Whether two cases must start from equal weights: twins, and rows that change none."""
    twins = one.side != other.side or one.variant == other.variant
    return twins or not (one.changes_weights or other.changes_weights)


def _loss_differences(one: Block, other: Block) -> list[tuple[float, int]]:
    """How far apart the losses of two blocks are, each with its step."""
    least = SMALLEST_LOSS * max((abs(loss) for loss in other.losses if loss), default=0.0)
    pairs = zip(one.losses, other.losses, strict=False)
    return [(_relative(a, b, least), step) for step, (a, b) in enumerate(pairs, 1)]


def _relative(one: float | None, other: float | None, least: float) -> float:
    """The relative difference of two losses; infinite where one is none.

    Relative to `least` where the loss is smaller: it may come to 0.
    """
    if one is None or other is None:
        return inf
    relative = abs(one - other) / max(abs(other), least, 1e-12)
    return relative if isfinite(relative) else inf


def _too_far(relative: float, step: int, allowed: float) -> str:
    return f"loss of step {step} differs by {relative:.1e}, allowed {allowed:.0e}"
