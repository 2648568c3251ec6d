"""The loss of equal outputs, and the settings of a loss that explain a difference.

How a loss treats one output and its target is seen by how it changes when that output is drawn
again. Each formula of a grid is compared with these changes on both sides.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product, starmap
from typing import Any

import numpy as np
import tensorflow
import torch

from bench.port.causes import LOSSES
from bench.port.report import Report
from bench.port.values import numpy, turned_as
from shared import user_model

BOUND, DRAWS = 1e-5, 3
SMOOTHINGS = (0.0, 0.1, 0.05, 0.2, 0.01, 0.15, 0.3)
IGNORED, MOST_CLASSES = (-100, -1, 0, 255), 12  # labels that may be left out
DELTAS = (1.0, 0.5, 2.0, 0.1)
COUNTED = "mean of those that count"
REDUCTIONS = ("mean", "sum", COUNTED, "sum over the batch")


@dataclass(frozen=True)
class Formula:
    """A loss of an output: its kind, its input, and its settings."""

    kind: str
    base: str = "logits"
    smoothing: float = 0.0
    ignored: int | None = None
    reduction: str = "mean"
    delta: float = 1.0


def compare(report: Report, pt: Any, tf: Any, both: Any) -> bool:
    """Add a finding if the losses differ; returns whether they are equal."""
    ours, theirs = float(pt.loss(both.pt.output)), float(tf.loss(both.tf.output))
    tf.call(tf.x, training=False)
    penalty = float(tf.penalty())
    size = _apart(ours, theirs + penalty)
    if size <= BOUND:
        report.equal.append(f"the loss, {ours:.4g}")
        return True
    key, values = "regularisation", ("", "")
    if not penalty or _apart(ours, theirs) > BOUND:
        key, values = _cause(pt, both, _draws(pt, tf, both))
    report.add("loss", ("", ""), size, BOUND, "all outputs", key, values)
    return False


def _apart(a: float, b: float) -> float:
    if not (np.isfinite(a) and np.isfinite(b)):
        return float("inf")
    return abs(a - b) / max(abs(a), abs(b), 1e-12)


@dataclass
class Draw:
    """One output drawn again on both sides: which it was, its numbers, and the losses."""

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
                _with_leaf(both.pt.output, a, torch.from_numpy(after)),
                _with_leaf(both.tf.output, b, tensorflow.constant(turn(after))),
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


def _cause(pt: Any, both: Any, draws: list[Draw]) -> tuple[str | None, tuple[str, str]]:
    """The setting in which the formulas of both sides differ, with its values."""
    targets = [numpy(leaf) for leaf in user_model.leaves(pt.y)]
    for place in range(len(both.pt.outputs)):
        of_place = [draw for draw in draws if draw.place == place]
        if all(_apart(*draw.changes) <= 1e-4 for draw in of_place):
            continue
        for target in targets:
            if best := _explained(of_place, target):
                return best
        ratios = [draw.changes[1] / draw.changes[0] for draw in of_place if draw.changes[0]]
        if ratios and np.ptp(ratios) <= 1e-3 * abs(np.mean(ratios)):
            ratio = float(np.mean(ratios))
            a, b = ("'mean'", "'sum'") if ratio > 1 else ("'sum'", "'mean'")
            return "loss_reduction", (f"{a} (TensorFlow's is {ratio:.4g} times)", b)
    return None, ("", "")


def _explained(draws: list[Draw], target: np.ndarray) -> tuple | None:
    sides: tuple[list, list] = ([], [])
    formulas, axis = _formulas(draws[0].before, target)
    for formula in formulas:
        with np.errstate(all="ignore"):
            values = [_value(formula, draw.after, target, axis)
                      - _value(formula, draw.before, target, axis) for draw in draws]  # fmt: skip
        for side, fitting in enumerate(sides):
            if all(_is_change(v, d, side) for v, d in zip(values, draws, strict=True)):
                fitting.append(formula)
    pairs = [(_differences(a, b), a, b) for a, b in product(*sides) if a != b]
    if not pairs:
        return None
    differences, a, b = min(pairs, key=lambda entry: (len(entry[0]), _plainness(entry[1:])))
    key = next(k for k, cause in LOSSES.items() if set(cause.settings) & set(differences))
    if key == "huber_delta" and not {a.kind, b.kind} <= {"huber", "smooth_l1"}:
        key = None
    return key, (_written(key, a), _written(key, b))


def _is_change(value: float, draw: Draw, side: int) -> bool:
    """Whether a formula's change is a side's, but for the rounding of its losses."""
    change, rounding = draw.changes[side], 2e-6 * abs(draw.whole[side])
    return abs(value - change) <= 1e-3 * abs(change) + rounding


def _plainness(formulas: tuple) -> int:
    return sum((f.smoothing > 0) + (f.ignored is not None) for f in formulas)


def _differences(a: Formula, b: Formula) -> list[str]:
    return [name for name in a.__match_args__ if getattr(a, name) != getattr(b, name)]


def _written(key: str | None, formula: Formula) -> str:
    """A formula's setting as the lines of a cause have it."""
    if key == "loss_logits":
        return str(formula.base == "logits")
    value = getattr(formula, LOSSES[key].settings[0]) if key else ""
    if key == "loss_reduction":
        return f"'{value}'"
    return str(-100 if key == "ignored_labels" and value is None else value)


