"""Which variables of a model are kernels, and which are biases, norms' or embeddings'.

Twin: `pt_impl/kit/parameter_kinds.py`.
Where the frameworks differ: Keras calls kernels kernels. In PyTorch `Linear.weight` and an
embedding's are both `weight`, so the module tells them apart.
"""

from collections.abc import Iterable

import tensorflow as tf


def of_kinds(model: tf.keras.Model, kinds: Iterable[str]) -> list[tf.Variable]:
    """Return the parameters of these kinds, frozen ones as well, in the model's order.

    kinds: of "kernel", "bias", "norm" and "embedding". Kernels are what Keras's layers call so.
    What is none of these (class tokens, positions, slopes) is of kind "other".
    """
    found = _kinds(model)
    return [variable for variable in model.weights if found.get(id(variable)) in kinds]


def _kinds(model: tf.keras.Model) -> dict[int, str]:
    found: dict[int, str] = {}
    for layer in model._flatten_layers(include_self=True):
        for variable in _own(layer):
            name = getattr(variable, "path", variable.name).rpartition("/")[2].partition(":")[0]
            if isinstance(layer, tf.keras.layers.Embedding):
                found[id(variable)] = "embedding"
            elif _is_norm(layer):
                found.setdefault(id(variable), "norm")
            elif "bias" in name:
                found.setdefault(id(variable), "bias")
            else:
                kernel = "kernel" in name and len(variable.shape) > 1
                found.setdefault(id(variable), "kernel" if kernel else "other")
    return found


def _is_norm(layer) -> bool:
    """Whether it normalises what it gets: SpectralNormalization does so with a layer's kernel."""
    is_wrapper = isinstance(layer, tf.keras.layers.Wrapper)
    return "Normalization" in type(layer).__name__ and not is_wrapper


def _own(layer) -> list:
    """The parameters that this layer itself holds, not its layers'."""
    new = getattr(layer, "_trainable_variables", None)  # tf_keras says weights
    return list(layer._trainable_weights if new is None else new)
