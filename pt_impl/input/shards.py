"""Sharded input pipeline: photos from a few large files, read from front to back.

What it changes: where samples lie. A folder of small files costs an open, and on a disk or over a
network a seek, for each; a shard is read in one go. The price is the order: that of the shards is
drawn for each epoch, and the next sample from a buffer of `shuffle_buffer` that were read. Batches
are those of `folder.py`: float32 images (n, 3, 224, 224) and int64 labels, with crops that
follow from the seed, the epoch and the sample's row in the folder that
`twinbench shards FOLDER TARGET --format tar` made the shards of.

Its twin: `tf_impl/input/shards.py`.

Where the frameworks differ and why:
- Shards are tar files here, as the webdataset convention has them, and TFRecord files there.
- Parallel reading means processes here, each with shards, a buffer and a last batch of its own,
  which may be smaller. There threads read several shards in turn into one buffer.
- PyTorch has no shuffle buffer: it is written here. tf.data's draws from a generator of its own, so
  that the order differs. Each epoch has the same samples, crops and flips on both sides.

When it helps and when it hurts: it helps where opening files is slow. In the page cache a folder is
as fast. With fewer shards than workers some have nothing to do; with a buffer smaller than a shard
what lies together stays near.

Run it alone: `python -m pt_impl.input.shards` prints samples/s of each loader.

Copy with it: `pt_impl/kit/runtime.py`, `shared/epochs.py`, `shared/images.py`, `shared/records.py`,
`shared/shards.py`.
"""

import io
import os
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from math import ceil

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torchvision.transforms.v2 import functional as F

from pt_impl.kit import runtime
from shared.epochs import crop_box, draw
from shared.records import read_tar
from shared.shards import Shard, open_shards

FORM = "tar"
SIZE = 224
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's, of pixels in [0, 1]
# A row at a time: over a last axis of 3 channels the same arithmetic takes ten times as long.
SCALE = np.tile(1 / (255 * np.float32(STD)), SIZE)
OFFSET = np.tile(-np.float32(MEAN) / np.float32(STD), SIZE)


def sequential_loader(
    source,
    *,
    batch_size: int,
    seed: int,
    shuffle_buffer: int = 256,
    on_error: str = "raise",
    start_batch: int = 0,
) -> Iterable:
    """One shard after the other, in this process.

    source: a folder of tar shards. on_error: "raise" ends at a shard that is not what was written;
    "skip" leaves its samples out, which makes their batches smaller, and adds a line for each to
    the loader's list `skipped`. Every shard's checksum is compared when its turn comes.
    start_batch: batches seen before, over all epochs; the first iteration yields exactly what is
    left of its epoch (what comes before is read, not decoded). Yields (x, y) on `runtime.device()`.

    Raises ValueError for settings that don't exist, and what `open_shards` raises; while it
    iterates, ValueError with the shard and the reason.
    """
    batches = _Batches(source, batch_size, seed, shuffle_buffer, on_error, start_batch, 1)
    return _Loader(batches, on_error, {})


def interleaved_loader(
    source,
    *,
    batch_size: int,
    seed: int,
    shuffle_buffer: int = 256,
    workers: int = 0,
    deterministic: bool = True,
    on_error: str = "raise",
    start_batch: int = 0,
) -> Iterable:
    """`workers` processes, 0 for one a core, each with its share of the shards.

    deterministic: batches come from the workers in turn. Without it the next one is whichever is
    ready; then there is no start_batch. Workers stay until the loader is deleted. All else is as
    for `sequential_loader`; a resumed epoch needs the same number of workers.
    """
    if start_batch and not deterministic:
        raise ValueError("start_batch needs deterministic: what is left depends on the order")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    workers = workers or cores
    batches = _Batches(source, batch_size, seed, shuffle_buffer, on_error, start_batch, workers)
    settings = {"num_workers": workers, "prefetch_factor": 2, "in_order": deterministic}
    settings["persistent_workers"] = True  # to start them takes longer than a short epoch
    return _Loader(batches, on_error, settings | {"pin_memory": torch.cuda.is_available()})


def work_rate(source, *, seed: int, part: int = 0, parts: int = 1) -> Callable[[], float]:
    """Return `measure() -> samples/s`: the work on samples in this process, with nothing around it.

    Each call works on every `parts`-th shard, into the same memory. As the limit of a pipeline call
    it in one single-threaded process a core, at once, each with its `part`, and add up.
    """
    found = open_shards(source, FORM)
    numbers = draw(found.size, seed=seed, epoch=0)
    out = np.zeros((SIZE, 3 * SIZE), np.float32)

    def measure() -> float:
        start, seen = time.perf_counter(), 0
        for shard in found.shards[part::parts]:
            for row, _, data in read_tar(shard.files[0]):
                np.multiply(_pixels(data, numbers[row]).reshape(out.shape), SCALE, out=out)
                np.add(out, OFFSET, out=out)
            seen += len(shard.rows)
        return seen / (time.perf_counter() - start)

    return measure


class _Loader:
    """An iteration is an epoch; `skipped` says which samples were left out, and why."""

    def __init__(self, batches: "_Batches", on_error: str, settings: dict) -> None:
        self.skipped: list[str] = []
        self._batches, self._raises = batches, on_error == "raise"
        self._loader = DataLoader(batches, batch_size=None, collate_fn=tuple, **settings)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self._batches.next_epoch()
        device = runtime.device()
        scale, offset = (torch.from_numpy(row).to(device) for row in (SCALE, OFFSET))
        for x, y, failures in self._loader:
            if failures and self._raises:
                raise ValueError(failures[0])
            self.skipped += failures
            if len(y):
                x = x.to(device, non_blocking=True)  # a byte a value, normalised here
                rows = torch.addcmul(offset, x.view(-1, 3 * SIZE).float(), scale)
                yield rows.view(x.shape).permute(0, 3, 1, 2), y.to(device, non_blocking=True)


