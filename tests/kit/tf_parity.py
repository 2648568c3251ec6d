"""TensorFlow's words for the tests of equal work."""

import contextlib

import numpy as np
import tensorflow as tf

from tf_impl.kit import detection  # noqa: F401 - tests take it


def cross_entropy_64(logits, labels):
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    return tf.reduce_mean(losses)


def numpy(tensor):
    return np.array(tensor)


channels_last = numpy


def gradients(model, named, loss_fn, x, y):
    with tf.GradientTape() as tape:
        loss = loss_fn(model(x, training=True), y)
    return [np.array(one) for one in tape.gradient(loss, list(named.values()))]


def keeps_biased_variance(wide):
    """Keras 3 does; tf_keras where it cannot use the fused kernel, which has no float64."""
    return wide or not tf.keras.Model.__module__.startswith("tf_keras")


@contextlib.contextmanager
def float64():
    """Models are built and run in float64 inside."""
    _compute_in("float64")
    try:
        yield
    finally:
        _compute_in("float32")


def _compute_in(dtype):
    tf.keras.backend.set_floatx(dtype)
    tf.keras.mixed_precision.set_global_policy(dtype)


@contextlib.contextmanager
def eager():
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(False)


def update(optimizer, parameters, gradients):
    """One step against tensors by the names of parameters."""
    values = [tf.convert_to_tensor(gradients[name]) for name in parameters]
    optimizer.apply_gradients(zip(values, parameters.values(), strict=True))
