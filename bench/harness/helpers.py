"""What many bench files do alike: the framework's plain step, and the figures of a probe."""

from __future__ import annotations

from statistics import median
from typing import Any

from bench.harness.plan import Prepared, Work
from bench.harness.worker import on_cpu


def plain(impl, work: Work, model: Any = None) -> Prepared:
    """The plain step and prediction of a model: of the task's with its initial weights."""
    if model is None:
        model = impl.kit.models.build(work.task.model, work.weights)
    training = impl.kit.training
    optimizer = training.make_optimizer(model, work.task.recipe)
    step = training.make_train_step(model, optimizer, training.loss_of(work.task))
    return Prepared(step, training.make_predict(model), model, optimizer)


def not_timed(x, y) -> None:
    """The step of a row that predicts."""
    raise RuntimeError("a prediction is timed here, not a step")


def need_cpu(impl) -> None:
    """Refuse a row whose file runs on a CPU alone, where the model is on a GPU."""
    if not on_cpu(impl.kit.runtime.device()):
        raise NotImplementedError("its file is for a CPU: hide the GPU (CUDA_VISIBLE_DEVICES=)")


def figure(unit: str, samples: list) -> dict:
    """What was measured repeatedly: the median of what is known, and each of them."""
    known = [sample for sample in samples if sample is not None]
    return {"value": median(known) if known else None, "unit": unit, "samples": samples}


def once(unit: str, value: float | None) -> dict:
    """What was measured once."""
    return {"value": value, "unit": unit, "samples": None}
