"""EfficientNetB0 of keras.applications at 96 px: normalised inputs, depthwise convolutions,
dropout, stochastic depth."""

import numpy as np


def tensorflow():
    import tensorflow as tf

    model = tf.keras.applications.EfficientNetB0(
        weights=None, input_shape=(96, 96, 3), classes=10, classifier_activation=None
    )
    return model, tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def batch(size=16, seed=0):
    random = np.random.default_rng(seed)
    x = random.uniform(0, 255, (size, 96, 96, 3)).astype(np.float32)
    return x, random.integers(0, 10, size)
