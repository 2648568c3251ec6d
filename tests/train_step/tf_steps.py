"""TensorFlow's models and words for the tests of train steps."""

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
