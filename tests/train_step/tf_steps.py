"""TensorFlow's models and words for the tests of train steps."""

from contextlib import contextmanager

import numpy as np
import tensorflow as tf

from tests.compression.tf_distillation import (  # noqa: F401
    cast,
    descent,
    freeze,
    numpy,
    recorder,
    state,
)
from tf_impl import kit  # noqa: F401 - the tests take these

keras, layers = tf.keras, tf.keras.layers
KERAS_3 = hasattr(keras, "StatelessScope")


def tensor(values):
    return tf.constant(values)


def dense(inputs=4, outputs=3):
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((inputs,)), layers.Dense(outputs)])


def unbuilt():
    return keras.Sequential([layers.Dense(2)])


def squares(output, y):
    return tf.reduce_mean(tf.square(output - y))


def dtypes(tensors):
    return {tf.as_dtype(tensor.dtype).name for tensor in tensors}


def kept(prepared):
    """What training keeps but for the step's counter: variables and the optimizer's state."""
    tensors = [*prepared.model.variables, *prepared.optimizer.variables]
    return [one for one in tensors if "int" not in tf.as_dtype(one.dtype).name]


def scaling():
    """Optimizers that expect a scaled loss."""
    sgd = keras.optimizers.SGD
    return [keras.optimizers.LossScaleOptimizer(sgd()), sgd(loss_scale_factor=2.0)]


def policies(model):
    return sorted({layer.dtype_policy.name for layer in model._flatten_layers()})


def difference(ours, theirs) -> float:
    """The relative L2 distance of two outputs."""
    return float(tf.norm(tf.cast(ours, theirs.dtype) - theirs) / tf.norm(theirs))


def normal(*shape, seed=0):
    return tf.constant(np.random.default_rng(seed).normal(size=shape), tf.float32)


# Gradient accumulation ----------------------------------------------------------------------------

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


# Gradient clipping --------------------------------------------------------------------------------


def embedding():
    return keras.Sequential([keras.Input((), dtype="int64"), layers.Embedding(4, 2)])


def only_weight(model):
    return np.array(model.trainable_variables[0])


def total(values):
    return tf.reduce_sum(values)


def clipped(make, gradients):
    """The gradients after clipping, and their norm before it where there is one; None is missing.

    make: the clipper of a model.
    """
    tensors = [None if g is None else tf.constant(g) for g in gradients]
    clipper = make(dense())
    norm = float(clipper.norm(tensors)) if hasattr(clipper, "norm") else None
    return [np.array(g) for g in clipper.clip(tensors) if g is not None], norm


def scaled(technique, prepared, loss_fn, x, y, scale, max_norm, in_order):
    """A loop of LossScaleOptimizer's with the clipper; out of order that knows no scale."""
    model, variables = prepared.model, prepared.model.trainable_variables
    optimizer = keras.optimizers.LossScaleOptimizer(prepared.optimizer, scale)
    optimizer.build(variables)
    with tf.GradientTape() as tape:
        loss = optimizer.scale_loss(loss_fn(model(x, training=True), y))
    clipper = technique.GradientClipper(model, max_norm=max_norm)
    given = {"scale": scale} if in_order else {}
    gradients = clipper.clip(tape.gradient(loss, variables), **given)
    optimizer.apply_gradients(zip(gradients, variables, strict=True))


# Optimizer implementations ------------------------------------------------------------------------


def buffers(model):
    """Tensors to hold the gradients."""
    return [tf.Variable(tf.zeros(variable.shape)) for variable in model.trainable_variables]


def fill(buffers, carrier):
    """Put a model's parameters there."""
    for buffer, value in zip(buffers, carrier.trainable_variables, strict=True):
        buffer.assign(value + 0.0)


def looked_up(make):
    """What the first update makes of a table of zeros that looks row 0 up twice."""
    table = layers.Embedding(3, 1, embeddings_initializer="zeros")
    model = keras.Sequential([keras.Input((), dtype="int64"), table])
    optimizer = make(model, learning_rate=0.5)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(tf.constant([0, 0, 1])) * tf.constant([[1.0], [2.0], [3.0]]))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return table.get_weights()[0].ravel().tolist()
