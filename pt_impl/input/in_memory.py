"""In-memory input pipeline: small images from arrays, standardised, shifted at random, in batches.

What it changes: how samples that are in memory already become batches. The work on one takes
microseconds, less than what a pipeline does around it, so that what counts is how often anything is
called: once a sample, or once a batch. Every loader gives the same batches: each image less its
mean and over its deviation, padded by two pixels and cut to its size again (`shared/epochs.py`),
float32 (n, channels, height, width), and int64 labels. Order and shifts follow from the seed and
the epoch; each iteration is the next epoch.

Its twin: `tf_impl/input/in_memory.py`.

Where the frameworks differ and why:
- A Dataset has `__getitem__` for a sample and `__getitems__` for a batch here, and a DataLoader
  takes the second where there is one. There the order of `map` and `batch` decides.
- Parallel means processes here, which share one copy of the data; each batch has to come back from
  them. There it means threads.
- There is no cache here, so that it is written out: a tensor, or an array on disk that is mapped.
  tf.data has one for both, of which the whole data set is one element here.

When it helps and when it hurts: a batch at a time is many times as fast as a sample at a time, on
both sides. Processes cost more than they bring. A cache saves the work that is the same in every
epoch, here a standardisation that hardly takes longer than to read what is stored.

Run it alone: `python -m pt_impl.input.in_memory` prints samples/s of each loader.

Copy with it: `shared/epochs.py`.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from shared.epochs import SHIFT, Epochs, fingerprint, open_arrays


def naive_loader(source, *, batch_size: int, seed: int, start_batch: int = 0) -> Iterable:
    """The tutorial's form: `__getitem__` works on a sample, and the DataLoader stacks them.

    source: a folder with train_x.npy, float32 (n, height, width, channels), and train_y.npy, whole
    numbers.
    start_batch: batches seen before, over all epochs; the first iteration yields exactly what is
    left of its epoch. Yields (x, y) on the GPU if there is one; the last batch may be smaller.

    Raises FileNotFoundError for a folder without these files, and ValueError for arrays of other
    forms, batch_size below 1 and a negative start_batch.
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
    cached = _Batches(_standardise(x), y, _shift)
    return _Loader(DataLoader(cached, batch_sampler=epochs, collate_fn=tuple))


def disk_cached_loader(
    source, *, batch_size: int, seed: int, cache: str, start_batch: int = 0
) -> Iterable:
    """`memory_cached_loader` that keeps the result in a file in the folder `cache`, and maps it.

    The file has a name of its own for each `source`, and serves every process and every run.
    """
    x, y, epochs = _open(source, batch_size, seed, start_batch)
    path = Path(cache, f"standardised-{fingerprint(source)}.npy")
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{os.getpid()}-{path.name}")
        np.save(partial, _standardise(x).numpy(), allow_pickle=False)
        os.replace(partial, path)  # complete, whoever else made the same
    # Private to this process where it is written to, which nothing does: torch has no other.
    cached = torch.from_numpy(np.load(path, mmap_mode="c", allow_pickle=False))
    return _Loader(DataLoader(_Batches(cached, y, _shift), batch_sampler=epochs, collate_fn=tuple))


def work_rate(
    source, *, seed: int, part: int = 0, parts: int = 1, batch_size: int = 128, cached: bool = False
) -> Callable[[], float]:
    """Return `measure() -> samples/s`: the work on batches in this process, with nothing around it.

    Each call works on every `parts`-th batch of epoch 0 (on one where they are fewer), without what
    a cache saves if `cached`. As the limit of a pipeline call it in one single-threaded process a
    core, at the same time, each with a `part` of its own, and add up what they return.
    """
    x, _, epochs = _open(source, batch_size, seed, 0)
    batches = list(epochs)
    batches = batches[part % len(batches) :: parts]
    x, work = (_standardise(x), _shift) if cached else (x, _work)

    def measure() -> float:
        start = time.perf_counter()
        for rows, places in batches:
            work(x[torch.from_numpy(rows)], torch.from_numpy(places))
        return sum(len(rows) for rows, _ in batches) / (time.perf_counter() - start)

    return measure


def _open(source, batch_size: int, seed: int, start_batch: int) -> tuple[Tensor, Tensor, Epochs]:
    """Images (n, channels, height, width), contiguous, labels and epochs."""
    x, y, epochs = open_arrays(source, batch_size, seed, start_batch)
    return torch.from_numpy(x.transpose(0, 3, 1, 2).copy()), torch.from_numpy(y.copy()), epochs


class _Loader:
    """An iteration is an epoch."""

    def __init__(self, batches: Iterable) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        device = _device()
        for x, y in self._batches:
            yield x.to(device, non_blocking=True), y.to(device, non_blocking=True)


class _OneByOne:
    """The batches of epochs as lists of samples."""

    def __init__(self, epochs: Epochs) -> None:
        self._epochs = epochs

    def __iter__(self) -> Iterator[list]:
        for rows, places in self._epochs:
            yield list(zip(rows.tolist(), places.tolist(), strict=True))


class _Singles(Dataset):
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
    def __init__(self, x: Tensor, y: Tensor, work: Callable | None = None) -> None:
        self.x, self.y, self.work = x, y, work or _work

    def __getitems__(self, batch: tuple[np.ndarray, np.ndarray]) -> tuple[Tensor, Tensor]:
        rows, places = map(torch.from_numpy, batch)
        return self.work(self.x[rows], places), self.y[rows]


def _work(x: Tensor, places: Tensor) -> Tensor:
    return _shift(_standardise(x), places)


def _standardise(x: Tensor) -> Tensor:
    """Each image less its mean, and over its deviation, which noise keeps above zero.

    As `tf.image.per_image_standardization` has it: the least deviation is 1 / sqrt(values).
    """
    values = x.flatten(1)
    values = values - values.mean(1, keepdim=True)
    # The root of the mean square: `std` along rows takes ten times as long.
    size = values.shape[1]
    deviation = values.norm(dim=1, keepdim=True) / size**0.5
    return (values / deviation.clamp(min=size**-0.5)).view_as(x)


def _shift(x: Tensor, places: Tensor) -> Tensor:
    """Pad, and cut each image to its size again where its place is: all windows, one of each."""
    padded = torch.nn.functional.pad(x, [SHIFT] * 4)
    windows = padded.unfold(2, x.shape[2], 1).unfold(3, x.shape[3], 1)
    return windows[torch.arange(len(x)), :, places[:, 0], places[:, 1]]


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def main() -> None:
    """Print each loader's rate in its second epoch, on the images of digits-cnn."""
    import tempfile

    from shared.datasets import materialise
    from shared.specs import TASKS

    with tempfile.TemporaryDirectory() as name:
        folder = materialise(TASKS["digits-cnn"].dataset, Path(name))
        print(f"work on one core: {work_rate(folder, seed=0)():.0f} samples/s")
        loaders = (naive_loader, vectorised_loader, parallel_loader, memory_cached_loader)
        for make in (*loaders, disk_cached_loader):
            settings = {"cache": name} if make is disk_cached_loader else {}
            loader = make(folder, batch_size=128, seed=0, **settings)
            for _ in range(2):
                start = time.perf_counter()
                rate = sum(len(y) for _, y in loader) / (time.perf_counter() - start)
            print(f"{make.__name__}: {rate:.0f} samples/s")


if __name__ == "__main__":
    main()
