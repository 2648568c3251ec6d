"""What checks find: a report in a few lines, and the named values of a batch that they look at.

Twin: `pt_impl/kit/findings.py`.
Where the frameworks differ: values become NumPy arrays; there they stay tensors on their device.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import tensorflow as tf


@dataclass(frozen=True)
class Finding:
    """One fault: which check, where, and what."""

    check: str
    place: str
    text: str

    def __str__(self) -> str:
        return f"{self.check}: {self.place}: {self.text}"


@dataclass
class Report:
    """What was looked at and what was found; its text is a line for each."""

    looked_at: str
    findings: list[Finding] = field(default_factory=list)

    def __str__(self) -> str:
        if not self.findings:
            return f"{self.looked_at}: nothing found"
        head = f"{self.looked_at}: {len(self.findings)} found"
        return "\n".join([head, *map(str, self.findings)])

    def add(self, check: str, place: str, text: str) -> None:
        """Add a fault."""
        self.findings.append(Finding(check, place, text))

    def raise_if_found(self) -> None:
        """Raise ValueError with the report's text unless it is clean."""
        if self.findings:
            raise ValueError(str(self))


def named_batches(data: Iterable) -> Iterator[list[tuple[str, object]]]:
    """Yield (name, leaf) of each batch's x, y and sample_weight.

    A dict, or what is neither a pair nor three, is x alone.
    """
    if isinstance(data, tf.keras.utils.Sequence):  # in Keras 3 another name of PyDataset
        batches = (data[number] for number in range(len(data)))
    else:
        batches = data
    for batch in batches:
        several = isinstance(batch, tuple | list) and len(batch) in (2, 3)
        parts = zip(("x", "y", "sample_weight"), batch if several else (batch,), strict=False)
        yield [leaf for name, part in parts for leaf in leaves(part, name)]


def leaves(tree, name: str) -> list[tuple[str, object]]:
    """Return (name, leaf) of a structure; a list of numbers or strings is a leaf."""
    if tree is None:
        return []
    if isinstance(tree, Mapping):
        return [leaf for key in tree for leaf in leaves(tree[key], f"{name}[{key!r}]")]
    if isinstance(tree, tuple | list) and not all(map(is_one, tree)):
        return [leaf for at, each in enumerate(tree) for leaf in leaves(each, f"{name}[{at}]")]
    return [(name, tree)]


def is_one(value) -> bool:
    """Whether it is a number or a text: of one sample in a list, of the whole batch by itself."""
    return isinstance(value, int | float | str | bytes) or getattr(value, "ndim", None) == 0


def values_of(leaf) -> np.ndarray | None:
    """Return a leaf as an array; None where it is text, which has no values.

    Raises NotImplementedError for ragged and sparse tensors.
    """
    if isinstance(leaf, tf.RaggedTensor | tf.SparseTensor):
        raise NotImplementedError(
            f"{type(leaf).__name__}: make it dense first, or check its values"
        )
    array = np.asarray(leaf)
    if array.dtype.kind == "V" or array.dtype.name == "bfloat16":
        return array.astype(np.float32)
    return None if array.dtype.kind in "SUO" else array


def nonfinite(values: np.ndarray | None) -> str:
    """Return how many values are NaN or infinite, "" for none."""
    if values is None:
        return ""
    nan, infinite = int(np.isnan(values).sum()), int(np.isinf(values).sum())
    parts = [f"{nan} NaN"] * bool(nan) + [f"{infinite} infinite"] * bool(infinite)
    return f"{' and '.join(parts)} of {values.size} values" if parts else ""


def many(count: int, what: str) -> str:
    """Return a number of things, in words: "1 batch", "2 batches"."""
    plural = what + ("es" if what.endswith("ch") else "s")
    return f"{count} {what if count == 1 else plural}"
