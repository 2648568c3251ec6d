"""Whether two cases did the same work: their weights, their first losses, and their later ones."""

from __future__ import annotations

import pytest

from bench.analysis.certificates import difference
from bench.record import Block
from tests import records

TOLERANCE = 1e-3
LOSSES = (2.0, 1.9, 1.8)


def block(number, losses, weights="ab"):
    return Block(match=0, block=number, losses=list(losses), weights_sha256=weights)


def case(variant="a", *blocks, **fields):
    """A case whose blocks are of these losses, or of LOSSES."""
    played = [block(number, losses) for number, losses in enumerate(blocks or [LOSSES])]
    return records.case(variant, **{"loss_tolerance": TOLERANCE, "blocks": played} | fields)


def later(*tolerances):
    """Blocks whose last loss is so many tolerances off."""
    return [(*LOSSES[:2], LOSSES[2] * (1 + TOLERANCE * each)) for each in tolerances]


@pytest.mark.parametrize("weights", [("ab", "cd"), ("cd", "ab")])
def test_other_weights_are_other_work(weights):
    one, other = (
        case(name, blocks=[block(0, LOSSES, sha256)])
        for name, sha256 in zip("ab", weights, strict=True)
    )
    assert difference(one, other)
    assert difference(one.but(changes_weights=True), other) is None
    assert difference(one, other.but(changes_weights=True)) is None
    # A twin has to have the same weights all the same.
    assert difference(one.but(changes_weights=True), other.but(framework="tf"))
    assert difference(one.but(changes_weights=True), other.but(variant="a"))


@pytest.mark.parametrize("side", [1, -1])
@pytest.mark.parametrize(("off", "same"), [(0.9, True), (1.1, False)])
def test_the_first_loss_agrees_in_every_block(off, same, side):
    first = (LOSSES[0] * (1 + side * off * TOLERANCE), *LOSSES[1:])
    found = difference(case("a", LOSSES, LOSSES, first), case("b", LOSSES, LOSSES, LOSSES))
    assert (found is None) is same


@pytest.mark.parametrize(
    ("off", "same"),
    [
        ((0.9, 0.9, 0.9), True),
        ((1.1, 0.9, 0.9), True),
        ((1.1, 1.1, 0.9), False),
        ((1.1, 1.1, -1.1), False),
        ((0, 0, 99.9), True),
        ((0, 0, 100.1), False),
        ((0, 100.1, 0), False),
        ((0.9, 1.1), False),  # of two the larger is the median
        ((1.1,), False),
    ],
)
def test_later_losses_agree_in_most_blocks_and_are_nowhere_far_apart(off, same):
    base = case("b", *[LOSSES] * len(off))
    assert (difference(case("a", *later(*off)), base) is None) is same


def test_a_difference_of_just_the_tolerance_is_allowed():
    exact = {"loss_tolerance": 0.5}
    base = case("b", (2.0, 2.0))
    assert difference(case("a", (3.0, 3.0), **exact), base) is None
    assert difference(case("a", (3.25, 2.0), **exact), base)
    assert difference(case("a", (2.0, 3.25), **exact), base)


def test_the_wider_tolerance_of_both_counts():
    one, other = case("a", *later(5)), case("b")
    assert difference(one, other)
    assert difference(one.but(loss_tolerance=0.01), other) is None
    assert difference(one, other.but(loss_tolerance=0.01)) is None


@pytest.mark.parametrize("changed", [(True, False), (False, True)])
def test_another_variant_may_compute_something_else_and_a_twin_may_not(changed):
    one, other = (
        case("a", losses, changes_math=each)
        for losses, each in zip(((7.0, 7.0), LOSSES), changed, strict=True)
    )
    assert difference(one, other)
    assert difference(one.but(variant="b"), other) is None
    assert difference(one.but(variant="b", framework="tf"), other) is None


@pytest.mark.parametrize("sides", [(None, 2.0), (2.0, None)])
def test_a_loss_that_is_no_number_is_other_work(sides):
    one, other = (case(name, (each,)) for name, each in zip("ab", sides, strict=True))
    assert difference(one, other)


def test_only_blocks_and_steps_that_both_have_count():
    assert difference(case("a", LOSSES, (9.0,)), case("b", LOSSES)) is None
    assert difference(case("a", LOSSES[:1]), case("b", LOSSES)) is None


def test_of_several_matches_the_first_block_of_a_number_counts():
    one = case("a", blocks=[block(0, LOSSES), block(0, [9.0], "cd")])
    assert difference(one, case("b")) is None


def test_losses_around_zero_are_compared_with_zero_itself():
    assert difference(case("a", (0.0,)), case("b", (0.0,))) is None
    assert difference(case("a", (1e-6,)), case("b", (0.0,)))


def test_a_side_is_framework_and_flavour():
    keras = case(framework="tf")
    assert keras.side == case("another", framework="tf").side
    assert keras.side != keras.but(flavour="tf_keras").side
    assert keras.side != keras.but(framework="pt").side


def test_a_loss_that_comes_to_nothing_is_held_to_the_largest():
    """Rounding is relative to what it rounds, and other work still shows."""
    one = case("a", (2.0, 1e-9, 0.0))
    assert difference(one, case("b", (2.0, 0.0, 1e-10))) is None
    assert "loss of step 3" in difference(one, case("b", (2.0, 0.0, 1e-3)))
    assert "loss of step 3" in difference(case("b", (2.0, 0.0, 1e-3)), one)
