"""Batches as tensors on the device, from the NumPy arrays that both frameworks share.

What it holds: the way from NumPy to the device, in PyTorch's layout, and the shared batch order.
Twin: `tf_impl/kit/data.py`.
Where the frameworks differ: images become NCHW here, once; labels and character codes are int64.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map  # torch has no public one

from pt_impl.kit import runtime
from shared.datasets import batch_order


def to_device(x: np.ndarray, y: np.ndarray) -> tuple[Tensor, Tensor]:
    """Copy to the device: images (n, h, w, c) to contiguous (n, c, h, w), the rest as it is."""
    if x.ndim == 4:
        x = x.transpose(0, 3, 1, 2)
    return _tensor(x), _tensor(y)


def _tensor(array: np.ndarray) -> Tensor:
    # A real copy: the shared files are mapped read-only, and a tensor must be writable.
    return torch.from_numpy(np.array(array, order="C")).to(runtime.device())


def resident_batches(batches: list[tuple[np.ndarray, np.ndarray]]) -> list[tuple[Tensor, Tensor]]:
    """Copy NumPy batches to the device, so that a timed step waits for no input."""
    return [to_device(x, y) for x, y in batches]


def epoch_batches(
    x: Tensor, y: Tensor, *, batch_size: int, seed: int, epoch: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of one epoch in the shared order; x and y are whole splits from `to_device`.

    y may be a tuple, such as labels and a teacher's logits.
    """
    for rows in batch_order(len(x), batch_size, seed=seed, epoch=epoch):
        index = torch.from_numpy(rows).to(x.device)
        yield x[index], tree_map(lambda whole, index=index: whole[index], y)
