"""Tensors of both frameworks brought to one layout and compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shared import user_model

# Up to which a relative L2 distance counts as equal: so many times what rounding to float32 does to
# PyTorch's tensor (against its own run in float64), never less than the floor. What changes by more
# than the most in float64, such as a type's largest number, is not changed by rounding.
TIMES_ROUNDING, FLOOR, MOST = 20.0, 2e-6, 0.01
WITHOUT_ROUNDING = 1e-4  # where a model has no float64 run
LEAST_SPREAD = 0.01  # of its size: a tensor that varies by less proves no cause
FEWEST = 4  # numbers; fewer may be equal by chance


def distance(ours: np.ndarray, theirs: np.ndarray) -> float:
    """The L2 norm of the difference over that of the first; inf if one is not finite."""
    a, b = np.asarray(ours, np.float64).ravel(), np.asarray(theirs, np.float64).ravel()
    finite = np.isfinite(a) & np.isfinite(b)
    if not finite.all():
        if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
            return float("inf")
        a, b = a[finite], b[finite]
    size = float(np.linalg.norm(a))
    apart = float(np.linalg.norm(a - b))
    if size == 0.0:
        return 0.0 if apart == 0.0 else float("inf")
    return apart / size


def varies(array: np.ndarray) -> bool:
    """Whether a tensor has different values: gates of tiny inputs are all 0.5."""
    return float(np.std(array)) > LEAST_SPREAD * float(np.sqrt(np.mean(np.square(array))))


# How an array of PyTorch may lie in TensorFlow: channels last, time first, heads after tokens.
TURNS: tuple[tuple[int, Callable[[np.ndarray], np.ndarray]], ...] = (
    (0, lambda array: array),
    (3, lambda array: np.moveaxis(array, 1, -1)),
    (3, lambda array: np.swapaxes(array, 0, 1)),
    (4, lambda array: np.swapaxes(array, 1, 2)),
    (4, lambda array: np.swapaxes(array, -1, -2)),
)


def layouts(ours: np.ndarray, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
    """An array of PyTorch in each layout in which it can have a shape of TensorFlow."""
    turned = [turn(ours) for rank, turn in TURNS if ours.ndim >= rank]
    same = [array for array in turned if array.shape == tuple(shape)]
    yield from same
    if not same and ours.size == np.prod(shape, dtype=int):
        yield from (array.reshape(shape) for array in turned[:3])


def turned_as(example: np.ndarray, theirs: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """What brings arrays to the layout in which an example is closest to TensorFlow's."""
    sizes = []
    for rank, turn in TURNS:
        if example.ndim >= rank and example.size == theirs.size:
            shaped = turn(example)
            wrong = shaped.shape != theirs.shape
            sizes.append((wrong, distance(shaped.reshape(theirs.shape), theirs), len(sizes), turn))
    turn = min(sizes, key=lambda entry: entry[:3])[3] if sizes else TURNS[0][1]
    return lambda array: turn(array).reshape(theirs.shape)


def closest(ours: np.ndarray, theirs: np.ndarray) -> float:
    """The smallest distance in any layout; inf if no layout has the shape."""
    sizes = [distance(array, theirs) for array in layouts(ours, theirs.shape)]
    return min(sizes, default=float("inf"))


def numpy(tensor: Any) -> np.ndarray:
    """A tensor of either framework as an array that shares its memory where it can."""
    if hasattr(tensor, "detach"):
        tensor = tensor.detach()
        tensor = (
            tensor.float() if str(tensor.dtype) in ("torch.bfloat16", "torch.float16") else tensor
        )
        return tensor.numpy()
    array = np.asarray(tensor)
    return array if array.dtype.kind in "fiub" else array.astype(np.float32)


def outputs(output: Any) -> list:
    """The tensors of a model's output that are of numbers, in order; of one with logits these."""
    tree = getattr(output, "logits", output)
    tree = tree.get("logits", tree) if isinstance(tree, dict) else tree
    leaves = (leaf for leaf in user_model.leaves(tree) if hasattr(leaf, "dtype"))
    return [leaf for leaf in leaves if numpy(leaf).dtype.kind == "f"]


@dataclass
class Entry:
    """A tensor that a layer gave: its place in the order of execution and its size."""

    place: int
    layer: str
    operator: str
    tensor: Any
    norm: float
    total: float


@dataclass
class Index:
    """TensorFlow's tensors, to be found by their values."""

    by_count: dict[int, list[Entry]] = field(default_factory=dict)
    count: int = 0

    def add(self, layer: str, operator: str, tensor: Any) -> None:
        """Add a tensor, if it can be told from others."""
        array = numpy(tensor)
        if array.dtype.kind != "f" or array.size < FEWEST:
            return
        flat = array.ravel()
        norm = float(np.sqrt(np.vdot(flat, flat)))
        entry = Entry(self.count, layer, operator, tensor, norm, float(flat.sum(dtype=np.float64)))
        self.by_count.setdefault(array.size, []).append(entry)
        self.count += 1

    def match(self, ours: np.ndarray, bound: float, layer: str | None = None) -> Entry | None:
        """The first tensor that equals one of PyTorch in any layout; only of a layer."""
        return next(self.matches(ours, bound, layer), None)

    def matches(self, ours: np.ndarray, bound: float, layer: str | None = None) -> Iterator[Entry]:
        """All tensors that are equal to one of PyTorch."""
        entries = self.by_count.get(ours.size, ()) if ours.dtype.kind == "f" else ()
        if not entries:
            return
        flat = ours.ravel()
        norm = float(np.sqrt(np.vdot(flat, flat)))
        total = float(flat.sum(dtype=np.float64))
        near = bound * norm
        for entry in entries:
            if layer is not None and not _within(entry.layer, layer):
                continue
            if abs(entry.norm - norm) > near + 1e-6 * norm:
                continue
            if abs(entry.total - total) > (near + 1e-6 * norm) * ours.size**0.5:
                continue
            if closest(ours, numpy(entry.tensor)) <= bound:
                yield entry

    def nearest(self, ours: np.ndarray, layer: str) -> float:
        """The smallest distance to a tensor of a layer; inf if none has its size."""
        entries = [e for e in self.by_count.get(ours.size, ()) if _within(e.layer, layer)]
        return min((closest(ours, numpy(e.tensor)) for e in entries), default=float("inf"))


def _within(layer: str, outer: str) -> bool:
    """Whether a tensor of a layer is one of another; a weight's name may stand for its layer."""
    return layer == outer or layer.startswith(f"{outer}/") or outer.startswith(f"{layer}/")
