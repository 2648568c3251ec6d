"""Trials of the batch-size finder: a function for each Keras model of the zoo, by its name."""

from collections.abc import Callable
from functools import partial

import tensorflow as tf

from tests.zoo.cells_tf import plain_step, sgd
from tests.zoo.tf import ZOO, loss_of


def __getattr__(name: str) -> Callable:
    if name not in ZOO:
        raise AttributeError(name)
    foreign = ZOO[name]

    def trial(batch_size: int) -> Callable:
        model = foreign.build()
        x, y = foreign.inputs(batch_size), foreign.labels(batch_size)
        step = tf.function(partial(plain_step, model, sgd(), loss_of(foreign)))
        return lambda: step(x, y).numpy()

    return trial
