"""The loss of equal outputs, and the settings of a loss that explain a difference.

What a loss does to one output and one target is told by how it changes when that output is drawn
anew. Each formula of a grid is held against these changes on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from bench.port.causes import CATALOGUE
from bench.port.report import Finding
from bench.port.values import numpy, turned_as
from shared import user_model

BOUND, DRAWS = 1e-5, 3
SMOOTHINGS = (0.0, 0.1, 0.05, 0.2, 0.01, 0.15, 0.3)
IGNORED, MOST_CLASSES = (-100, -1, 0, 255), 12  # labels that may be left out
DELTAS = (1.0, 0.5, 2.0, 0.1)
REDUCTIONS = ("mean", "sum", "mean of those that count", "sum over the batch")


@dataclass(frozen=True)
class Formula:
    """A loss of an output: its kind, what it takes, and its settings."""

    kind: str
    base: str = "logits"
    smoothing: float = 0.0
    ignored: int | None = None
    reduction: str = "mean"
    delta: float = 1.0


def compare(outcome: Any, pt: Any, tf: Any, both: Any) -> bool:
    """Add a finding where the losses differ; whether they are equal."""
    ours = float(pt.loss(both.pt.output))
    theirs = float(tf.loss(both.tf.output))
    penalty = _penalty(tf)
    size = _apart(ours, theirs + penalty)
    if size <= BOUND:
        outcome.equal.append(f"the loss, {ours:.4g}")
        return True
    if penalty and _apart(ours, theirs) <= BOUND:
        _add(outcome, "regularisation", size, "", "")
        return False
    draws = _draws(pt, tf, both)
    key, a, b = _cause(pt, tf, both, draws) if draws else (None, "", "")
    _add(outcome, key, size, a, b)
    return False


def _penalty(tf: Any) -> float:
    tf.call(tf.x, training=False)
    return float(tf.penalty())


def _apart(a: float, b: float) -> float:
    if not (np.isfinite(a) and np.isfinite(b)):
        return float("inf")
    return abs(a - b) / max(abs(a), abs(b), 1e-12)


def _add(outcome: Any, key: str | None, size: float, a: str, b: str) -> None:
    before = "all outputs"
    if key is None:
        outcome.findings.append(Finding("loss", "", "", size, BOUND, before))
        return
    cause = CATALOGUE[key]
    words = [text.format(a=a, b=b) for text in (cause.change_pt, cause.change_tf)]
    outcome.findings.append(
        Finding("loss", "", "", size, BOUND, before, key, True, *words, cause.why)
    )


@dataclass
class Draw:
    """One output drawn anew on both sides: which it was, its numbers, and the losses."""

    place: int
    before: np.ndarray
    after: np.ndarray
    changes: tuple[float, float]  # of PyTorch's loss and of TensorFlow's
    whole: tuple[float, float]


def _draws(pt: Any, tf: Any, both: Any) -> list[Draw]:
    random, draws = np.random.default_rng(0), []
    first = [float(pt.loss(both.pt.output)), float(tf.loss(both.tf.output))]
    for place, (a, b) in enumerate(zip(both.pt.outputs, both.tf.outputs, strict=True)):
        before = numpy(a)
        turn = turned_as(before, numpy(b))
        for _ in range(DRAWS):
            after = _redrawn(before, random)
            trees = [
                _with_leaf(both.pt.output, a, pt.tensor(after)),
                _with_leaf(both.tf.output, b, tf.tensor(turn(after))),
            ]
            try:
                losses = float(pt.loss(trees[0])), float(tf.loss(trees[1]))
            except Exception:  # a loss that takes more than the output's numbers
                return []
            changes = losses[0] - first[0], losses[1] - first[1]
            draws.append(Draw(place, before, after, changes, losses))
    return draws


def _redrawn(before: np.ndarray, random: np.random.Generator) -> np.ndarray:
    after = before + random.standard_normal(before.shape) * max(before.std(), 0.1)
    if before.min() >= 0 and before.max() <= 1:  # probabilities
        after = before * random.uniform(0.05, 1.0, before.shape)
        for axis in (1, -1):
            if before.ndim > 1 and np.allclose(before.sum(axis), 1, atol=1e-4):
                after = after / after.sum(axis, keepdims=True)
                break
    return after.astype(before.dtype)


def _with_leaf(tree: Any, old: Any, new: Any) -> Any:
    if hasattr(tree, "logits"):
        return user_model.Logits(new)
    return user_model.mapped(lambda leaf: new if leaf is old else leaf, tree)


def _cause(pt: Any, tf: Any, both: Any, draws: list[Draw]) -> tuple[str | None, str, str]:
    """The setting in which the formulas of both sides differ, with its values."""
    targets = [numpy(leaf) for leaf in user_model.leaves(pt.y)]
    for place in range(len(both.pt.outputs)):
        of_place = [draw for draw in draws if draw.place == place]
        if all(_apart(*draw.changes) <= 1e-4 for draw in of_place):
            continue
        for target in targets:
            best = _explained(of_place, target)
            if best:
                return best
        ratios = [draw.changes[1] / draw.changes[0] for draw in of_place if draw.changes[0]]
        if ratios and np.ptp(ratios) <= 1e-3 * abs(np.mean(ratios)):
            ratio = float(np.mean(ratios))
            a, b = ("mean", "sum") if ratio > 1 else ("sum", "mean")
            return "loss_reduction", f"{a} (TensorFlow's is {ratio:.4g} times)", b
    return None, "", ""


def _explained(draws: list[Draw], target: np.ndarray) -> tuple | None:
    sides: tuple[list, list] = ([], [])
    for formula, function in _formulas(draws[0].before, target):
        with np.errstate(all="ignore"):
            values = [function(draw.after) - function(draw.before) for draw in draws]
        for side, formulas in enumerate(sides):
            if all(_is_change(v, d, side) for v, d in zip(values, draws, strict=True)):
                formulas.append(formula)
    pairs = [(_differences(a, b), a, b) for a, b in product(*sides)]
    pairs = [entry for entry in pairs if entry[0]]
    if not pairs:
        return None
    differences, a, b = min(pairs, key=lambda entry: (len(entry[0]), _plainness(entry[1:])))
    return _named(differences, a, b)


def _is_change(value: float, draw: Draw, side: int) -> bool:
    """Whether a formula's change is a side's, but for the rounding of its losses."""
    change, rounding = draw.changes[side], 2e-6 * abs(draw.whole[side])
    return abs(value - change) <= 1e-3 * abs(change) + rounding


def _plainness(formulas: tuple) -> int:
    return sum((f.smoothing > 0) + (f.ignored is not None) for f in formulas)


def _differences(a: Formula, b: Formula) -> list[str]:
    names = ("kind", "base", "smoothing", "ignored", "reduction", "delta")
    return [name for name in names if getattr(a, name) != getattr(b, name)]


def _named(differences: list[str], a: Formula, b: Formula) -> tuple[str | None, str, str]:
    if "base" in differences:
        words = "F.cross_entropy(logits)" if b.base == "logits" else "F.nll_loss(output.log(), y)"
        return "loss_logits", str(a.base == "logits"), words
    if "ignored" in differences:
        return "ignored_labels", str(a.ignored), "-100" if b.ignored is None else str(b.ignored)
    if "smoothing" in differences:
        return "label_smoothing", f"{a.smoothing:g}", f"{b.smoothing:g}"
    if "delta" in differences or "kind" in differences:
        key = "huber_delta" if {a.kind, b.kind} <= {"huber", "smooth_l1"} else None
        return key, f"{a.delta:g}", f"{b.delta:g}"
    return "loss_reduction", a.reduction, b.reduction


Function = Callable[[np.ndarray], float]


def _formulas(output: np.ndarray, target: np.ndarray) -> Iterator[tuple[Formula, Function]]:
    """Losses that an output of this shape may have, with these targets."""
    for axis in dict.fromkeys((1, output.ndim - 1)):
        left = output.shape[:axis] + output.shape[axis + 1 :]
        if output.ndim > 1 and target.shape in (left, (*left, 1)) and target.dtype.kind in "iu":
            yield from _classes(output, target.reshape(left), axis)
            return
    if output.shape == target.shape:
        if target.min() >= 0 and target.max() <= 1:
            yield from _binary(output, target.astype(np.float64))
        yield from _distances(target.astype(np.float64))


def _reduced(losses: np.ndarray, kept: np.ndarray, how: str) -> float:
    total = float((losses * kept).sum())
    counts = {"mean": losses.size, "sum": 1, "mean of those that count": max(kept.sum(), 1)}
    return total / counts.get(how, len(losses))


def _classes(
    output: np.ndarray, target: np.ndarray, axis: int
) -> Iterator[tuple[Formula, Function]]:
    count = output.shape[axis]

    def losses(z: np.ndarray, base: str, smoothing: float) -> np.ndarray:
        z = np.moveaxis(z.astype(np.float64), axis, -1)
        if base == "probabilities":
            z = np.log(np.clip(z / z.sum(-1, keepdims=True), 1e-7, 1 - 1e-7))
        elif base == "logits":
            z = z - z.max(-1, keepdims=True)
            z = z - np.log(np.exp(z).sum(-1, keepdims=True))
        place = np.clip(target, 0, count - 1)[..., None]
        right = -np.take_along_axis(z, place, -1)[..., 0]
        return (1 - smoothing) * right - smoothing * z.mean(-1)

    positive = output.min() >= 0 and output.max() <= 1
    bases = ("logits", "probabilities") if positive else ("logits", "log-probabilities")
    there = np.unique(target)[:MOST_CLASSES].tolist()
    ignored = [None, *dict.fromkeys(i for i in (*IGNORED, *there) if (target == i).any())]
    for base, smoothing, leave, how in product(bases, SMOOTHINGS, ignored, REDUCTIONS):
        kept = np.ones(target.shape) if leave is None else (target != leave).astype(float)
        if leave is None and how == "mean of those that count":
            continue

        def function(z, base=base, smoothing=smoothing, kept=kept, how=how) -> float:
            return _reduced(losses(z, base, smoothing), kept, how)

        yield Formula("classes", base, smoothing, leave, how), function


def _binary(output: np.ndarray, target: np.ndarray) -> Iterator[tuple[Formula, Function]]:
    def losses(z: np.ndarray, base: str, smoothing: float) -> np.ndarray:
        z, y = z.astype(np.float64), target * (1 - smoothing) + 0.5 * smoothing
        if base == "logits":
            return np.maximum(z, 0) - z * y + np.log1p(np.exp(-np.abs(z)))
        p = np.clip(z, 1e-7, 1 - 1e-7)
        return -(y * np.log(p) + (1 - y) * np.log(1 - p))

    kept = np.ones(target.shape)
    for base, smoothing, how in product(("logits", "probabilities"), SMOOTHINGS, REDUCTIONS):

        def function(z, base=base, smoothing=smoothing, how=how) -> float:
            return _reduced(losses(z, base, smoothing), kept, how)

        yield Formula("binary", base, smoothing, None, how), function


def _distances(target: np.ndarray) -> Iterator[tuple[Formula, Function]]:
    def losses(z: np.ndarray, kind: str, delta: float) -> np.ndarray:
        apart = np.abs(z.astype(np.float64) - target)
        if kind == "squares":
            return apart**2
        if kind == "absolute":
            return apart
        huber = np.where(apart < delta, 0.5 * apart**2, delta * (apart - 0.5 * delta))
        return huber if kind == "huber" else huber / delta

    kept = np.ones(target.shape)
    kinds = ("squares", "absolute", "huber", "smooth_l1")
    for kind, delta, how in product(kinds, DELTAS, REDUCTIONS):

        def function(z, kind=kind, delta=delta, how=how) -> float:
            return _reduced(losses(z, kind, delta), kept, how)

        if delta == 1.0 or kind in ("huber", "smooth_l1"):
            yield Formula(kind, "", 0.0, None, how, delta), function
