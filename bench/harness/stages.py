"""Training in stages, whose weights are kept: no two rows of a run train the same stage.

A stage is identified by task, recipe, seed, framework and flavour (by its folder), initial weights,
the step's name and settings, and epochs. A row that asks for a stage that another row trained gets
its weights. The same holds for what is computed before a training: `Stages.once`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from bench.harness.plan import Prepared, Work
from bench.harness.watching import Watch
from shared.specs import Task, more_is_better
from shared.weights import checksum

Weights = dict[str, np.ndarray]


@dataclass
class Stages:
    """What `Prepared.train` gets: it trains a row's stages with one seed, or finds them.

    `fit(step, epochs=None)` trains for so many epochs, default the recipe's. A row's last stage,
    which no other row has, is trained only with that. `folder`: of one framework and flavour, where
    stages are kept. `epochs`: how many were really trained. `metrics`: figures from `watch`, shown
    beside the accuracy. `evidence`: what the training shows; the record keeps that of the first
    seed, such as a `curve`.
    """

    impl: Any
    task: Task
    weights: Weights
    seed: int
    folder: Path
    _fit: Callable[[Callable, int], None]
    _evaluate: Callable[[Callable, str], float] | None = None
    _split: Callable[[str], tuple] | None = None
    epochs: int = 0
    metrics: dict[str, dict] = field(default_factory=dict)
    evidence: dict[str, Any] = field(default_factory=dict)

    def fit(
        self, step: Callable, epochs: int | None = None, *, batch_size: int | None = None
    ) -> None:
        """Train with `step`, by default with the recipe's `batch_size`.

        The result is not shared with other rows.
        """
        epochs = epochs or self.task.recipe.epochs
        fit = partial(self._fit, batch_size=batch_size) if batch_size else self._fit
        fit(step, epochs)
        self.epochs += epochs

    def split(self, name: str) -> tuple[Any, Any]:
        """x and y of "train" or "test" on the device, for a row with its own loop."""
        return self._split(name)

    def watch(
        self,
        step: Callable,
        predict: Callable,
        *,
        batch_size: int | None = None,
        evaluating: Callable[[], AbstractContextManager] = nullcontext,
    ) -> None:
        """Train for the recipe's epochs, and note when the task's target is reached: `Watch`.

        evaluating: the context in which the model is evaluated, such as with other weights.
        """

        def evaluate(split: str) -> float:
            with evaluating():
                return self._evaluate(predict, split)

        watch = Watch(
            step,
            partial(evaluate, "test"),
            target=self.task.target,
            rising=more_is_better(self.task.metric),
            unit="" if self.task.metric == "mAP" else "nats",  # its loss is more than an entropy
        )
        self.fit(watch, batch_size=batch_size)
        trained = {"value": evaluate("train"), "unit": ""}
        self.metrics |= watch.metrics() | {f"train_{self.task.metric}": trained}

    def watch_plain(self, model: Any) -> None:
        """Give `model` the weights of plain training, watched once for all rows."""
        make_predict = self.impl.kit.training.make_predict

        def train() -> None:
            self.watch(self._plain_step(model), make_predict(model))

        self.train_once("watched", model, train)

    def _plain_step(self, model: Any) -> Callable:
        """The framework's plain step of a model, with a new optimizer."""
        training = self.impl.kit.training
        optimizer = training.make_optimizer(model, self.task.recipe)
        return training.make_train_step(model, optimizer, training.loss_of(self.task))

    def train_once(self, name: str, model: Any, train: Callable[[], None]) -> None:
        """Give `model` the weights and `metrics` of `train()`, which runs once for all rows.

        `name` must say everything that the training depends on besides task, seed and initial
        weights.
        """
        path, models = (
            self._path(name, self.weights, self.task.recipe.epochs, {}),
            self.impl.kit.models,
        )

        def work_out() -> dict:
            train()
            _save(path, models.export_weights(model))
            return self.metrics

        self.metrics |= self.once(name, work_out)
        with np.load(path, allow_pickle=False) as kept:
            models.import_weights(model, dict(kept))

    def once(self, name: str, work_out: Callable[[], Any]) -> Any:
        """The result of `work_out()`, as JSON; computed by the first row that asks for it.

        `name` must say everything that it depends on besides task, seed and initial weights.
        """
        path = self._path(name, self.weights, self.task.recipe.epochs, {}).with_suffix(".json")
        if not path.exists():
            text = json.dumps(work_out())
            _write(path, lambda file: file.write(text.encode()))
        return json.loads(path.read_text())

    def plain(self, weights: Weights | None = None, epochs: int | None = None) -> Weights:
        """The weights after plain training from `weights`, or from the seed's initial ones."""

        def make(weights: Weights) -> tuple[Callable, Callable]:
            model = self.impl.kit.models.build(self.task.model, weights)
            return self._plain_step(model), lambda: model

        return self.shared("plain", make, weights, epochs)

    def shared(
        self,
        name: str,
        make: Callable[[Weights], tuple[Callable, Callable]],
        weights: Weights | None = None,
        epochs: int | None = None,
        **settings: Any,
    ) -> Weights:
        """The weights of a stage, which the first row that asks for it trains.

        `make(weights)` gives the step and a function for the trained model. `name` and `settings`
        must say everything that the step depends on besides its initial weights.
        """
        weights = self.weights if weights is None else weights
        epochs = epochs or self.task.recipe.epochs
        path = self._path(name, weights, epochs, settings)
        if not path.exists():
            step, trained = make(weights)
            self.fit(step, epochs)
            _save(path, self.impl.kit.models.export_weights(trained()))
        with np.load(path, allow_pickle=False) as kept:
            return dict(kept)

    def _path(self, name: str, weights: Weights, epochs: int, settings: dict) -> Path:
        recipe = asdict(self.task.recipe)
        determined = [recipe, self.seed, name, settings, epochs, checksum(weights)]
        key = hashlib.sha256(json.dumps(determined, sort_keys=True).encode()).hexdigest()
        return self.folder / f"{self.task.name}-seed{self.seed}-{name}-{epochs}-{key[:16]}.npz"


