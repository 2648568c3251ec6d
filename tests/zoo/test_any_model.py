"""The zoo is wide enough, its record is whole and good, and a sample of its cells live.

`python -m tests.zoo` applies every technique to every model, which takes much longer.
"""

from __future__ import annotations

from functools import partial

import pytest

from tests import workers
from tests.zoo import matrix
from tests.zoo.cells import FAMILIES, REFUSED, TECHNIQUES, WORKS, WRONG, Cell, Coarse, Rounding
from tests.zoo.foreign import TRAITS

FRAMEWORKS = tuple(matrix.FRAMEWORKS)
# Those that a framework cannot have: Keras's layers, regularisers inside a model, output objects,
# TorchScript, inputs that change.
ONE_SIDED = {
    "pt": {"l2", "subclassed", "lookup", "activity", "conv lstm", "ctc"},
    "tf": {"encoder", "dataclass outputs", "top-level list", "len", "torchscript", "bags"}
    | {"untaken head", "inputs in place", "loss of model"},
}
# A second or two each: a plain one, and one with several outputs.
SAMPLE = {
    "pt": [("gradient_clipping", "two_towers"), ("baseline", "two_heads")],
    "tf": [("gradient_clipping", "two_inputs"), ("baseline", "two_heads")],
}


def test_the_zoo_has_models_enough_and_all_traits():
    for framework in FRAMEWORKS:
        zoo = matrix.models(framework)
        assert len(zoo) >= 12
        traits = {trait for traits in zoo.values() for trait in traits}
        assert traits == TRAITS.keys() - ONE_SIDED[framework]


# They take features and heads apart.
OF_PARTS = {"adversarial", "discrepancy"}


def test_every_technique_that_takes_a_model_is_applied():
    folders = {
        file.stem
        for family in FAMILIES
        for file in (matrix.ROOT / "pt_impl" / family).glob("[!_]*.py")
    }
    assert folders - OF_PARTS == TECHNIQUES.keys()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_record_has_every_cell(framework):
    found = matrix.read()[framework]
    recorded = {(technique, model) for technique, cells in found.items() for model in cells}
    assert recorded == {*matrix.every_cell(framework)}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_no_recorded_cell_is_wrong_or_a_traceback_and_nine_of_ten_work(framework):
    found = matrix.read()[framework]
    counted = matrix.count(found)
    assert counted.keys() <= {WORKS, REFUSED}, [
        (technique, model, cell["reason"])
        for technique, cells in found.items()
        for model, cell in cells.items()
        if cell["status"] not in (WORKS, REFUSED)
    ]
    assert matrix.share(counted) >= 0.9


def test_the_page_says_what_the_record_does():
    assert matrix.PAGE.read_text() == matrix.page(matrix.read())


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_live_sample_works_or_is_refused_with_its_reason(framework):
    said = []
    for technique, model, cell in matrix.run(SAMPLE[framework], framework, lambda *_: None):
        said.append((technique, model, cell["status"], cell.get("reason")))
        assert cell["status"] in (WORKS, REFUSED), said
        assert cell["status"] == WORKS or len(cell["reason"]) > 20, said


# Where float32 is too coarse ---------------------------------------------------------------------

COARSE = Rounding(outputs=1e-5, losses=0.08, updates=0.05)  # as of an untrained ResNet50


def attempt(exactly) -> dict:
    """A variant whose updates are 7% off in float32, on a model that amplifies rounding."""
    cell = Cell()

    def in_float32():
        cell.near("updates", [1.07], [1.0], COARSE.of_updates, Coarse)

    cell.attempt("one", in_float32, lambda: True, exactly and partial(exactly, cell))
    return cell.result()


def test_float64_decides_where_float32_cannot():
    assert COARSE.is_coarse
    assert not Rounding(outputs=1e-7, losses=1e-7, updates=1e-4).is_coarse
    good = attempt(lambda cell: cell.near("updates", [1.0 + 1e-9], [1.0], 1e-5))
    assert good["variants"]["one"] == {"status": WORKS, "in": "float64", "apart": 1e-9}
    assert attempt(lambda cell: cell.near("updates", [1.01], [1.0], 1e-5))["status"] == WRONG
    assert attempt(None)["status"] == WRONG


def test_float64_sees_what_float32_would_let_pass():
    found = workers.run("zoo.exactness_worker", ("tf",))["tf"]["tried"]
    assert found["plain"]["status"] == WORKS
    assert found["plain"]["apart"] < 1e-9
    assert found["faster"]["status"] == WRONG
    assert "updates: 0.0001 from plain code" in found["faster"]["reason"]
