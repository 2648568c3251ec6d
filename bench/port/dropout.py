"""What dropout drops on each side: where it stands, how much of it, and in which shape."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from bench.port.pytorch_side import ATTENTION, DROPOUTS, RECURRENT, Event, Patch
from bench.port.recurrent import Settings, is_packed, run, run_packed
from bench.port.report import Report
from bench.port.values import closest, numpy

MOST_ROWS = 50  # of packed sequences that are looked for
MOST_CALLS, ENOUGH = 40, 2000  # of a layer, to see what it drops; independent numbers that it drew
SIGMAS = 5.0  # by which two shares may differ before they count as different
BEFORE = "all outputs without dropout"


@dataclass
class Place:
    """Where something is dropped. rate: as it is set. given: what it is given while nothing is
    dropped. drop: gives that with a part dropped."""

    layer: str
    rate: float
    given: np.ndarray
    drop: Callable[[], Any]
    channels_last: bool = False
    packed: bool = False

    def __post_init__(self) -> None:
        self.share, self.what, self.scatter = _measured(self)
        if abs(self.share - self.rate) > max(self.scatter, 0.02):
            self.rate = self.share


def compare(report: Report, pt: Any, tf: Any, both: Any) -> None:
    """Add findings."""
    events = both.pt.events
    ours = [place for event in events for place in _of_event(event, events, pt.patches)]
    theirs = [place for call in both.tf.calls for place in _of_layer(call)]
    ours, theirs = ([place for place in side if place.rate] for side in (ours, theirs))
    recurrent = [(call, rate) for call in both.tf.calls if (rate := _recurrent_rate(tf, call))]
    count = max(len(ours), len(theirs))
    for call, rate in recurrent[:1]:
        modules = [e.layer for e in both.pt.events if e.name in RECURRENT]
        words = (rate, 1e-6, BEFORE, "recurrent_dropout", (f"{rate:g}", ""))
        report.add("dropout", ((*modules, "")[0], call.name), *words)
        ours = [place for place in ours if place.layer not in modules]
    bound = max(both.bounds, default=1e-5)
    for place in list(ours):
        twin = next((t for t in theirs if _is_same(place, t, bound)), None)
        if twin is None:
            continue
        ours.remove(place)
        theirs.remove(twin)
        layers, apart = (place.layer, twin.layer), abs(place.rate - twin.rate)
        key, values = "dropout_rate", (f"{place.rate:g}", f"{twin.rate:g}")
        if place.what != twin.what:
            key, values, apart = "dropout_shape", (place.what, twin.what), 1.0
        if apart > 1e-6:
            right = _is_right(place, twin)
            report.add("dropout", layers, apart, 1e-6, BEFORE, key if right else None, values)
    for place in (*ours, *theirs):
        here = f"Dropout({place.rate:g})` where {place.layer} has it"
        layers, values = (place.layer, ""), (f"`layers.{here}", "no dropout")
        if place in theirs:
            layers, values = ("", place.layer), ("no dropout", f"`nn.{here}")
        words = (place.rate, 1e-6, BEFORE, "dropout_missing", values)
        report.add("dropout", layers, *words)
    if count and not report.has("dropout"):
        report.equal.append(f"dropout at {count} places: its rate and shape")


def _is_right(place: Place, twin: Place) -> bool:
    """Whether PyTorch drops what TensorFlow does once it is told to: checked by dropping."""
    given = torch.from_numpy(np.ascontiguousarray(place.given))
    ones = {"values": 0, "channels": given.ndim - 2, "samples": given.ndim - 1}[twin.what]
    noise = torch.empty(given.shape[: given.ndim - ones] + (1,) * ones)
    drop = lambda: given * noise.bernoulli_(1 - twin.rate)  # noqa: E731
    changed = Place("", twin.rate, place.given, drop)
    near = abs(changed.share - twin.share) <= max(changed.scatter + twin.scatter, 0.02)
    return near and changed.what == twin.what


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


def _of_event(event: Event, events: list[Event], patches: list[Patch]) -> list[Place]:
    """What a call of PyTorch drops: dropout, attention, between layers of nn.LSTM, samples."""
    name, layer, places = event.name, event.layer, []
    if name in DROPOUTS:
        x = event.args[0] if event.args else event.kwargs["input"]
        drop = lambda: event.again(input=(0, x.clone()))  # noqa: E731
        places.append(Place(layer, float(event.argument(1, "p", 0.5)), numpy(x), drop))
    elif name in ATTENTION and event.argument(ATTENTION[name], "dropout_p", 0.0):
        kept = _attention(event, 0.0)
        rate = float(event.argument(ATTENTION[name], "dropout_p"))
        places.append(Place(layer, rate, numpy(kept), lambda: _attention(event, rate)))
    elif name in RECURRENT:
        places += _between(event, patches)
    noise = events[event.place - 1] if event.place else event
    if "mul" in name and "div" in noise.name and event.place > 1:
        noise = events[event.place - 2]
    if "mul" in name and noise.name == "bernoulli_":
        x, kept = event.args[0], float(noise.argument(1, "p", 0.5))
        drawn = torch.empty(noise.out.shape)
        places.append(Place(layer, 1 - kept, numpy(x), lambda: x * drawn.bernoulli_(kept)))
    return places


def _attention(event: Event, rate: float) -> torch.Tensor:
    """The weights of a call of attention, with a share of them dropped."""
    changed: dict[str, tuple] = {"dropout_p": (ATTENTION[event.name], rate)}
    if event.name == "scaled_dot_product_attention":
        key = event.args[1]
        value = torch.eye(key.shape[-2], dtype=key.dtype).expand(*key.shape[:-1], key.shape[-2])
        return event.again(value=(2, value), **changed)
    changed |= {"need_weights": (15, True), "average_attn_weights": (99, False)}
    return event.again(**changed)[1]


def _between(event: Event, patches: list[Patch]) -> list[Place]:
    """What nn.LSTM drops between its layers: it is read from its settings."""
    packed, args = is_packed(event.args), list(event.args)
    at = 5 if packed else 4
    layers, rate = args[at : at + 2]
    places = []
    for layer in range(1, layers if rate else 1):
        args[at] = layer
        changed = replace(event, args=tuple(args))
        result = (run_packed if packed else run)(event.name.split("_")[0], tuple(args), Settings())
        for patch in patches:  # such as a mask
            with suppress(Exception):  # one of other calls
                result = patch(changed) or result
        drop = partial(F.dropout, result[0], rate)
        places.append(Place(event.layer, float(rate), numpy(result[0]), drop, packed=packed))
    return places


def _of_layer(call: Any) -> list[Place]:
    """What a layer of Keras drops, if it is one of dropout."""
    if "Dropout" not in type(call.layer).__name__ or not call.inputs:
        return []
    x = call.inputs[0]
    rate, last = float(getattr(call.layer, "rate", 0.0)), x.shape.rank > 2
    return [Place(call.name, rate, numpy(x), lambda: call.layer(x, training=True), last)]


def _measured(place: Place) -> tuple[float, str, float]:
    """The share that is dropped, whether values, channels or samples are, and how far a share may
    be off by chance."""
    x = np.moveaxis(place.given, -1, 1) if place.channels_last else place.given
    there = x != 0
    axes = {"samples": tuple(range(1, x.ndim)), "channels": tuple(range(2, x.ndim))}
    sizes = {name: np.prod([x.shape[axis] for axis in over]) for name, over in axes.items()}
    kinds = {name: over for name, over in axes.items() if sizes[name] > 1 and not place.packed}
    dropped, total, drawn = 0, 0, 0
    for _ in range(MOST_CALLS):
        y = numpy(place.drop())
        gone = there & ((np.moveaxis(y, -1, 1) if place.channels_last else y) == 0)
        kinds = {
            name: over for name, over in kinds.items()
            if np.array_equal(gone.sum(over), there.sum(over) * gone.any(over))
        }  # fmt: skip
        dropped, total = dropped + gone.sum(), total + there.sum()
        over = next(iter(kinds.values()), ())
        drawn += there.any(over).sum() if over else there.sum()
        if drawn >= ENOUGH:
            break
    share = float(dropped / max(total, 1))
    what = next(iter(kinds), "values") if dropped else "values"
    rate = min(max(place.rate, 0.01), 0.99)
    return share, what, SIGMAS * float(np.sqrt(rate * (1 - rate) / max(drawn, 1)))


def _recurrent_rate(tf: Any, call: Any) -> float:
    """At which a recurrent layer of Keras drops by itself: its outputs scatter only if it does."""
    cell = getattr(call.layer, "cell", None)
    rates = [getattr(cell, name, 0.0) or 0.0 for name in ("dropout", "recurrent_dropout")]
    if cell is None or not any(rates):
        return 0.0

    def scatters() -> bool:
        one, other = (numpy(call.layer(call.inputs[0], training=True)) for _ in range(2))
        return not np.array_equal(one, other)

    with tf.without_dropout():
        still = scatters()
    return float(max(rates)) if scatters() and not still else 0.0
