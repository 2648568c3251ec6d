"""What loss scaling refuses: a scale that cannot work, and optimizers that scale already."""

import tensorflow as tf


def check_loss_scaling(model: tf.keras.Model, initial_scale: float, growth_interval: int) -> None:
    """Raise ValueError for settings that cannot work, and a model without variables."""
    if initial_scale <= 0 or growth_interval < 1:
        raise ValueError("initial_scale must be positive and growth_interval at least 1")
    if not model.built:
        raise ValueError("the model has no variables yet: call it once on an example input")


def check_optimizer(
    optimizer: tf.keras.optimizers.Optimizer, *, enabled: bool, has_one: bool
) -> None:
    """Raise ValueError for an optimizer that scales the loss, and for a second one of a scale.

    NotImplementedError in tf_keras where scaling is enabled.
    """
    # Keras 3's loss_scale_factor unscales as well.
    if hasattr(optimizer, "inner_optimizer") or getattr(optimizer, "loss_scale_factor", None):
        raise ValueError(
            "pass the optimizer itself, without loss_scale_factor: float16 wraps it in a "
            "LossScaleOptimizer, and nothing else needs a scale"
        )
    if enabled and not hasattr(tf.keras.optimizers, "LossScaleOptimizer"):
        raise NotImplementedError(
            "tf_keras's LossScaleOptimizer does not unscale in its update: use Keras 3"
        )
    if has_one:
        raise ValueError(
            "float16: one optimizer holds the loss's scale, another would hold a scale of its "
            "own: give it all variables, or choose bfloat16, which needs no scale"
        )
