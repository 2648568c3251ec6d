"""A user's own model in a worker: it is checked once, then measured like a model of the suite.

`Side` is a framework's package whose kit builds the file's model, loss and optimizer, so every
technique's bench file works on it unchanged.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from bench.analysis.values import SMALLEST_LOSS
from bench.harness import memory
from bench.harness.machine import KERAS_BACKEND
from shared import user_model
from shared.health import padding
from shared.profiles import endless
from shared.user_model import BATCHES, MAKERS, SEED, BadFile, NoFigure
from shared.weights import checksum

DRAWN = 1e-6  # relative: what rounding does to weights, of which float32 has seven digits
RUNS = 3  # of ten steps, to see how far rounding and dropout carry the losses
SCATTER = 5.0  # times what these differ, losses of the same work may
LEAST_PARITY = 1e-5
SCATTER_S, LEAST_STEPS = 20.0, 3  # after which a run of slow steps ends, with these at least
MARGIN = 1.0  # of the file's figure that count as no loss: a point, where it is in percent
TRAIN_STEPS = 100  # before the file evaluates
KIT = ("kit.models", "kit.data", "kit.training", "kit.runtime")
FAR = 1e-3  # relative, of the outputs of twins whose weights were copied


class Side:
    """A framework's package whose kit has a user's model, loss, optimizer and batches."""

    def __init__(self, impl: Any, folder: Path) -> None:
        self._impl, self.__name__ = impl, impl.__name__
        self.name = impl.__name__.removesuffix("_impl")
        self.about = user_model.about(folder)
        self.task = user_model.task(self.about, self.name)
        self.folder = folder / self.name
        self.weights = user_model.load_weights(self.folder)
        self.parts_apart = self.about["sides"][self.name].get("parts_apart", 0.0)
        kit = importlib.import_module(f"{impl.__name__}.kit.user_model")
        with impl.kit.runtime.same_threads():
            module = user_model.load_checked(self.about["path"], folder, self.about["cwd"])
        file_model = kit.UserModel(
            _maker(module, self.name),
            has_logits=self.about["sides"][self.name]["has_logits"],
        )
        file_model.example, _ = kit.to_device(*user_model.load_batches(self.folder, 2)[0])
        self.module, self._of_file = module, kit
        self.fused_optimizer = file_model.fused_optimizer
        blocks = getattr(module, "blocks", "")
        self.blocks = blocks.get(MAKERS[self.name], "") if isinstance(blocks, dict) else blocks
        if hasattr(module, "batches"):
            self.stream = _Stream(module, kit)
        self.kit = _kit(impl.kit, kit, file_model, self.task)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._impl, name)  # the technique's families

    def batches(self, size: int) -> list[tuple]:
        """The prepared batches, or the first sample of each."""
        whole = size == self.about["batch_size"]
        return user_model.load_batches(self.folder, None if whole else size)

    def of_size(self, size: int) -> tuple:
        """A batch of so many samples: from `batch`, or by repeating the prepared ones.

        Also by repeating if `batch` returns fewer: otherwise a smaller batch would count as the
        full one.
        """
        if hasattr(self.module, "batch"):
            with suppress(BadFile):
                x, y = user_model.draw(self.module, size, SEED, self.name)
                user_model.check_size(x, size, "batch")
                return x, y
        x, y = user_model.samples(self.folder, BATCHES * self.about["batch_size"])
        whole = user_model.sample_count(x)
        return user_model.resized(x, whole, size), user_model.resized(y, whole, size)

    def most_samples(self, seconds: float) -> int:
        """The largest batch with steps of at most `seconds`, by the check; at least the file's."""
        step_s = self.about["sides"][self.name]["step_s"]
        size = self.about["batch_size"]
        return max(size, int(size * seconds / step_s))

    def drawn(self, seed: int) -> Iterator[tuple]:
        """The training batches of a seed, from `batch` or from the file's `batches`.

        Each seed begins `batches` one batch later, because with one order all seeds would train the
        same.
        """
        if hasattr(self.module, "batches"):
            stream = islice(endless(self.stream), seed, None)
        else:
            size, first = self.about["batch_size"], (1 + seed) * 1_000_000
            numbers = count(first)

            def draw(number: int) -> tuple:
                return user_model.draw(self.module, size, number, self.name)

            stream = (self._of_file.to_device(*draw(number)) for number in numbers)
        return islice(stream, self.about["train_steps"])

    def evaluate(self, predict: Callable) -> float:
        """The file's metric of a prediction function, which takes and returns NumPy arrays."""
        return _evaluated(self.module, self._of_file, predict, self.name)

    def checksum(self, weights: dict[str, np.ndarray]) -> str:
        """The checksum of weights; the same in both frameworks for weights that were copied."""
        found = checksum(weights)
        return self.about["pairs"].get(found, found)


