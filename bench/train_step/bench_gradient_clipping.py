"""Gradient clipping: what a step pays for it."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

from bench.harness.helpers import gradient, norm, plain
from bench.harness.plan import (
    TRAIN_STEP,
    Prepared,
    Technique,
    UserModel,
    Variant,
    Work,
    Workload,
    other_math,
    row,
)
from shared.specs import parameter_shapes

# Below the norm of the gradients that any task starts with, so that clipping binds. Not far below:
# for AdamW small gradients bring out epsilon, which Keras has in another place.
BOUND = 0.5

TECHNIQUE = Technique(
    family="train_step",
    name="gradient_clipping",
    title="Gradient clipping",
    user_model=UserModel(TRAIN_STEP, ("plain", "clip"), learns=True),
    variants=(
        Variant("plain", role="baseline", title="no clipping", program="plain"),
        other_math("clip", "clip by the norm of all gradients", max_norm=BOUND),
        other_math(
            "clip_per_variable", "clip each variable by its norm", "ordinary", max_norm=BOUND
        ),
        row("neutral", "clipping with nothing to clip", "full", measure_norm=False),
    ),
    workloads=(
        # Ten million parameters: the price is per parameter.
        Workload("text-gpt-10m", "compute"),
        Workload("digits-cnn", "compute", effort="ordinary"),
        Workload("digits-cnn", "small", effort="full"),
    ),
    differs_by_design=("PyTorch divides by norm + 1e-6, TensorFlow by norm.",),
    notes=(
        f"max_norm is {BOUND}, half of the norm at which digits-cnn starts. A step costs the same "
        "whether it clips or not. Rows without clipping have no max_norm.",
        "neutral is the cost if there is nothing to do: it runs the plain step's operators.",
    ),
)


def prepare(impl, work: Work) -> Prepared:
    """The baseline step, or the technique's with its settings."""
    return plain(impl, work, make=partial(_make_step, impl, work))


def _make_step(impl, work, model, optimizer, loss_fn):
    if not work.settings:
        return impl.kit.training.make_train_step(model, optimizer, loss_fn)
    if work.variant == "clip_per_variable":
        return impl.train_step.gradient_clipping.make_per_variable_step(
            model, optimizer, loss_fn, **work.settings
        )
    settings = {"max_norm": math.inf} | work.settings
    return impl.train_step.gradient_clipping.make_train_step(model, optimizer, loss_fn, **settings)


def took_effect(impl, work: Work, prepared: Prepared, batch) -> tuple[dict, str | None]:
    """The update has the norm that it should have.

    One step of plain descent with learning rate 1 moves the weights by what it is given.
    """
    before = _moved(impl, replace(work, variant="plain", settings={}), batch)
    after = _moved(impl, work, batch)
    evidence = {"norm_of_gradients": before, "norm_of_update": after}
    most = work.settings.get("max_norm", math.inf)
    if work.variant == "clip_per_variable":
        tensors = len(parameter_shapes(work.task.model))
        if not after < min(before, 1.001 * most * math.sqrt(tensors)):
            return evidence, f"{tensors} tensors of a norm up to {most} have one of {after}"
    elif not math.isclose(after, min(before, most), rel_tol=1e-3):
        return evidence, f"the update has a norm of {after}, not {min(before, most)}"
    return evidence, None


def _moved(impl, work, batch) -> float:
    """The norm of what the weights of a fresh model moved in one step."""
    impl.kit.runtime.set_seed(0)  # else each model drops other activations
    return norm(gradient(prepare, impl, work, batch))
