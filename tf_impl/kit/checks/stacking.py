"""What a stack of techniques refuses."""

import tensorflow as tf

from tf_impl.kit.checks.compilation import check_xla


def check_stacking(
    model: tf.keras.Model, optimizer: tf.keras.optimizers.Optimizer, *, compiled: bool
) -> None:
    """Raise NotImplementedError for what XLA lacks, if it compiles, and for a legacy optimizer.

    Its variables cannot be made before a step.
    """
    if compiled:
        check_xla(model)
    if not hasattr(optimizer, "build"):
        raise NotImplementedError(
            "a legacy optimizer: take the one of its name in keras.optimizers"
        )