def _evaluated(module: Any, kit: Any, predict: Callable, side: str) -> float:
    """The file's figure. `evaluate` may take a second argument: the framework's name."""

    failed = False

    def ask(x: Any) -> Any:
        nonlocal failed
        failed = True  # until it has answered
        x, _ = kit.to_device(user_model.arrays(x), np.zeros(0))
        found = predict(x)
        found = user_model.arrays(getattr(found, "logits", found))
        failed = False
        return found

    given = (ask, MAKERS[side])[: user_model.argument_count(module.evaluate)]
    try:
        returned = user_model.call("evaluate", module.__file__, module.evaluate, *given)
    except BadFile as error:
        if failed:
            raise
        raise NoFigure(str(error)) from error
    try:
        value = float(returned)
    except (TypeError, ValueError):
        kind = type(returned).__name__
        raise BadFile(f"evaluate returns a {kind}: return a number, higher is better") from None
    if not np.isfinite(value):
        raise BadFile(f"evaluate returns {value}: return a finite number, higher is better")
    return value


class _Stream:
    """The file's own batches as they come, on the device: what its input takes is in them."""

    def __init__(self, module: Any, kit: Any) -> None:
        self.module, self.kit = module, kit

    def __iter__(self) -> Any:
        for each in self.module.batches():
            yield self.kit.to_device(*user_model.pair(each, "batches"))


def _kit(usual: Any, kit: Any, file_model: Any, task: Any) -> SimpleNamespace:
    """The kit's parts, with those of a file where these take their place."""

    def build(spec: Any, weights: dict | None = None) -> Any:
        return file_model.build(weights)

    def make_optimizer(model: Any, recipe: Any) -> Any:
        if recipe == task.recipe:
            return file_model.optimizer(model, recipe)
        return usual.training.make_optimizer(model, recipe)  # of a proof, which has its own

    loss = {"cross_entropy": file_model.loss, "loss_of": lambda task: file_model.loss}
    loss["prediction_loss"] = file_model.prediction_loss
    training = _with(usual.training, make_optimizer=make_optimizer, **loss)
    names = ("export_weights", "import_weights", "named_parameters", "parameter_count")
    models = SimpleNamespace(build=build, **{name: getattr(kit, name) for name in names})
    data = SimpleNamespace(to_device=kit.to_device, resident_batches=kit.resident_batches)
    return SimpleNamespace(models=models, training=training, data=data, runtime=usual.runtime)


def _with(module: Any, **others: Any) -> SimpleNamespace:
    return SimpleNamespace(**vars(module) | others)


def _maker(module: Any, side: str) -> Callable:
    """What makes the file's model; rows are measured with the run's threads, not with its own."""
    name = user_model.maker_of(module, side)
    runtime = importlib.import_module(f"{side}_impl.kit.runtime")

    def make() -> Any:
        with runtime.same_threads():
            return user_model.call(name, module.__file__, user_model.function(module, name))

    return make


