"""Regularization with few labels: accuracy on the test split beside that on the training split."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from bench.harness.plan import TRAINED, Prepared, Technique, Variant, Work, Workload, other_math
from bench.harness.stages import Stages
from shared.specs import parameter_shapes, state_shapes

_row = partial(other_math, measured=TRAINED)
L2, DECAY, SMOOTHING, DROPOUT = 1e-3, 0.05, 0.1, 0.3

TECHNIQUE = Technique(
    family="recipes",
    name="regularization",
    effort="ordinary",
    title="Regularization",
    variants=(
        Variant("none", role="baseline", measured=TRAINED, title="none"),
        _row("l2", f"L2 in the loss, {L2:g}", "ordinary", l2=L2),
        _row("decoupled", f"decoupled decay, {DECAY:g}", "ordinary", decay=DECAY),
        _row("smoothing", f"label smoothing, {SMOOTHING:g}", smoothing=SMOOTHING),
        _row("dropout", f"dropout before the head, {DROPOUT:g}", "ordinary", dropout=DROPOUT),
        _row("without_batchnorm", "without BatchNorm", "ordinary", batch_norm=False),
        _row(
            "together",
            "decoupled decay, smoothing and dropout",
            "ordinary",
            decay=DECAY,
            smoothing=SMOOTHING,
            dropout=DROPOUT,
        ),
        _row(
            "decoupled_x2",
            f"twice the batch, decoupled decay, {DECAY:g}",
            "ordinary",
            decay=DECAY,
            times=2,
        ),
        _row(
            "decoupled_x2_scaled",
            "twice the batch and the decoupled decay",
            "ordinary",
            decay=DECAY,
            times=2,
            scaled=True,
        ),
    ),
    workloads=(Workload("digits-few", "compute", accuracy=True, timed=False),),
    notes=(
        "All rows train with AdamW at a rate of 0.001, the first without any decay. L2 in the "
        "loss and decoupled decay apply only to kernels, each with a usual strength: under Adam "
        "they do not mean the same.",
        "There are 600 images, each seen 40 times. Accuracy on the training split is shown, too.",
        "Rows of twice the batch take half the steps at the same rate. In the scaled row, decay "
        "takes the same share of the weights per epoch as at the task's batch.",
        "All rows but one have BatchNorm. That one starts from the same kernels, and has biases "
        "instead.",
    ),
)


def prepare(impl, work: Work) -> Prepared:
    """AdamW's step with what the settings ask for."""
    asked, technique = work.settings, impl.recipes.regularization
    model = _build(impl, work)
    if "dropout" in asked:
        model = technique.add_dropout(model, rate=asked["dropout"])
    recipe = replace(work.task.recipe, optimizer="adamw", learning_rate=1e-3, weight_decay=0.0)
    optimizer = impl.kit.training.make_optimizer(model, recipe)
    if "decay" in asked:
        if hasattr(optimizer, "from_config"):  # Keras takes a decay before it makes its variables
            optimizer = type(optimizer).from_config(optimizer.get_config())
        technique.apply_decoupled_decay(model, optimizer, weight_decay=_decay(impl, work))
    loss_fn = impl.kit.training.cross_entropy
    if "smoothing" in asked:
        loss_fn = partial(technique.smoothed_cross_entropy, smoothing=asked["smoothing"])
    if "l2" in asked:
        loss_fn = technique.make_penalized_loss(loss_fn, model, weight_decay=asked["l2"])
    step = impl.kit.training.make_train_step(model, optimizer, loss_fn)
    predict = impl.kit.training.make_predict(model)

    def train(stages: Stages) -> None:
        stages.watch(step, predict, batch_size=_batch_size(work) if "times" in asked else None)

    return Prepared(step, predict, model, optimizer, train=train)


def _batch_size(work: Work) -> int:
    """Samples of an update in training."""
    return work.settings.get("times", 1) * work.task.recipe.accuracy_batch_size


def _decay(impl, work: Work) -> float:
    """The decay asked for, or what becomes of it where it is that of the task's batch."""
    if not work.settings.get("scaled"):
        return work.settings["decay"]
    return impl.recipes.regularization.scale_decay(
        weight_decay=work.settings["decay"],
        batch_size=_batch_size(work),
        nominal_batch_size=work.task.recipe.accuracy_batch_size,
    )


def _build(impl, work: Work):
    """The task's model, or the same without BatchNorm: equal kernels, and biases of zero."""
    spec, weights = work.task.model, work.weights
    if not work.settings.get("batch_norm", True):
        spec = replace(spec, batch_norm=False)
        zeros = {n: np.zeros(shape, np.float32) for n, shape in parameter_shapes(spec).items()}
        weights = {name: weights.get(name, zero) for name, zero in zeros.items()}
    return impl.kit.models.build(spec, weights)


def took_effect(impl, work: Work, prepared: Prepared, batch) -> tuple[dict, str | None]:
    """Two steps lead to other weights than without, or the model keeps no statistics."""
    if not work.settings:
        return {}, None
    if not work.settings.get("batch_norm", True):
        names = impl.kit.models.export_weights(prepared.model)
        kept = [name for name in names if name in state_shapes(work.task.model)]
        return {"tensors": len(names)}, f"it keeps {', '.join(kept)}" if kept else None
    plain = prepare(impl, replace(work, settings={}))
    for _ in range(2):
        prepared.step(*batch)
        plain.step(*batch)
    ours, theirs = (impl.kit.models.export_weights(p.model) for p in (prepared, plain))
    apart = max(float(np.abs(ours[name] - value).max()) for name, value in theirs.items())
    return {"largest_difference": apart}, None if apart else "the weights are those without it"
