"""What the learning-rate finder refuses: a model without variables, and schedules."""

import tensorflow as tf


def check_learning_rate_finder(
    model: tf.keras.Model, optimizer: tf.keras.optimizers.Optimizer
) -> None:
    """Raise ValueError for a model without variables, and for a schedule."""
    if not model.built:
        raise ValueError("the model has no variables yet: call it once on an example input")
    held = getattr(getattr(optimizer, "inner_optimizer", optimizer), "_learning_rate", None)
    if isinstance(held, tf.keras.optimizers.schedules.LearningRateSchedule):
        raise ValueError("the optimizer's rate is a schedule: make one with a number")
