"""The largest batch of the digits CNN within one memory budget, plain and with what saves memory.

The finder tries each size in a separate process, which imports the trial from here: one function
a side and variant, `pt_fp32` to `tf_accumulated`.
"""

from __future__ import annotations

import importlib
import os
from functools import partial
from pathlib import Path

import numpy as np

from bench.harness import machine
from bench.harness.helpers import once
from bench.harness.plan import TRAIN_STEP, Technique, UserModel, Work, Workload, warm
from bench.harness.user_model import KIT, Side
from shared.specs import TASKS

BUDGET = 512 * 2**20  # where --memory-budget sets none
MAXIMUM = 65_536
# Of a user's file: the share of the free memory that is the budget, the folder of the file for
# trials, and seconds a step at most, so that large batches of a slow model end in time.
FREE, OWN_FILE, STEP_S = 0.7, "TWINBENCH_OWN_FILE", 2.0
MICRO_BATCHES = 4
TASK = "digits-cnn"

TECHNIQUE = Technique(
    family="train_step",
    name="batch_size_finder",
    effort="ordinary",
    title="Largest batch within a memory budget",
    user_model=UserModel(TRAIN_STEP, ("fp32",), timed=False),
    variants=(
        warm("fp32", "float32", role="baseline"),
        warm("bf16", "bfloat16", "ordinary"),
        warm("checkpointed", "activation checkpointing", "ordinary"),
        warm("accumulated", f"{MICRO_BATCHES} micro-batches", "ordinary"),
    ),
    workloads=(Workload(TASK, "compute", timed=False),),
    differs_by_design=(
        "The peak is of resident memory above the imports: TensorFlow's includes the traced "
        "graph, which does not depend on the batch.",
    ),
    notes=(
        "The budget is --memory-budget, or 512 MiB. The size that was found was tried and fits. "
        "5% more was tried and does not fit, or does not by a line through two measured sizes.",
        f"accumulated cuts its batch into {MICRO_BATCHES} micro-batches.",
    ),
    probes=True,
)


def probe(impl, work: Work, batches) -> dict[str, dict]:
    """The largest batch that fits, its peak and its rate."""
    side, name, budget, maximum = impl.__name__[:2], work.variant, BUDGET, MAXIMUM
    if isinstance(impl, Side):
        name, budget = "own", int(FREE * machine.free_memory())
        maximum = impl.most_samples(STEP_S)
        os.environ[OWN_FILE] = str(impl.folder.parent)
    fitting = impl.train_step.batch_size_finder.find_batch_size(
        f"{__name__}:{side}_{name}",
        budget_bytes=work.memory_budget or budget,
        maximum=maximum,
    )
    return {
        "largest_batch": once("samples", fitting.batch_size),
        "rate_at_largest": once("samples/s", fitting.samples_per_s),
        "peak": once("bytes", fitting.peak_bytes),
        "evidence": {
            "limit": fitting.limit,
            "budget_bytes": work.memory_budget or budget,
            "trials": [vars(trial) for trial in fitting.trials],
        },
    }


# Trials ---------------------------------------------------------------------------------------


def _own(package: str, batch_size: int):
    for module in KIT:
        importlib.import_module(f"{package}.{module}")
    side = Side(importlib.import_module(package), Path(os.environ[OWN_FILE]))
    training, task = side.kit.training, side.task
    model = side.kit.models.build(task.model, side.weights)
    optimizer = training.make_optimizer(model, task.recipe)
    step = training.make_train_step(model, optimizer, training.cross_entropy)
    batch = side.kit.data.to_device(*side.of_size(batch_size))
    return lambda: step(*batch)


def _accumulated(package: str, batch_size: int):
    parts = min(MICRO_BATCHES, batch_size)
    return _trial(package, "train_step.gradient_accumulation", batch_size, micro_batches=parts)


def _trial(package: str, technique: str, batch_size: int, *, recomputed: str = "", **settings):
    """A step on random images, made by `technique` of a side."""
    models, data, training, checkpointing, maker = (
        importlib.import_module(f"{package}.{name}")
        for name in (
            *("kit.models", "kit.data", "kit.training"),
            *("train_step.activation_checkpointing", technique),
        )
    )
    task, random = TASKS[TASK], np.random.default_rng(0)
    model = models.build(task.model)
    if recomputed:
        model = checkpointing.apply_checkpointing(model, blocks=recomputed)
    optimizer = training.make_optimizer(model, task.recipe)
    step = maker.make_train_step(model, optimizer, training.cross_entropy, **settings)
    images = random.normal(size=(batch_size, *task.model.input_shape)).astype(np.float32)
    batch = data.to_device(images, random.integers(0, 10, batch_size))
    return lambda: step(*batch)


pt_fp32 = partial(_trial, "pt_impl", "kit.training")
tf_fp32 = partial(_trial, "tf_impl", "kit.training")
pt_bf16 = partial(_trial, "pt_impl", "train_step.mixed_precision", dtype="bfloat16")
tf_bf16 = partial(_trial, "tf_impl", "train_step.mixed_precision", dtype="bfloat16")
pt_checkpointed = partial(_trial, "pt_impl", "kit.training", recomputed="conv*")
tf_checkpointed = partial(_trial, "tf_impl", "kit.training", recomputed="conv*")
pt_accumulated = partial(_accumulated, "pt_impl")
tf_accumulated = partial(_accumulated, "tf_impl")
pt_own = partial(_own, "pt_impl")
tf_own = partial(_own, "tf_impl")
