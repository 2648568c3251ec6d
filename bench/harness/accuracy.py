"""Training for accuracy, in a worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import ceil
from pathlib import Path

from bench.analysis.values import finite
from bench.harness.answers import Proof, Taught, TrainedSeed
from bench.harness.plan import CaseMessage
from bench.harness.sizes import artifact_bytes
from bench.harness.stages import Stages, train_plain
from bench.harness.user_model import Side
from shared import datasets, teacher
from shared.user_model import NoFigure

PLAIN = "plain"  # the program of rows whose step is the framework's own
EVALUATED = 600  # samples at once at most: a third of the test images


def even_batch(samples: int) -> int:
    """A batch size that cuts so many samples into few batches of nearly equal size.

    What is compiled or planned per batch size is then made once, and not again for a remainder.
    """
    return ceil(samples / ceil(samples / EVALUATED))


class Training:
    """Operations that train: see `worker.Operations`."""

    taught = None  # what `Prepared.targets` made of the training split

    def _op_train(
        self, case: CaseMessage, data: str, seed: int, stages: str, prove: bool
    ) -> TrainedSeed:
        """Train to the task's plateau from weights and batch order of `seed`.

        The answer is the metric, the size of what would be deployed of it, if anything, how many
        epochs it took, and what was seen on the way; or why a user's file found no metric.
        `stages`: the folder of those that rows share.
        `prove`: with the proof that the technique happened, which nothing else is asked for.
        """
        proof = self._proof(case, data, seed) if prove else Proof()
        if proof.not_applied:
            return TrainedSeed(evidence=proof.evidence, not_applied=proof.not_applied)
        self._prepare(case, seed, data, trains=True)
        folder = Path(data)
        task, weights = self.work.task, self.work.weights
        of_split = [partial(ask, folder) for ask in (self._evaluate, self._split)]
        fit = partial(self._fit, folder, seed)
        training = Stages(self.impl, task, weights, seed, Path(stages), fit, *of_split)
        train = self.prepared.train
        if not train and case.program == PLAIN:
            train = train_plain(self.impl, self.prepared.model)
        if not train:
            training.fit(self.prepared.step)
        elif predict := train(training):
            self.prepared = replace(self.prepared, predict=predict)
        self._deploy()
        artifact = artifact_bytes(self.prepared.artifact)
        try:
            value = self._evaluate(folder, self.prepared.predict)
        except NoFigure as error:
            return TrainedSeed(no_figure=str(error))
        if task.metric == "mAP":
            at_half = self._evaluate(folder, self.prepared.predict, metric="mAP50")
            training.metrics["mAP50"] = {"value": at_half, "unit": "%"}
        evidence = proof.evidence
        if prove and training.evidence:
            evidence = (evidence or {}) | finite(training.evidence)
        return TrainedSeed(
            value=finite(value),
            artifact=artifact,
            epochs=training.epochs,
            metrics=finite(training.metrics),
            evidence=evidence,
        )

    def _proof(self, case: CaseMessage, data: str, seed: int) -> Proof:
        """The evidence of a case that is built for it alone."""
        self._op_build(case, data, seed)
        return self._op_evidence()

    def _op_teach(self, case: CaseMessage, data: str, seed: int, stages: list, path: str) -> Taught:
        """Train a teacher in stages and write it; the metric is that of the file's own weights.

        A stage is (learning rate, epochs); it starts from what the file would hold after the one
        before, without momentum.
        """
        self._find_work(case, seed, trains=True)
        models = self.kit.models
        for number, (learning_rate, epochs) in enumerate(stages):
            task = self.work.task
            recipe = replace(task.recipe, learning_rate=learning_rate, epochs=epochs)
            self.work = replace(self.work, task=replace(task, recipe=recipe))
            self.prepared = self.bench.prepare(self.impl, self.work)
            self._fit(Path(data), seed + number, self.prepared.step, epochs)
            weights = teacher.rounded(models.export_weights(self.prepared.model))
            self.work = replace(self.work, weights=weights)
        models.import_weights(self.prepared.model, weights)
        value = self._evaluate(Path(data), self.prepared.predict)
        teacher.save(teacher.Teacher(weights, value), Path(path))
        return Taught(value=value)

    def _fit(
        self,
        folder: Path,
        seed: int,
        step: Callable,
        epochs: int,
        batch_size: int | None = None,
    ) -> None:
        kit = self.kit
        if isinstance(self.impl, Side):
            if batch_size:
                raise NotImplementedError("a file's batches have one size: this row needs others")
            for batch in self.impl.drawn(seed):
                step(*batch)
            return
        x, y = kit.data.to_device(*datasets.load(folder, "train"))
        if self.prepared.targets:
            if self.taught is None:  # the same for every seed
                self.taught = self.prepared.targets(x, y)
            y = self.taught
        kit.training.fit(
            step,
            x,
            y,
            batch_size=batch_size or self.work.task.recipe.accuracy_batch_size,
            epochs=epochs,
            seed=seed,
        )

    def _evaluate(
        self, folder: Path, predict: Callable, split: str = "test", metric: str = ""
    ) -> float:
        if isinstance(self.impl, Side):
            return self.impl.evaluate(predict)
        x, y = self._split(folder, split)
        return self.kit.training.evaluate_task(
            predict, x, y, self.work.task, batch_size=even_batch(len(x)), metric=metric
        )

    def _split(self, folder: Path, name: str) -> tuple:
        return self.kit.data.to_device(*datasets.load(folder, name))
