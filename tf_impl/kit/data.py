"""Data in TensorFlow: resident tensors and the shared order of batches. Images stay NHWC."""

from collections.abc import Callable, Iterable, Iterator
from itertools import count

import numpy as np
import tensorflow as tf

from shared.datasets import batch_order
from tf_impl.kit import runtime


def to_device(x: np.ndarray, y: np.ndarray) -> tuple[tf.Tensor, tf.Tensor]:
    """Copy arrays to `runtime.device()`; images (n, height, width, channels), codes (n, t)."""
    with tf.device(runtime.device()):
        return tf.constant(x), tf.constant(y)


def resident_batches(
    batches: list[tuple[np.ndarray, np.ndarray]],
) -> list[tuple[tf.Tensor, tf.Tensor]]:
    """Copy each batch to the device, so that a timed step finds its input there."""
    return [to_device(x, y) for x, y in batches]


def epoch_batches(
    x: tf.Tensor, y: tf.Tensor, *, batch_size: int, seed: int, epoch: int
) -> Iterator[tuple[tf.Tensor, tf.Tensor]]:
    """Batches of one epoch of a resident split, in the shared order of (seed, epoch).

    y may be a tuple, such as labels and a teacher's logits.
    """
    for rows in batch_order(len(x), batch_size, seed=seed, epoch=epoch):
        labels = tf.nest.map_structure(lambda whole, rows=rows: tf.gather(whole, rows), y)
        yield tf.gather(x, rows), labels


def host_loader(
    x: np.ndarray,
    y: np.ndarray,
    wrap: Callable[[tf.data.Dataset], tf.data.Dataset],
    *,
    batch_size: int,
    seed: int = 0,
) -> Iterable[tuple[tf.Tensor, tf.Tensor]]:
    """Batches in the shared order that are put together on the host, by as many threads as help.

    Each iteration is the next epoch; images are NHWC. `wrap` is given the dataset of batches, and
    makes another of it.
    """
    epochs = count()

    def order():
        return batch_order(len(x), batch_size, seed=seed, epoch=next(epochs))

    with tf.device("CPU:0"):
        images, labels = tf.constant(x), tf.constant(y)
    rows = tf.data.Dataset.from_generator(
        order, output_signature=tf.TensorSpec((batch_size,), tf.int64)
    )
    batches = rows.map(lambda rows: (tf.gather(images, rows), tf.gather(labels, rows)))
    return wrap(batches).prefetch(tf.data.AUTOTUNE)
