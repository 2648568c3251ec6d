"""Running statistics of BatchNorm after one step of training on the same batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from bench.port.causes import CATALOGUE
from bench.port.report import Finding
from bench.port.values import numpy

BOUND = 1e-4  # relative to what the step changed
# Up to which the unbiased variance counts as the biased one: n / (n - 1) for n = 100 values.
MOST_BIAS = 0.01


def compare(outcome: Any, pt: Any, tf: Any, weights: Any, both: Any) -> dict[str, float]:
    """Add findings. Returns Keras's share of the new value, in PyTorch's words, by module."""
    calls = {event.layer: event for event in both.pt.events if event.name == "batch_norm"}
    momenta, notes, count = {}, {}, 0
    for pair in weights.pairs:
        event = calls.get(pair.pt.name)
        module = pt.module(pair.pt.name)
        if event is None or getattr(module, "running_var", None) is None:
            continue
        layer = _layer(tf, pair)
        ours, theirs, old = (_state(pair, side, both) for side in ("pt", "tf", "old"))
        share = 1.0 - float(getattr(layer, "momentum", 1.0 - (module.momentum or 0.1)))
        count += 1
        size = max(_apart(ours[role], theirs[role], old[role]) for role in ours)
        momenta[pair.pt.name] = share
        if size <= BOUND:
            continue
        x = np.moveaxis(numpy(event.args[0]).astype(np.float64), 1, -1)
        x = x.reshape(-1, x.shape[-1])
        key = _cause(x, theirs, old, share, module.momentum)
        if key == "running_variance" and 1 / max(len(x) - 1, 1) < MOST_BIAS:
            notes[pair.pt.name] = 1 / (len(x) - 1)
            continue
        group = (key, share)
        for place, finding in enumerate(outcome.findings):
            if finding.step == "statistics" and finding.cause == key:
                outcome.findings[place] = replace(finding, places=finding.places + 1)
                break
        else:
            outcome.findings.append(_finding(pair, size, *group, module.momentum, count))
    if notes:
        outcome.notes.append(
            "PyTorch keeps the unbiased running variance, Keras the biased one: apart by up to "
            f"{max(notes.values()):.1%} here"
        )
    elif count and not any(f.step == "statistics" for f in outcome.findings):
        outcome.equal.append("running statistics after one training step")
    return momenta


def _layer(tf: Any, pair: Any) -> Any:
    variable = id(pair.transfers[0].variable)
    return next(
        layer for layer in tf.layers() if any(id(w) == variable for w in layer.weights)
        and not list(layer._flatten_layers(include_self=False))
    )  # fmt: skip


def _state(pair: Any, side: str, both: Any) -> dict[str, np.ndarray]:
    state = {}
    for transfer in pair.transfers:
        if transfer.role.startswith("moving"):
            value = transfer.variable.numpy()
            if side == "pt":
                value = both.pt.state.get(transfer.names[0], value)
            elif side == "tf":
                value = both.tf.state.get(id(transfer.variable), value)
            state[transfer.role] = np.asarray(value, np.float64)
    return state


def _apart(ours: np.ndarray, theirs: np.ndarray, old: np.ndarray) -> float:
    moved = max(np.linalg.norm(ours - old), np.linalg.norm(theirs - old), 1e-12)
    return float(np.linalg.norm(ours - theirs) / moved)


def _cause(x: np.ndarray, theirs: dict, old: dict, share: float, momentum: float) -> str | None:
    """Which momentum and variance give what TensorFlow has."""
    sizes = []
    for unbiased in (True, False):
        new = {"moving_mean": x.mean(0), "moving_variance": x.var(0, ddof=int(unbiased))}
        expected = {role: (1 - share) * old[role] + share * new[role] for role in theirs}
        sizes.append(max(_apart(expected[role], theirs[role], old[role]) for role in theirs))
    if min(sizes) > 1e-3:
        return None
    if abs(share - (momentum or 0.1)) > 1e-6:
        return "norm_momentum"
    return "running_variance" if sizes[1] < sizes[0] else None


def _finding(pair: Any, size: float, key: str | None, share: float, momentum, count) -> Finding:
    before = "all outputs" + (f", and {count - 1} statistics" if count > 1 else "")
    if key is None:
        return Finding("statistics", pair.pt.name, pair.tf.name, size, BOUND, before)
    cause = CATALOGUE[key]
    words = (text.format(a=f"{1 - momentum:g}", b=f"{share:g}")
             for text in (cause.change_pt, cause.change_tf))  # fmt: skip
    return Finding(
        "statistics", pair.pt.name, pair.tf.name, size, BOUND, before, key, True, *words, cause.why
    )
