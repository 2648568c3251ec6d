"""What checks find: a report in a few lines, and the named values of a batch that they look at.

Twin: `tf_impl/kit/findings.py`.
Where the frameworks differ: values stay tensors on their device; there they are NumPy arrays.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset


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
    """Yield (name, leaf) of each batch's x and y; a dataset of samples is batched.

    A dict, or what is not a pair, is x alone.
    """
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        data = DataLoader(data, batch_size=256)
    for batch in data:
        pair = isinstance(batch, tuple | list) and len(batch) == 2
        x, y = batch if pair else (batch, None)
        yield [*leaves(x, "x"), *leaves(y, "y")]


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


def values_of(leaf) -> Tensor | None:
    """Return a leaf as a tensor without gradient; None where it is text, which has no values."""
    if isinstance(leaf, tuple | list):
        leaf = [each.item() if isinstance(each, Tensor) else each for each in leaf]
    if not isinstance(leaf, Tensor):
        array = np.asarray(leaf)
        if array.dtype.kind in "SUOT":
            return None
        leaf = torch.as_tensor(array)
    if leaf.dtype in (torch.uint16, torch.uint32, torch.uint64):
        return leaf.long()  # torch compares none of these
    return torch.view_as_real(leaf.detach()) if leaf.is_complex() else leaf.detach()


def nonfinite(values: Tensor | None) -> str:
    """Return how many values are NaN or infinite, "" for none."""
    if values is None:
        return ""
    nan, infinite = int(values.isnan().sum()), int(values.isinf().sum())
    parts = [f"{nan} NaN"] * bool(nan) + [f"{infinite} infinite"] * bool(infinite)
    return f"{' and '.join(parts)} of {values.numel()} values" if parts else ""


def check_checkpoints(value: Tensor) -> None:
    """Raise NotImplementedError where `torch.autograd.grad` of it would find no gradient inside.

    So it is with torch's reentrant checkpoint, whose own graph hides its parameters.
    """
    seen, left = set(), [value.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            if "CheckpointFunctionBackward" in node.name():
                raise NotImplementedError(
                    "the model has a reentrant checkpoint, inside of which torch.autograd.grad"
                    " finds nothing: give torch.utils.checkpoint use_reentrant=False"
                )
            left += [other for other, _ in node.next_functions]


def many(count: int, what: str) -> str:
    """Return a number of things, in words: "1 batch", "2 batches"."""
    plural = what + ("es" if what.endswith("ch") else "s")
    return f"{count} {what if count == 1 else plural}"
