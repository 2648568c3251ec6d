"""TensorFlow's model and plain step for the tests of stacking."""

import math
import re

import numpy as np
import tensorflow as tf

from tests.train_step.tf_steps import (  # noqa: F401 - the tests take these
    KERAS_3,
    dense,
    dtypes,
    kept,
    scaling,
    unbuilt,
)

keras, layers = tf.keras, tf.keras.layers
SMALL = 2.0**-6  # times the loss: no gradient overflows in float16 at the scaler's first scale


def sgd(model, rate, *, fused=False):
    optimizer = keras.optimizers.SGD(rate, momentum=0.9)
    optimizer.build(model.trainable_variables)
    return optimizer


def small_loss(output, y):
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, output)
    return SMALL * tf.reduce_mean(losses)


def plain_model(dtype):
    """No layer of it mixes samples, so that parts add up to the batch."""
    keras.utils.set_random_seed(0)
    policy = {"dtype": dtype if dtype == "float32" else f"mixed_{dtype}"}
    inputs = keras.Input((6, 6, 3))
    x = layers.Conv2D(4, 3, name="stem", **policy)(inputs)
    x = layers.ReLU(name="body.first", **policy)(x)
    x = layers.Conv2D(4, 3, activation="tanh", name="body.second", **policy)(x)
    return keras.Model(inputs, layers.Dense(3, name="head", **policy)(layers.Flatten(**policy)(x)))


def plain_batch(samples=7):
    images = np.random.default_rng(1).normal(size=(samples, 6, 6, 3))
    return tf.constant(images, tf.float32), tf.constant(np.arange(samples) % 3)


def plain_step(model, rate, *, dtype, max_norm):
    """As a user of TensorFlow writes it."""
    optimizer, variables = sgd(model, rate), model.trainable_variables
    scale = 2.0**16 if dtype == "float16" else 1.0

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = small_loss(tf.cast(model(x, training=True), tf.float32), y)
            scaled = loss * scale
        gradients = [gradient / scale for gradient in tape.gradient(scaled, variables)]
        if max_norm < math.inf:
            gradients, _ = tf.clip_by_global_norm(gradients, max_norm)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    return step


def weights(model):
    """All of them, as one vector."""
    return np.concatenate([weight.ravel() for weight in model.get_weights()])


def is_compiled_in_bfloat16(kit, step, x, y):
    """What is compiled; a CPU computes it in float32 where XLA has no kernel."""
    compiled = step.get_concrete_function(x, y).function_def.attr["_XlaMustCompile"].b
    program = step.experimental_get_compiler_ir(x, y)(stage="hlo")  # before passes for the device
    return compiled and set(re.findall(r"= (\w+)\[.* convolution\(", program)) == {"bf16"}


def half():
    return keras.Sequential([keras.Input((2,)), layers.Dense(2, dtype="bfloat16")])