def _check_margin(module: Any, value: float) -> None:
    """Ask for a margin if the figure is no percentage: the default margin is one point."""
    if hasattr(module, "margin"):
        return
    if value < 0:
        raise BadFile(
            f"evaluate returns {value:.3g}, which is no percentage: set margin = ... in the "
            "file, the loss that you accept"
        )
    if value <= 1:
        raise BadFile(
            f"evaluate returns {value:.3g}: set margin in the file, the loss that you accept: "
            f"margin = 0.01 if this is a fraction, margin = {MARGIN:g} if it is a percentage"
        )


class Checking:
    """Operations on a user's file: see `worker.Operations`."""

    def _op_check(self, path: str, folder: str, cwd: str) -> dict:
        """Hold a side of a file to what a run needs, and write its batches and initial weights.

        The answer is what `about.json` says of the side. Weights that are there already, which
        another framework's were copied to, are used.
        """
        side = self.impl.__name__.removesuffix("_impl")
        with self.impl.kit.runtime.same_threads():
            module = user_model.load_checked(path, Path(folder), cwd)
        kit = importlib.import_module(f"{self.impl.__name__}.kit.user_model")
        place, file_model = Path(folder) / side, kit.UserModel(_maker(module, side))
        size, batches, as_given = _batches(module, side)
        if (place / "weights.npz").is_file():
            batches = _of_twins(module, batches, Path(folder))
        resident = kit.resident_batches(batches)
        file_model.example = resident[0][0]
        try:
            model = file_model.build(None)
            if (place / "weights.npz").is_file():
                kit.import_weights(model, user_model.load_weights(place))
            weights = kit.export_weights(model)
            checked = kit.check(file_model, model, resident[0])
            apart = kit.repeatable(file_model.build(weights), resident[0][0])
            if apart > 1e-5:
                raise BadFile(
                    f"two predictions of one batch differ by {apart:.0e}: the model draws random "
                    "numbers in evaluation mode; switch that off"
                )
            if hasattr(module, "evaluate"):
                predict = self.impl.kit.training.make_predict(file_model.build(weights))
                _check_margin(module, _evaluated(module, kit, predict, side))
            memory.reset_peak()
            scatter, step_s = self._scatter(kit, file_model, weights, resident)
        except BadFile as error:
            raise user_model.placed(error, path) from error
        except Exception as error:
            if not kit.is_out_of_memory(error):
                raise
            raise BadFile(
                f"a step at batch {size} does not fit into memory ({user_model.one_line(error)}): "
                "give batch a smaller default size"
            ) from error
        user_model.save_batches(place, batches)
        user_model.save_weights(place, weights)
        return {
            **checked,
            **_of_model(kit.named_parameters(model), weights),
            **_of_file(module),
            **_of_shapes(batches),
            "parts_apart": self._parts_apart(file_model, model, resident[0]),
            "batch_size": size,
            "labels_sha256": checksum(_numbered(batches[0][1])),
            "scatter": scatter,
            "step_s": step_s,
            "peak_bytes": memory.proportional_peak(),
            "as_given": as_given,
        }

    def _parts_apart(self, file_model: Any, model: Any, batch: tuple) -> float:
        """See `parts_apart`; 0 where the loss takes no prediction."""
        try:
            output = self.impl.kit.training.make_predict(model)(batch[0])
            return user_model.parts_apart(file_model.loss, output, batch[1])
        except Exception:  # the model predicts something else, or its loss takes more than that
            return 0.0

    def _scatter(
        self, kit: Any, file_model: Any, weights: dict, batches: list
    ) -> tuple[float, float]:
        """How far losses of the same work may be apart here, and seconds a step.

        Ten steps, or fewer of slow ones, are run again from weights that differ by rounding, and
        with other seeds: what carries a difference on shows in the losses, and so does dropout.
        """
        runs, recipe, usual = [], user_model.RECIPE, self.impl.kit
        for run in range(RUNS):
            random = np.random.default_rng(run)
            model = file_model.build(_rounded(weights, random) if run else weights)
            step = usual.training.make_train_step(
                model, file_model.optimizer(model, recipe), file_model.loss
            )
            kit.reseed(model, run)  # the file may have set one seed as it made each
            losses, step_s = _losses(step, batches, usual.runtime.to_float)
            runs.append(losses)
        fewest = min(map(len, runs))
        runs = [losses[:fewest] for losses in runs]
        if not np.isfinite(runs).all():
            last = 1 + int(np.isfinite(runs).all(0).argmin())
            raise BadFile(f"the loss of step {last} is not finite: choose a smaller learning rate")
        first = np.array(runs[0])
        least = max(SMALLEST_LOSS * np.abs(first).max(), np.finfo(np.float32).tiny)
        scale = np.maximum(np.abs(first), least)  # a loss may come to 0
        apart = float(max(np.abs(np.array(runs[1:]) - first).max(0) / scale))
        return apart * len(batches) / fewest, step_s  # it grows from step to step

    def _op_check_pair(self, path: str, folder: str, cwd: str) -> dict:
        """Copy weights from PyTorch to TensorFlow with the file's function, and compare outputs.

        Runs in PyTorch's worker, which imports TensorFlow too: the other way round the process
        aborts. PyTorch's side has been checked.
        """
        os.environ["KERAS_BACKEND"] = KERAS_BACKEND
        module, place = user_model.load_checked(path, Path(folder), cwd), Path(folder)
        kits, models = {}, {}
        for side in ("pt", "tf"):
            importlib.import_module(f"{side}_impl.kit.training")
            kits[side] = kit = importlib.import_module(f"{side}_impl.kit.user_model")
            file_model = kit.UserModel(_maker(module, side))
            _, batches, _ = _batches(module, side)
            x, _ = kit.to_device(*_of_twins(module, batches, place)[0])
            file_model.example = x
            weights = user_model.load_weights(place / "pt") if side == "pt" else None
            models[side] = file_model.build(weights), x
        user_model.call("copy_weights", path, module.copy_weights, models["pt"][0], models["tf"][0])
        outputs = []
        for side, (model, x) in models.items():
            predict = importlib.import_module(f"{side}_impl.kit.training").make_predict(model)
            first = user_model.first(predict(x))
            outputs.append(np.asarray(first.cpu() if hasattr(first, "cpu") else first, np.float64))
        _check_outputs(*outputs)
        weights = kits["tf"].export_weights(models["tf"][0])
        user_model.save_weights(place / "tf", weights)
        return {"weights_sha256": checksum(weights)}


