"""What the rows of the family share: two domains, plain training on either, and what is seen of it.

y of a step is (labels of the source, images of the target, labels of the target); only the bound
looks at the last.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from bench.harness.accuracy import even_batch
from bench.harness.helpers import plain
from bench.harness.plan import WARM, Prepared, Work, Workload, other_math, warm
from bench.harness.stages import Stages
from bench.harness.watching import Watch
from shared import datasets
from shared.specs import ModelSpec, layers, parameter_shapes, train_step_flops

row = partial(other_math, measured=WARM)
ROUNDING = 1e-5  # share of two steps' way that no rounding leads apart
SOURCE_ONLY = warm("source_only", "source alone", role="baseline", program="plain")
TARGET_LABELS = row(
    "target_labels",
    "labels of the target (the bound)",
    role="bound",
    program="target",
    labels="target",
)
WORKLOADS = (
    Workload("digits-to-photos", "compute", accuracy=True, timed=False),
    Workload("digits-to-photos", "small", effort="ordinary"),
)
NOTES = (
    "From 2,560 digits on black with labels to the same digits over photos without, blended as "
    "MNIST-M is. Accuracy is on digits over photos: no original digit and no pixel of a photo of "
    "the test split was trained on. Network, rate and steps were chosen before any row was "
    "trained.",
    "labels of the target is the same network trained on these labels: the upper bound. It does "
    "not adapt, so it is never advised.",
    "step cpu time is of one thread, over all steps of a training. step flops are counted from the "
    "layers, relative to training on the source only. source accuracy is on other digits on black.",
)


def prepare_plain(impl, work: Work) -> Prepared:
    """The plain step on one domain: the source, or the target with its labels."""
    alone = plain(impl, work)
    usual = alone.step
    domain, step = "source", lambda x, y: usual(x, y[0])
    if work.settings:
        domain, step = "target", lambda x, y: usual(y[1], y[2])
    row = finish(impl, work, step, alone.model, alone.optimizer, work_ratio=1.0)

    def train(stages: Stages) -> None:
        stages.train_once(f"alone on {domain}", alone.model, lambda: row.train(stages))

    return replace(row, train=train)


def finish(impl, work: Work, step: Callable, model, optimizer, *, work_ratio: float) -> Prepared:
    """A row whose training is watched. work_ratio: FLOPs of a step over those of the plain one."""
    predict = impl.kit.training.make_predict(model)

    def targets(x, y):
        target_x, target_y = impl.kit.data.to_device(*datasets.load(Path(work.data), "target"))
        return y, target_x[: len(y)], target_y[: len(y)]

    def train(stages: Stages) -> None:
        seen = Watch(step, lambda: 0.0, target=math.inf, rising=True)  # evaluated at the end alone
        stages.fit(seen)
        x, y = stages.split("source_test")
        source = impl.kit.training.evaluate(
            predict, x, y, metric=work.task.metric, batch_size=even_batch(len(x))
        )
        stages.metrics |= {
            "loss_fluctuation": seen.metrics()["loss_fluctuation"],
            "step_cpu_time": {"value": seen.seconds / len(seen.losses), "unit": "s"},
            "step_flops": {"value": work_ratio, "unit": ""},
            "source_accuracy": {"value": source, "unit": "%"},
        }

    return Prepared(step, predict, model, optimizer, targets=targets, train=train)


def steps_in_all(work: Work) -> int:
    """The steps of a training."""
    recipe = work.task.recipe
    return recipe.epochs * (work.task.dataset.train_size // recipe.accuracy_batch_size)


def features_width(spec: ModelSpec) -> int:
    """What the head is given of a sample."""
    return parameter_shapes(spec)["head.kernel"][0]


def step_flops(spec: ModelSpec, batch_size: int, *, extra_macs: int) -> float:
    """FLOPs of a step on both domains over those of the plain one on the source.

    The features see both, the head the source alone. extra_macs: multiply-adds of a forward pass
    in what is added; both gradients cost as much again.
    """
    head = next(layer for layer in layers(spec) if layer.name == "head")
    both = train_step_flops(spec, 2 * batch_size) - 3 * 2 * batch_size * head.macs
    return (both + 3 * 2 * extra_macs) / train_step_flops(spec, batch_size)


def took_effect(
    impl, work: Work, prepare: Callable, batch, setting: str
) -> tuple[dict, str | None]:
    """Two steps lead elsewhere than with a `setting` of 0, or than on the source alone.

    By how much is a share of how far these lead from the beginning.
    """
    if not work.settings:
        return {}, None
    without = work.settings | {setting: 0.0} if setting in work.settings else {}
    weights = []
    for settings in (work.settings, without):
        prepared = prepare(impl, replace(work, settings=settings))
        for _ in range(2):
            prepared.step(*batch)
        weights.append(impl.kit.models.export_weights(prepared.model))
    ours, theirs = weights
    names = parameter_shapes(work.task.model)
    way = math.sqrt(sum(np.square(theirs[n] - work.weights[n]).sum() for n in names))
    apart = math.sqrt(sum(np.square(ours[n] - theirs[n]).sum() for n in names)) / way
    reason = None if apart > ROUNDING else "two steps lead where they lead without it"
    return {"moved_apart": apart}, reason
