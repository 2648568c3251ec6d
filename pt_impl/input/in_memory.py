"""In-memory input pipeline: batches of small images from arrays, standardised and randomly shifted.

    for x, y in vectorised_loader("data", batch_size=128, seed=0):  # data/train_x.npy, train_y.npy
        loss = step(x, y)

What it changes: how samples in memory become batches. The work on one sample takes microseconds,
less than a pipeline's overhead. So it matters whether functions are called once per sample or once
per batch. Every loader gives the same batches: each image less its mean, divided by its standard
deviation, padded by two pixels and cropped to its size, in float32, and int64 labels. Images are
(n, channels, height, width), in TensorFlow (n, height, width, channels). Order and shifts follow
from the seed and the epoch (`shared/epochs.py`). Each pass over the loader is the next epoch.

Its twin: `tf_impl/input/in_memory.py`.

Where the frameworks differ and why:
- By sample or by batch: a PyTorch Dataset has `__getitem__` and `__getitems__`, in TensorFlow the
  order of `map` and `batch` decides.
- PyTorch works in parallel by processes, which share one copy of the data and have to send each
  batch. TensorFlow uses threads, so nothing is sent.
- tf.data has a cache, in memory or on disk. PyTorch has none, so it is written here: a tensor, or a
  mapped array on disk. Only TensorFlow has `snapshot_loader`.

When it helps and when it hurts: a batch at a time is many times as fast as a sample at a time. A
cache saves the work that is the same in every epoch. Here that is the standardisation, which takes
hardly longer than reading the cache.
- Worker processes cost more than they save.

Run it alone: `python -m pt_impl.input.in_memory` prints samples/s of each loader.

Copy with it: `pt_impl/kit/small_images.py`, `shared/epochs.py`.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from pt_impl.kit.small_images import shift, standardise
from shared.epochs import SHIFT, Epochs, fingerprint, open_arrays


def naive_loader(source, *, batch_size: int, seed: int, start_batch: int = 0) -> Iterable:
    """The tutorial's form: `__getitem__` works on a sample, and the DataLoader stacks them.

    Args:
        source: a folder with train_x.npy, float32 (n, height, width, channels), and train_y.npy,
            whole numbers.
        start_batch: batches seen before, over all epochs; the first iteration yields exactly what
            is left of its epoch.

    Returns:
        What yields (x, y), on the GPU if there is one; the last batch may be smaller.

    Raises:
        FileNotFoundError: a folder without these files.
        ValueError: arrays of other forms, batch_size below 1 or a negative start_batch.
    """
    x, y, epochs = _open(source, batch_size, seed, start_batch)
    return _Loader(DataLoader(_Singles(x, y), batch_sampler=_OneByOne(epochs)))


def vectorised_loader(source, *, batch_size: int, seed: int, start_batch: int = 0) -> Iterable:
    """`__getitems__` works on a batch. Settings and errors are those of `naive_loader`."""
    x, y, epochs = _open(source, batch_size, seed, start_batch)
    return _Loader(DataLoader(_Batches(x, y), batch_sampler=epochs, collate_fn=tuple))


def parallel_loader(
    source, *, batch_size: int, seed: int, workers: int = 0, start_batch: int = 0
) -> Iterable:
    """`vectorised_loader` in `workers` processes, 0 for one a core, which share the data.

    They stay until the loader is deleted. All else is as for `naive_loader`.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    x, y, epochs = _open(source, batch_size, seed, start_batch)
    batches = DataLoader(
        _Batches(x.share_memory_(), y.share_memory_()),
        batch_sampler=epochs,
        collate_fn=tuple,
        num_workers=workers or cores,
        persistent_workers=True,  # to start them takes longer than an epoch
        prefetch_factor=2,
        pin_memory=torch.cuda.is_available(),
    )
    return _Loader(batches)


def memory_cached_loader(source, *, batch_size: int, seed: int, start_batch: int = 0) -> Iterable:
    """`vectorised_loader` that standardises once, when it is made, and keeps the result."""
    x, y, epochs = _open(source, batch_size, seed, start_batch)
    cached = _Batches(standardise(x), y, shift)
    return _Loader(DataLoader(cached, batch_sampler=epochs, collate_fn=tuple))


