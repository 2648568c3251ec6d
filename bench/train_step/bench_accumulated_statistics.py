"""Accumulated statistics: what one update of BatchNorm's statistics a step costs and gains."""

from __future__ import annotations

from functools import partial

from bench.harness.helpers import plain
from bench.harness.plan import Prepared, Technique, Variant, Work, Workload, other_math
from bench.train_step.bench_gradient_accumulation import look_at_a_step
from shared.specs import state_shapes

TECHNIQUE = Technique(
    family="train_step",
    name="accumulated_statistics",
    effort="ordinary",
    title="BatchNorm's statistics under gradient accumulation",
    user_model="it changes only BatchNorm's statistics: see docs/your_model.md",
    composed_of=("train_step.gradient_accumulation",),
    variants=(
        Variant("one_batch", role="baseline", title="one batch", program="plain"),
        other_math(
            "micro_4_statistics_once",
            "4 micro-batches, running statistics once",
            "ordinary",
            micro_batches=4,
        ),
        Variant("neutral", {"micro_batches": 1}, effort="full", title="one part, statistics once"),
    ),
    workloads=(
        Workload("digits-cnn", "compute"),
        Workload("digits-resnet20", "compute", effort="full", accuracy=True),
    ),
    differs_by_design=(
        "PyTorch pools statistics in a hook of each layer, TensorFlow in the graph of a part.",
        "BatchNorm normalises each part separately, so these rows compute something else than "
        "one large batch; the frameworks compute the same.",
        "PyTorch's running variance is unbiased, Keras 3's is not.",
    ),
    notes=(
        "Every row makes one update from the same batch. The row micro_4 of "
        "gradient_accumulation has 4 micro-batches that each update the statistics.",
        "neutral is the cost of pooling: it trains like the plain step.",
    ),
)


def prepare(impl, work: Work) -> Prepared:
    """The baseline step, or the technique's with its settings."""
    if not state_shapes(work.task.model):
        raise NotImplementedError(f"no layer of {work.task.name} keeps running statistics")
    return plain(impl, work, make=partial(_make_step, impl, work))


def _make_step(impl, work, model, optimizer, loss_fn):
    technique = impl.train_step.accumulated_statistics if work.settings else impl.kit.training
    return technique.make_train_step(model, optimizer, loss_fn, **work.settings)


def took_effect(impl, work: Work, prepared: Prepared, batch) -> tuple[dict, str | None]:
    """The loss saw parts, and running statistics were updated once."""
    return look_at_a_step(impl, work, batch, _make_step, 1)
