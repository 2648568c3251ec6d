"""Gradients of every weight, of the file's loss where it is equal and of the outputs otherwise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
import torch

from bench.port import pytorch_side, tensorflow_side
from bench.port.pytorch_side import Event, Patch
from bench.port.report import Report
from bench.port.values import TIMES_ROUNDING, distance, numpy, outputs, turned_as

LEAST_BOUND, WITHOUT_ROUNDING = 1e-5, 1e-3
SCATTER = 5.0  # times what weights that are a little off do


@dataclass
class Gradients:
    """PyTorch's by name and TensorFlow's by the identity of the variable, as they came."""

    pt: dict[str, np.ndarray]
    tf: dict[int, Any]


def compare(report: Report, pt: Any, side: Any, weights: Any, same_loss: bool) -> Gradients | None:
    """Add findings; the gradients, None where they differ without a cause."""
    scales = None if same_loss else _scales(pt, side)
    theirs = _tensorflow(side, weights, scales)
    ours = _pytorch(pt, scales)
    bounds = _bounds(pt, weights, ours, scales)
    before = "outputs" + ("" if report.has("loss") else " and the loss")
    wrong = _unequal(weights, ours, theirs, bounds)
    if wrong:
        pair, size, bound = wrong[-1]  # the nearest to the loss
        key, values = _cause(pt, side, weights, theirs, bounds, scales, wrong)
        report.add("gradients", pair.layers, size, bound, before, key, values)
        if key is None:
            return None
        ours = _pytorch(pt, scales)
    frozen = any(finding.cause == "norm_frozen" for finding in report.findings)
    for pair in weights.pairs:
        change = _train_alike(pt, side, pair)
        # What a frozen normalisation does not train is a part of that cause.
        if change and not (frozen and pair.pt.kind == "batch_norm"):
            report.add("gradients", pair.layers, 1.0, LEAST_BOUND, before, "frozen", change)
    if not report.has("gradients"):
        report.equal.append(f"gradients of all {len(weights.transfers())} weights")
    return Gradients(ours, theirs)


def _scales(pt: Any, side: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    """Fixed random factors of the outputs, whose sum stands for a loss."""
    random, scales = np.random.default_rng(0), []
    for a, b in zip(pt.trace().outputs, side.trace().outputs, strict=True):
        array = random.standard_normal(tuple(a.shape)).astype(np.float32)
        scales.append((array, turned_as(numpy(a), numpy(b))(array)))
    return scales


def _pytorch(pt: Any, scales: Any) -> dict[str, np.ndarray]:
    """Gradients of all parameters, trained or not."""
    parameters = {n: p for n, p in pt.model.named_parameters() if p.is_floating_point()}
    frozen = [p for p in parameters.values() if not p.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    with pytorch_side.kept(pt.model.buffers()):
        with pt.calls(training=True):
            output = pt.call(pt.x)
        value = pt.loss(output) if scales is None else _weighted(output, scales)
        grads = torch.autograd.grad(value, list(parameters.values()), allow_unused=True)
    for parameter in frozen:
        parameter.requires_grad_(False)
    return {
        name: np.zeros(tuple(p.shape), np.float32) if grad is None else grad.detach().numpy()
        for (name, p), grad in zip(parameters.items(), grads, strict=True)
    }


def _weighted(output: Any, scales: Any) -> torch.Tensor:
    parts = zip(outputs(output), scales, strict=True)
    return sum((leaf * torch.from_numpy(scale[0])).sum() for leaf, scale in parts)


def _tensorflow(side: Any, weights: Any, scales: Any) -> dict[int, Any]:
    variables = [t.variable for _, t in weights.transfers() if not t.role.startswith("moving")]
    with (
        tensorflow_side.kept(side.model.non_trainable_variables),
        side.without_dropout(),
        tf.GradientTape(watch_accessed_variables=False) as tape,
    ):
        for variable in variables:
            tape.watch(variable.value)
        output = side.call(side.x, training=True)
        if scales is None:
            value = side.loss(output) + side.penalty()
        else:
            parts = zip(outputs(output), scales, strict=True)
            value = sum(tf.reduce_sum(leaf * scale[1]) for leaf, scale in parts)
    grads = tape.gradient(value, [variable.value for variable in variables])
    return {id(v): g for v, g in zip(variables, grads, strict=True)}


def dense(grad: Any, variable: Any) -> np.ndarray:
    """A gradient as an array: zeros where there is none, slices added up."""
    if grad is None:
        return np.zeros(tuple(variable.shape), np.float32)
    return tf.convert_to_tensor(grad).numpy()


def _bounds(pt: Any, weights: Any, ours: dict, scales: Any) -> dict[int, float]:
    """By variable of Keras: what rounding does to its gradient, by a run in float64 and by one of
    weights that are a little off, in which units on the edge of a ReLU fall to its other side."""
    transfers = [t for _, t in weights.transfers() if not t.role.startswith("moving")]
    try:
        with pt.in_double():
            exact = _pytorch(pt, scales)
    except Exception:  # the model is written for float32
        return {id(t.variable): WITHOUT_ROUNDING for t in transfers}
    with pt.shaken():
        shaken = _pytorch(pt, scales)
    bounds = {}
    for transfer in transfers:
        one, double, other = (transfer.convert(g, gradient=True) for g in (ours, exact, shaken))
        sizes = TIMES_ROUNDING * distance(one, double), SCATTER * distance(one, other)
        bounds[id(transfer.variable)] = max(*sizes, LEAST_BOUND)
    return bounds


def _unequal(weights: Any, ours: dict, theirs: dict, bounds: dict) -> list[tuple]:
    """(pair, size, bound) of the weights whose gradients differ, in the order of execution."""
    wrong = []
    for pair, transfer in weights.transfers():
        if transfer.role.startswith("moving"):
            continue
        a = transfer.convert(ours, gradient=True)
        b = dense(theirs[id(transfer.variable)], transfer.variable)
        bound, size = bounds[id(transfer.variable)], distance(a, b)
        if size > bound:
            wrong.append((pair, size, bound))
    return wrong


def _train_alike(pt: Any, side: Any, pair: Any) -> tuple[str, str] | None:
    """Have PyTorch train a pair's weights only if TensorFlow does; who did, where one did."""
    trained = {id(v) for v in side.model.trainable_variables}
    theirs = any(id(transfer.variable) in trained for transfer in pair.transfers)
    every, groups = dict(pt.model.named_parameters()), pt.optimizer.param_groups
    names = {name for transfer in pair.transfers for name in transfer.names if name in every}
    given = {id(parameter) for group in groups for parameter in group["params"]}
    ours = any(every[name].requires_grad and id(every[name]) in given for name in names)
    if ours == theirs or not names:
        return None
    for name in names:
        every[name].requires_grad_(theirs)
        if theirs and id(every[name]) not in given:
            groups[0]["params"].append(every[name])
    return str(ours), str(theirs)


