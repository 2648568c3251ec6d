"""Whether a row keeps what counts, if it is not trained to its metric; asked in a worker.

A train step is checked by the loss of held-out samples after a short training from equal weights.
Predictions are checked on a model that the run has trained, against the same model in float32. That
model's weights and outputs are in a folder of the run, for both frameworks.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np

from bench.analysis.values import finite
from bench.harness.answers import CheckedLoss, Taught
from bench.harness.plan import CaseMessage
from bench.record import Fidelity
from shared import datasets
from shared.specs import LossCheck, Task
from shared.user_model import first
from shared.weights import init_weights

TRAINED = "TWINBENCH_TRAINED"  # the folder, as the environment names it
HELD_OUT = 2_048  # samples of the test split at most, of which predictions are compared
AT_ONCE = 128


def trained_weights(task: str) -> Path:
    """The file with the weights of a task's trained model; None if the run has trained none."""
    return Path(os.environ.get(TRAINED, os.devnull)) / f"{task}.npz"


def trained_outputs(task: str) -> Path:
    """The file with that model's float32 outputs for the first samples of the test split."""
    return trained_weights(task).with_suffix(".npy")


def checked_task(task: Task) -> Task:
    """The task as trained for its check: another learning rate, and shorter samples of text."""
    check, model = task.loss_check, task.model
    if check.length:
        model = replace(model, sequence_length=check.length)
    recipe = replace(task.recipe, learning_rate=check.learning_rate)
    return replace(task, model=model, recipe=recipe)


def cut(samples: np.ndarray, check: LossCheck) -> np.ndarray:
    """Text cut to the check's length; other data unchanged."""
    return samples[:, : check.length] if check.length else samples


def load_weights(path: Path) -> dict[str, np.ndarray]:
    """Canonical weights from a file, without pickle, so that no code can be executed."""
    with np.load(path, allow_pickle=False) as kept:
        return dict(kept)


class KeepingChecks:
    """Operations that check what a row keeps: see `worker.Operations`."""

    def _op_check_loss(self, case: CaseMessage, data: str, seed: int) -> CheckedLoss:
        """The short training of the task's `loss_check`, from weights and batches of `seed`.

        Held-out samples are predicted by the plain model with the weights that it leaves.
        """
        self._find_work(case, seed, data=data, trains=True)
        task, folder = checked_task(self.work.task), Path(data)
        check = task.loss_check
        self.work = replace(
            self.work,
            task=task,
            batch_size=check.batch_size,
            weights=init_weights(task.model, seed),
        )
        self.prepared = self.bench.prepare(self.impl, self.work)
        x, y = (cut(part, check) for part in datasets.load(folder, "train"))
        losses = [
            self.prepared.step(*self.kit.data.to_device(*batch))
            for batch in datasets.first_batches(x, y, check.batch_size, check.steps, seed=seed)
        ]
        left = self.kit.models.export_weights(self.prepared.model)
        plain = self.kit.models.build(task.model, left)
        return CheckedLoss(
            first=finite(self.kit.runtime.to_float(losses[0])),
            held_out=finite(self._held_out_loss(plain, folder, check)),
        )

    def _held_out_loss(self, model, folder: Path, check: LossCheck) -> float:
        """The mean loss of the check's samples of the test split, in nats."""
        training = self.kit.training
        predict, loss = training.make_predict(model), training.loss_of(self.work.task)
        x, y = (cut(part[: check.held_out], check) for part in datasets.load(folder, "test"))
        total, batch_size = 0.0, max(check.batch_size, 32)
        for start in range(0, len(x), batch_size):
            rows = slice(start, start + batch_size)
            inputs, labels = self.kit.data.to_device(x[rows], y[rows])
            total += len(x[rows]) * self.kit.runtime.to_float(loss(predict(inputs), labels))
        return total / len(x)

    def _op_deploy(self, case: CaseMessage, data: str, seed: int) -> Taught:
        """Train the task's model by its recipe `deployed` and write it with its outputs.

        The answer is its accuracy in percent. The case is that of a plain step.
        """
        self._find_work(case, seed, trains=True)
        task, folder = self.work.task, Path(data)
        self.work = replace(self.work, task=replace(task, recipe=task.deployed))
        self.prepared = self.bench.prepare(self.impl, self.work)
        self._fit(folder, seed, self.prepared.step, task.deployed.epochs)
        path = trained_weights(task.name)
        path.parent.mkdir(exist_ok=True)
        outputs = self._outputs(folder)
        np.save(trained_outputs(task.name), outputs)
        np.savez(path, **self.kit.models.export_weights(self.prepared.model))
        _, labels = datasets.load(folder, "test")
        return Taught(value=100 * float((outputs.argmax(-1) == labels[: len(outputs)]).mean()))

    def _op_check_predictions(
        self, case: CaseMessage, data: str, weights_seed: int, files: str | None = None
    ) -> Fidelity:
        """The predictions of the run's trained model by this row, beside its float32 outputs."""
        self._prepare(case, weights_seed, data, files)
        if not self.is_trained:
            raise RuntimeError(f"the run has no trained model of {case.task}")
        if not self.prepared.write:
            self.kit.runtime.to_evaluation(self.prepared.model)
        self._deploy()
        folder = Path(data)
        _, labels = datasets.load(folder, "test")
        return compared(self._outputs(folder), np.load(trained_outputs(case.task)), labels)

    def _outputs(self, folder: Path) -> np.ndarray:
        """The logits of the first samples of the test split, float32 (n, classes)."""
        x, _ = datasets.load(folder, "test")
        x = x[:HELD_OUT]
        outputs = []
        for start in range(0, len(x), AT_ONCE):
            rows = x[start : start + AT_ONCE]
            output = first(self.prepared.predict(self.kit.data.to_device(rows, rows)[0]))
            if hasattr(output, "detach"):  # NumPy has no bfloat16 of PyTorch's
                output = output.detach().float().cpu()
            outputs.append(np.asarray(output).astype(np.float32))
        return np.concatenate(outputs)


def compared(outputs: np.ndarray, expected: np.ndarray, labels: np.ndarray) -> Fidelity:
    """What outputs have lost and gained relative to the float model's; both are (n, classes)."""
    labels = np.asarray(labels[: len(expected)])
    right, ours = (each.argmax(-1) == labels for each in (expected, outputs))
    more = _losses(outputs, labels) - _losses(expected, labels)
    known = bool(np.isfinite(more).all())
    return Fidelity(
        samples=len(labels),
        right=int(right.sum()),
        lost=int((right & ~ours).sum()),
        gained=int((ours & ~right).sum()),
        flipped=int((expected.argmax(-1) != outputs.argmax(-1)).sum()),
        loss_more=float(more.mean()) if known else None,
        loss_sd=float(more.std(ddof=1)) if known else None,
    )


def _losses(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """The cross-entropy of each sample, in nats."""
    logits = np.asarray(logits, np.float64)
    largest = logits.max(-1, keepdims=True)
    sums = np.log(np.exp(logits - largest).sum(-1)) + largest[:, 0]
    return sums - logits[np.arange(len(labels)), labels]
