"""What `main` of a technique file shows: a task of the suite with its data, timed and evaluated.

Twin: `tf_impl/kit/demo.py`.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from torch import nn

from pt_impl.kit import data, models, runtime, training
from shared import datasets
from shared.specs import TASKS
from shared.weights import init_weights


class Demo:
    """A task: `train` and `test` are its data on the device, `batches` ten batches of it.

    Where it has two domains, `target` are samples of the other one, without labels.

    Args:
        name: of the task, one whose data is arrays.
        batch_size: of `batches`; 0 is the task's compute batch.
    """

    def __init__(self, name: str = "digits-cnn", *, batch_size: int = 0) -> None:
        runtime.configure(threads=os.cpu_count() or 1, seed=0)
        self.task = TASKS[name]
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
        task, recipe = self.task, self.task.recipe
        model = models.build(task.model, init_weights(task.model, seed=0))
        recipe = replace(recipe, learning_rate=learning_rate or recipe.learning_rate)
        return model, training.make_optimizer(model, recipe), training.loss_of(task)

    def fit(self, step: Callable, *, epochs: int = 1, batch_size: int = 64, y=None) -> float:
        """Train in the shared order; return milliseconds a step. y: in the place of the labels."""
        x, labels = self.train
        start = time.perf_counter()
        y = labels if y is None else y
        training.fit(step, x, y, batch_size=batch_size, epochs=epochs, seed=0)
        runtime.synchronize()
        return (time.perf_counter() - start) * 1e3 / (epochs * (len(x) // batch_size))

    def score(self, model: nn.Module) -> float:
        """Return the metric of the task on the test data, such as the accuracy in percent."""
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
                runtime.synchronize()
                seconds[name].append((time.perf_counter() - start) / len(self.batches))
        return {name: statistics.median(each) * 1e3 for name, each in seconds.items()}