def _cause(pt, side, weights, theirs, bounds, scales, wrong) -> tuple:
    """The first change with which all gradients are equal, and its values."""

    def equal() -> bool:
        return not _unequal(weights, _pytorch(pt, scales), theirs, bounds)

    for pair, _, _ in wrong:
        module = pt.module(pair.pt.name)
        if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
            kept, module.padding_idx = module.padding_idx, None
            if equal():
                return "padding_token", ("", "")
            module.padding_idx = kept
    events = pt.trace(training=True).events
    patches: list[tuple[Patch, tuple[str, str]]] = []
    if any(event.name == "detach" for event in events):
        undone = lambda e: e.args[0] * 1.0 if e.name == "detach" else None  # noqa: E731
        patches.append((undone, ("`tf.stop_gradient` there", "take the `detach()` away")))
    index = side.trace(training=True).index
    every = [entry for group in index.by_count.values() for entry in group]
    for entry in (entry for entry in every if entry.operator == "StopGradient"):
        event = next((e for e in events if index.match(numpy(e.out), 1e-4, entry.layer)), None)
        if event:
            patches.append((_detached(event), ("no `stop_gradient`", "`detach()` there")))
    for patch, values in patches:
        pt.patches.append(patch)
        if equal():
            return "stopped_gradient", values
        pt.patches.remove(patch)
    return None, ("", "")


def _detached(event: Event) -> Patch:
    def patch(other: Event) -> Any:
        again = other.is_again(event)
        return other.function(*other.args, **other.kwargs).detach() if again else None

    return patch
