"""How fast input pipelines are: an epoch of a loader, and the work on its samples by itself.

Twin: `pt_impl/kit/input_rates.py`.
Where the frameworks differ: the work is a loop within one graph here, and one in Python there.

Each `..._limit` returns `measure() -> samples/s`: the work on samples in this process, with nothing
around it, on every `parts`-th of them. As the limit of a pipeline call it in one single-threaded
process a core, at the same time, each with its own `part`, and add up what they return.
"""

import time
from collections.abc import Callable, Iterable

import numpy as np
import tensorflow as tf

from shared.epochs import MEAN, STD, Epochs, ImageForm, draw, open_arrays
from shared.images import open_folder
from shared.shards import MappedImages, open_shards
from tf_impl.kit.photos import load_record, make_load, make_mapped_load
from tf_impl.kit.small_images import shift, standardise

SIZE = 224


def second_epoch(loader: Iterable) -> float:
    """Return samples/s of a loader's second epoch, when its graphs are there."""
    for _ in range(2):
        start = time.perf_counter()
        rate = sum(len(y) for _, y in loader) / (time.perf_counter() - start)
    return rate


def folder_limit(
    source, *, seed: int, part: int = 0, parts: int = 1, decoder: str = "standard"
) -> Callable[[], float]:
    """Files that are read, decoded, cropped, flipped and normalised."""
    paths, labels, epochs = open_folder(source, 1, seed, decoder)
    load = make_load(paths, labels, decoder, ImageForm(SIZE, MEAN, STD))
    rows, numbers = (np.concatenate(each)[part::parts] for each in zip(*epochs, strict=True))
    return _looped(lambda i: load(tf.gather(rows, i), tf.gather(numbers, i))[0][0, 0, 0], len(rows))


def shards_limit(source, *, seed: int, part: int = 0, parts: int = 1) -> Callable[[], float]:
    """As `folder_limit`, on every `parts`-th TFRecord file, and on one where there are fewer."""
    form, opened = ImageForm(SIZE, MEAN, STD), open_shards(source, "tfrecord")
    shards = opened.shards[part % len(opened.shards) :: parts]
    numbers = draw(opened.size, seed=seed, epoch=0)
    records = tf.data.TFRecordDataset([str(shard.files[0]) for shard in shards])

    def sample(seen, record):
        image, _, _ = load_record(record, numbers, form)
        return seen + image[0, 0, 0]  # so that nothing of it is left out

    return _rate(lambda: records.reduce(0.0, sample), sum(len(shard.rows) for shard in shards))


def mapped_arrays_limit(source, *, seed: int, part: int = 0, parts: int = 1) -> Callable[[], float]:
    """Samples that are cropped, resized, flipped and normalised."""
    images = MappedImages(open_shards(source, "arrays"))
    load = make_mapped_load(images, ImageForm(SIZE, MEAN, STD))
    epochs = Epochs(images.size, batch_size=1, seed=seed)
    batches = [batch for batch in epochs.batches(0) if images.has(batch[0])[0]][part::parts]
    rows, numbers = (np.concatenate(each) for each in zip(*batches, strict=True))
    return _looped(lambda i: load(tf.gather(rows, i), tf.gather(numbers, i))[0][0, 0, 0], len(rows))


def in_memory_limit(
    source, *, seed: int, part: int = 0, parts: int = 1, batch_size: int = 128, cached: bool = False
) -> Callable[[], float]:
    """Every `parts`-th full batch, and one where there are fewer; `cached`: they are standardised.

    Where all samples fill no batch they are the one.
    """
    x, _, epochs = open_arrays(source, batch_size, seed)
    size = min(batch_size, len(x))
    full = [batch for batch in epochs if len(batch[0]) == size]
    full = full[part % len(full) :: parts]
    rows, places = (tf.constant(np.stack(each)) for each in zip(*full, strict=True))
    x, prepare = (standardise(x), tf.identity) if cached else (tf.constant(x), standardise)

    def batch(i):
        return shift(prepare(tf.gather(x, rows[i])), places[i])[0, 0, 0, 0]

    return _looped(batch, len(full), size)


def _looped(work: Callable, count: int, samples: int = 1) -> Callable[[], float]:
    """`work` on 0 to `count`, of so many samples each, in a loop within one graph.

    It returns a value of its result, so that nothing of it is left out.
    """

    def body(index, seen):
        return index + 1, seen + work(index)

    loop = (lambda index, _: index < count, body, (0, 0.0))
    return _rate(lambda: tf.while_loop(*loop, parallel_iterations=1), count * samples)


def _rate(work: Callable, samples: int) -> Callable[[], float]:
    graph = tf.function(work)

    def measure() -> float:
        start = time.perf_counter()
        graph()
        return samples / (time.perf_counter() - start)

    measure()  # traces
    return measure
