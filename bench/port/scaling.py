"""Scaling and normalising of inputs within a model, before its first layer with weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bench.port.values import FLOOR, closest, distance, numpy, turned_as
from shared import user_model

LINEAR = 1e-5  # up to which what is left of a fit is rounding
FEWEST_ROWS = 4


@dataclass
class Scaling:
    """What a model makes of an input before its first weights: `slope * x + shift`, by channel."""

    layer: str
    slope: np.ndarray
    shift: np.ndarray

    def to(self, other: Scaling) -> Scaling:
        """What has to be made of the input so that this scaling after it gives the other's."""
        shift = (other.shift - self.shift) / self.slope
        return Scaling(other.layer, other.slope / self.slope, shift)

    def __str__(self) -> str:
        parts = []
        for values in (self.slope, self.shift):
            rounded = [f"{value:.6g}" for value in dict.fromkeys(values.astype(np.float32))]
            parts.append(rounded[0] if len(rounded) == 1 else f"[{', '.join(rounded)}]")
        return f"`x = x * {parts[0]} + {parts[1]}`"


@dataclass
class Difference:
    """Both sides' scaling of one input, and how far apart the scaled inputs are."""

    place: int
    channels: int  # the axis of PyTorch's
    ours: Scaling
    theirs: Scaling
    size: float

    @property
    def layers(self) -> tuple[str, str]:
        """Those that scale, on both sides."""
        return self.ours.layer, self.theirs.layer

    @property
    def words(self) -> tuple[str, str]:
        """What makes PyTorch's input that of TensorFlow, and the other way round."""
        return str(self.theirs.to(self.ours)), str(self.ours.to(self.theirs))

    def apply(self, x: Any) -> Any:
        """Inputs for PyTorch's model that are scaled as TensorFlow's are."""
        change, leaves = self.ours.to(self.theirs), user_model.leaves(x)
        chosen = leaves[self.place]
        shape = [1] * chosen.ndim
        shape[self.channels] = -1
        slope, shift = (torch.tensor(v).view(shape) for v in (change.slope, change.shift))
        scaled = (chosen.double() * slope + shift).to(chosen.dtype)
        return user_model.mapped(lambda leaf: scaled if leaf is chosen else leaf, x)


def find(pt: Any, tf: Any, ours: Any, theirs: Any, weights: Any) -> Difference | None:
    """The first input that both scale otherwise; None where there is none."""
    names = [name for pair in weights.pairs for part in pair.pt.parts.values() for name in part]
    held = {id(weights.state[name]) for name in names}
    events = [e for e in ours.events if not any(id(t) in held for t in e.tensors())]
    layers = tuple(pair.tf.name for pair in weights.pairs)
    for place, (a, b) in enumerate(zip(*map(user_model.leaves, (pt.x, tf.x)), strict=False)):
        x, other = numpy(a), numpy(b)
        if x.dtype.kind != "f" or x.size != other.size or closest(x, other) > FLOOR:
            continue
        turn = turned_as(x, other)
        made = ((e.layer, turn(numpy(e.out))) for e in events if e.out.shape == a.shape)
        entries = (e for e in theirs.index.by_count.get(x.size, ()) if e.layer not in layers)
        given = ((e.layer, numpy(e.tensor)) for e in entries if e.tensor.shape == b.shape)
        sides = _last(other, made), _last(other, given)
        scaled = [side.slope * other + side.shift for side in sides]
        size = distance(scaled[0], scaled[1])
        if size > LINEAR:
            last = x.shape == other.shape and np.array_equal(turn(x), x)
            return Difference(place, x.ndim - 1 if last else 1, *sides, size)
    return None


def _last(x: np.ndarray, tensors: Iterable[tuple[str, np.ndarray]]) -> Scaling:
    """The last of some tensors that is the input, scaled by channel; else the input itself."""
    rows = x.reshape(-1, x.shape[-1]).astype(np.float64)
    spread = rows.var(0)
    scaling = Scaling("", np.ones(x.shape[-1]), np.zeros(x.shape[-1]))
    if len(rows) < FEWEST_ROWS or not spread.all():
        return scaling
    apart = rows - rows.mean(0)
    for layer, tensor in tensors:
        y = tensor.reshape(rows.shape).astype(np.float64)
        slope = (apart * y).mean(0) / spread
        shift = y.mean(0) - slope * rows.mean(0)
        if slope.all() and distance(y, slope * rows + shift) <= LINEAR:
            scaling = Scaling(layer, slope, shift)
    return scaling
