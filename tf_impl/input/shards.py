"""Sharded input pipeline: photos from a few large files, read from front to back.

    # once: twinbench shards photos shards --format tfrecord
    for x, y in interleaved_loader("shards", batch_size=32, seed=0):
        loss = step(x, y)

What it changes: how samples are stored. Each small file in a folder has to be opened, which on a
disk or over a network costs a seek. A shard is read from front to back. So the order is less
random: shards are shuffled in each epoch, and samples are drawn from a buffer of `shuffle_buffer`
samples. Batches are those of `folder.py`. A crop follows from the seed, the epoch and the sample's
place in the original folder.

Its twin: `pt_impl/input/shards.py`, which says where the frameworks differ.

When it helps and when it hurts: it helps if opening files is slow. A folder in the page cache is as
fast. With a buffer smaller than a shard, neighbouring samples stay near each other.

Run it alone: `python -m tf_impl.input.shards` prints samples/s of each loader.

Copy with it: `shared/epochs.py`, `shared/shards.py`, `tf_impl/kit/photos.py`.
"""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import tensorflow as tf

from shared.epochs import MEAN, STD, ImageForm, draw
from shared.shards import Shard, Shards, open_shards
from tf_impl.kit.photos import cores, load_record, readable, reason_of

FORM = "tfrecord"


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
    """One shard after the other, and what tf.data makes of the map by itself.

    Args:
        source: a folder of TFRecord shards.
        on_error: "raise" ends at a shard that is not what was written; "skip" leaves its samples
            out, which makes their batches smaller, and adds a line for each to the loader's list
            `skipped`. Every shard's checksum is compared when its turn comes.
        start_batch: batches seen before, over all epochs; the first iteration yields exactly what
            is left of its epoch (what comes before is read, not decoded). A batch of which nothing
            can be read is not yielded, but counts.
        image_size, mean, std: of the images, as `ImageForm` has them.

    Returns:
        What yields (x, y).

    Raises:
        ValueError: settings that don't exist, and what `open_shards` raises; while it iterates, a
            damaged shard, with the reason.
    """
    settings = {
        "batch_size": batch_size,
        "shuffle_buffer": shuffle_buffer,
        "start_batch": start_batch,
    }
    form = ImageForm(image_size, mean, std)
    shards = open_shards(source, FORM, on_error, **settings)
    return _Loader(source, shards, form, on_error, seed, **settings)


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
    """`workers` shards at a time, 0 for one a core, a sample of each in turn; as many maps at once.

    deterministic: samples come in their turn. Without it the next one is whichever is ready; then
    there is no start_batch. All else is as for `sequential_loader`; a resumed epoch needs the same
    number of workers.
    """
    if start_batch and not deterministic:
        raise ValueError("start_batch needs deterministic: what is left depends on the order")
    settings = {
        "batch_size": batch_size,
        "shuffle_buffer": shuffle_buffer,
        "start_batch": start_batch,
    }
    form, calls = ImageForm(image_size, mean, std), workers or cores()
    shards = open_shards(source, FORM, on_error, **settings)
    return _Loader(
        source, shards, form, on_error, seed, **settings, parallel=(calls, deterministic)
    )


@dataclass(repr=False, eq=False)
class _Loader:
    """An iteration is an epoch; `skipped` says which samples were left out, and why.

    parallel: how many shards are read and samples decoded at a time, and whether they come in their
    turn.
    """

    source: str
    shards: Shards
    form: ImageForm
    on_error: str
    seed: int
    batch_size: int
    shuffle_buffer: int
    start_batch: int
    parallel: tuple = ()
    skipped: list[str] = field(default_factory=list)

    def __iter__(self) -> Iterator[tuple[tf.Tensor, tf.Tensor]]:
        length = -(-self.shards.samples // self.batch_size)
        epoch, start = divmod(self.start_batch, length)
        self.start_batch = (epoch + 1) * length
        damage = {}  # row: reason
        try:
            for x, y, rows, wanted in self._batches(epoch, start, damage):
                for row in np.setdiff1d(wanted, rows).tolist():
                    reason = damage.get(row, f"{self.source}: can't be decoded")
                    self.skipped.append(f"{reason}: sample {row:09}")
                if len(y):
                    yield x, y
        except tf.errors.OpError as error:
            reason = f"{self.source}: {reason_of(error)}"
            raise ValueError(next(iter(damage.values()), reason)) from None

    def _batches(self, epoch: int, start: int, damage: dict[int, str]) -> tf.data.Dataset:
        """Batches of (x, y, rows, rows that were to be there)."""
        samples = self._records(self.shards.order(seed=self.seed, epoch=epoch), damage)
        drawn = int(np.random.default_rng([self.seed, epoch, 3]).integers(2**31))
        samples = samples.shuffle(self.shuffle_buffer, seed=drawn)
        samples = samples.skip(start * self.batch_size)  # not decoded yet
        numbers = tf.constant(draw(self.shards.size, seed=self.seed, epoch=epoch))

        def load(record, row):
            return load_record(record, numbers, self.form)

        if self.on_error == "raise":
            batches = samples.map(load, *self.parallel).batch(self.batch_size)
            return batches.map(lambda x, y, rows: (x, y, rows, rows)).prefetch(tf.data.AUTOTUNE)

        one = readable(load, self.batch_size, *self.parallel)  # by itself

        def batch(records, wanted):
            return one(records, wanted).map(lambda x, y, rows: (x, y, rows, wanted))

        return samples.batch(self.batch_size).flat_map(batch).prefetch(tf.data.AUTOTUNE)

    def _records(self, order: list[Shard], damage: dict[int, str]) -> tf.data.Dataset:
        """(record, row) of the shards in their order; the records of a damaged one are empty."""
        all_rows = tf.constant(np.concatenate([shard.rows for shard in order]))
        ends = np.cumsum([len(shard.rows) for shard in order])
        begins = np.concatenate([[0], ends[:-1]])

        def readable_path(number):
            """The path of a shard, none if it is damaged."""
            if reason := order[number].damage():
                damage.update(dict.fromkeys(order[number].rows.tolist(), reason))
                if self.on_error == "raise":
                    raise ValueError(reason)
            return np.array([] if reason else [os.fsencode(order[number].files[0])], object)

        def records(number, begin, end):
            paths = tf.numpy_function(readable_path, [number], tf.string)
            paths = tf.ensure_shape(paths, [None])
            empty = tf.data.Dataset.from_tensors(b"").repeat()
            rows = tf.data.Dataset.from_tensor_slices(all_rows[begin:end])
            return tf.data.Dataset.zip((tf.data.TFRecordDataset(paths).concatenate(empty), rows))

        shards = tf.data.Dataset.from_tensor_slices((np.arange(len(order)), begins, ends))
        if not self.parallel:
            return shards.flat_map(records)
        calls, deterministic = self.parallel
        return shards.interleave(
            records,
            cycle_length=calls,
            num_parallel_calls=calls,
            deterministic=deterministic,
        )


def main() -> None:
    """Print each loader's rate in its second epoch, on 512 photos of 256 pixels, and the limit."""
    import tempfile

    from shared.conversion import convert
    from shared.photos import make_photos
    from tf_impl.kit import input_rates

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
