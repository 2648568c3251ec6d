"""Models of the suite in Keras 3 on TensorFlow: their optimizer and loss, and what a call ran.

What it holds: what `train_step/keras_backend.py` is measured with. The models are those of
`models.py`.
Twin: `pt_impl/kit/keras_models.py`.
Where the frameworks differ: the suite's images are NHWC already here. What Keras runs is a
`tf.function`, whose graphs are seen when another one traces it; eager there.
"""

from collections.abc import Callable

import tensorflow as tf

from tf_impl.kit import models, operators, training

build, make_optimizer = models.build, training.make_optimizer


def state_of(optimizer: tf.keras.Optimizer) -> tf.keras.Optimizer:
    """What an optimizer keeps: its variables."""
    return optimizer


def cross_entropy() -> tf.keras.losses.Loss:
    """The mean cross-entropy of logits (n, classes) and labels (n,)."""
    return tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def images(x: tf.Tensor) -> tf.Tensor:
    """Images as Keras takes them, (n, h, w, c): as they are."""
    return x


def ran(model: tf.keras.Model, function: Callable, *inputs) -> dict:
    """What a call of a step or prediction ran: the backend of the weights, and graphs.

    Calls `function` once, so that Keras's own function is there.
    """
    function(*inputs)
    of_keras = model.train_function if len(inputs) > 1 else model.predict_function
    traced = tf.function(lambda *batch: of_keras([batch]), autograph=False)
    backend = type(model.weights[0].value).__module__.partition(".")[0]
    return {"backend": backend, **operators.executed_graphs(traced, *inputs)}