def _of_model(named: dict, weights: dict[str, np.ndarray]) -> dict:
    """What is to be known of a model: the shapes of its parameters and of its other state."""
    return {
        "parameters": [(name, list(value.shape)) for name, value in named.items()],
        "state": [(n, list(v.shape)) for n, v in weights.items() if n not in named],
        "weights_sha256": checksum(weights),
    }


def _of_file(module: Any) -> dict:
    """What a file says beside its model."""
    return {
        "evaluates": hasattr(module, "evaluate"),
        "keras_backend": os.environ.get("KERAS_BACKEND"),
        "margin": float(getattr(module, "margin", MARGIN)),
        "train_steps": int(getattr(module, "train_steps", TRAIN_STEPS)),
        "named": hasattr(module, "batch") and user_model.takes_framework(module),
    }


def _of_shapes(batches: list[tuple]) -> dict:
    """How many shapes a file's batches have, and what of them is padding, in them or to come.

    `to_longest`: the share of padding if all were padded to the longest.
    """
    sizes = [user_model.leaves(x)[0].size for x, _ in batches]
    shares = [padding(batch) or 0.0 for batch in batches]
    return {
        "shapes": len(set(map(user_model.shape_of, batches))),
        "padding": float(np.mean(shares)),
        "to_longest": 1 - float(np.mean(sizes)) / max(sizes),
    }


