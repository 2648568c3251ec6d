"""In-memory input pipeline: batches of small images from arrays, standardised and randomly shifted.

    for x, y in vectorised_loader("data", batch_size=128, seed=0):  # data/train_x.npy, train_y.npy
        loss = step(x, y)

What it changes: how samples in memory become batches. The work on one sample takes microseconds,
less than a pipeline's overhead. So it matters whether functions are called once per sample or once
per batch. Every loader gives the same batches: each image less its mean, divided by its standard
deviation, padded by two pixels and cropped to its size, in float32, and int64 labels. Images are
(n, channels, height, width), in TensorFlow (n, height, width, channels). Order and shifts follow
from the seed and the epoch (`shared/epochs.py`). Each pass over the loader is the next epoch.

Its twin: `pt_impl/input/in_memory.py`, which says where the frameworks differ.

When it helps and when it hurts: a batch at a time is many times as fast as a sample at a time. A
cache saves the work that is the same in every epoch. Here that is the standardisation, which takes
hardly longer than reading the cache.
- A cache on disk is read again in every epoch.

Run it alone: `python -m tf_impl.input.in_memory` prints samples/s of each loader.

Copy with it: `shared/epochs.py`, `tf_impl/kit/small_images.py`.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

import tensorflow as tf

from shared.epochs import SHIFT, fingerprint, open_arrays
from tf_impl.kit.small_images import shift, standardise


def naive_loader(source, *, batch_size: int, seed: int, start_batch: int = 0) -> Iterable:
    """The tutorial's form: map, which works on a sample, then batch.

    Args:
        source: a folder with train_x.npy, float32 (n, height, width, channels), and train_y.npy,
            whole numbers.
        start_batch: batches seen before, over all epochs; the first iteration yields exactly what
            is left of its epoch. Keras's `fit` takes later epochs for as short as its first: give
            what is left of one its own `fit`.

    Returns:
        What yields (x, y); the last batch may be smaller.

    Raises:
        FileNotFoundError: a folder without these files.
        ValueError: arrays of other forms, batch_size below 1 or a negative start_batch.
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
    return batches.map(_make_work(x, y))


def parallel_loader(
    source, *, batch_size: int, seed: int, workers: int = 0, start_batch: int = 0
) -> Iterable:
    """`vectorised_loader` with `workers` calls of the map at a time, and a prefetch.

    0 workers: as many as tf.data finds best. All else is as for `naive_loader`.
    """
    x, y, batches = _open(source, batch_size, seed, start_batch)
    work = _make_work(x, y)
    return batches.map(work, workers or tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)


def memory_cached_loader(source, *, batch_size: int, seed: int, start_batch: int = 0) -> Iterable:
    """`vectorised_loader` that standardises once, in the first epoch, and keeps the result."""
    x, y, batches = _open(source, batch_size, seed, start_batch)
    whole = tf.data.Dataset.from_tensors(x).map(standardise).cache()
    return _from_cache(whole, y, batches)


def disk_cached_loader(
    source, *, batch_size: int, seed: int, cache: str, start_batch: int = 0
) -> Iterable:
    """`memory_cached_loader` that keeps the result in files in the folder `cache`.

    Each `source` has its own files, by their name, which serve every process and every run, once
    they are whole: the first epoch writes them, and an epoch that is left early does not keep
    them. A second process meanwhile gets AlreadyExistsError, and so do all later ones if the first
    is killed: TensorFlow asks to delete its lock file. PyTorch's twin writes when it is made.
    """
    x, y, batches = _open(source, batch_size, seed, start_batch)
    Path(cache).mkdir(parents=True, exist_ok=True)
    prefix = str(Path(cache, f"standardised-{fingerprint(source)}"))
    whole = tf.data.Dataset.from_tensors(x).map(standardise).cache(prefix)
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
    whole = tf.data.Dataset.from_tensors(x).map(standardise).snapshot(cache, compression=None)
    return _from_cache(whole, y, batches)


def _open(
    source, batch_size: int, seed: int, start_batch: int
) -> tuple[tf.Tensor, tf.Tensor, tf.data.Dataset]:
    """Images (n, height, width, channels), labels, and (rows, places) of each batch."""
    x, y, epochs = open_arrays(source, batch_size, seed, start_batch)
    # Python gives the order, a batch at a time, and anew in each epoch.
    specs = (tf.TensorSpec([None], tf.int64), tf.TensorSpec([None, 2], tf.int64))
    batches = tf.data.Dataset.from_generator(lambda: epochs, output_signature=specs)
    return tf.constant(x), tf.constant(y), batches


def _make_work(x: tf.Tensor, y: tf.Tensor) -> Callable:
    def batch(rows, places):
        return shift(standardise(tf.gather(x, rows)), places), tf.gather(y, rows)

    return batch


def _from_cache(whole: tf.data.Dataset, y: tf.Tensor, batches: tf.data.Dataset) -> tf.data.Dataset:
    """The batches of an epoch from the one element that is cached."""

    def epoch(x):
        def batch(rows, places):
            return shift(tf.gather(x, rows), places), tf.gather(y, rows)

        return batches.map(batch)

    return whole.flat_map(epoch)


def main() -> None:
    """Print each loader's rate in its second epoch, on the images of digits-cnn, and the limit."""
    import tempfile

    from shared.datasets import materialise
    from shared.specs import TASKS
    from tf_impl.kit import input_rates

    with tempfile.TemporaryDirectory() as name:
        folder = materialise(TASKS["digits-cnn"].dataset, Path(name))
        print(f"work on one core: {input_rates.in_memory_limit(folder, seed=0)():.0f} samples/s")
        loaders = (naive_loader, vectorised_loader, parallel_loader, memory_cached_loader)
        for make in (*loaders, disk_cached_loader, snapshot_loader):
            settings = {} if make in loaders else {"cache": f"{name}/{make.__name__}"}
            loader = make(folder, batch_size=128, seed=0, **settings)
            print(f"{make.__name__}: {input_rates.second_epoch(loader):.0f} samples/s")


if __name__ == "__main__":
    main()
