"""TensorFlow's models and words for the tests of stacked compression."""

import numpy as np
import tensorflow as tf

from tf_impl.compression import distillation, pruning, quantization_aware_training  # noqa: F401
from tf_impl.kit import file_zeros, int8_files  # noqa: F401

layers = tf.keras.layers


def Heads(kernels):  # noqa: N802 - the twin's class
    """Two heads with such kernels."""
    x, heads = tf.keras.Input((6,)), [layers.Dense(3, name=name) for name in ("used", "unused")]
    model = tf.keras.Model(x, {head.name: head(x) for head in heads})
    for head, kernel in zip(heads, kernels, strict=True):
        head.kernel.assign(kernel)
    return model


def kernels(model):
    return [np.array(model.get_layer(name).kernel) for name in ("used", "unused")]


def unknown_operator():
    """A whole file that needs an operator which its runtime does not have."""
    inverse = tf.function(tf.linalg.inv).get_concrete_function(tf.TensorSpec([2, 2]))
    converter = tf.lite.TFLiteConverter.from_concrete_functions([inverse])
    converter.allow_custom_ops = True
    return converter.convert()
