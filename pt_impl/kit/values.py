"""The named values of a batch, which checks look at.

Twin: `tf_impl/kit/values.py`.
Where the frameworks differ: values stay tensors on their device; there they are NumPy arrays.
"""

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from shared.findings import leaves


def named_batches(data: Iterable) -> Iterator[list[tuple[str, object]]]:
    """Yield (name, leaf) of each batch's x and y; a dataset of samples is batched.

    A dict, or what is not a pair, is only x.
    """
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        data = DataLoader(data, batch_size=256)
    for batch in data:
        pair = isinstance(batch, tuple | list) and len(batch) == 2
        x, y = batch if pair else (batch, None)
        yield [*leaves(x, "x"), *leaves(y, "y")]


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
