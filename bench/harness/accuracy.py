"""What a worker is asked where a case is trained for its accuracy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import ceil
from pathlib import Path

from bench.harness.sizes import artifact_bytes
from shared import datasets, teacher

EVALUATED = 600  # samples at once at most: a third of the test images


def even_batch(samples: int) -> int:
    """A batch size that cuts so many samples into few and, as far as it can be, equal batches.

    What is compiled or planned for each size of a batch is then made once, not for a rest, too.
    """
    return ceil(samples / ceil(samples / EVALUATED))


class Training:
    """Operations that train: see `worker.Operations`."""

    taught = None  # what `Prepared.targets` made of the training split

    def _op_train(self, case: dict, data: str, seed: int) -> dict:
        """Train to the task's plateau from weights and batch order of `seed`.

        The answer is the metric, and the size of what would be deployed of it, if anything.
        """
        self._prepare(case, seed, data)
        fit = partial(self._fit, Path(data), seed)
        if not self.prepared.train:
            fit(self.prepared.step)
        elif predict := self.prepared.train(fit):
            self.prepared = replace(self.prepared, predict=predict)
        self._deploy()
        artifact = artifact_bytes(self.prepared.artifact)
        return {"value": self._evaluate(Path(data)), "artifact": artifact}

    def _op_teach(self, case: dict, data: str, seed: int, stages: list, path: str) -> dict:
        """Train a teacher in stages and write it; the metric is that of the file's own weights.

        A stage is (learning rate, epochs); it starts from what the file would hold after the one
        before, without momentum.
        """
        self._find_work(case, seed)
        models = self.kit.models
        for number, (learning_rate, epochs) in enumerate(stages):
            task = self.work.task
            recipe = replace(task.recipe, learning_rate=learning_rate, epochs=epochs)
            self.work = replace(self.work, task=replace(task, recipe=recipe))
            self.prepared = self.bench.prepare(self.impl, self.work)
            self._fit(Path(data), seed + number, self.prepared.step)
            weights = teacher.rounded(models.export_weights(self.prepared.model))
            self.work = replace(self.work, weights=weights)
        models.import_weights(self.prepared.model, weights)
        value = self._evaluate(Path(data))
        teacher.save(teacher.Teacher(weights, value), Path(path))
        return {"value": value}

    def _fit(self, folder: Path, seed: int, step: Callable, epochs: int | None = None) -> None:
        kit = self.kit
        recipe = self.work.task.recipe
        x, y = kit.data.to_device(*datasets.load(folder, "train"))
        if self.prepared.targets:
            if self.taught is None:  # the same for every seed
                self.taught = self.prepared.targets(x, y)
            y = self.taught
        kit.training.fit(
            step,
            x,
            y,
            batch_size=recipe.accuracy_batch_size,
            epochs=epochs or recipe.epochs,
            seed=seed,
        )

    def _evaluate(self, folder: Path) -> float:
        task = self.work.task
        x, y = self.kit.data.to_device(*datasets.load(folder, "test"))
        return self.kit.training.evaluate(
            self.prepared.predict,
            x,
            y,
            metric=task.metric,
            batch_size=even_batch(len(x)),
        )
