"""TensorFlow's models for the tests of gradient clipping."""

import numpy as np
import tensorflow as tf

from tests.train_step.tf_steps import (  # noqa: F401 - the tests take these
    dense,
    descent,
    freeze,
    recorder,
    scaling,
    squares,
    tensor,
    unbuilt,
)

keras, layers = tf.keras, tf.keras.layers


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
