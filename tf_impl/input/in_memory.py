"""In-memory input pipeline: small images from arrays, standardised, shifted at random, in batches.

What it changes: how samples that are in memory already become batches. The work on one takes
microseconds, less than what a pipeline does around it, so that what counts is how often anything is
called: once a sample, or once a batch. Every loader gives the same batches: each image less its
mean and over its deviation, padded by two pixels and cut to its size again (`shared/epochs.py`),
float32 (n, height, width, channels), and int64 labels. Order and shifts follow from the seed and
the epoch; each iteration is the next epoch.

Its twin: `pt_impl/input/in_memory.py`.

Where the frameworks differ and why:
- Whether a sample or a batch is worked on is decided here by the order of `map` and `batch`. There
  a Dataset has a method for each.
- Parallel means threads here: nothing is moved. There it means processes that share the data.
- tf.data has a cache, in memory or on disk, for what comes before it. The whole data set is one of
  its elements here, so that any row can be taken of it; cached sample by sample, it would have to
  be shuffled behind the cache. There a cache is a tensor or a mapped array.
- `snapshot_loader` has no twin: PyTorch stores nothing that a pipeline makes.

When it helps and when it hurts: a batch at a time is many times as fast as a sample at a time, on
both sides. A cache saves the work that is the same in every epoch, here a standardisation that
hardly takes longer than to read what is stored; that on disk is read anew in every epoch.

Run it alone: `python -m tf_impl.input.in_memory` prints samples/s of each loader.

Copy with it: `shared/epochs.py`.
"""

import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import tensorflow as tf

from shared.epochs import SHIFT, fingerprint, open_arrays


def naive_loader(source, *, batch_size: int, seed: int, start_batch: int = 0) -> Iterable:
    """The tutorial's form: map, which works on a sample, then batch.

    source: a folder with train_x.npy, float32 (n, height, width, channels), and train_y.npy, whole
    numbers.
    start_batch: batches seen before, over all epochs; the first iteration yields exactly what is
    left of its epoch. Yields (x, y); the last batch may be smaller. Keras's `fit` takes later
    epochs for as short as its first: give what is left of one a `fit` of its own.

    Raises FileNotFoundError for a folder without these files, and ValueError for arrays of other
    forms, batch_size below 1 and a negative start_batch.
    """
    x, y, batches = _open(source, batch_size, seed, start_batch)
    padding = [[SHIFT, SHIFT], [SHIFT, SHIFT], [0, 0]]

    def sample(row, place):
        image = tf.pad(tf.image.per_image_standardization(x[row]), padding)
        return tf.slice(image, [place[0], place[1], 0], x.shape[1:]), y[row]

    return batches.unbatch().map(sample).batch(batch_size)


def vectorised_loader(source, *, batch_size: int, seed: int, start_batch: int = 0) -> Iterable:
    """Batch, then map, which works on a batch. All else is as for `naive_loader`."""
    x, y, batches = _open(source, batch_size, seed, start_batch)

    def batch(rows, places):
        return _shift(_standardise(tf.gather(x, rows)), places), tf.gather(y, rows)

    return batches.map(batch)


def parallel_loader(
    source, *, batch_size: int, seed: int, workers: int = 0, start_batch: int = 0
) -> Iterable:
    """`vectorised_loader` with `workers` calls of the map at a time, and a prefetch.

    0 workers: as many as tf.data finds best. All else is as for `naive_loader`.
    """
    x, y, batches = _open(source, batch_size, seed, start_batch)

    def batch(rows, places):
        return _shift(_standardise(tf.gather(x, rows)), places), tf.gather(y, rows)

    return batches.map(batch, workers or tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)


def memory_cached_loader(source, *, batch_size: int, seed: int, start_batch: int = 0) -> Iterable:
    """`vectorised_loader` that standardises once, in the first epoch, and keeps the result."""
    x, y, batches = _open(source, batch_size, seed, start_batch)
    whole = tf.data.Dataset.from_tensors(x).map(_standardise).cache()
    return _from_cache(whole, y, batches)


def disk_cached_loader(
    source, *, batch_size: int, seed: int, cache: str, start_batch: int = 0
) -> Iterable:
    """`memory_cached_loader` that keeps the result in files in the folder `cache`.

    They have a name of their own for each `source`, and serve every process and every run, once
    they are whole: the first epoch writes them, and an epoch that is left early does not keep
    them. A second process meanwhile gets AlreadyExistsError, and so do all later ones if the first
    is killed: TensorFlow asks to delete its lock file. PyTorch's twin writes when it is made.
    """
    x, y, batches = _open(source, batch_size, seed, start_batch)
    Path(cache).mkdir(parents=True, exist_ok=True)
    prefix = str(Path(cache, f"standardised-{fingerprint(source)}"))
    whole = tf.data.Dataset.from_tensors(x).map(_standardise).cache(prefix)
    return _from_cache(whole, y, batches)


