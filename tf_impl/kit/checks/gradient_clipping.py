"""What gradient clipping refuses: bounds that are none, models without gradients, optimizers."""

from numbers import Real

import tensorflow as tf


def check_gradient_clipping(model: tf.keras.Model, max_norm: float) -> None:
    """Raise ValueError for a bound that is not above 0, and a model that trains nothing yet."""
    if not isinstance(max_norm, Real) or not max_norm > 0:
        raise ValueError(f"max_norm must be above 0 (inf does not clip), not {max_norm!r}")
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
