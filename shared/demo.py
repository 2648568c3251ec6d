"""A task of the suite with its data, its model and a timer, by either framework's kit.

Neither is known here: a kit has the modules `data`, `models`, `runtime` and `training`.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from shared import datasets
from shared.specs import TASKS, Task
from shared.weights import init_weights


class Demo:
    """A task: `train` and `test` are its data on the device, `batches` ten batches of it.

    Where it has two domains, `target` are samples of the other one, without labels.

    Args:
        name: of the task, one whose data is arrays.
        batch_size: of `batches`; 0 is the task's compute batch.
    """

    kit = None  # of a framework

    def __init__(self, name: str = "digits-cnn", *, batch_size: int = 0) -> None:
        self.kit.runtime.configure(threads=os.cpu_count() or 1, seed=0)
        self.task, data = TASKS[name], self.kit.data
        with tempfile.TemporaryDirectory() as folder:
            folder = datasets.materialise(self.task.dataset, Path(folder))
            x, y = datasets.load(folder, "train")
            size = batch_size or self.task.compute_batch
            self.batches = data.resident_batches(datasets.first_batches(x, y, size, 10, seed=0))
            self.train = data.to_device(x, y)
            self.test = data.to_device(*datasets.load(folder, "test"))
            if self.task.dataset.kind == "domains":
                self.target, _ = data.to_device(*datasets.load(folder, "target"))

    def build(self, *, learning_rate: float = 0.0) -> tuple:
        """Return the model from the weights of seed 0, its optimizer, and the loss.

        learning_rate: 0 is the recipe's.
        """
        return built(self.kit, self.task, learning_rate=learning_rate)

    def fit(self, step: Callable, *, epochs: int = 1, batch_size: int = 64, y=None) -> float:
        """Train in the shared order; return milliseconds a step. y: in place of the labels."""
        x, labels = self.train
        start = time.perf_counter()
        y = labels if y is None else y
        self.kit.training.fit(step, x, y, batch_size=batch_size, epochs=epochs, seed=0)
        self.kit.runtime.synchronize()
        return (time.perf_counter() - start) * 1e3 / (epochs * (len(x) // batch_size))

    def score(self, model) -> float:
        """Return the metric of the task on the test data, such as the accuracy in percent."""
        training = self.kit.training
        predict = training.make_predict(model)
        return training.evaluate(predict, *self.test, metric=self.task.metric, batch_size=256)

    def times(self, calls: dict[str, Callable], *, rounds: int = 20) -> dict[str, float]:
        """Return milliseconds a call on `batches`, the median of rounds in which all take turns."""
        seconds = {name: [] for name in calls}
        for _ in range(rounds):
            for name, function in calls.items():
                start = time.perf_counter()
                for batch in self.batches:
                    function(*batch)
                self.kit.runtime.synchronize()
                seconds[name].append((time.perf_counter() - start) / len(self.batches))
        return {name: statistics.median(taken) * 1e3 for name, taken in seconds.items()}


def built(kit, task: Task, *, learning_rate: float = 0.0) -> tuple:
    """Return the model of a task from the weights of seed 0, its optimizer, and the loss.

    learning_rate: 0 is the recipe's.
    """
    model = kit.models.build(task.model, init_weights(task.model, seed=0))
    rate = learning_rate or task.recipe.learning_rate
    recipe = replace(task.recipe, learning_rate=rate)
    return model, kit.training.make_optimizer(model, recipe), kit.training.loss_of(task)


def train_step(kit, name: str, batch_size: int | None) -> tuple:
    """Return the plain step of a task, and four batches of its data in memory.

    batch_size: None is the task's compute batch. Raises ValueError for a task whose data is files.
    """
    known = [task for task, one in TASKS.items() if one.dataset.kind != "photos"]
    if name not in known:
        raise ValueError(f"{name!r} is no task with data in memory; these are: {', '.join(known)}")
    task = TASKS[name]
    size = batch_size or task.compute_batch
    with tempfile.TemporaryDirectory() as folder:
        place = datasets.materialise(task.dataset, Path(folder))
        x, y = kit.data.to_device(*(part[: 4 * size] for part in datasets.load(place, "train")))
    step = kit.training.make_train_step(*built(kit, task))
    return step, [(x[at : at + size], y[at : at + size]) for at in range(0, len(x), size)]