def _formulas(output: np.ndarray, target: np.ndarray) -> tuple[Iterable[Formula], int]:
    """Losses that an output of this shape may have, with these targets; the axis of classes."""
    positive = output.min() >= 0 and output.max() <= 1
    for axis in dict.fromkeys((1, output.ndim - 1)):
        left = output.shape[:axis] + output.shape[axis + 1 :]
        if output.ndim > 1 and target.shape in (left, (*left, 1)) and target.dtype.kind in "iu":
            bases = ("logits", "probabilities") if positive else ("logits", "log-probabilities")
            labels = dict.fromkeys((*IGNORED, *np.unique(target)[:MOST_CLASSES].tolist()))
            ignored = [None, *(label for label in labels if (target == label).any())]
            grid = product(("classes",), bases, SMOOTHINGS, ignored, REDUCTIONS)
            formulas = starmap(Formula, grid)
            return (f for f in formulas if (f.ignored, f.reduction) != (None, COUNTED)), axis
    if output.shape != target.shape:
        return (), 0
    formulas = []
    if target.min() >= 0 and target.max() <= 1:
        bases = ("logits", "probabilities")
        grid = product(("binary",), bases, SMOOTHINGS, (None,), REDUCTIONS)
        formulas += starmap(Formula, grid)
    kinds = (("squares", 1.0), ("absolute", 1.0), *product(("huber", "smooth_l1"), DELTAS))
    for (kind, delta), how in product(kinds, REDUCTIONS):
        formulas.append(Formula(kind, "", reduction=how, delta=delta))
    return formulas, 0


def _value(formula: Formula, z: np.ndarray, target: np.ndarray, axis: int) -> float:
    """The loss of an output."""
    losses = {"classes": _of_classes, "binary": _of_two}.get(formula.kind, _of_distances)
    values = losses(formula, z.astype(np.float64), target, axis)
    kept = np.ones(values.shape)
    if formula.ignored is not None:
        kept = (target != formula.ignored).reshape(values.shape).astype(float)
    counts = {"mean": values.size, "sum": 1, COUNTED: max(kept.sum(), 1)}
    return float((values * kept).sum()) / counts.get(formula.reduction, len(values))


def _of_classes(formula: Formula, z: np.ndarray, target: np.ndarray, axis: int) -> np.ndarray:
    z = np.moveaxis(z, axis, -1)
    if formula.base == "probabilities":
        z = np.log(np.clip(z / z.sum(-1, keepdims=True), 1e-7, 1 - 1e-7))
    elif formula.base == "logits":
        z = z - z.max(-1, keepdims=True)
        z = z - np.log(np.exp(z).sum(-1, keepdims=True))
    place = np.clip(target.reshape(z.shape[:-1]), 0, z.shape[-1] - 1)[..., None]
    right = -np.take_along_axis(z, place, -1)[..., 0]
    return (1 - formula.smoothing) * right - formula.smoothing * z.mean(-1)


def _of_two(formula: Formula, z: np.ndarray, target: np.ndarray, axis: int) -> np.ndarray:
    y = target * (1 - formula.smoothing) + 0.5 * formula.smoothing
    if formula.base == "logits":
        return np.maximum(z, 0) - z * y + np.log1p(np.exp(-np.abs(z)))
    p = np.clip(z, 1e-7, 1 - 1e-7)
    return -(y * np.log(p) + (1 - y) * np.log(1 - p))


def _of_distances(formula: Formula, z: np.ndarray, target: np.ndarray, axis: int) -> np.ndarray:
    apart, delta = np.abs(z - target), formula.delta
    if formula.kind in ("squares", "absolute"):
        return apart**2 if formula.kind == "squares" else apart
    huber = np.where(apart < delta, 0.5 * apart**2, delta * (apart - 0.5 * delta))
    return huber if formula.kind == "huber" else huber / delta
