"""Sharded input pipeline: photos from a few large files, read from front to back.

    # once: twinbench shards photos shards --format tar
    for x, y in interleaved_loader("shards", batch_size=32, seed=0):
        loss = step(x, y)

What it changes: how samples are stored. Each small file in a folder has to be opened, which on a
disk or over a network costs a seek. A shard is read from front to back. So the order is less
random: shards are shuffled in each epoch, and samples are drawn from a buffer of `shuffle_buffer`
samples. Batches are those of `folder.py`. A crop follows from the seed, the epoch and the sample's
place in the original folder.

Its twin: `tf_impl/input/shards.py`.

Where the frameworks differ and why:
- Shards are tar files (webdataset's convention) in PyTorch, and TFRecord files in TensorFlow.
- PyTorch reads in processes. Each has its share of the shards, a buffer, and a last batch that may
  be smaller. TensorFlow reads in threads, several shards in turn into one buffer.
- PyTorch has no shuffle buffer, so it is written here. tf.data's draws another order, which also
  depends on `tf.random.set_seed` if that is called.
- Each epoch has the same samples, crops and flips in both.

When it helps and when it hurts: it helps if opening files is slow. A folder in the page cache is as
fast. With a buffer smaller than a shard, neighbouring samples stay near each other.
- With fewer shards than workers, some workers have nothing to do.

Run it alone: `python -m pt_impl.input.shards` prints samples/s of each loader.

Copy with it: `pt_impl/kit/photos.py`, `shared/epochs.py`, `shared/shards.py`.
"""

import io
from collections.abc import Iterable, Iterator
from itertools import islice

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from pt_impl.kit.photos import PhotoLoader, cores, decode_photo
from shared.epochs import MEAN, STD, ImageForm, draw
from shared.shards import Shard, Shares, open_shards, read_tar

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

    Args:
        source: a folder of tar shards.
        on_error: "raise" ends at a shard that is not what was written; "skip" leaves its samples
            out, which makes their batches smaller, and adds a line for each to the loader's list
            `skipped`. Every shard's checksum is compared when its turn comes.
        start_batch: batches seen before, over all epochs; the first iteration yields exactly what
            is left of its epoch (what comes before is read, not decoded). A batch of which nothing
            can be read is not yielded, but counts.
        image_size, mean, std: of the images, as `ImageForm` has them.

    Returns:
        What yields (x, y), on the GPU where there is one.

    Raises:
        ValueError: settings that don't exist, and what `open_shards` raises; while it iterates, a
            damaged shard, with the reason.
    """
    form = ImageForm(image_size, mean, std)
    settings = {"batch_size": batch_size, "shuffle_buffer": shuffle_buffer}
    shards = open_shards(source, FORM, on_error, **settings, start_batch=start_batch)
    shares = Shares(shards, 1, batch_size=batch_size, seed=seed, start_batch=start_batch)
    batches = _Batches(shares, image_size, shuffle_buffer)
    return _Epochs(DataLoader(batches, batch_size=None, collate_fn=tuple), on_error, form)


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
    form, workers = ImageForm(image_size, mean, std), workers or cores()
    settings = {"batch_size": batch_size, "shuffle_buffer": shuffle_buffer}
    shards = open_shards(source, FORM, on_error, **settings, start_batch=start_batch)
    shares = Shares(shards, workers, batch_size=batch_size, seed=seed, start_batch=start_batch)
    processes = DataLoader(
        _Batches(shares, image_size, shuffle_buffer),
        batch_size=None,  # they are batches already
        collate_fn=tuple,
        num_workers=workers,
        persistent_workers=True,  # to start them takes longer than a short epoch
        prefetch_factor=2,
        in_order=deterministic,
        pin_memory=torch.cuda.is_available(),
    )
    return _Epochs(processes, on_error, form)


class _Epochs(PhotoLoader):
    """The batches of a DataLoader over `_Batches`."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.batches.dataset.next_epoch()
        yield from super().__iter__()


class _Batches(IterableDataset):
    """The batches of an epoch, in as many shares as there are processes."""

    def __init__(self, shares: Shares, image_size: int, shuffle_buffer: int) -> None:
        self.shares, self.image_size, self.shuffle_buffer = shares, image_size, shuffle_buffer
        # Workers that stay for all epochs read here which one they begin, and at which batch.
        self.position = torch.zeros(2, dtype=torch.int64).share_memory_()

    def next_epoch(self) -> None:
        self.position[:] = torch.tensor(self.shares.next_epoch())

    def __iter__(self) -> Iterator[tuple[Tensor, list[int], list[str]]]:
        """Yield the batches of this process's share of the epoch."""
        epoch, start = self.position.tolist()
        worker, batch_size = get_worker_info(), self.shares.batch_size
        share, seen = self.shares.turn(epoch, start, worker.id if worker else 0)
        samples = (each for shard in self.shares.of(epoch, share) for each in _samples(shard))
        random = np.random.default_rng([self.shares.seed, epoch, 3, share])
        shuffled = _shuffled(samples, self.shuffle_buffer, random)
        rest = islice(shuffled, seen * batch_size, None)  # what comes before is not decoded
        numbers = draw(self.shares.images, seed=self.shares.seed, epoch=epoch)
        while batch := list(islice(rest, batch_size)):
            yield self._decoded(batch, numbers)

    def _decoded(self, batch: list, numbers: np.ndarray) -> tuple[Tensor, list[int], list[str]]:
        """Images, uint8 (n, size, size, 3), labels, and what was left out."""
        x = np.empty((len(batch), self.image_size, self.image_size, 3), np.uint8)
        labels, failures = [], []
        for row, label, jpeg in batch:
            if isinstance(jpeg, str):
                failures.append(f"{jpeg}: sample {row:09}")
            else:
                drawn = numbers[row].tolist()
                x[len(labels)] = decode_photo(io.BytesIO(jpeg), drawn, self.image_size)
                labels.append(label)
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


def main() -> None:
    """Print each loader's rate in its second epoch, on 512 photos of 256 pixels, and the limit."""
    import tempfile

    from pt_impl.kit import input_rates
    from shared.conversion import convert
    from shared.photos import make_photos

    with tempfile.TemporaryDirectory() as name:
        folder = make_photos(f"{name}/photos", images=512, size=256, seed=0)
        convert(folder, f"{name}/shards", form=FORM, samples=64)
        limit = input_rates.shards_limit(f"{name}/shards", seed=0)
        print(f"work on one core: {limit():.0f} samples/s")
        for make in (sequential_loader, interleaved_loader):
            loader = make(f"{name}/shards", batch_size=32, seed=0)
            print(f"{make.__name__}: {input_rates.second_epoch(loader):.0f} samples/s")


if __name__ == "__main__":
    main()
