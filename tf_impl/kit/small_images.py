"""The work on a batch of small images: standardised, and shifted by some pixels.

Twin: `pt_impl/kit/small_images.py`.
Where the frameworks differ: TensorFlow has an operator that standardises; there it is written out.
"""

import tensorflow as tf

from shared.epochs import SHIFT


def standardise(x: tf.Tensor) -> tf.Tensor:
    """Return each image of (n, height, width, channels) less its mean, and over its deviation."""
    return tf.image.per_image_standardization(x)


def shift(x: tf.Tensor, places: tf.Tensor) -> tf.Tensor:
    """Pad images by SHIFT pixels, and cut each to its size again at its place from `shifts`.

    places: int64 (n, 2), from top and left.
    """
    padded = tf.pad(x, [[0, 0], [SHIFT, SHIFT], [SHIFT, SHIFT], [0, 0]])
    height, width = (tf.range(length, dtype=tf.int64) for length in x.shape[1:3])
    found = tf.gather(padded, places[:, :1] + height, axis=1, batch_dims=1)
    return tf.gather(found, places[:, 1:] + width, axis=2, batch_dims=1)
