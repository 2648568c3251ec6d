"""A planted cause is named, in both frameworks, and none for a step beside itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.why.causes import causes, sentence
from bench.why.difference import Difference, compare
from bench.why.measuring import Program, alternately
from shared import step_events as kinds

FRAMEWORKS = ("pt", "tf")
ROUND_S, ROUNDS = 0.03, 3

PLANTED = {
    "sleeping": kinds.WAITING,
    "busy_python": kinds.DISPATCH,
    "larger_products": kinds.PRODUCTS,
    "casts": kinds.COPIES,
    "norms": kinds.NORMALISATION,
    "activations": kinds.ELEMENTWISE,
    "optimizer_that_loops": kinds.OPTIMIZER,
    "waits_for_input": kinds.INPUT,
    "layout": kinds.COPIES,
    "compiles_by_shape": kinds.RECOMPILATION,
    "unfused_attention": kinds.ATTENTION,
    "python_in_the_graph": kinds.PYTHON,
}
ONLY = {"python_in_the_graph": "tf"}


def decided(difference: Difference) -> Difference:
    """The difference as on a quiet machine, where rounds agree."""
    return replace(difference, interval=(difference.seconds, difference.seconds))


def program(impl, name: str, built: tuple) -> Program:
    step, batches, model = built
    return Program(name, impl, step, batches, model, round_s=ROUND_S)


@pytest.mark.campaign  # it times steps of milliseconds: tests/why/test_causes.py has planted times
@pytest.mark.parametrize(
    "plant",
    [
        pytest.param(name, marks=pytest.mark.only(ONLY.get(name, "pt"), ONLY.get(name, "tf")))
        for name in PLANTED
    ],
)
def test_a_planted_cause_is_named(impl, models, plant):
    pair = [program(impl, plant, getattr(models, plant)()), program(impl, "plain", models.plain())]
    difference = decided(compare(*alternately(pair, rounds=ROUNDS)))
    others = {kinds.DELAYED, kinds.WAITING} - {PLANTED[plant]}  # when other programs compute
    named = [one.kind for one in causes(difference) if one.kind not in others]
    assert difference.seconds > 0
    assert named[0] == PLANTED[plant], (sentence(difference), difference.kinds)
    assert sum(line.more for line in difference.kinds) == pytest.approx(difference.seconds)
    assert sum(line.more for line in difference.layers) == pytest.approx(difference.seconds)


@pytest.mark.campaign
def test_no_cause_is_named_of_equal_steps(impl, models):
    pair = [program(impl, name, models.plain()) for name in ("one", "another")]
    difference = compare(*alternately(pair, rounds=ROUNDS))
    assert [one for one in causes(difference) if one.kind != kinds.DELAYED] == []


def test_layers_have_the_work_of_both_passes(impl, models):
    (side,) = alternately([program(impl, "wide", models.larger_products())], rounds=2)
    seen = {(one.layer, one.phase) for one in side.pieces if one.kind == kinds.PRODUCTS}
    assert {("first", "forward"), ("first", "backward"), ("head", "forward")} <= seen
    flops = sum(one.flops for one in side.products if one.layer == "head")
    assert flops == pytest.approx(3 * 2 * 1024 * 64 * 4)
