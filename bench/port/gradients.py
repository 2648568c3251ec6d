"""Gradients of every weight, of the file's loss where it is equal and of the outputs otherwise."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
import torch

from bench.port.causes import CATALOGUE
from bench.port.report import Finding
from bench.port.values import TIMES_ROUNDING, distance, numpy, turned_as
from shared import user_model

LEAST_BOUND, WITHOUT_ROUNDING = 1e-5, 1e-3


@dataclass
class Gradients:
    """PyTorch's by name and TensorFlow's by the identity of the variable, as they came."""

    pt: dict[str, np.ndarray]
    tf: dict[int, Any]


def compare(outcome: Any, pt: Any, side: Any, weights: Any, same_loss: bool) -> Gradients | None:
    """Add findings; the gradients, None where they differ without a cause."""
    scales = None if same_loss else _scales(pt, side)
    theirs = _tensorflow(side, weights, scales)
    ours = _pytorch(pt, scales)
    bounds = _bounds(pt, weights, ours, scales)
    wrong = _unequal(weights, ours, theirs, bounds)
    resolved = not wrong
    if wrong:
        pair, size, bound = wrong[-1]  # the nearest to the loss
        key, a, b = _cause(pt, side, weights, theirs, bounds, scales, wrong)
        _add(outcome, pair, size, bound, key, a, b)
        resolved = key is not None
        ours = _pytorch(pt, scales)
    for pair in weights.pairs:
        trained = _trained(pt, side, pair)
        if trained[0] != trained[1] and "norm_frozen" not in [f.cause for f in outcome.findings]:
            a, b = map(str, trained)
            _add(outcome, pair, 1.0, LEAST_BOUND, "frozen", a, b)
            break
    if resolved and not any(f.step == "gradients" for f in outcome.findings):
        outcome.equal.append(f"gradients of all {len(weights.transfers())} weights")
    return Gradients(ours, theirs) if resolved else None


def _add(outcome: Any, pair: Any, size: float, bound: float, key: str | None, a="", b="") -> None:
    before = "outputs" + (
        "" if any(f.step == "loss" for f in outcome.findings) else " and the loss"
    )
    names = pair.layers
    if key is None:
        outcome.findings.append(Finding("gradients", *names, size, bound, before))
        return
    cause = CATALOGUE[key]
    words = [text.format(a=a, b=b) for text in (cause.change_pt, cause.change_tf)]
    outcome.findings.append(
        Finding("gradients", *names, size, bound, before, key, True, *words, cause.why)
    )


def _scales(pt: Any, side: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    """Fixed random factors of the outputs, whose sum stands for a loss."""
    random, scales = np.random.default_rng(0), []
    for a, b in zip(pt.trace().outputs, side.trace().outputs, strict=True):
        array = random.standard_normal(tuple(a.shape)).astype(np.float32)
        scales.append((array, turned_as(numpy(a), numpy(b))(array)))
    return scales


def _pytorch(pt: Any, scales: Any, model: Any = None, x: Any = None) -> dict[str, np.ndarray]:
    """Gradients of all parameters, trained or not."""
    kept, pt.model = pt.model, model or pt.model
    x = pt.x if x is None else x
    parameters = {n: p for n, p in pt.model.named_parameters() if p.is_floating_point()}
    frozen = [p for p in parameters.values() if not p.requires_grad]
    buffers = {n: b.clone() for n, b in pt.model.named_buffers()}
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        with pt.calls(training=True):
            output = pt.call(x)
        value = pt.loss(output) if scales is None else _weighted(output, scales)
        grads = torch.autograd.grad(value, list(parameters.values()), allow_unused=True)
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
        for name, buffer in pt.model.named_buffers():
            buffer.data.copy_(buffers[name])
        pt.model = kept
    return {
        name: np.zeros(tuple(p.shape), np.float32) if grad is None else grad.detach().numpy()
        for (name, p), grad in zip(parameters.items(), grads, strict=True)
    }


def _weighted(output: Any, scales: Any) -> torch.Tensor:
    from bench.port.pytorch_side import outputs

    parts = zip(outputs(output), scales, strict=True)
    return sum((leaf * torch.from_numpy(scale[0])).sum() for leaf, scale in parts)


def _tensorflow(side: Any, weights: Any, scales: Any) -> dict[int, Any]:
    variables = [t.variable for _, t in weights.transfers() if not t.role.startswith("moving")]
    state = [v.numpy() for v in side.model.non_trainable_variables]
    with side.without_dropout(), tf.GradientTape(watch_accessed_variables=False) as tape:
        for variable in variables:
            tape.watch(variable.value)
        output = side.call(side.x, training=True)
        if scales is None:
            value = side.loss(output) + side.penalty()
        else:
            from bench.port.tensorflow_side import outputs

            parts = zip(outputs(output), scales, strict=True)
            value = sum(tf.reduce_sum(leaf * scale[1]) for leaf, scale in parts)
    grads = tape.gradient(value, [variable.value for variable in variables])
    for variable, old in zip(side.model.non_trainable_variables, state, strict=True):
        variable.assign(old)
    return {id(v): g for v, g in zip(variables, grads, strict=True)}


def dense(grad: Any, variable: Any) -> np.ndarray:
    """A gradient as an array: zeros where there is none, slices added up."""
    if grad is None:
        return np.zeros(tuple(variable.shape), np.float32)
    return tf.convert_to_tensor(grad).numpy()


def _bounds(pt: Any, weights: Any, ours: dict, scales: Any) -> dict[int, float]:
    """By variable of Keras: what rounding does to its gradient, by a run in float64."""
    transfers = [t for _, t in weights.transfers() if not t.role.startswith("moving")]
    try:
        twin = copy.deepcopy(pt.model).double()
        x = user_model.mapped(lambda t: t.double() if t.is_floating_point() else t, pt.x)
        exact = _pytorch(pt, scales, twin, x)
    except Exception:  # the model is written for float32
        return {id(t.variable): WITHOUT_ROUNDING for t in transfers}
    bounds = {}
    for transfer in transfers:
        given = (transfer.convert(grads, gradient=True) for grads in (ours, exact))
        bounds[id(transfer.variable)] = max(TIMES_ROUNDING * distance(*given), LEAST_BOUND)
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


def _trained(pt: Any, side: Any, pair: Any) -> tuple[bool, bool]:
    ours = dict(pt.model.named_parameters())
    trained = {id(v) for v in side.model.trainable_variables}
    names = [n for t in pair.transfers for n in t.names if n in ours]
    variables = [t.variable for t in pair.transfers if not t.role.startswith("moving")]
    return any(ours[n].requires_grad for n in names), any(id(v) in trained for v in variables)


def _cause(pt, side, weights, theirs, bounds, scales, wrong) -> tuple[str | None, str, str]:
    """The first change with which all gradients are equal."""

    def equal() -> bool:
        return not _unequal(weights, _pytorch(pt, scales), theirs, bounds)

    for pair, _, _ in wrong:
        module = pt.module(pair.pt.name)
        if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
            kept, module.padding_idx = module.padding_idx, None
            if equal():
                return "padding_token", "", ""
            module.padding_idx = kept
    names = [event.name for event in pt.trace(training=True).events]
    patches: list[tuple[Callable, str, str]] = []
    if "detach" in names:
        undone = lambda e: e.args[0] * 1.0 if e.name == "detach" else None  # noqa: E731
        patches.append((undone, "a detach() that is taken away", "tf.stop_gradient there"))
    index = side.trace(training=True).index
    stopped = [
        e for group in index.by_count.values() for e in group if e.operator == "StopGradient"
    ]
    for entry in stopped:
        for event in pt.trace(training=True).events:
            if index.match(numpy(event.out), 1e-4, entry.layer):
                patches.append((_detached(event), "detach() there", "no stop_gradient"))
                break
    for patch, b, a in patches:
        pt.patches.append(patch)
        if equal():
            return "stopped_gradient", a, b
        pt.patches.remove(patch)
    return None, "", ""


def _detached(event: Any) -> Callable:
    def patch(other: Any) -> Any:
        if (other.place, other.name, other.layer) != (event.place, event.name, event.layer):
            return None
        result = other.function(*other.args, **other.kwargs)
        return result.detach()

    return patch
