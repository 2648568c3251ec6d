"""Plain Keras: a short training of the digits CNN, its held-out loss, and its logits."""

import tensorflow as tf

from tf_impl.kit import models


def trained(spec, weights, batches, rate):
    """A model after a step of SGD with momentum on each batch of arrays."""
    model = models.build(spec, weights)
    model.compile(tf.keras.optimizers.SGD(rate, momentum=0.9), _loss())
    for x, y in batches:
        model.train_on_batch(x, y)
    return model


def held_out_loss(model, x, y):
    """The mean cross-entropy in evaluation mode."""
    return float(_loss()(y, model(x, training=False)))


def logits(spec, weights, x):
    """The outputs in evaluation mode."""
    return models.build(spec, weights)(x, training=False).numpy()


def _loss():
    return tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
