"""What the learning-rate finder refuses: settings out of range, and schedules."""

import tensorflow as tf


def check_learning_rate_finder(
    model: tf.keras.Model,
    optimizer: tf.keras.optimizers.Optimizer,
    lowest: float,
    highest: float,
    steps: int,
    window: int,
    divergence: float,
) -> None:
    """Raise ValueError for settings out of range, a model without variables, and a schedule."""
    if not 0 < lowest < highest or divergence <= 0:
        raise ValueError(
            "a range test needs 0 < lowest < highest and divergence above 0, "
            f"not {lowest}, {highest}, {divergence}"
        )
    if window < 3 or window % 2 == 0 or steps < 2 * window:
        raise ValueError(
            "a range test needs an odd window of 3 or more and steps of twice that or more, "
            f"not window={window}, steps={steps}"
        )
    if not model.built:
        raise ValueError("the model has no variables yet: call it once on an example input")
    held = getattr(getattr(optimizer, "inner_optimizer", optimizer), "_learning_rate", None)
    if isinstance(held, tf.keras.optimizers.schedules.LearningRateSchedule):
        raise ValueError("the optimizer's rate is a schedule: make one with a number")
