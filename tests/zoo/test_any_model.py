"""The zoo is wide enough, its record is whole and good, and a sample of its cells live.

`python -m tests.zoo` applies every technique to every model, which takes much longer.
"""

from __future__ import annotations

import pytest

from tests.zoo import matrix
from tests.zoo.cells import REFUSED, TECHNIQUES, WORKS
from tests.zoo.foreign import TRAITS

FRAMEWORKS = tuple(matrix.FRAMEWORKS)
# Those that a framework cannot have: Keras's layer, regularisers inside a model, output objects.
ONE_SIDED = {
    "pt": {"l2", "subclassed"},
    "tf": {"encoder", "dataclass outputs", "top-level list"},
}
# A few seconds each: a plain one, tied weights, names, refusals.
SAMPLE = {
    "pt": [
        ("gradient_clipping", "two_towers"),
        ("mixed_precision", "gpt2"),
        ("optimizer_implementations", "wide_and_deep"),
        ("baseline", "two_heads"),
    ],
    "tf": [
        ("gradient_accumulation", "two_inputs"),
        ("distillation", "normalized"),
        ("gradient_clipping", "wide_and_deep"),
        ("structured_pruning", "bilstm"),
        ("baseline", "two_heads"),
        ("baseline", "two_arguments"),
    ],
}


def test_the_zoo_has_models_enough_and_all_traits():
    for framework in FRAMEWORKS:
        zoo = matrix.models(framework)
        assert len(zoo) >= 12
        traits = {trait for traits in zoo.values() for trait in traits}
        assert traits == TRAITS.keys() - ONE_SIDED[framework]


def test_every_technique_that_takes_a_model_is_applied():
    folders = {
        file.stem
        for family in ("train_step", "parallel", "compression", "deployment")
        for file in (matrix.ROOT / "pt_impl" / family).glob("[!_]*.py")
    }
    assert folders == TECHNIQUES.keys()


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
