"""Running statistics of BatchNorm after one step of training on the same batch."""

from __future__ import annotations

from typing import Any

import numpy as np

from bench.port.report import Report
from bench.port.tensorflow_side import held
from bench.port.values import numpy

BOUND, EXPLAINED = 1e-4, 1e-3  # relative to what the step changed
# Up to which the unbiased variance counts as the biased one: n / (n - 1) for n = 100 values.
MOST_BIAS = 0.01


def compare(report: Report, pt: Any, tf: Any, weights: Any, both: Any) -> None:
    """Add findings."""
    calls = {event.layer: event for event in both.pt.events if event.name == "batch_norm"}
    layers = {id(w): layer for layer in tf.layers() for w in held(layer)}
    bias, count = 0.0, 0
    for pair in weights.pairs:
        event, module = calls.get(pair.pt.name), pt.module(pair.pt.name)
        if event is None or getattr(module, "running_var", None) is None:
            continue
        x = np.moveaxis(numpy(event.args[0]).astype(np.float64), 1, -1)
        x = x.reshape(-1, x.shape[-1])
        ours, theirs, old = (_state(pair, state) for state in (both.pt.state, both.tf.state, {}))
        layer = layers.get(id(pair.transfers[0].variable))
        momentum = module.momentum or 0.1
        share = 1.0 - float(getattr(layer, "momentum", 1.0 - momentum))
        least = share * float(np.sqrt(np.mean(x**2)))  # means of nearly zero are rounding
        size = _apart(ours, theirs, old, least)
        count += 1
        if size <= BOUND:
            continue
        # Which momentum and variance give what TensorFlow has.
        sizes = []
        for unbiased in (True, False):
            new = {"moving_mean": x.mean(0), "moving_variance": x.var(0, ddof=int(unbiased))}
            made = {role: (1 - share) * old[role] + share * new[role] for role in theirs}
            sizes.append(_apart(made, theirs, old, least))
        key = "running_variance" if sizes[1] < sizes[0] else None
        if abs(share - momentum) > 1e-6:
            key = "norm_momentum"
        elif key and 1 / max(len(x) - 1, 1) < MOST_BIAS:
            bias = max(bias, 1 / (len(x) - 1))
            continue
        key = key if min(sizes) <= EXPLAINED else None
        before = "all outputs" + (f", and {count - 1} statistics" if count > 1 else "")
        values = (f"{1 - momentum:g}", f"{share:g}")
        report.add("statistics", (pair.pt.name, pair.tf.name), size, BOUND, before, key, values)
    if bias:
        report.notes.append(
            "PyTorch keeps the unbiased running variance, Keras the biased one: they differ by "
            f"up to {bias:.1%} here"
        )
    elif count and not report.has("statistics"):
        report.equal.append("running statistics after one training step")


def _state(pair: Any, state: dict) -> dict[str, np.ndarray]:
    """The statistics by role: those after the step by a side's state, without it those before."""
    arrays = {}
    for transfer in pair.transfers:
        if transfer.role.startswith("moving"):
            value = state.get(transfer.names[0], state.get(id(transfer.variable)))
            value = transfer.variable.numpy() if value is None else value
            arrays[transfer.role] = np.asarray(value, np.float64)
    return arrays


def _apart(ours: dict, theirs: dict, old: dict, least: float) -> float:
    """The largest difference, relative to what the step changed."""
    sizes = []
    for role, before in old.items():
        moved = max(np.linalg.norm(side[role] - before) for side in (ours, theirs))
        if role == "moving_mean":
            moved = max(moved, least * before.size**0.5)
        sizes.append(np.linalg.norm(ours[role] - theirs[role]) / max(moved, 1e-12))
    return float(max(sizes))
