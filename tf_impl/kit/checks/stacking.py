"""What a stack of techniques refuses."""

import tensorflow as tf


def check_stacking(optimizer: tf.keras.optimizers.Optimizer) -> None:
    """Raise NotImplementedError for an optimizer whose variables cannot be made before a step."""
    if not hasattr(optimizer, "build"):
        raise NotImplementedError(
            "a legacy optimizer: take the one of its name in keras.optimizers"
        )
