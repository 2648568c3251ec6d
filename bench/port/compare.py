"""Compares the two models of a file, step by step: batch, weights, outputs, loss, training."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bench.port.report import Certificate, Finding, Match, Report
from shared import user_model
from shared.user_model import SEED, BadFile, File

ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",  # the comparison runs on the CPU, where there is no TF32
    "KERAS_BACKEND": "tensorflow",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
MOST_NUMBERS = 2_000_000  # of inputs; the batch is cut down to these


@dataclass
class Comparison:
    """What is known so far."""

    say: Callable[[str], None]
    findings: list[Finding] = field(default_factory=list)
    equal: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    matches: tuple[Match, ...] = ()
    certificate: Certificate | None = None
    copied: bool = False
    code: str = ""
    seconds: dict[str, float] = field(default_factory=dict)

    def report(self) -> Report:
        """What is answered."""
        return Report(
            tuple(self.findings), self.matches, tuple(self.equal), tuple(self.notes),
            self.certificate, self.copied, self.seconds, self.code,
        )  # fmt: skip


def port(file: File, say: Callable[[str], None] = print) -> Report:
    """Compare the models of a file. Raises BadFile with one line that says what is wrong with it.

    say: is told what is looked at. Both frameworks are imported here, and run on the CPU.
    """
    if len(file.sides) < 2:
        raise BadFile(f"{file.path.name} needs both pytorch() and tensorflow(): write the other")
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
        x, y = batches[name](0)
        try:
            sides.append(side(_maker(name, module, make), x, y))
            sides[-1].check()
        except BadFile as error:
            raise user_model.placed(error, file.path) from error
    outcome = Comparison(say)
    _compare(outcome, module, *sides, batches)
    return outcome.report()


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


def _compare(outcome: Comparison, module: Any, pt: Any, tf: Any, batches: dict) -> None:
    """Go through the steps until one differs without a cause."""
    from bench.port import dropout, gradients, losses, running_statistics, updates
    from bench.port.forward import Forward
    from bench.port.weights import Weights

    clock = _Clock(outcome.seconds)
    has_copy = hasattr(module, "copy_weights")
    if has_copy:
        arguments = (module.copy_weights, pt.model, tf.model)
        user_model.call("copy_weights", module.__file__, *arguments)
    _inputs(outcome, pt, tf)
    weights = Weights(pt, tf, (pt.trace(), tf.trace()))
    outcome.matches = weights.matches()
    outcome.copied, outcome.code = not has_copy, weights.code()
    for side, names in zip(("PyTorch", "TensorFlow"), weights.left, strict=True):
        if names:
            outcome.notes.append(f"weights of {side} without a match: {', '.join(names[:5])}")
    if not has_copy:
        outcome.notes.append(
            "the file has no copy_weights, so that both models begin with other initial values; "
            "they were copied by the match"
        )
        for pair in weights.pairs:
            weights.copy(pair)
    clock("weights")
    forward = Forward(pt, tf, weights, outcome.say, outcome.findings)
    for step, words in (
        ("evaluation", "outputs in evaluation mode"),
        ("training", "outputs in training mode, dropout off"),
    ):
        outcome.say(f"comparing {words}")
        both, before = None, len(outcome.findings)
        both = forward.search(step)
        clock(step)
        if both is None:
            return
        if len(outcome.findings) == before:
            outcome.equal.append(f"{words} ({both.size:.0e}, bound {both.bound:.0e})")
            if step == "evaluation":
                _precision(outcome, weights, both)
    outcome.say("comparing dropout")
    dropout.compare(outcome, pt, tf, weights, both)
    clock("dropout")
    running_statistics.compare(outcome, pt, tf, weights, both)
    clock("statistics")
    outcome.say("comparing the loss")
    same_loss = losses.compare(outcome, pt, tf, both)
    clock("loss")
    outcome.say("comparing gradients")
    grads = gradients.compare(outcome, pt, tf, weights, same_loss)
    clock("gradients")
    outcome.say("comparing the optimizers")
    settings = updates.compare(outcome, pt, tf, weights, grads)
    clock("update")
    trained_alike = not any(
        f.step in ("gradients", "update", "steps") or f.cause == "norm_frozen"
        for f in outcome.findings
    )
    if same_loss and trained_alike and settings is not None:
        outcome.say("training both")
        updates.train(outcome, pt, tf, weights, settings, batches)
        clock("steps")


def _precision(outcome: Comparison, weights: Any, both: Any) -> None:
    """Add the layers whose weights are float64 on one side: results differ by rounding only."""
    from bench.port.causes import CATALOGUE

    def is_double(dtype: Any) -> bool:
        return "float64" in str(dtype)

    mixed = [
        pair
        for pair in weights.pairs
        for transfer in pair.transfers[:1]
        if is_double(transfer.variable.dtype) != is_double(weights.state[transfer.names[0]].dtype)
    ]
    if mixed:
        cause = CATALOGUE["float64"]
        words = (cause.key, True, cause.change_pt, cause.change_tf, cause.why)
        before = "outputs, up to rounding"
        outcome.findings.append(
            Finding(
                "evaluation", *mixed[0].layers, both.size, both.bound, before, *words, len(mixed)
            )
        )


class _Clock:
    def __init__(self, seconds: dict[str, float]):
        self.seconds, self.last = seconds, time.monotonic()

    def __call__(self, step: str) -> None:
        now = time.monotonic()
        self.seconds[step] = now - self.last
        self.last = now


def _inputs(outcome: Comparison, pt: Any, tf: Any) -> None:
    """Whether both models are given the same batch, in whatever layout."""
    from bench.port.causes import CATALOGUE
    from bench.port.values import closest, numpy

    ours, theirs = (user_model.leaves(side.x) for side in (pt, tf))
    for a, b in zip(ours, theirs, strict=False):
        one, other = numpy(a), numpy(b)
        size = closest(one, other)
        # Of inputs by name the order says nothing, and one such as segments is constant.
        known = any(closest(numpy(each), other) <= 1e-6 for each in ours)
        if size <= 1e-6 or (isinstance(pt.x, dict) and (known or np.ptp(other.astype(float)) == 0)):
            continue
        reshaped = one.size == other.size and np.array_equal(one.reshape(other.shape), other)
        cause = CATALOGUE["data_format"] if reshaped else None
        words = (cause.key, True, cause.change_pt, cause.change_tf, cause.why) if cause else ()
        outcome.findings.append(Finding("input", "", "", size, 1e-6, "nothing yet", *words))
        return
    outcome.equal.append("the batch")