def snapshot_loader(
    source, *, batch_size: int, seed: int, cache: str, start_batch: int = 0
) -> Iterable:
    """`disk_cached_loader` by `Dataset.snapshot`, which knows its files by what they were made of.

    Another graph or other data has other files in the folder `cache`, with nothing to name. What a
    killed process left is no error: until it has expired, after a day, others do without files.
    Uncompressed, since noise in images does not compress. Source: `tf.data.Dataset.snapshot`.
    """
    x, y, batches = _open(source, batch_size, seed, start_batch)
    whole = tf.data.Dataset.from_tensors(x).map(_standardise).snapshot(cache, compression=None)
    return _from_cache(whole, y, batches)


def work_rate(
    source, *, seed: int, part: int = 0, parts: int = 1, batch_size: int = 128, cached: bool = False
) -> Callable[[], float]:
    """Return `measure() -> samples/s`: the work on batches in this process, with nothing around it.

    A call works on every `parts`-th full batch of epoch 0 (on one where they are fewer, and on all
    samples where they fill none), in a loop within one graph, without what a cache saves if
    `cached`. For the limit of a pipeline call it in
    a single-threaded process a core, at once, each with its `part`, and add up.
    """
    x, _, epochs = open_arrays(source, batch_size, seed)
    size = min(batch_size, len(x))
    full = [batch for batch in epochs if len(batch[0]) == size]
    full = full[part % len(full) :: parts]
    rows, places = (tf.constant(np.stack(each)) for each in zip(*full, strict=True))
    x, prepare = (_standardise(x), tf.identity) if cached else (tf.constant(x), _standardise)

    def batch(index, seen):
        found = _shift(prepare(tf.gather(x, rows[index])), places[index])
        return index + 1, seen + found[0, 0, 0, 0]  # so that nothing of it is left out

    loop = (lambda index, _: index < len(full), batch, (0, 0.0))
    work = tf.function(lambda: tf.while_loop(*loop, parallel_iterations=1))

    def measure() -> float:
        start = time.perf_counter()
        work()
        return len(full) * size / (time.perf_counter() - start)

    measure()  # traces
    return measure


def _open(
    source, batch_size: int, seed: int, start_batch: int
) -> tuple[tf.Tensor, tf.Tensor, tf.data.Dataset]:
    """Images (n, height, width, channels), labels, and (rows, places) of each batch."""
    x, y, epochs = open_arrays(source, batch_size, seed, start_batch)
    # Python gives the order, a batch at a time, and anew in each epoch.
    specs = (tf.TensorSpec([None], tf.int64), tf.TensorSpec([None, 2], tf.int64))
    batches = tf.data.Dataset.from_generator(lambda: epochs, output_signature=specs)
    return tf.constant(x), tf.constant(y), batches


def _from_cache(whole: tf.data.Dataset, y: tf.Tensor, batches: tf.data.Dataset) -> tf.data.Dataset:
    """The batches of an epoch from the one element that is cached."""

    def epoch(x):
        def batch(rows, places):
            return _shift(tf.gather(x, rows), places), tf.gather(y, rows)

        return batches.map(batch)

    return whole.flat_map(epoch)


def _standardise(x: tf.Tensor) -> tf.Tensor:
    """Each image less its mean, and over its deviation: `tf.image.per_image_standardization`."""
    return tf.image.per_image_standardization(x)


def _shift(x: tf.Tensor, places: tf.Tensor) -> tf.Tensor:
    """Pad, and cut each image to its size again where its place is."""
    padded = tf.pad(x, [[0, 0], [SHIFT, SHIFT], [SHIFT, SHIFT], [0, 0]])
    height, width = (tf.range(length, dtype=tf.int64) for length in x.shape[1:3])
    found = tf.gather(padded, places[:, :1] + height, axis=1, batch_dims=1)
    return tf.gather(found, places[:, 1:] + width, axis=2, batch_dims=1)


def main() -> None:
    """Print each loader's rate in its second epoch, on the images of digits-cnn."""
    import tempfile

    from shared.datasets import materialise
    from shared.specs import TASKS

    with tempfile.TemporaryDirectory() as name:
        folder = materialise(TASKS["digits-cnn"].dataset, Path(name))
        loaders = (naive_loader, vectorised_loader, parallel_loader, memory_cached_loader)
        for make in (*loaders, disk_cached_loader, snapshot_loader):
            settings = {} if make in loaders else {"cache": f"{name}/{make.__name__}"}
            loader = make(folder, batch_size=128, seed=0, **settings)
            for _ in range(2):
                start = time.perf_counter()
                rate = sum(len(y) for _, y in loader) / (time.perf_counter() - start)
            print(f"{make.__name__}: {rate:.0f} samples/s")


if __name__ == "__main__":
    main()
