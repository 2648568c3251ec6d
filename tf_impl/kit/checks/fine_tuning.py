"""What fine-tuning refuses: settings out of range, and models with nothing to train."""

import math

import tensorflow as tf

from tf_impl.kit.calling import layers


def check_fine_tuning(head: tf.keras.layers.Layer) -> None:
    """Raise ValueError for a head without variables to train."""
    if not head.trainable_variables:
        raise ValueError("the head has no trainable variables: there is nothing to train")


def check_lora(model: tf.keras.Model, rank: int, alpha: float) -> None:
    """Raise ValueError for settings out of range, and for a model without layers to adapt.

    NotImplementedError where Keras has no LoRA: legacy Keras, and a kernel that is constrained.
    """
    if rank < 1:
        raise ValueError(f"rank must be 1 or more, not {rank!r}")
    if not 0 < alpha < math.inf:
        raise ValueError(f"alpha must be above 0 and finite, not {alpha!r}")
    if not hasattr(tf.keras.layers.Dense, "enable_lora"):
        raise NotImplementedError("legacy Keras has no LoRA: it is Keras 3's")
    dense = dense_layers(model)
    if not dense:
        raise ValueError("the model has no Dense layer that is built: there is nothing to adapt")
    for layer in dense:
        if layer.lora_enabled:
            raise ValueError(f"{layer.name} has adapters already: merge them first")
        if layer.kernel_constraint:
            raise NotImplementedError(f"Keras adapts no constrained kernel, as {layer.name} has")


def dense_layers(model: tf.keras.Model) -> list[tf.keras.layers.Dense]:
    """Return the layers that can be adapted, in the model's order.

    Subclasses stay as they are: they may read the kernel themselves.
    """
    return [
        layer for layer in layers(model) if type(layer) is tf.keras.layers.Dense and layer.built
    ]