def _losses(step: Callable, batches: list, to_float: Callable) -> tuple[list[float], float]:
    """A step's losses on each batch, or on fewer where it is slow; seconds a step.

    The first step at a shape may trace or compile: where shapes vary, all are taken once more.
    """
    losses, _ = _timed(step, batches[:1], to_float)
    more, seconds = _timed(step, batches[1:], to_float)
    losses += more
    if len(set(map(user_model.shape_of, batches))) > 1:
        _, seconds = _timed(step, batches[: len(losses)], to_float)
    return losses, seconds


def _timed(step: Callable, batches: list, to_float: Callable) -> tuple[list[float], float]:
    """A step's losses on batches, of which slow ones are left out at the end; seconds a step."""
    losses, start = [], time.perf_counter()
    for batch in batches:
        losses.append(to_float(step(*batch)))
        seconds = time.perf_counter() - start
        if seconds > SCATTER_S and len(losses) >= LEAST_STEPS - 1:
            break
    return losses, seconds / len(losses)


def _check_outputs(ours: np.ndarray, theirs: np.ndarray) -> None:
    """Twins predict the same once weights were copied."""
    if ours.shape != theirs.shape:
        raise BadFile(
            f"outputs have different shapes: {ours.shape} in PyTorch, {theirs.shape} in TensorFlow"
        )
    apart = np.linalg.norm(ours - theirs) / max(np.linalg.norm(ours), 1e-12)
    if not apart < FAR:
        raise BadFile(
            f"after copy_weights the outputs differ by {apart:.0%}: it misses a weight or "
            "transposes one wrongly, or the models differ; twinbench port finds where"
        )


def _batches(module: Any, side: str) -> tuple[int, list[tuple], bool]:
    """The size that the file means, its first batches, and whether they have its structure."""
    if hasattr(module, "batch"):
        size = user_model.usual_size(module)
        given = [user_model.given(module, size, SEED + place, side) for place in range(BATCHES)]
        batches = [user_model.pair(each, "batch") for each in given]
        if not _equal(user_model.draw(module, size, SEED, side), batches[0]):
            raise BadFile(
                f"batch({size}, {SEED}) returns different numbers each time: draw them from "
                "np.random.default_rng(seed)"
            )
        if hasattr(module, "evaluate") and _equal(batches[1], batches[0]):
            raise BadFile(
                "batch returns the same numbers for every seed, and evaluate needs several: draw "
                "them from np.random.default_rng(seed)"
            )
    else:
        make = user_model.function(module, "batches", "batch")
        stream = iter(user_model.call("batches", module.__file__, make))
        given = []
        while len(given) < BATCHES:
            batch = user_model.call("batches", module.__file__, next, stream, None)
            if batch is None:
                raise BadFile(f"batches() ends after {len(given)} batches: give {BATCHES} or more")
            given.append(batch)
        batches = [user_model.pair(each, "batches") for each in given]
        size = len(user_model.leaves(batches[0][0])[0])
    for x, _ in batches:
        user_model.check_size(x, size, "batch" if hasattr(module, "batch") else "batches")
    return size, batches, all(map(user_model.keeps_structure, given[0]))


def _of_twins(module: Any, batches: list[tuple], folder: Path) -> list[tuple]:
    """What both twins are given: a file's own batches may be shuffled, so they are PyTorch's."""
    return batches if hasattr(module, "batch") else user_model.load_batches(folder / "pt")


def _equal(one: tuple, other: tuple) -> bool:
    """Whether two batches hold the same numbers."""
    ours, theirs = _numbered(one), _numbered(other)
    return ours.keys() == theirs.keys() and all(
        np.array_equal(ours[name], theirs[name], equal_nan=True) for name in theirs
    )


def _numbered(tree: Any) -> dict[str, np.ndarray]:
    return {str(place): leaf for place, leaf in enumerate(user_model.leaves(tree))}


def _rounded(weights: dict[str, np.ndarray], random: np.random.Generator) -> dict:
    """Weights of which each differs by a little, as rounding would have it."""
    return {
        name: (value * (1 + DRAWN * random.standard_normal(value.shape))).astype(value.dtype)
        if value.dtype.kind == "f"
        else value
        for name, value in weights.items()
    }