def disk_cached_loader(
    source, *, batch_size: int, seed: int, cache: str, start_batch: int = 0
) -> Iterable:
    """`memory_cached_loader` that keeps the result in a file in the folder `cache`, and maps it.

    Each `source` has its own file, by its name, which serves every process and every run.
    """
    x, y, epochs = _open(source, batch_size, seed, start_batch)
    path = Path(cache, f"standardised-{fingerprint(source)}.npy")
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{os.getpid()}-{path.name}")
        np.save(partial, standardise(x).numpy(), allow_pickle=False)
        os.replace(partial, path)  # complete, whoever else made the same
    # Private to this process where it is written to, which nothing does: torch has no other.
    cached = torch.from_numpy(np.load(path, mmap_mode="c", allow_pickle=False))
    return _Loader(DataLoader(_Batches(cached, y, shift), batch_sampler=epochs, collate_fn=tuple))


def _open(source, batch_size: int, seed: int, start_batch: int) -> tuple[Tensor, Tensor, Epochs]:
    """Images (n, channels, height, width), contiguous, labels and epochs."""
    x, y, epochs = open_arrays(source, batch_size, seed, start_batch)
    return torch.from_numpy(x.transpose(0, 3, 1, 2).copy()), torch.from_numpy(y.copy()), epochs


class _Loader:
    """An iteration is an epoch."""

    def __init__(self, batches: DataLoader) -> None:
        self.batches = batches
        self.device = "cuda" if torch.cuda.is_available() else "cpu"

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for x, y in self.batches:
            yield x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)


class _OneByOne:
    """The batches of epochs as lists of samples."""

    def __init__(self, epochs: Epochs) -> None:
        self.epochs = epochs

    def __iter__(self) -> Iterator[list]:
        for rows, places in self.epochs:
            yield list(zip(rows.tolist(), places.tolist(), strict=True))


class _Singles(Dataset):
    """The work on a sample."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __getitem__(self, sample: tuple[int, list[int]]) -> tuple[Tensor, Tensor]:
        row, (top, left) = sample
        image = self.x[row]
        least = image.numel() ** -0.5
        image = (image - image.mean()) / image.std(correction=0).clamp(min=least)
        padded = torch.nn.functional.pad(image, [SHIFT] * 4)
        height, width = image.shape[1:]
        return padded[:, top : top + height, left : left + width], self.y[row]


class _Batches(Dataset):
    """The work on a batch."""

    def __init__(self, x: Tensor, y: Tensor, work: Callable | None = None) -> None:
        self.x, self.y, self.work = x, y, work or _standardise_and_shift

    def __getitems__(self, batch: tuple[np.ndarray, np.ndarray]) -> tuple[Tensor, Tensor]:
        rows, places = map(torch.from_numpy, batch)
        return self.work(self.x[rows], places), self.y[rows]


def _standardise_and_shift(x: Tensor, places: Tensor) -> Tensor:
    return shift(standardise(x), places)


def main() -> None:
    """Print each loader's rate in its second epoch, on the images of digits-cnn, and the limit."""
    import tempfile

    from pt_impl.kit import input_rates
    from shared.datasets import materialise
    from shared.specs import TASKS

    with tempfile.TemporaryDirectory() as name:
        folder = materialise(TASKS["digits-cnn"].dataset, Path(name))
        print(f"work on one core: {input_rates.in_memory_limit(folder, seed=0)():.0f} samples/s")
        loaders = (naive_loader, vectorised_loader, parallel_loader, memory_cached_loader)
        for make in (*loaders, disk_cached_loader):
            settings = {"cache": name} if make is disk_cached_loader else {}
            loader = make(folder, batch_size=128, seed=0, **settings)
            print(f"{make.__name__}: {input_rates.second_epoch(loader):.0f} samples/s")


if __name__ == "__main__":
    main()
