"""What regularization refuses: shares out of range, built optimizers, unclear heads."""

import math
from itertools import pairwise

import tensorflow as tf


def check_decay(weight_decay: float) -> None:
    """Raise ValueError for a decay below 0, or that is no number."""
    if not 0 <= weight_decay < math.inf:
        raise ValueError(f"weight_decay is 0 or more, not {weight_decay!r}")


def check_decayed(variables: list) -> None:
    """Raise ValueError where nothing decays."""
    if not variables:
        raise ValueError("the model has nothing that decays (or was not called yet)")


def check_optimizer(optimizer: tf.keras.optimizers.Optimizer) -> None:
    """Raise ValueError for an optimizer that is built: Keras wants to be told before."""
    if getattr(optimizer, "built", False) or getattr(optimizer, "_built", False):
        raise ValueError("the optimizer is built: set the decay before the first step")


def check_share(share: float, name: str) -> None:
    """Raise ValueError for a share that is not in [0, 1)."""
    if not 0 <= share < 1:
        raise ValueError(f"{name} is at least 0 and below 1, not {share!r}")


def check_batch_sizes(batch_size: int, nominal_batch_size: int) -> None:
    """Raise ValueError for a batch size below 1."""
    if batch_size < 1 or nominal_batch_size < 1:
        raise ValueError(f"batch sizes are 1 or more, not {batch_size}, {nominal_batch_size}")


def check_dropouts(found: list[str]) -> None:
    """Raise ValueError where a model has no dropout whose rate could be set."""
    if not found:
        raise ValueError("the model has no dropout that is on: use add_dropout")


def find_head(model: tf.keras.Model, head: str) -> int:
    """Return which of `model.layers` is the head: the one of this name, or the last Dense.

    Raises ValueError where there is none, where the last Dense is within a layer, or where dropout
    is before it; NotImplementedError where the model is no graph of layers, or does not end in one
    layer after the other.
    """
    layers = list(model.layers)
    named = [layer for layer in layers if layer.name == head] if head else []
    dense = [layer for layer in layers if isinstance(layer, tf.keras.layers.Dense)]
    found = named or ([] if head else dense)
    if not found:
        raise ValueError(f"no head {head!r}: name the layer before which dropout is to stand")
    at = layers.index(found[-1])
    for layer in [] if head else layers[at + 1 :]:
        inner = layer._flatten_layers(include_self=False)
        if any(isinstance(each, tf.keras.layers.Dense) for each in inner):
            raise ValueError(f"the last Dense is within {layer.name}: name the head")
    if at and isinstance(layers[at - 1], tf.keras.layers.Dropout):
        raise ValueError(f"{found[-1].name} has dropout before it: use set_dropout_rate")
    if not isinstance(model, tf.keras.Sequential):
        _check_graph(model, layers[at:])
    return at


def _check_graph(model: tf.keras.Model, tail: list) -> None:
    graph = getattr(model, "inputs", None) and len(model.outputs) == 1
    if not graph or not all(_one_input(layer) for layer in tail) or not _in_a_row(tail):
        raise NotImplementedError(
            "the model is no graph of layers that ends in a row behind its head: put "
            "tf.keras.layers.Dropout into its call"
        )


def _one_input(layer) -> bool:
    """Whether it was called once, on one tensor."""
    return len(layer._inbound_nodes) == 1 and not isinstance(layer.input, list | tuple | dict)


def _in_a_row(layers: list) -> bool:
    return all(after.input is before.output for before, after in pairwise(layers))
