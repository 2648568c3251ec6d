"""What the guide's step and `fit` refuse: other outputs than logits, and scaled losses."""

import tensorflow as tf


def check_baseline(optimizer) -> None:
    """Raise NotImplementedError for an optimizer that expects a scaled loss."""
    scales = isinstance(optimizer, tf.keras.mixed_precision.LossScaleOptimizer)
    if scales or getattr(optimizer, "loss_scale_factor", None):
        raise NotImplementedError("a scaled loss: this is the step in float32, which needs none")


def check_output(output) -> None:
    """Raise ValueError for an output that is not one tensor."""
    if not tf.is_tensor(output):
        raise ValueError(
            "the guide's step has one loss, cross-entropy of logits (n, classes): "
            f"the model gives a {type(output).__name__}"
        )


def check_fit(model: tf.keras.Model, x) -> None:
    """Raise ValueError for a model that does not take x as `fit` hands it over, as one argument.

    Also where its output is not one tensor.
    """
    try:
        output = model(x, training=False)
    except TypeError as error:
        raise ValueError(f"`fit` hands x over as one argument, and the model: {error}") from error
    check_output(output)
