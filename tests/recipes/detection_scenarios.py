"""One framework's share of the test that rows are trained to detect; see `worker.py`."""

from __future__ import annotations

import importlib
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from msgspec import to_builtins

from bench.harness.selection import cases_of
from bench.harness.worker import Operations
from shared import datasets
from shared.specs import TASKS
from tests import workers

FRAMEWORK = "pt" if sys.argv[1:] == ["pt"] else "tf"
impl = workers.implementation(FRAMEWORK)
NAME = "digits-detection"
ROWS = {
    "recipes.bench_schedules": ("cosine",),
    "recipes.bench_averaging": ("swa_early_stopping",),
}


def small():
    """The task with fewer scenes, layers and channels."""
    task = TASKS[NAME]
    convolutions = ((8, 2), (16, 2), (16, 2))
    return replace(
        task,
        dataset=replace(task.dataset, name="few-scenes", train_size=8 * 16, test_size=20),
        model=replace(task.model, convolutions=convolutions, levels=(1, 2)),
        recipe=replace(task.recipe, epochs=2),
        target=0.0,  # which the first look finds reached
    )


def trained():
    """What a worker answers that trains a row: by technique and variant."""
    task, found = TASKS[NAME], {}
    TASKS[NAME] = small()
    try:
        with tempfile.TemporaryDirectory() as folder:
            data = datasets.materialise(TASKS[NAME].dataset, Path(folder))
            for name, variants in ROWS.items():
                if sys.argv[1] == "tf_keras" and "schedules" not in name:
                    continue  # what trains and judges is the same
                module = importlib.import_module(f"bench.{name}")
                for case in cases_of(module.TECHNIQUE, module.__name__, "ordinary"):
                    wanted = case.workload.task == NAME and case.variant.name in variants
                    if wanted and case.framework == FRAMEWORK:
                        found[f"{case.technique} {case.variant.name}"] = answer(case, data, folder)
    finally:
        TASKS[NAME] = task
    return found


def answer(case, data, folder):
    operations = Operations()
    operations.impl, operations.kit = impl, impl.kit
    stages = str(Path(folder) / "stages")
    return to_builtins(operations._op_train(case.message(), str(data), 0, stages, prove=True))


SCENARIOS = (trained,)
