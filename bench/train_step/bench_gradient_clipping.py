"""Gradient clipping and the guard against values that are not finite: what a step pays for them."""

from __future__ import annotations

import math
from dataclasses import replace

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
    title="Gradient clipping and the non-finite guard",
    user_model=UserModel(TRAIN_STEP, ("plain", "clip", "guard"), learns=True),
    variants=(
        Variant("plain", role="baseline", title="no clipping", program="plain"),
        other_math("clip", "clip by the norm of all gradients", max_norm=BOUND),
        Variant("guard", {"check_finite": True}, title="guard against NaN and infinity"),
        other_math(
            "clip_and_guard", "clip and guard", "ordinary", max_norm=BOUND, check_finite=True
        ),
        other_math(
            "clip_per_variable", "clip each variable by its norm", "ordinary", max_norm=BOUND
        ),
        row("neutral", "clipping with nothing to clip", "full", check_finite=False),
    ),
    workloads=(
        Workload("digits-cnn", "compute"),
        Workload("digits-cnn", "small", effort="full"),
        # Ten million parameters: the price is per parameter.
        Workload("text-gpt-10m", "compute", effort="ordinary"),
    ),
    differs_by_design=(
        "PyTorch divides by norm + 1e-6, TensorFlow by norm.",
        "The guard: PyTorch reads its flag before the update; in TensorFlow the graph decides, and "
        "Python reads the flag after it.",
    ),
    notes=(
        f"max_norm is {BOUND}, half of what digits-cnn starts with; a step costs the same whether "
        "it binds or not. Rows without clipping have none.",
        "neutral is the price where there is nothing to do: it runs the plain step's operators.",
    ),
)


def prepare(impl, work: Work) -> Prepared:
    """The baseline step, or the technique's with its settings."""
    model = impl.kit.models.build(work.task.model, work.weights)
    optimizer = impl.kit.training.make_optimizer(model, work.task.recipe)
    step = _make_step(impl, work, model, optimizer, impl.kit.training.cross_entropy)
    return Prepared(step, impl.kit.training.make_predict(model), model, optimizer)


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
    """The update has the norm that it should have, and the guard stops a poisoned batch.

    One step of plain descent with learning rate 1 moves the weights by what it is given.
    """
    _, before = _moved(impl, replace(work, variant="plain", settings={}), batch)
    stopped, after = _moved(impl, work, batch)
    evidence = {"norm_of_gradients": before, "norm_of_update": after}
    if stopped:
        return evidence, f"the guard stopped an ordinary step: {stopped}"
    most = work.settings.get("max_norm", math.inf)
    if work.variant == "clip_per_variable":
        tensors = len(parameter_shapes(work.task.model))
        if not after < min(before, 1.001 * most * math.sqrt(tensors)):
            return evidence, f"{tensors} tensors of a norm up to {most} have one of {after}"
    elif not math.isclose(after, min(before, most), rel_tol=1e-3):
        return evidence, f"the update has a norm of {after}, not {min(before, most)}"
    if work.settings.get("check_finite"):
        said, moved = _moved(impl, work, batch, poison=True)
        evidence |= {"guard": said, "norm_of_update_when_stopped": moved}
        if not said or moved:
            return evidence, "the guard let a poisoned batch through"
    return evidence, None


def _moved(impl, work, batch, poison: bool = False) -> tuple[str, float]:
    """What the guard said in one step of a fresh model, and the norm of what the weights moved.

    A poisoned batch of images is NaN; codes cannot be, so there the loss is.
    """
    x, y = batch
    images = work.task.dataset.kind == "digits"

    def loss_fn(logits, labels):
        loss = impl.kit.training.cross_entropy(logits, labels)
        return loss * math.nan if poison and not images else loss

    impl.kit.runtime.set_seed(0)  # else each model drops other activations
    model = impl.kit.models.build(work.task.model, work.weights)
    recipe = replace(work.task.recipe, optimizer="sgd", learning_rate=1.0, momentum=0.0)
    optimizer = impl.kit.training.make_optimizer(model, recipe)
    step = _make_step(impl, work, model, optimizer, loss_fn)
    said = ""
    try:
        step(x * math.nan if poison and images else x, y)
    except FloatingPointError as error:
        said = str(error)
    after = impl.kit.models.export_weights(model)
    names = parameter_shapes(work.task.model)
    return said, math.sqrt(sum(((work.weights[n] - after[n]) ** 2).sum() for n in names))
