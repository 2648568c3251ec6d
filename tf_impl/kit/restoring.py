"""A trial that leaves no trace: model, optimizer and random numbers come back bit for bit.

Twin: `pt_impl/kit/restoring.py`.
Where the frameworks differ: Keras 3 layers hold their random state as variables of the model, and
`tf.random` has a global generator; tf_keras layers draw from operators that nobody can set back.
PyTorch's random state is global. Gradients and modes are state of a module there.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf


@contextmanager
def restored(model: tf.keras.Model, optimizer: tf.keras.optimizers.Optimizer) -> Iterator[None]:
    """Give model, optimizer and generator back what they had, whatever happens inside.

    All variables of both, those that a Keras 3 optimizer trains beside the model's (of a loss), and
    the global generator. The optimizer is built.
    """
    holder = getattr(optimizer, "inner_optimizer", optimizer)  # of a LossScaleOptimizer
    trained = getattr(holder, "_trainable_variables", [])  # tf_keras keeps no list of them
    variables = [*_variables(model), *_variables(optimizer), *trained]
    variables = list({id(variable): variable for variable in variables}.values())
    variables.append(holder._learning_rate)  # tf_keras doesn't count it among the variables
    variables.append(tf.random.get_global_generator().state)
    kept = [tf.identity(variable) for variable in variables]
    try:
        yield
    finally:
        for variable, value in zip(variables, kept, strict=True):
            variable.assign(value)


def _variables(owner) -> list:
    """All variables of a model or an optimizer: a property in Keras 3, a method in tf_keras."""
    return list(owner.variables() if callable(owner.variables) else owner.variables)
