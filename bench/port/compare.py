"""Compares the two models of a file: batch, weights, outputs, loss, training."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from bench.port.report import Report, Say
from bench.port.values import closest, numpy
from shared import user_model
from shared.user_model import SEED, BadFile, File

ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",  # the comparison runs on the CPU, where there is no TF32
    "KERAS_BACKEND": "tensorflow",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
MOST_NUMBERS = 2_000_000  # of inputs; the batch is cut down to these


def port(file: File, say: Say = print) -> Report:
    """Compare the models of a file. Raises BadFile with one line if the file is wrong.

    say: called with what is compared. Both frameworks are imported here, and run on the CPU.
    """
    if not file.functions.issuperset(user_model.MAKERS.values()):
        raise BadFile(f"{file.path.name} needs both pytorch() and tensorflow(): write both")
    os.environ.update(ENVIRONMENT)
    say("importing PyTorch and TensorFlow")
    # In this order: the other way round the process aborts.
    from bench.port.pytorch_side import PyTorchSide
    from bench.port.tensorflow_side import TensorFlowSide

    module = user_model.load(file.path)
    batches = _batches(module)
    sides = []
    say("building both models")
    for name, side in (("pytorch", PyTorchSide), ("tensorflow", TensorFlowSide)):
        make = user_model.function(module, name)
        try:
            sides.append(side(_maker(name, module, make), *batches[name](0)))
            sides[-1].check()
        except BadFile as error:
            raise user_model.placed(error, file.path) from error
    report = Report()
    _compare(report, say, module, *sides, batches)
    return report


def _maker(name: str, module: Any, make: Callable) -> Callable:
    return lambda: user_model.call(name, module.__file__, make)


def _batches(module: Any) -> dict[str, Callable[[int], tuple]]:
    """For each framework a function that draws its batch of a number."""
    if not hasattr(module, "batch"):
        stream = iter(module.batches())
        kept: list[tuple] = []

        def drawn(number: int) -> tuple:
            while len(kept) <= number:
                kept.append(user_model.pair(next(stream), "batches"))
            return kept[number]

        return {"pytorch": drawn, "tensorflow": drawn}
    size = user_model.usual_size(module)
    x, _ = user_model.draw(module, size, SEED, "pt")
    numbers = sum(np.size(leaf) for leaf in user_model.leaves(x))
    size = max(min(size, 4), int(size * min(1.0, MOST_NUMBERS / max(numbers, 1))))
    return {
        name: (lambda number, side=side: user_model.draw(module, size, SEED + number, side))
        for side, name in user_model.MAKERS.items()
    }


def _compare(report: Report, say: Say, module: Any, pt: Any, tf: Any, batches: dict) -> None:
    """Go through the steps until one differs without a cause."""
    from bench.port import dropout, gradients, losses, running_statistics, updates
    from bench.port.forward import Forward

    @contextmanager
    def step(name: str, words: str) -> Iterator[None]:
        say(words)
        start = time.monotonic()
        yield
        report.seconds[name] = time.monotonic() - start

    with step("weights", "matching weights"):
        weights = _copied(report, module, pt, tf)
    forward = Forward(report, say, pt, tf, weights)
    for mode, words in (
        ("evaluation", "outputs in evaluation mode"),
        ("training", "outputs in training mode, dropout off"),
    ):
        with step(mode, f"comparing {words}"):
            before = len(report.findings)
            both = forward.search(mode)
            if both is None:
                return
            if len(report.findings) == before:
                report.equal.append(f"{words} ({both.size:.0e}, bound {both.bound:.0e})")
                if mode == "evaluation":
                    _precision(report, weights, both)
    with step("dropout", "comparing dropout"):
        dropout.compare(report, pt, tf, both)
    with step("statistics", "comparing running statistics"):
        running_statistics.compare(report, pt, tf, weights, both)
    with step("loss", "comparing the loss"):
        same_loss = losses.compare(report, pt, tf, both)
    with step("gradients", "comparing gradients"):
        grads = gradients.compare(report, pt, tf, weights, same_loss)
    with step("update", "comparing the optimizers"):
        settings = updates.compare(report, pt, tf, weights, grads)
    steps = ("gradients", "update", "steps")  # after what is frozen on one side both train alike
    apart = any(f.step in steps and f.cause != "frozen" for f in report.findings)
    if same_loss and settings and not apart:
        with step("steps", "training both"):
            updates.train(report, pt, tf, weights, settings, batches)


def _copied(report: Report, module: Any, pt: Any, tf: Any) -> Any:
    """The match of both models' weights, which are copied by the file, or by the match."""
    from bench.port.weights import Weights

    report.copied = not hasattr(module, "copy_weights")
    if not report.copied:
        user_model.call("copy_weights", module.__file__, module.copy_weights, pt.model, tf.model)
    _inputs(report, pt, tf)
    weights = Weights(pt, tf, (pt.trace(), tf.trace()))
    report.matches, report.code = weights.matches(), weights.code()
    for side, names in zip(("PyTorch", "TensorFlow"), weights.left, strict=True):
        if names:
            report.notes.append(f"weights of {side} without a match: {', '.join(names[:5])}")
    if report.copied:
        report.notes.append(
            "the file has no copy_weights, so both models start from different initial values; "
            "the match has copied those of PyTorch to TensorFlow"
        )
        for pair in weights.pairs:
            weights.copy(pair)
    return weights


def _precision(report: Report, weights: Any, both: Any) -> None:
    """Add the layers whose weights are float64 on one side: results differ by rounding only."""
    mixed = []
    for pair in weights.pairs:
        one = pair.transfers[0]
        types = [str(kind) for kind in (one.variable.dtype, weights.state[one.names[0]].dtype)]
        if ("float64" in types[0]) != ("float64" in types[1]):
            mixed.append(pair)
    if mixed:
        words = ("outputs, up to rounding", "float64")
        report.add("evaluation", mixed[0].layers, both.size, both.bound, *words, places=len(mixed))


def _inputs(report: Report, pt: Any, tf: Any) -> None:
    """Whether both models are given the same batch, in whatever layout."""
    ours, theirs = ([numpy(leaf) for leaf in user_model.leaves(side.x)] for side in (pt, tf))
    for one, other in zip(ours, theirs, strict=False):
        size = closest(one, other)
        # Of inputs by name the order says nothing, and one such as segments is constant.
        known = any(closest(array, other) <= 1e-6 for array in ours)
        if size <= 1e-6 or (isinstance(pt.x, dict) and (known or np.ptp(other.astype(float)) == 0)):
            continue
        reshaped = one.size == other.size and np.array_equal(one.reshape(other.shape), other)
        key = "data_format" if reshaped else None
        report.add("input", ("", ""), size, 1e-6, "nothing", key)
        return
    report.equal.append("the batch")
