"""What dropout drops on each side: where it stands, how much of it, and in which shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bench.port.causes import CATALOGUE
from bench.port.pytorch_side import DROPOUTS, RECURRENT
from bench.port.recurrent import Settings, is_packed, run, run_packed
from bench.port.report import Finding
from bench.port.values import closest, numpy

MOST_ROWS = 50  # of packed sequences that are looked for
SIGMAS = 5.0  # by which two shares may differ before they count as different


@dataclass
class Place:
    """Where something is dropped. given: what it is given while nothing is dropped."""

    layer: str
    rate: float
    whole: bool  # channels
    given: np.ndarray
    packed: bool = False


def compare(outcome: Any, pt: Any, tf: Any, weights: Any, both: Any) -> None:
    """Add findings."""
    ours, theirs = _pytorch(pt, both), _tensorflow(tf, both)
    recurrent = _recurrent(tf, both)
    count = len(ours) + len(theirs) + len(recurrent)
    before = len(outcome.findings)
    if recurrent:
        name, rate = recurrent[0]
        modules = [e.layer for e in both.pt.events if e.name in RECURRENT]
        _add(outcome, "recurrent_dropout", modules[:1] or [""], [name], rate, a=f"{rate:g}")
        ours = [place for place in ours if place.layer not in modules]
    bound = max(both.bounds, default=1e-5)
    for place in list(ours):
        twin = next((t for t in theirs if _is_same(place, t, bound)), None)
        if twin is None:
            continue
        ours.remove(place)
        theirs.remove(twin)
        names = [place.layer], [twin.layer]
        apart = abs(place.rate - twin.rate)
        if place.whole != twin.whole:
            words = ("Dropout2d", "Dropout") if twin.whole else ("Dropout", "Dropout2d")
            b, a = words
            a = "SpatialDropout2D" if a == "Dropout2d" else "Dropout"
            _add(outcome, "dropout_shape", *names, 1.0, a=a, b=b)
        elif apart > 1e-6:
            a, b = f"{place.rate:g}", f"{twin.rate:g}"
            if abs(place.rate - (1 - twin.rate)) < 1e-6:
                a += " (not the share that is kept)"
            _add(outcome, "dropout_rate", *names, apart, a=a, b=b)
    attention = _attention(pt, tf, weights, both)
    for pt_name, tf_name, p, rate in attention:
        theirs = [t for t in theirs if not t.layer.startswith(tf_name)]
        if abs(p - rate) > 1e-6:
            _add(
                outcome,
                "dropout_rate",
                [pt_name],
                [tf_name],
                abs(p - rate),
                a=f"{p:g}",
                b=f"{rate:g}",
            )
    for place in ours:
        a, b = f"Dropout({place.rate:g}) where {place.layer} has it", "no dropout there"
        _add(outcome, "dropout_missing", [place.layer], [""], place.rate, a, b)
    for place in theirs:
        a, b = "no dropout there", f"nn.Dropout({place.rate:g}) where {place.layer} is"
        _add(outcome, "dropout_missing", [""], [place.layer], place.rate, a, b)
    if (count or attention) and len(outcome.findings) == before:
        outcome.equal.append(
            f"dropout at {max(count // 2, len(attention), 1)} places: its rate and shape"
        )


def _is_same(place: Place, twin: Place, bound: float) -> bool:
    """Whether both are given the same; of packed sequences, whether each step is in both."""
    if not place.packed:
        return closest(place.given, twin.given) <= bound
    if twin.given.shape[-1] != place.given.shape[-1]:
        return False
    rows = twin.given.reshape(-1, twin.given.shape[-1])
    return all(
        np.min(np.linalg.norm(rows - row, axis=1)) <= max(bound, 1e-5) * np.linalg.norm(row)
        for row in place.given[:MOST_ROWS]
    )


def _add(outcome: Any, key: str, pt: list, tf: list, size: float, a: str = "", b: str = "") -> None:
    cause = CATALOGUE[key]
    words = [text.format(a=a, b=b) for text in (cause.change_pt, cause.change_tf)]
    before = "all outputs without dropout"
    outcome.findings.append(
        Finding("dropout", pt[0], tf[0], size, 1e-6, before, key, True, *words, cause.why)
    )


def _pytorch(pt: Any, both: Any) -> list[Place]:
    """Calls of dropout, with the share that they drop; what nn.LSTM drops between its layers."""
    places = []
    active = pt.trace(training=True, dropout=True).events
    for event, with_dropout in zip(both.pt.events, active, strict=False):
        if with_dropout.name in DROPOUTS:
            rate, whole = _measured(with_dropout.args[0], with_dropout.out, channels_last=False)
            nominal = with_dropout.argument(1, "p", 0.5)
            rate = _rounded(rate, nominal, with_dropout.out)
            if rate:
                places.append(Place(event.layer, rate, whole, numpy(event.args[0])))
        elif event.name in RECURRENT:
            places += _between(with_dropout, event)
    return places


def _between(active: Any, event: Any) -> list[Place]:
    packed = is_packed(active.args)
    layers, rate = active.args[5 if packed else 4], active.args[6 if packed else 5]
    places = []
    kind, both = event.name.split("_")[0], event.args[8 if packed else 7]
    for layer in range(1, layers if rate else 1):
        args = list(event.args)
        args[5 if packed else 4] = layer
        if packed:
            out = run_packed(kind, tuple(args), Settings())[0]
        else:
            out = run(kind, args[0], args[2], args[3], layer, both, args[8], Settings(), None)[0]
        places.append(Place(event.layer, rate, False, numpy(out), packed))
    return places


def _tensorflow(tf: Any, both: Any) -> list[Place]:
    active = {call.name: call for call in tf.trace(training=True, dropout=True).calls}
    places = []
    for call in both.tf.calls:
        if "Dropout" not in type(call.layer).__name__ or not call.inputs:
            continue
        with_dropout = active[call.name]
        rate, whole = _measured(with_dropout.inputs[0], with_dropout.out, channels_last=True)
        rate = _rounded(rate, float(getattr(call.layer, "rate", rate)), with_dropout.out)
        if rate:
            places.append(Place(call.name, rate, whole, numpy(call.inputs[0])))
    return places


def _measured(given: Any, out: Any, *, channels_last: bool) -> tuple[float, bool]:
    """The share that is dropped, and whether it is whole channels."""
    x, y = numpy(given), numpy(out)
    x = np.moveaxis(x, -1, 1) if channels_last and x.ndim > 2 else x
    y = np.moveaxis(y, -1, 1) if channels_last and y.ndim > 2 else y
    there, dropped = x != 0, (x != 0) & (y == 0)
    if not there.any() or not dropped.any():
        return 0.0, False
    rate = float(dropped.sum() / there.sum())
    if x.ndim < 3:
        return rate, False
    axes = tuple(range(2, x.ndim))
    partly = (dropped.sum(axes) > 0) & (dropped.sum(axes) < there.sum(axes))
    return rate, not partly.any()


def _rounded(measured: float, nominal: float, out: Any) -> float:
    """The rate that a layer has, where what was measured does not contradict it."""
    count = max(min(np.size(numpy(out)), 10_000), 1) / 16  # channels are dropped together
    scatter = SIGMAS * np.sqrt(max(nominal * (1 - nominal), 1e-4) / count)
    return nominal if abs(measured - nominal) <= max(scatter, 0.02) else measured


def _recurrent(tf: Any, both: Any) -> list[tuple[str, float]]:
    """Keras's recurrent layers that drop by themselves."""
    layers = []
    for call in both.tf.calls:
        cell = getattr(call.layer, "cell", None)
        rates = [getattr(cell, name, 0.0) or 0.0 for name in ("dropout", "recurrent_dropout")]
        if cell is not None and any(rates):
            layers.append((call.name, max(rates)))
    return layers


def _attention(pt: Any, tf: Any, weights: Any, both: Any) -> list[tuple[str, str, float, float]]:
    """Layers of attention, with the rates at which each side drops scores."""
    layers = {
        call.name: call.layer for call in both.tf.calls if hasattr(call.layer, "_dropout_layer")
    }
    pairs = []
    for pair in weights.pairs:
        module, _, role = pair.pt.name.rpartition(".")
        outer = pair.tf.name.rpartition("/")[0]
        if (
            role == "query"
            and outer in layers
            and isinstance(pt.module(module), torch.nn.MultiheadAttention)
        ):
            rate = float(getattr(layers[outer], "_dropout", 0.0) or 0.0)
            pairs.append((module, outer, pt.module(module).dropout, rate))
    return pairs
