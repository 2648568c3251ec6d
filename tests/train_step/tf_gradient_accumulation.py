"""TensorFlow's models for the tests of gradient accumulation."""

from contextlib import contextmanager

import tensorflow as tf

from tests.train_step.tf_steps import (  # noqa: F401 - the tests take these
    dense,
    descent,
    freeze,
    recorder,
    squares,
    state,
    tensor,
    unbuilt,
)

keras, layers = tf.keras, tf.keras.layers
EVENTS = []


def _note(what, rows):
    tf.py_function(lambda rows: EVENTS.append(f"{what} {int(rows)}"), [rows], [])


@tf.custom_gradient
def _spy(x):
    _note("forward", tf.shape(x)[0])

    def gradient(upstream):
        with tf.control_dependencies([upstream]):
            _note("backward", tf.shape(upstream)[0])
        return upstream

    return tf.identity(x), gradient


class Spy(layers.Layer):
    def call(self, x):
        return _spy(x)


def spied():
    """A model that notes when it goes forward and backward, and the notes."""
    model = keras.Sequential([dense(), Spy()])
    model.build((None, 4))
    EVENTS.clear()
    return model, EVENTS


class Deep(layers.Layer):
    """Its activations outweigh all else: 12 of 16 MiB for 1024 samples of 4096 numbers."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(4096,), initializer="ones", name="scale")

    def call(self, x):
        for _ in range(12):
            x = tf.tanh(x * self.scale)
        return x


def deep():
    return keras.Sequential([keras.Input((4096,)), Deep()])


@contextmanager
def in_float64():
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    try:
        yield
    finally:
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("float32")
