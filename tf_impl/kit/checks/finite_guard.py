"""What the non-finite guard refuses: models without gradients, optimizers that it cannot call."""

import tensorflow as tf


def check_finite_guard(model: tf.keras.Model) -> None:
    """Raise ValueError for a model that trains nothing, or has no variables yet."""
    if not (model.built and model.trainable_variables):
        raise ValueError("the model has no trainable variables (a new one: call it on an example)")


def check_optimizer(optimizer) -> None:
    """Raise ValueError for an optimizer that unscales; NotImplementedError for a legacy one."""
    # Keras 3's loss_scale_factor unscales as well.
    if hasattr(optimizer, "inner_optimizer") or getattr(optimizer, "loss_scale_factor", None):
        raise ValueError(
            "pass the optimizer itself, without loss_scale_factor: this step scales no loss"
        )
    if not hasattr(optimizer, "build"):
        raise NotImplementedError(
            "a legacy optimizer: take the one of its name in keras.optimizers"
        )
