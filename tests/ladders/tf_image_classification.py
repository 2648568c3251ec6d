"""Plain TensorFlow for test_image_classification.py."""

import tensorflow as tf


def by_hand(model, batches):
    """Losses of SGD with momentum."""
    optimizer, losses = tf.keras.optimizers.SGD(0.02, momentum=0.9), []
    cost = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    for x, y in batches:
        with tf.GradientTape() as tape:
            loss = cost(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        losses.append(float(loss))
    return losses


def is_channels_last(model, x):
    """Whether the channels lie last in what a convolution makes."""
    return model.get_layer("conv0").data_format == "channels_last"
