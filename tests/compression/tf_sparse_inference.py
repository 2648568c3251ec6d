"""TensorFlow's models and words for the tests of sparse inference."""

import numpy as np
import tensorflow as tf

from tests.compression.tf_distillation import numpy  # noqa: F401 - the tests take it
from tf_impl.compression import pruning, sparse_inference
from tf_impl.kit import sparse_files  # noqa: F401 - the tests take it

keras, layers = tf.keras, tf.keras.layers


def predicted(model, x):
    """What a dense model predicts, and what it does over sparse kernels; the names of these."""
    predict = sparse_inference.make_predict(model)
    return np.array(_called(model, x)), np.array(predict(x)), list(predict.layers)


def _called(model, x):
    return model(*x) if isinstance(x, tuple) else model(x)


def sequential(shape, *stack):
    return keras.Sequential([keras.Input(shape), *stack])


def linear(kernel, bias):
    model = sequential(kernel.shape[:1], layers.Dense(kernel.shape[1]))
    model.set_weights([kernel, bias])
    return model


class Inside(layers.Layer):
    """A dense layer in another."""

    def __init__(self, units, name, activation=None):
        super().__init__()
        self.dense = layers.Dense(units, activation, name=name)

    def build(self, shape):
        self.dense.build(shape)
        self.built = True

    def call(self, x):
        return self.dense(x)


class Two(keras.Model):
    """Two inputs, and a layer within another."""

    def __init__(self):
        super().__init__()
        self.inside, self.drop = Inside(8, "wide", "relu"), layers.Dropout(0.5)
        self.head = layers.Dense(3, use_bias=False, name="head")

    def call(self, a, b, training=False):
        return self.head(self.drop(self.inside(tf.stack([a, b], 1)), training=training))


def two_inputs(kernel, bias, head):
    model, x = Two(), tf.zeros((1, 5))
    model(x, x)
    model.inside.dense.set_weights([kernel, bias])
    model.head.set_weights([head])
    return model


WIDE = "wide"
tensor = tf.constant


def half():
    layer = layers.Dense(4, kernel_initializer="zeros", dtype="mixed_bfloat16")
    return sequential((4,), layer)


def masked():
    settings = {"final_sparsity": 0.9, "begin_step": 0, "end_step": 1, "frequency": 1}
    model, update = pruning.apply_pruning(sequential((5,), layers.Dense(8)), **settings)
    update(1)
    model(tf.ones((2, 5)), training=True)
    return model


def softmax_over_places(kernel, bias):
    over_places = layers.Dense(8, lambda x: tf.nn.softmax(x, axis=1))
    model = sequential((3, 5), over_places)
    model.set_weights([kernel, bias])
    return model


def two_outputs():
    x = keras.Input((16,))
    model = keras.Model(x, [layers.Dense(8)(x), layers.Dense(5)(x)])
    model.set_weights([np.where(abs(w) > 0.4, w, 0.0) for w in model.get_weights()])
    return model, tf.random.normal((4, 16))


def same_names():
    """Blocks that each hold a layer "up", of zeros."""
    x = keras.Input((4,))
    blocks = Inside(3, "up")(Inside(2, "up")(x))
    model = keras.Model(x, layers.Dense(5, name="up_1")(blocks))
    model.set_weights([np.zeros(value.shape, np.float32) for value in model.get_weights()])
    return model
