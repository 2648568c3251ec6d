"""Techniques cost nothing where they do nothing."""

from __future__ import annotations

from functools import partial
from importlib import import_module

import numpy as np
import pytest

from tests.train_step import steps

FRAMEWORKS = ("pt", "tf")
MODELS = "any_model"
NEUTRAL = {
    "gradient_accumulation": {"micro_batches": 1},
    "gradient_clipping": {"max_norm": float("inf")},
    "mixed_precision": {"dtype": "float32"},
    "stacking": {},
}


@pytest.fixture(scope="module")
def operators(impl, kit, framework, models):
    """`operators(make, change)`: what one step runs, by name; in TensorFlow what its graph has."""
    kit_operators = import_module(f"{impl.__name__}.kit.operators")
    images, labels = np.random.default_rng(0).normal(size=(8, 8, 8, 2)), np.arange(8) % 10
    batch = kit.data.to_device(images.astype(np.float32), labels)

    def operators(make, change=lambda model: model):
        model = change(steps.prepare(kit, steps.CNN).model)
        optimizer = kit.training.make_optimizer(model, steps.RECIPE)
        step = make(model, optimizer, kit.training.cross_entropy)
        if framework == "pt":
            return kit_operators.update_operators(lambda: step(*batch))
        return kit_operators.executed_graphs(step, *batch)["outside"]

    return operators


@pytest.fixture(scope="module")
def plain(models, operators):
    return operators(models.plain)


@pytest.mark.parametrize("name", NEUTRAL)
def test_a_neutral_step_runs_the_operators_of_a_plain_one_and_no_others(
    impl, operators, plain, name
):
    make = import_module(f"{impl.__name__}.train_step.{name}").make_train_step
    assert operators(partial(make, **NEUTRAL[name])) == plain


def test_so_does_a_model_in_the_usual_format_without_recomputed_blocks(
    impl, framework, models, operators, plain
):
    usual = {"pt": ("eager", "channels_first"), "tf": ("graph", "channels_last")}[framework]
    train_step = f"{impl.__name__}.train_step"
    format_of = import_module(f"{train_step}.memory_format").apply_memory_format
    recompute = import_module(f"{train_step}.activation_checkpointing").apply_checkpointing
    compilation = import_module(f"{train_step}.compilation")
    assert operators(getattr(compilation, f"{usual[0]}_train_step")) == plain
    assert operators(models.plain, partial(format_of, memory_format=usual[1])) == plain
    assert operators(models.plain, partial(recompute, blocks="")) == plain


def test_what_is_added_would_be_seen(impl, operators, plain):
    clipping = import_module(f"{impl.__name__}.train_step.gradient_clipping")
    assert sum(operators(clipping.make_train_step).values()) > sum(plain.values())
