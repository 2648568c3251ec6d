"""What a memory format refuses: unknown ones, models without images, devices without kernels."""

import re

import tensorflow as tf

from tf_impl.kit.rebuilding import has_images, tensors_of

_NAMES = {"channels_last": "NHWC", "channels_first": "NCHW"}


def check_memory_format(model: tf.keras.Model, memory_format: str) -> str:
    """Return the format of the model's layers of images.

    Raises ValueError for an unknown format, for a model without layers of images, and for one with
    both formats; NotImplementedError where this device trains no convolution in `memory_format`.
    """
    check_name(memory_format)
    layers = model._flatten_layers(include_self=False)  # those inside layers too
    formats = {layer.data_format for layer in layers if _is_of_images(layer)}
    if not formats:
        raise ValueError("the model has no 2-D layer with a data_format: nothing to convert")
    if formats == {memory_format}:
        return memory_format
    if len(formats) > 1:
        raise ValueError("the model has layers of both formats: build it in one")
    try_convolution(memory_format)
    return formats.pop()


def check_name(memory_format: str) -> None:
    """Raise ValueError for an unknown format."""
    if memory_format not in _NAMES:
        raise ValueError(
            f"unknown memory format {memory_format!r}: choose one of {', '.join(_NAMES)}"
        )


def try_convolution(memory_format: str) -> None:
    """Train one convolution; raise NotImplementedError with TensorFlow's reason if it cannot."""
    x, kernel = tf.ones((2, 4, 4, 4)), tf.ones((3, 3, 4, 4))
    try:
        with tf.GradientTape() as tape:
            tape.watch((x, kernel))
            y = tf.nn.conv2d(x, kernel, 1, "VALID", data_format=_NAMES[memory_format])
        tape.gradient(y, (x, kernel))
    except (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError) as error:
        # Without the names of functions and nodes that TensorFlow puts around its words.
        reason = re.sub(r"\{\{.*?\}\} | \[Op:.*", "", error.message, flags=re.DOTALL)
        raise NotImplementedError(f"no training in {memory_format} here: {reason}") from error


def _is_of_images(layer) -> bool:
    """Whether the layer has a data_format, and 4-D inputs where it says what it gets."""
    if not hasattr(layer, "data_format"):
        return False
    known = tensors_of(layer)  # none inside subclassed models and layers
    return has_images(known) if known else "2D" in type(layer).__name__
