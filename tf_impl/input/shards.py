"""Sharded input pipeline: photos from a few large files, read from front to back.

What it changes: where samples lie. A folder of small files costs an open, and on a disk or over a
network a seek, for each; a shard is read in one go. The price is the order: that of the shards is
drawn for each epoch, and the next sample from a buffer of `shuffle_buffer` that were read. Batches
are those of `folder.py`: float32 images (n, 224, 224, 3) and int64 labels, with crops that
follow from the seed, the epoch and the sample's row in the folder that
`twinbench shards FOLDER TARGET --format tfrecord` made the shards of.

Its twin: `pt_impl/input/shards.py`.

Where the frameworks differ and why:
- Shards are TFRecord files here, and tar files there, as the webdataset convention has them.
- Parallel reading means threads here, which read several shards in turn into one buffer. There
  processes have shards, a buffer and a last batch of their own.
- The shuffle buffer is tf.data's, which draws from a generator of its own, and from the seed of
  `tf.random.set_seed` where one is set, so that the order differs. Each epoch has the same samples,
  crops and flips on both sides.

When it helps and when it hurts: it helps where opening files is slow. In the page cache a folder is
as fast. With a buffer smaller than a shard what lies together stays near.

Run it alone: `python -m tf_impl.input.shards` prints samples/s of each loader.

Copy with it: `shared/epochs.py`, `shared/shards.py`.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import tensorflow as tf

from shared.epochs import MEAN, RATIOS, STD, TRIES, ImageForm, draw
from shared.shards import open_shards

FORM = "tfrecord"
FEATURES = {
    "image/encoded": tf.io.FixedLenFeature([], tf.string),
    "image/class/label": tf.io.FixedLenFeature([], tf.int64),
    "image/row": tf.io.FixedLenFeature([], tf.int64),
}


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

    source: a folder of TFRecord shards. on_error: "raise" ends at a shard that is not what was
    written; "skip" leaves its samples out, which makes their batches smaller, and adds a line for
    each to the loader's list `skipped`. Every shard's checksum is compared when its turn comes.
    start_batch: batches seen before, over all epochs; the first iteration yields exactly what is
    left of its epoch (what comes before is read, not decoded). A batch of which nothing can be read
    is not yielded, but counts. image_size, mean, std: of the images, as `ImageForm` has them.
    Yields (x, y).

    Raises ValueError for settings that don't exist, and what `open_shards` raises; while it
    iterates, ValueError with the shard and the reason.
    """

    def read(shards, records):
        return shards.flat_map(records)

    return _Loader(
        source,
        ImageForm(image_size, mean, std),
        read,
        {},
        batch_size=batch_size,
        seed=seed,
        shuffle_buffer=shuffle_buffer,
        on_error=on_error,
        start_batch=start_batch,
    )


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
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    settings = {"num_parallel_calls": workers or cores, "deterministic": deterministic}

    def read(shards, records):
        return shards.interleave(records, cycle_length=workers or cores, **settings)

    return _Loader(
        source,
        ImageForm(image_size, mean, std),
        read,
        settings,
        batch_size=batch_size,
        seed=seed,
        shuffle_buffer=shuffle_buffer,
        on_error=on_error,
        start_batch=start_batch,
    )


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

    A call works on every `parts`-th shard, in a loop within one graph, and on one where they are
    fewer than `parts`. For the limit of a pipeline call it in a single-threaded process a core, at
    once, each with its `part`, and add up.
    """
    form, opened = ImageForm(image_size, mean, std), open_shards(source, FORM)
    shards = opened.shards[part % len(opened.shards) :: parts]
    numbers = draw(opened.size, seed=seed, epoch=0)
    count = sum(len(shard.rows) for shard in shards)
    records = tf.data.TFRecordDataset([str(shard.files[0]) for shard in shards])

    def sample(seen, record):
        image, _, _ = _decode(record, numbers, form)
        return seen + image[0, 0, 0]  # so that nothing of it is left out

    work = tf.function(lambda: records.reduce(0.0, sample))

    def measure() -> float:
        start = time.perf_counter()
        work()
        return count / (time.perf_counter() - start)

    measure()  # traces
    return measure


class _Loader:
    """An iteration is an epoch; `skipped` says which samples were left out, and why.

    read: makes the samples of a data set of shards. settings: of the map that decodes them.
    """

    def __init__(
        self,
        source,
        form: ImageForm,
        read: Callable,
        settings: dict,
        *,
        batch_size: int,
        seed: int,
        shuffle_buffer: int,
        on_error: str,
        start_batch: int,
    ) -> None:
        self._shards = open_shards(
            source,
            FORM,
            on_error,
            batch_size=batch_size,
            shuffle_buffer=shuffle_buffer,
            start_batch=start_batch,
        )
        self._source, self._seed, self._raises = source, seed, on_error == "raise"
        self._batch_size, self._buffer = batch_size, shuffle_buffer
        self._form, self._read, self._settings = form, read, settings
        self.skipped: list[str] = []
        self._epoch, self._start = divmod(start_batch, -(-self._shards.samples // batch_size))

    def __iter__(self) -> Iterator[tuple[tf.Tensor, tf.Tensor]]:
        damage = {}  # row: reason
        batches = self._dataset(self._epoch, self._start, damage)
        self._epoch, self._start = self._epoch + 1, 0
        try:
            for x, y, rows, wanted in batches:
                for row in np.setdiff1d(wanted, rows).tolist():
                    reason = damage.get(row, f"{self._source}: can't be decoded")
                    self.skipped.append(f"{reason}: sample {row:09}")
                if len(y):
                    yield x, y
        except tf.errors.OpError as error:
            reason = error.message.partition("[[")[0].strip().splitlines()[-1]
            raise ValueError(next(iter(damage.values()), f"{self._source}: {reason}")) from None

    def _dataset(self, epoch: int, start: int, damage: dict[int, str]) -> tf.data.Dataset:
        """Batches of (x, y, rows, rows that were to be there)."""
        order = self._shards.order(seed=self._seed, epoch=epoch)
        all_rows = tf.constant(np.concatenate([shard.rows for shard in order]))
        ends = np.cumsum([len(shard.rows) for shard in order])
        begins = np.concatenate([[0], ends[:-1]])

        def readable(number):
            """The path of a shard, none if it is damaged."""
            if reason := order[number].damage():
                damage.update(dict.fromkeys(order[number].rows.tolist(), reason))
                if self._raises:
                    raise ValueError(reason)
            return np.array([] if reason else [os.fsencode(order[number].files[0])], object)

        def records(number, begin, end):
            """(record, row) of a shard; the records of a damaged one are empty."""
            paths = tf.ensure_shape(tf.numpy_function(readable, [number], tf.string), [None])
            empty = tf.data.Dataset.from_tensors(b"").repeat()
            rows = tf.data.Dataset.from_tensor_slices(all_rows[begin:end])
            return tf.data.Dataset.zip((tf.data.TFRecordDataset(paths).concatenate(empty), rows))

        shards = tf.data.Dataset.from_tensor_slices((np.arange(len(order)), begins, ends))
        drawn = int(np.random.default_rng([self._seed, epoch, 3]).integers(2**31))
        samples = self._read(shards, records).shuffle(self._buffer, seed=drawn)
        samples = samples.skip(start * self._batch_size)  # not decoded yet
        numbers = tf.constant(draw(self._shards.size, seed=self._seed, epoch=epoch))
        return self._decoded(samples, numbers).prefetch(tf.data.AUTOTUNE)

    def _decoded(self, samples: tf.data.Dataset, numbers: tf.Tensor) -> tf.data.Dataset:
        def decode(record, row):
            return _decode(record, numbers, self._form)

        if self._raises:
            batches = samples.map(decode, **self._settings).batch(self._batch_size)
            return batches.map(lambda x, y, rows: (x, y, rows, rows))

        def batch(records, rows):
            samples = tf.data.Dataset.from_tensor_slices((records, rows))
            samples = samples.filter(lambda record, row: tf.strings.length(record) > 0)
            samples = samples.map(decode, **self._settings)
            empty = [tf.zeros([0, *spec.shape], spec.dtype) for spec in samples.element_spec]
            one = samples.ignore_errors().batch(self._batch_size)
            one = one.concatenate(tf.data.Dataset.from_tensors(tuple(empty))).take(1)
            return one.map(lambda x, y, kept: (x, y, kept, rows))

        # A batch is a data set, so that what is left out makes it smaller and moves no other.
        return samples.batch(self._batch_size).flat_map(batch)


def _decode(
    record: tf.Tensor, numbers: tf.Tensor, form: ImageForm
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Image, label and row of a record, with the crop that `numbers` have for its row."""
    example = tf.io.parse_single_example(record, FEATURES)
    data, row = example["image/encoded"], example["image/row"]
    drawn = tf.gather(numbers, row)
    height, width, _ = tf.unstack(tf.io.extract_jpeg_shape(data))
    top, left, high, wide = tf.unstack(_crop_box(height, width, tf.cast(drawn, tf.float64)))
    image = tf.io.decode_jpeg(data, channels=3, dct_method="INTEGER_ACCURATE")
    image = image[top : top + high, left : left + wide]
    image = tf.cond(drawn[-1] < 0.5, lambda: tf.reverse(image, [1]), lambda: image)
    image = tf.image.resize(image, (form.size, form.size), antialias=True)
    rows = tf.reshape(image, [form.size, 3 * form.size]) * form.scale + form.offset
    return tf.reshape(rows, [form.size, form.size, 3]), example["image/class/label"], row


