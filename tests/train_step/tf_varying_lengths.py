"""TensorFlow's side of test_varying_lengths.py."""

import tensorflow as tf


def loss_and_gradients(model, loss_of):
    """The loss, and its gradients by the order of variables, as NumPy."""
    with tf.GradientTape() as tape:
        loss = loss_of()
    gradients = tape.gradient(loss, model.trainable_variables)
    return float(loss), [tf.convert_to_tensor(one).numpy() for one in gradients]


def plain_loss(model, codes, labels):
    """The mean loss of one sample without padding."""
    losses = tf.keras.losses.sparse_categorical_crossentropy(
        labels, model(tf.constant(codes)[None])[0], from_logits=True
    )
    return tf.reduce_mean(losses)


def sgd(model, rate):
    """Plain SGD."""
    return tf.keras.optimizers.SGD(rate)


def forget_graphs():
    """Each function has its graphs."""
