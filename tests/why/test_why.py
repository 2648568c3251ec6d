"""A planted cause is named, in both frameworks, and none for a step beside itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.why import experiments
from bench.why.causes import FLUSHED, causes, sentence
from bench.why.difference import Difference, compare
from bench.why.measuring import Program
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
    "larger_convolutions": kinds.CONVOLUTIONS,
    "lookups": kinds.INDEXING,
    "sums": kinds.REDUCTIONS,
    "products_in_float64": kinds.PRODUCTS,
    "page_faults": kinds.FAULTS,
    "recurrent": kinds.RECURRENT,
    "reads_results": kinds.READING,
    "denormals": "denormals",
    "eager": kinds.DISPATCH,
}
ONLY = {"python_in_the_graph": "tf", "eager": "tf"}
ONLY |= dict.fromkeys(("page_faults", "recurrent", "reads_results", "denormals"), "pt")


def alternately(programs: list[Program], *, rounds: int):
    """Measure programs of one process in rounds that take turns."""
    for number in range(rounds):
        for program in programs[:: 1 if number % 2 else -1]:
            program.round()
    return [program.side() for program in programs]


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
    flushed = difference.a.facts.flushed
    if plant == "denormals" and flushed and flushed > FLUSHED:
        pytest.skip("this processor computes with denormal numbers as fast")
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


def test_convolutions_are_computed_by_themselves_at_the_shapes_of_the_step(impl, models):
    convolving = program(impl, "images", models.larger_convolutions())
    (side,) = alternately([convolving], rounds=2)
    (shape,) = {one.shape for one in side.products if one.kind == kinds.CONVOLUTIONS}
    assert shape[:-1] == (8, 64, 64, 16, 3, 3, 16, 32, 1, 1, 1, 1)
    assert convolving.compute(kinds.CONVOLUTIONS, shape, "float32", train=True, seconds=0.0) > 0


def test_attention_is_computed_by_itself_once_a_layer(impl, models):
    attending = program(impl, "attention", models.unfused_attention())
    (side,) = alternately([attending], rounds=2)
    ((calls, _, what),) = experiments._shapes(side, kinds.ATTENTION)
    assert (round(calls), what.shape, what.train) == (1, (1, 1024, 64), True)
    assert attending.compute(kinds.ATTENTION, what.shape, "float32", train=True, seconds=0.0) > 0
