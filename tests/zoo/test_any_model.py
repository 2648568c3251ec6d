"""Every technique on every model of the zoo: the record, its page, and a live sample of it."""

from __future__ import annotations

import pytest

from tests.zoo import matrix
from tests.zoo.cells import REFUSED, TECHNIQUES, TRACEBACK, WORKS, WRONG
from tests.zoo.foreign import TRAITS

FRAMEWORKS = tuple(matrix.FRAMEWORKS)
# Those that a framework cannot have: Keras's layer, regularisers inside a model, output objects.
ONE_SIDED = {
    "pt": {"l2", "subclassed"},
    "tf": {"encoder", "dataclass outputs", "top-level list"},
}
# A few seconds each: a plain one, tied weights, names, a refusal.
SAMPLE = {
    "pt": [
        ("gradient_clipping", "two_towers"),
        ("mixed_precision", "gpt2"),
        ("optimizer_implementations", "wide_and_deep"),
        ("memory_format", "bilstm"),
    ],
    "tf": [
        ("gradient_accumulation", "two_inputs"),
        ("distillation", "normalized"),
        ("sparse_inference", "wide_and_deep"),
        ("structured_pruning", "bilstm"),
    ],
}


@pytest.fixture(scope="module")
def record():
    assert matrix.RECORD.exists(), "python -m tests.zoo makes the record"
    return matrix.read()


def test_the_zoo_has_models_enough_and_all_traits():
    for framework in FRAMEWORKS:
        zoo = matrix.models(framework)
        assert len(zoo) >= 12
        traits = {trait for traits in zoo.values() for trait in traits}
        assert traits == TRAITS.keys() - ONE_SIDED[framework]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_record_has_every_cell(record, framework):
    cells = record[framework]
    found = [(technique, model) for technique in cells for model in cells[technique]]
    assert sorted(found) == sorted(matrix.every_cell(framework))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_no_cell_is_wrong_or_a_traceback(record, framework):
    bad = {
        (technique, model): cell["reason"]
        for technique, found in record[framework].items()
        for model, cell in found.items()
        if cell["status"] in (WRONG, TRACEBACK)
    }
    assert not bad


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_nine_of_ten_cells_work(record, framework):
    assert matrix.share(matrix.count(record[framework])) >= 0.9


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_refusal_says_why(record, framework):
    for technique, found in record[framework].items():
        for model, cell in found.items():
            if cell["status"] == REFUSED:
                assert len(cell["reason"]) > 20, (technique, model)
                assert "\n" not in cell["reason"], (technique, model)


def test_the_page_is_made_from_the_record(record):
    assert matrix.PAGE.read_text() == matrix.page(record)


def test_every_technique_that_takes_a_model_is_applied():
    folders = {
        file.stem
        for family in ("train_step", "parallel", "compression", "deployment")
        for file in (matrix.ROOT / "pt_impl" / family).glob("[!_]*.py")
    }
    assert folders == TECHNIQUES.keys()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_live_sample_is_what_the_record_says(record, framework):
    said = []
    for technique, model, cell in matrix.run(SAMPLE[framework], framework, lambda *_: None):
        recorded = record[framework][technique][model]
        said.append((technique, model, cell["status"], cell.get("reason")))
        assert cell["status"] == recorded["status"], said
        assert cell["status"] in (WORKS, REFUSED), said
        assert cell.get("reason") == recorded.get("reason"), said
