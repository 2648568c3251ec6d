"""The guard against values that are not finite: what a step pays for it."""

from __future__ import annotations

import math

import numpy as np

from bench.harness.helpers import plain
from bench.harness.plan import TRAIN_STEP, Prepared, Technique, UserModel, Variant, Work, Workload
from shared.specs import parameter_shapes

TECHNIQUE = Technique(
    family="train_step",
    name="finite_guard",
    effort="ordinary",
    title="Guard against NaN and infinity",
    user_model=UserModel(TRAIN_STEP, ("plain", "guard")),
    variants=(
        Variant("plain", role="baseline", title="no guard", program="plain"),
        Variant("guard", title="guard against NaN and infinity"),
    ),
    workloads=(
        Workload("digits-cnn", "compute"),
        Workload("digits-cnn", "small", effort="full"),
        # Ten million parameters: the price is per parameter.
        Workload("text-gpt-10m", "compute", effort="ordinary"),
    ),
    differs_by_design=(
        "PyTorch reads its flag before the update. In TensorFlow the graph decides, and Python "
        "reads the flag after it.",
    ),
)


def prepare(impl, work: Work) -> Prepared:
    """The baseline step, or the guarded one."""
    return plain(impl, work, make=_maker(impl, work))


def _maker(impl, work: Work):
    return (impl.train_step.finite_guard if _guards(work) else impl.kit.training).make_train_step


def _guards(work: Work) -> bool:
    return work.variant == "guard"


def took_effect(impl, work: Work, prepared: Prepared, batch) -> tuple[dict, str | None]:
    """The guard lets an ordinary step through and stops a poisoned one before it moves a weight."""
    said, moved = _stepped(impl, work, batch, poison=False)
    if said or not moved:
        return {"guard": said}, f"the guard stopped an ordinary step: {said}"
    if not _guards(work):
        return {}, None
    said, moved = _stepped(impl, work, batch, poison=True)
    evidence = {"guard": said, "moved_when_stopped": moved}
    return evidence, "the guard let a poisoned batch through" if not said or moved else None


def _stepped(impl, work: Work, batch, *, poison: bool) -> tuple[str, bool]:
    """What the guard said in one step of a fresh model, and whether a weight moved.

    A poisoned batch of images is NaN; codes cannot be, so there the loss is.
    """
    x, y = batch
    images = work.task.dataset.kind == "digits"

    def loss_fn(logits, labels):
        loss = impl.kit.training.cross_entropy(logits, labels)
        return loss * math.nan if poison and not images else loss

    model = impl.kit.models.build(work.task.model, work.weights)
    optimizer = impl.kit.training.make_optimizer(model, work.task.recipe)
    step, said = _maker(impl, work)(model, optimizer, loss_fn), ""
    try:
        step(x * math.nan if poison and images else x, y)
    except FloatingPointError as error:
        said = str(error)
    after, names = impl.kit.models.export_weights(model), parameter_shapes(work.task.model)
    return said, not all(np.array_equal(work.weights[name], after[name]) for name in names)
