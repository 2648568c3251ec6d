"""Sharded input pipeline: photos from a few large files, read from front to back.

What it changes: where samples lie. A folder of small files costs an open, and on a disk or over a
network a seek, for each; a shard is read in one go. The price is the order: that of the shards is
drawn for each epoch, and the next sample from a buffer of `shuffle_buffer` that were read. Batches
are those of `folder.py`: float32 images and int64 labels, with crops that
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

Copy with it: `shared/epochs.py`, `shared/shards.py`.
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

from shared.epochs import MEAN, STD, ImageForm, crop_box, draw
from shared.shards import Shard, Shards, open_shards, read_tar

FORM = "tar"


def sequential_loader(
    source,
    *,
    batch_size: int,
    seed: int,
    shuffle_buffer: int = 256,
    on_error: str = "raise",
    start_batch: int = 0,
    image_size: int = 224,
    mean: tuple = MEAN,
    std: tuple = STD,
) -> Iterable:
    """One shard after the other, in this process.

    source: a folder of tar shards. on_error: "raise" ends at a shard that is not what was written;
    "skip" leaves its samples out, which makes their batches smaller, and adds a line for each to
    the loader's list `skipped`. Every shard's checksum is compared when its turn comes.
    start_batch: batches seen before, over all epochs; the first iteration yields exactly what is
    left of its epoch (what comes before is read, not decoded). A batch of which nothing can be read
    is not yielded, but counts. image_size, mean, std: of the images, as `ImageForm` has them.
    Yields (x, y) on the GPU if there is one.

    Raises ValueError for settings that don't exist, and what `open_shards` raises; while it
    iterates, ValueError with the shard and the reason.
    """
    form = ImageForm(image_size, mean, std)
    settings = {"batch_size": batch_size, "shuffle_buffer": shuffle_buffer}
    shards = open_shards(source, FORM, on_error, **settings, start_batch=start_batch)
    batches = _Batches(shards, form, **settings, seed=seed, start_batch=start_batch, shares=1)
    processes = DataLoader(batches, batch_size=None, collate_fn=tuple)
    return _Loader(batches, processes, form, on_error)


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
    image_size: int = 224,
    mean: tuple = MEAN,
    std: tuple = STD,
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
    form = ImageForm(image_size, mean, std)
    settings = {"batch_size": batch_size, "shuffle_buffer": shuffle_buffer}
    shards = open_shards(source, FORM, on_error, **settings, start_batch=start_batch)
    batches = _Batches(shards, form, **settings, seed=seed, start_batch=start_batch, shares=workers)
    processes = DataLoader(
        batches,
        batch_size=None,  # they are batches already
        collate_fn=tuple,
        num_workers=workers,
        persistent_workers=True,  # to start them takes longer than a short epoch
        prefetch_factor=2,
        in_order=deterministic,
        pin_memory=torch.cuda.is_available(),
    )
    return _Loader(batches, processes, form, on_error)


def work_rate(
    source,
    *,
    seed: int,
    part: int = 0,
    parts: int = 1,
    image_size: int = 224,
    mean: tuple = MEAN,
    std: tuple = STD,
) -> Callable[[], float]:
    """Return `measure() -> samples/s`: the work on samples in this process, with nothing around it.

    Each call works on every `parts`-th shard, into the same memory, and on one where they are fewer
    than `parts`. As the limit of a pipeline call it in one single-threaded process a core, at once,
    each with its `part`, and add up.
    """
    form, opened = ImageForm(image_size, mean, std), open_shards(source, FORM)
    shards = opened.shards[part % len(opened.shards) :: parts]
    numbers = draw(opened.size, seed=seed, epoch=0)
    out = np.zeros((image_size, 3 * image_size), np.float32)

    def measure() -> float:
        start, seen = time.perf_counter(), 0
        for shard in shards:
            for row, _, data in read_tar(shard.files[0]):
                pixels = _pixels(data, numbers[row], image_size)
                np.multiply(pixels.reshape(out.shape), form.scale, out=out)
                np.add(out, form.offset, out=out)
            seen += len(shard.rows)
        return seen / (time.perf_counter() - start)

    return measure


class _Loader:
    """An iteration is an epoch; `skipped` says which samples were left out, and why."""

    def __init__(
        self, batches: "_Batches", processes: DataLoader, form: ImageForm, on_error: str
    ) -> None:
        self.skipped: list[str] = []
        self._batches, self._processes = batches, processes
        self._form, self._raises = form, on_error == "raise"

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self._batches.next_epoch()
        device, form = _device(), self._form
        scale, offset = (torch.from_numpy(row).to(device) for row in (form.scale, form.offset))
        for x, y, failures in self._processes:
            if failures and self._raises:
                raise ValueError(failures[0])
            self.skipped += failures
            if len(y):
                x = x.to(device, non_blocking=True)  # a byte a value, normalised here
                rows = torch.addcmul(offset, x.view(-1, 3 * form.size).float(), scale)
                yield rows.view(x.shape).permute(0, 3, 1, 2), y.to(device, non_blocking=True)


class _Batches(IterableDataset):
    """The batches of an epoch, in as many shares as there are processes."""

    def __init__(
        self,
        shards: Shards,
        form: ImageForm,
        *,
        batch_size: int,
        shuffle_buffer: int,
        seed: int,
        start_batch: int,
        shares: int,
    ) -> None:
        self._shards, self._size, self._seed = shards, form.size, seed
        self._batch_size, self._buffer, self._shares = batch_size, shuffle_buffer, shares
        self._epoch, self._start = 0, start_batch
        # Epochs differ in length: which shards a process has decides how many batches they make.
        while self._start >= sum(self._lengths(self._epoch)):
            self._start -= sum(self._lengths(self._epoch))
            self._epoch += 1
        self._position = torch.zeros(2, dtype=torch.int64).share_memory_()

    def next_epoch(self) -> None:
        """Tell the processes which epoch they begin, and at which batch."""
        self._position[:] = torch.tensor([self._epoch, self._start])
        self._epoch, self._start = self._epoch + 1, 0

    def _share(self, epoch: int, share: int) -> list[Shard]:
        return self._shards.order(seed=self._seed, epoch=epoch)[share :: self._shares]

    def _lengths(self, epoch: int) -> list[int]:
        """Batches of each share."""
        shares = (self._share(epoch, share) for share in range(self._shares))
        return [ceil(sum(len(s.rows) for s in share) / self._batch_size) for share in shares]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, list[str]]]:
        """The batches of one process's share of the epoch."""
        epoch, start = self._position.tolist()
        seen, turn = self._seen(epoch, start)
        worker = get_worker_info()
        share = (turn + (worker.id if worker else 0)) % self._shares
        samples = (each for shard in self._share(epoch, share) for each in _samples(shard))
        random = np.random.default_rng([self._seed, epoch, 3, share])
        shuffled = _shuffled(samples, self._buffer, random)
        rest = islice(shuffled, seen[share] * self._batch_size, None)  # not decoded before
        numbers = draw(self._shards.size, seed=self._seed, epoch=epoch)
        while batch := list(islice(rest, self._batch_size)):
            yield self._decoded(batch, numbers)

    def _seen(self, epoch: int, start: int) -> tuple[list[int], int]:
        """Batches of each share among the first `start` of an epoch, and whose turn comes then.

        They come from the shares in turn, but from none that is at its end.
        """
        lengths, turn = self._lengths(epoch), 0
        seen = [0 for _ in lengths]
        while sum(seen) < start or seen[turn] == lengths[turn]:
            if seen[turn] < lengths[turn]:
                seen[turn] += 1
            turn = (turn + 1) % self._shares
        return seen, turn

    def _decoded(self, batch: list, numbers: np.ndarray) -> tuple[Tensor, Tensor, list[str]]:
        """Images, uint8 (n, size, size, 3), labels, and what was left out."""
        x = np.empty((len(batch), self._size, self._size, 3), np.uint8)
        labels, failures = [], []
        for row, label, data in batch:
            if isinstance(data, str):
                failures.append(f"{data}: sample {row:09}")
            else:
                x[len(labels)] = _pixels(data, numbers[row], self._size)
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


def _pixels(data: bytes, numbers: np.ndarray, size: int) -> np.ndarray:
    """Decoded, cropped, resized and flipped: uint8 (size, size, 3)."""
    numbers = numbers.tolist()
    with Image.open(io.BytesIO(data), formats=["JPEG"]) as file:
        image = file if file.mode == "RGB" else file.convert("RGB")
        image.load()
    image = F.resized_crop(image, *crop_box(image.height, image.width, numbers), [size, size])
    return np.asarray(F.horizontal_flip(image) if numbers[-1] < 0.5 else image)


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def main() -> None:
    """Print each loader's rate in its second epoch, on 512 photos of 256 pixels."""
    import tempfile

    from shared.conversion import convert
    from shared.photos import make_photos

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
