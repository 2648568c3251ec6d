"""The zoo is wide enough, and a sample of its cells does what it should.

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
def test_a_live_sample_works_or_is_refused_with_its_reason(framework):
    said = []
    for technique, model, cell in matrix.run(SAMPLE[framework], framework, lambda *_: None):
        said.append((technique, model, cell["status"], cell.get("reason")))
        assert cell["status"] in (WORKS, REFUSED), said
        assert cell["status"] == WORKS or len(cell["reason"]) > 20, said