def _crop_box(height: tf.Tensor, width: tf.Tensor, numbers: tf.Tensor) -> tf.Tensor:
    """`shared.epochs.crop_box` in a graph: top, left, height and width, int32 (4,)."""
    size = tf.cast([height, width], tf.float64)
    areas, ratios = numbers[:TRIES], numbers[TRIES : 2 * TRIES]
    pixels = size[0] * size[1] * areas
    tries = tf.round(tf.sqrt([pixels / ratios, pixels * ratios]))
    # Behind the tries stands the largest crop with a ratio within bounds, which fits.
    largest = tf.round([size[1] / RATIOS[0], size[0] * RATIOS[1]])
    tries = tf.concat([tries, tf.minimum(size, tf.maximum(largest, 1))[:, None]], 1)
    fits = tf.reduce_all((tries > 0) & (tries <= size[:, None]), 0)
    first = tf.where(fits)[0, 0]
    crop = tries[:, first]
    drawn = tf.floor(numbers[2 * TRIES : 2 * TRIES + 2] * (size - crop + 1))
    begin = tf.where(first == TRIES, tf.floor((size - crop) / 2), drawn)
    return tf.cast(tf.concat([begin, crop], 0), tf.int32)


def main() -> None:
    """Print each loader's rate in its second epoch, on 512 photos of 256 pixels."""
    import tempfile

    from shared.conversion import convert
    from shared.photos import make_photos

    with tempfile.TemporaryDirectory() as name:
        folder = make_photos(f"{name}/photos", images=512, size=256, seed=0)
        convert(folder, f"{name}/shards", form=FORM, samples=64)
        for make in (sequential_loader, interleaved_loader):
            loader = make(f"{name}/shards", batch_size=32, seed=0)
            for _ in range(2):
                start = time.perf_counter()
                rate = sum(len(y) for _, y in loader) / (time.perf_counter() - start)
            print(f"{make.__name__}: {rate:.0f} samples/s")


if __name__ == "__main__":
    main()
