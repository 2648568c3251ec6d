"""What the implementations of an optimizer refuse: settings, and what the kernel lacks."""

import tensorflow as tf


def check_optimizer_implementations(
    model: tf.keras.Model,
    learning_rate: float,
    weight_decay: float,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    """Raise ValueError for a model without variables, and for a setting out of range."""
    if not model.built:
        raise ValueError("the model has no variables yet: call it once on an example input")
    if min(learning_rate, weight_decay, eps) < 0 or not (0 <= beta1 < 1 and 0 <= beta2 < 1):
        raise ValueError(
            "learning_rate, weight_decay and eps must be at least 0, beta1 and beta2 in [0, 1)"
        )


def check_kernel(optimizer: tf.keras.optimizers.AdamW, variables: list) -> None:
    """Raise NotImplementedError for what `ResourceApplyAdam` cannot do."""
    if optimizer.amsgrad:
        raise NotImplementedError("ResourceApplyAdam has no amsgrad: use Keras's AdamW")
    for variable in variables:
        if not tf.as_dtype(variable.dtype).is_floating:
            raise NotImplementedError(f"ResourceApplyAdam updates no {variable.dtype}")
