"""What many bench files need: the framework's plain step, and the figures of a probe."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from statistics import median
from types import ModuleType
from typing import Any

import numpy as np

from bench.harness.plan import Prepared, Work
from bench.harness.worker import on_cpu
from shared.specs import parameter_shapes


def plain(impl, work: Work, model: Any = None, make: Callable | None = None) -> Prepared:
    """The plain step and prediction of a model, or of the task's with its initial weights.

    make: makes another step from (model, optimizer, loss).
    """
    if model is None:
        model = impl.kit.models.build(work.task.model, work.weights)
    training = impl.kit.training
    optimizer = training.make_optimizer(model, work.task.recipe)
    step = (make or training.make_train_step)(model, optimizer, training.loss_of(work.task))
    return Prepared(step, training.make_predict(model), model, optimizer)


def kit_module(impl, name: str) -> ModuleType:
    """A module of the kit that only this technique needs."""
    return import_module(f"{impl.__name__}.kit.{name}")


def not_timed(x, y) -> None:
    """The step of a row that only predicts."""
    raise RuntimeError("this row times predictions and has no train step")


def need_cpu(impl) -> None:
    """Refuse a row whose file runs on a CPU only, if the model is on a GPU."""
    if not on_cpu(impl.kit.runtime.device()):
        raise NotImplementedError("runs on a CPU only: hide the GPU with CUDA_VISIBLE_DEVICES=")


def figure(unit: str, samples: list) -> dict:
    """A figure that was measured repeatedly: the median of the known samples, and all samples."""
    known = [sample for sample in samples if sample is not None]
    return {"value": median(known) if known else None, "unit": unit, "samples": samples}


def once(unit: str, value: float | None) -> dict:
    """A figure that was measured once."""
    return {"value": value, "unit": unit, "samples": None}


def checking(work: Work, call: Callable[[], object], faults: Callable[[], dict]) -> dict:
    """Seconds of a call; for a row that checks, also what it says about planted faults."""
    passes = []
    for _ in range(work.repetitions):
        start = time.perf_counter()
        call()
        passes.append(time.perf_counter() - start)
    metrics = {"pass": figure("s", passes)}
    if work.settings:
        seen = faults()
        metrics["found"] = once("faults", sum(map(bool, seen.values())))
        metrics["evidence"] = {"faults": seen}
    return metrics


def ran_in(impl, work: Work, function, batch, wanted: str) -> tuple[dict, str | None]:
    """Whether a call's matrix products and convolutions ran in the wanted dtype."""
    dtypes = impl.kit.runtime.operator_dtypes(function, *batch)
    # Of a user's file not every product has a kernel in half precision, such as those of an LSTM.
    mixed = work.settings.get("keep_fp32") or work.task.model.from_file
    allowed = {wanted, "float32"} if mixed else {wanted}
    ran = {dtype for operators in dtypes.values() for dtype in operators}
    applied = wanted in ran and ran <= allowed
    if work.task.model.from_file and not work.settings:
        applied = True  # in whatever dtype it is
    return (
        {"operator_dtypes": dtypes},
        None if applied else f"ran in {', '.join(sorted(ran)) or 'nothing'}, not only {wanted}",
    )


def gradient(prepare: Callable, impl, work: Work, batch) -> dict[str, np.ndarray]:
    """The gradient of one step: how far plain descent at rate 1 moves a new model."""
    recipe = replace(work.task.recipe, optimizer="sgd", learning_rate=1.0, momentum=0.0)
    prepared = prepare(impl, replace(work, task=replace(work.task, recipe=recipe)))
    prepared.step(*batch)
    after = impl.kit.models.export_weights(prepared.model)
    return {n: work.weights[n] - after[n] for n in parameter_shapes(work.task.model)}


def norm(tensors: dict[str, np.ndarray]) -> float:
    """The norm of all tensors together."""
    return float(np.sqrt(sum(np.sum(np.square(value, dtype=float)) for value in tensors.values())))
