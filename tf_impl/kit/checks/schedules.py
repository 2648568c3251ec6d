"""What learning-rate schedules of Keras refuse: a second schedule, and no reduction."""

import tensorflow as tf


def check_rate(optimizer: tf.keras.optimizers.Optimizer) -> None:
    """Raise ValueError for an optimizer whose rate is a schedule already."""
    held = getattr(optimizer, "_learning_rate", None)
    if isinstance(held, tf.keras.optimizers.schedules.LearningRateSchedule):
        raise ValueError("the optimizer's rate is a schedule already: make one with a number")


def check_factor(factor: float) -> None:
    """Raise ValueError for a factor that does not reduce."""
    if not 0 < factor < 1:
        raise ValueError(f"factor must be between 0 and 1, not {factor!r}")
