"""Gradient accumulation: what it costs at one batch size, and what memory it saves there."""

from __future__ import annotations

from functools import partial
from math import ceil, log

from bench.harness.helpers import plain
from bench.harness.plan import (
    TRAIN_STEP,
    Prepared,
    Technique,
    UserModel,
    Variant,
    Work,
    Workload,
    other_math,
)
from shared.user_model import first

FAR = 1e6  # a running mean that no data has
ALLOWED = 1e-5  # relative, between a batch's loss and the mean of those of its micro-batches

TECHNIQUE = Technique(
    family="train_step",
    name="gradient_accumulation",
    title="Gradient accumulation",
    remedies=("memory size",),
    user_model=UserModel(TRAIN_STEP, ("one_batch", "micro_4"), learns=True),
    variants=(
        Variant("one_batch", role="baseline", title="one batch", program="plain"),
        other_math("micro_4", "4 micro-batches", micro_batches=4),
        other_math("micro_16", "16 micro-batches", "ordinary", micro_batches=16),
        Variant("neutral", {"micro_batches": 1}, effort="full", title="accumulation of one batch"),
    ),
    workloads=(
        Workload("text-gpt-10m", "compute"),
        Workload("digits-cnn", "compute", effort="ordinary"),
        # Activations outweigh all else here: for the memory.
        Workload("text-gpt-deep", "compute", effort="ordinary", timed=False),
        Workload("digits-resnet20", "compute", effort="full", accuracy=True),
    ),
    differs_by_design=(
        "PyTorch adds up in the parameters' .grad; TensorFlow carries a copy of all gradients "
        "through a loop in the graph.",
        "BatchNorm normalises each part separately, so these rows compute something else than "
        "one large batch; the frameworks compute the same.",
        "Running statistics are updated once per part (accumulated_statistics: once per step); "
        "PyTorch's variance is unbiased, Keras 3's is not.",
    ),
    notes=(
        "Every row makes one update from the same batch. Accumulation is for memory: see the "
        "peaks.",
        "neutral is the cost if there is nothing to do: it runs the plain step's operators.",
    ),
)


def prepare(impl, work: Work) -> Prepared:
    """The baseline step, or the technique's with its settings."""
    parts = work.settings.get("micro_batches", 1)
    if work.batch_size < parts:
        raise NotImplementedError(f"a batch of {work.batch_size} can't be cut into {parts} parts")
    apart = getattr(impl, "parts_apart", 0.0)  # of a user's loss
    if parts > 1 and apart > ALLOWED:
        raise NotImplementedError(
            "loss_fn is not a mean over samples, so micro-batches change the loss, by "
            f"{apart:.1e} (allowed: {ALLOWED:.0e}). If it is a mean over tokens, weight each "
            "micro-batch by its tokens, see docs/your_model.md"
        )
    return plain(impl, work, make=partial(_make_step, impl, work))


def _make_step(impl, work, model, optimizer, loss_fn):
    technique = impl.train_step.gradient_accumulation if work.settings else impl.kit.training
    return technique.make_train_step(model, optimizer, loss_fn, **work.settings)


def took_effect(impl, work: Work, prepared: Prepared, batch) -> tuple[dict, str | None]:
    """The loss saw parts, and running statistics were updated in each."""
    return look_at_a_step(impl, work, batch, _make_step, work.settings.get("micro_batches", 1))


def look_at_a_step(impl, work, batch, make_step, wanted: int) -> tuple[dict, str | None]:
    """The samples that the loss saw at a time, and the updates of statistics: `wanted` a step.

    A step on a fresh model whose running means are far off: each update leaves 1 - momentum of
    that, so what is left counts the updates. TensorFlow traces a part once, for all of them.
    """
    seen = []

    def loss_fn(logits, labels):
        seen.append(first(labels).shape[0])
        return impl.kit.training.cross_entropy(logits, labels)

    means = [name for name in work.weights if name.endswith(".bn.mean")]
    weights = work.weights | {name: work.weights[name] + FAR for name in means}
    model = impl.kit.models.build(work.task.model, weights)
    optimizer = impl.kit.training.make_optimizer(model, work.task.recipe)
    make_step(impl, work, model, optimizer, loss_fn)(*batch)
    left = impl.kit.models.export_weights(model)
    updates = sorted(
        {round(log(left[n].mean() / FAR) / log(1 - work.task.model.bn_momentum)) for n in means}
    )

    parts = work.settings.get("micro_batches", 1)
    sizes = {work.batch_size // parts, ceil(work.batch_size / parts)}  # which differ by one
    reason = None
    if set(seen) != sizes:
        reason = f"the loss saw {seen} samples at a time, not {sorted(sizes)}"
    elif means and updates != [wanted]:
        reason = f"running statistics were updated {updates} times"
    return {"samples_at_a_time": seen, "updates_of_statistics": updates}, reason
