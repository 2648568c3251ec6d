"""Averaged weights: what a training keeps, and what that is worth."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from functools import partial

import numpy as np

from bench.harness.helpers import plain
from bench.harness.plan import TRAINED, Prepared, Technique, Variant, Work, Workload, other_math
from bench.harness.stages import Stages
from shared.specs import more_is_better

_row = partial(other_math, measured=TRAINED)
MEMORY = 0.1  # of the exponential average: share of the training's steps
HELD_OUT = 100  # samples of the training split by which early stopping decides
PATIENCE = 5
GLANCED = 4  # batches of which an average has statistics where it is looked at on the way

TECHNIQUE = Technique(
    family="recipes",
    name="averaging",
    effort="ordinary",
    title="Averaged weights",
    variants=(
        Variant("last", role="baseline", measured=TRAINED, title="last weights"),
        _row("ema", "exponential average (EMA)", kept=["ema"]),
        _row("swa", "equal average of the second half (SWA)", "ordinary", kept=["swa"]),
        _row("ema_early_stopping", "EMA and early stopping", "ordinary", kept=["ema", "stop"]),
        _row("swa_early_stopping", "SWA and early stopping", "ordinary", kept=["swa", "stop"]),
    ),
    workloads=(
        Workload("digits-few", "compute", accuracy=True, timed=False),
        Workload("digits-cnn", "compute", effort="ordinary", accuracy=True, timed=False),
        Workload("digits-detection", "compute", effort="ordinary", accuracy=True, timed=False),
    ),
    composed_of=("recipes.early_stopping",),
    notes=(
        f"The exponential average remembers {MEMORY:.0%} of the steps. SWA is the mean of the "
        "weights after each epoch of the second half. Statistics of BatchNorm are computed "
        "again.",
        f"Early stopping looks at {HELD_OUT} samples that it holds out of the training split; "
        f"other rows train on them. It ends after {PATIENCE} epochs without improvement. With an "
        "average it looks at that, with statistics computed for it; SWA has none in the first "
        "half.",
        f"On the way to the target, the exponential average has statistics of {GLANCED} batches.",
    ),
)


def prepare(impl, work: Work) -> Prepared:
    """The plain step, which updates an exponential average where that is kept.

    `work.settings["kept"]`: "ema", "swa", and "stop" for early stopping, alone or with one of them.
    """
    model, optimizer, step, average = _build(impl, work)
    predict = impl.kit.training.make_predict(model)

    def train(stages: Stages) -> None:
        if work.settings:
            _train(impl, work, stages, model, step, predict, average)
        else:
            stages.watch_plain(model)

    return Prepared(step, predict, model, optimizer, train=train)


def _build(impl, work: Work) -> tuple:
    """Model, optimizer, step, and the average that is kept, or None."""
    row = plain(impl, work)
    model, step = row.model, row.step
    kept, averaging = work.settings.get("kept", []), impl.recipes.averaging
    average = averaging.make_equal_average(model) if "swa" in kept else None
    if "ema" in kept:
        steps = work.task.recipe.epochs * (work.task.dataset.train_size // _batch_size(work))
        average = averaging.make_exponential_average(model, decay=1 - 1 / (MEMORY * steps))
        step = averaging.make_averaging_step(step, model, average)
    return model, row.optimizer, step, average


def _train(impl, work: Work, stages: Stages, model, step, predict, average) -> None:
    """Train epoch by epoch; after each, averages and early stopping look at what may be kept."""
    averaging, kit, kept = impl.recipes.averaging, impl.kit, work.settings["kept"]
    x, y = stages.split("train")
    if kept == ["ema"]:  # there is one from the first step on, which can be watched
        _watch(averaging, work, stages, model, step, predict, average, x)
        return
    held_x, held_y = x[:HELD_OUT], y[:HELD_OUT]
    if "stop" in kept:
        x, y = x[HELD_OUT:], y[HELD_OUT:]
    rising = more_is_better(work.task.metric)
    stopping = impl.recipes.early_stopping.EarlyStopping(
        model, patience=PATIENCE, higher_is_better=rising
    )
    size, epochs = _batch_size(work), work.task.recipe.epochs
    batches = _batches(x, size)
    first = epochs // 2 if "swa" in kept else 0  # from when there is something to keep
    for epoch in range(epochs):
        seed = stages.seed * epochs + epoch  # another order in each epoch
        kit.training.fit(step, x, y, batch_size=size, epochs=1, seed=seed)
        stages.epochs += 1
        if epoch < first:
            continue
        if "swa" in kept:
            average.update_parameters(model)
        if "stop" in kept:
            with averaging.averaged(model, average) if average else nullcontext():
                if average:
                    averaging.update_statistics(model, batches)
                value = kit.training.evaluate_task(
                    predict, held_x, held_y, work.task, batch_size=HELD_OUT
                )
                if stopping.step(value):
                    break
    stages.metrics["epochs"] = {"value": epoch + 1, "unit": "epochs"}
    if "stop" in kept:
        stopping.restore()
    else:
        averaging.apply_average(model, average)
        averaging.update_statistics(model, batches)


def _watch(averaging, work: Work, stages: Stages, model, step, predict, average, x) -> None:
    """Train, and see when the average, with statistics of its own, reaches the target."""
    batches = _batches(x, _batch_size(work))

    @contextmanager
    def averaged():
        with averaging.averaged(model, average):
            averaging.update_statistics(model, batches[:GLANCED])
            yield

    stages.watch(step, predict, evaluating=averaged)
    averaging.apply_average(model, average)
    averaging.update_statistics(model, batches)


def _batches(x, size: int) -> list:
    return [x[start : start + size] for start in range(0, len(x), size)]


def _batch_size(work: Work) -> int:
    return work.task.recipe.accuracy_batch_size


def took_effect(impl, work: Work, prepared: Prepared, batch) -> tuple[dict, str | None]:
    """After two steps, what is kept is not the last weights."""
    averaging, kept = impl.recipes.averaging, work.settings.get("kept", [])
    if not kept:
        return {}, None
    model, _, step, average = _build(impl, work)
    stopping = impl.recipes.early_stopping.EarlyStopping(model)
    for value in (1.0, 2.0):  # a loss, so that the first one is the best
        step(*batch)
        stopping.step(value)
        if "swa" in kept:
            average.update_parameters(model)
    last = impl.kit.models.export_weights(model)
    if "stop" in kept:
        stopping.restore()
    else:
        averaging.apply_average(model, average)
    found = impl.kit.models.export_weights(model)
    apart = max(float(np.abs(found[name] - value).max()) for name, value in last.items())
    return {"largest_difference": apart}, None if apart else "the last weights were kept"
