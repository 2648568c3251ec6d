"""TensorFlow's models for the tests of the guard."""

import math

import numpy as np
import tensorflow as tf

from tests.train_step.tf_steps import (  # noqa: F401 - the tests take these
    dense,
    descent,
    freeze,
    scaling,
    squares,
    state,
    tensor,
    unbuilt,
)
from tf_impl import kit
from tf_impl.train_step.gradient_clipping import GradientClipper

keras, layers = tf.keras, tf.keras.layers
FACTOR = tf.Variable(1.0, trainable=False)


def with_nan(x, count):
    array = np.array(x)
    array.reshape(-1)[5 : 5 + count] = math.nan
    return tf.constant(array)


def root(logits, labels):
    """The loss and a root, which for labels below zero is that of zero: finite, but steep."""
    factor = tf.cast(tf.reduce_all(labels >= 0), logits.dtype)
    labels = tf.where(labels < 0, -1 - labels, labels)
    size = tf.reduce_sum(tf.square(logits * factor))
    return kit.training.cross_entropy(logits, labels) + 1e-3 * tf.sqrt(size)


def clipping_step(technique, model, optimizer, loss_fn):
    """A loop with the guard and the clipper."""
    guard, clipper = technique.FiniteGuard(model), GradientClipper(model, max_norm=0.5)
    optimizer.build(model.trainable_variables)

    @tf.function
    def train(x, y):
        with tf.GradientTape() as tape:
            loss = loss_fn(model(x, training=True), y)
        gradients = tape.gradient(loss, model.trainable_variables)
        clipped = clipper.clip(gradients)
        return loss, *guard.apply(optimizer, gradients, x, y, loss, clipped)

    def step(x, y):
        loss, finite, counts = train(x, y)
        guard.check(x, y, finite, counts)
        return loss

    return step


class Two(keras.Model):
    """Two inputs, and a root behind one of the two layers."""

    def __init__(self):
        super().__init__()
        keras.utils.set_random_seed(0)
        self.left = layers.Dense(2, use_bias=False, name="left")
        self.right = layers.Dense(2, use_bias=False, name="right")

    def call(self, a, b, training=False):
        length = tf.sqrt(tf.reduce_sum(tf.square(self.left(a)), -1))
        return tf.reduce_sum(self.right(b), -1) + length


def two(*x):
    model = Two()
    model(*x)
    return model


class Mixed(keras.Model):
    """A sparse graph and complex numbers as inputs."""

    def __init__(self):
        super().__init__()
        self.layer = layers.Dense(2)

    def call(self, graph, x):
        return tf.sparse.sparse_dense_matmul(graph, self.layer(tf.abs(x)))


def mixed(graph, x, kind):
    """A model and its inputs, of a graph as a matrix."""
    model, x = Mixed(), (tf.sparse.from_dense(graph), tf.constant(x))
    model(*x)
    return model, x