def curve(
    points: Iterable[tuple[float, float]],
    *,
    x: str,
    y: str,
    log: bool = False,
    mark: tuple[float, float] | None = None,
) -> dict[str, Any]:
    """The curve of a training for the report: `points` to five digits, their meaning, one to mark.

    `log`: whether the x axis is logarithmic.
    """

    def rounded(point: Iterable[float]) -> list[float]:
        return [float(f"{value:.5g}") for value in point]

    found = {"x": x, "y": y, "log": log, "points": list(map(rounded, points))}
    return found | ({"mark": rounded(mark)} if mark else {})


def _save(path: Path, weights: Weights) -> None:
    _write(path, lambda file: np.savez(file, **weights))


def _write(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """Whole or not at all: a row that is ended while it writes leaves nothing to be found."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    with part.open("wb") as file:
        write(file)
    part.replace(path)


def train_plain(impl, model: Any, *more: int) -> Callable[[Stages], None]:
    """A `Prepared.train` that gives `model` the weights of plain training.

    It trains for the recipe's epochs and then, with a new optimizer each time, for `more`.
    """

    def train(stages: Stages) -> None:
        weights = stages.plain()
        for epochs in more:
            weights = stages.plain(weights, epochs)
        impl.kit.models.import_weights(model, weights)

    return train


def train_on(
    impl, work: Work, prepare: Callable[..., Prepared], *, epochs: int
) -> Callable[[Stages], Callable]:
    """A `Prepared.train` of two stages, the same for a technique's baseline and its rows.

    The baseline, which `prepare(impl, work)` makes without settings, trains for the recipe's
    epochs. From its weights `prepare` makes the row with a new optimizer, which trains for `epochs`
    more. So every row takes the same number of steps at the same learning rate.
    """

    def train(stages: Stages) -> Callable:
        trained = stages.plain()
        if not work.settings:
            trained = stages.plain(trained, epochs)
        row = prepare(impl, replace(work, weights=trained))
        if work.settings:
            stages.fit(row.step, epochs)
        return row.predict

    return train