class _Batches(IterableDataset):
    """The batches of an epoch, in as many shares as there are processes."""

    def __init__(self, source, batch_size, seed, shuffle_buffer, on_error, start_batch, shares):
        self._found = open_shards(
            *(source, FORM, on_error),
            batch_size=batch_size,
            shuffle_buffer=shuffle_buffer,
            start_batch=start_batch,
        )
        self._batch_size, self._buffer = batch_size, shuffle_buffer
        self._seed, self._shares, self._epoch, self._start = seed, shares, 0, start_batch
        while self._start >= (batches := sum(self._lengths(self._epoch))):
            self._epoch, self._start = self._epoch + 1, self._start - batches
        self._position = torch.zeros(2, dtype=torch.int64).share_memory_()

    def next_epoch(self) -> None:
        """Tell the processes which epoch they begin, and at which batch."""
        self._position[:] = torch.tensor([self._epoch, self._start])
        self._epoch, self._start = self._epoch + 1, 0

    def _share(self, epoch: int, share: int) -> list[Shard]:
        return self._found.order(seed=self._seed, epoch=epoch)[share :: self._shares]

    def _lengths(self, epoch: int) -> list[int]:
        """Batches of each share."""
        shares = (self._share(epoch, share) for share in range(self._shares))
        return [ceil(sum(len(s.rows) for s in share) / self._batch_size) for share in shares]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, list[str]]]:
        epoch, start = self._position.tolist()
        lengths, seen, turn = self._lengths(epoch), [0] * self._shares, 0
        # Batches come from the shares in turn, but from none that is at its end.
        while sum(seen) < start or seen[turn] == lengths[turn]:
            if seen[turn] < lengths[turn]:
                seen[turn] += 1
            turn = (turn + 1) % self._shares
        worker = get_worker_info()
        share = (turn + (worker.id if worker else 0)) % self._shares
        samples = (each for shard in self._share(epoch, share) for each in _samples(shard))
        random = np.random.default_rng([self._seed, epoch, 3, share])
        samples = _shuffled(samples, self._buffer, random)
        samples = islice(samples, seen[share] * self._batch_size, None)
        numbers = draw(self._found.size, seed=self._seed, epoch=epoch)
        while batch := list(islice(samples, self._batch_size)):
            yield self._decoded(batch, numbers)

    def _decoded(self, batch: list, numbers: np.ndarray) -> tuple[Tensor, Tensor, list[str]]:
        """Images, uint8 (n, SIZE, SIZE, 3), labels, and what was left out."""
        x, labels, failures = np.empty((len(batch), SIZE, SIZE, 3), np.uint8), [], []
        for row, label, data in batch:
            if isinstance(data, str):
                failures.append(f"{data}: sample {row:09}")
            else:
                x[len(labels)] = _pixels(data, numbers[row])
                labels.append(label)
        labels = torch.tensor(labels, dtype=torch.int64)
        return torch.from_numpy(x[: len(labels)]), labels, failures


def _samples(shard: Shard) -> Iterable[tuple[int, int, bytes | str]]:
    """Row, label and JPEG; of a damaged shard the reason in its place."""
    if damage := shard.damage():
        return ((row, -1, damage) for row in shard.rows.tolist())
    return read_tar(shard.files[0])


def _shuffled(samples: Iterable, size: int, random: np.random.Generator) -> Iterator:
    """Draw from the `size` samples that are waiting, and put the next one in its place."""
    waiting = []
    for sample in samples:
        if len(waiting) < size:
            waiting.append(sample)
        else:
            place = random.integers(size)
            yield waiting[place]
            waiting[place] = sample
    yield from (waiting[place] for place in random.permutation(len(waiting)))


def _pixels(data: bytes, numbers: np.ndarray) -> np.ndarray:
    """Decoded, cropped, resized and flipped: uint8 (SIZE, SIZE, 3)."""
    numbers = numbers.tolist()
    with Image.open(io.BytesIO(data), formats=["JPEG"]) as file:
        image = file if file.mode == "RGB" else file.convert("RGB")
        image.load()
    image = F.resized_crop(image, *crop_box(image.height, image.width, numbers), [SIZE, SIZE])
    return np.asarray(F.horizontal_flip(image) if numbers[-1] < 0.5 else image)


def main() -> None:
    """Print each loader's rate in its second epoch, on 512 photos of 256 pixels."""
    import tempfile

    from shared.photos import make_photos
    from shared.shards import convert

    with tempfile.TemporaryDirectory() as name:
        folder = make_photos(f"{name}/photos", images=512, size=256, seed=0)
        convert(folder, f"{name}/shards", form=FORM, samples=64)
        print(f"work on one core: {work_rate(f'{name}/shards', seed=0)():.0f} samples/s")
        for make in (sequential_loader, interleaved_loader):
            loader = make(f"{name}/shards", batch_size=32, seed=0)
            for _ in range(2):
                start = time.perf_counter()
                rate = sum(len(y) for _, y in loader) / (time.perf_counter() - start)
            print(f"{make.__name__}: {rate:.0f} samples/s")


if __name__ == "__main__":
    main()
