"""Batches as tensors on the device, from the NumPy arrays that both frameworks share.

What it holds: the way from NumPy to the device, in PyTorch's layout, and the shared batch order.
Twin: `tf_impl/kit/data.py`.
Where the frameworks differ: images become NCHW here, once; labels and character codes are int64. A
loader on the host has worker processes here, threads there.
"""

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map  # torch has no public one
from torch.utils.data import DataLoader, Dataset, TensorDataset

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


def host_loader(
    x: np.ndarray,
    y: np.ndarray,
    wrap: Callable[[Dataset], Dataset],
    *,
    batch_size: int,
    seed: int = 0,
) -> Iterable[tuple[Tensor, Tensor]]:
    """Batches in the shared order that are put together on the host, as many workers as threads.

    Each iteration is the next epoch; batches come on `runtime.device()`, images NCHW. `wrap` is
    given the dataset of samples, and makes another of it; one with `set_epoch` is told the epoch.
    """
    if x.ndim == 4:
        x = x.transpose(0, 3, 1, 2)
    samples = TensorDataset(*(torch.from_numpy(np.array(a, order="C")) for a in (x, y)))
    return _HostLoader(wrap(samples), batch_size, seed)


class _HostLoader:
    def __init__(self, dataset: Dataset, batch_size: int, seed: int) -> None:
        self.dataset, self.batch_size, self.seed, self.epoch = dataset, batch_size, seed, 0
        self.batches = DataLoader(
            dataset,
            batch_sampler=_Order(self),
            num_workers=torch.get_num_threads(),
            persistent_workers=True,  # to start them takes longer than an epoch
            pin_memory=torch.cuda.is_available(),
        )

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(self.epoch)
        for batch in self.batches:
            yield tuple(tree_map(lambda part: part.to(runtime.device()), part) for part in batch)
        self.epoch += 1


class _Order:
    """The rows of each batch of a loader's epoch."""

    def __init__(self, loader: _HostLoader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[list[int]]:
        loader = self.loader
        order = {"seed": loader.seed, "epoch": loader.epoch}
        for rows in batch_order(len(loader.dataset), loader.batch_size, **order):
            yield rows.tolist()
