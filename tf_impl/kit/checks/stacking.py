"""What a stack of techniques refuses."""

import tensorflow as tf

from tf_impl.kit.checks.compilation import check_xla


def check_compiled(model: tf.keras.Model, compiled: bool) -> None:
    """Raise NotImplementedError for layers that XLA has no kernels for."""
    if compiled:
        check_xla(model)


def check_stacking(optimizer: tf.keras.optimizers.Optimizer) -> None:
    """Raise NotImplementedError for an optimizer whose variables cannot be made before a step."""
    if not hasattr(optimizer, "build"):
        raise NotImplementedError(
            "a legacy optimizer: take the one of its name in keras.optimizers"
        )
