"""What 2:4 pruning refuses: models without layers to mask, or that cannot be masked."""

from collections import Counter
from collections.abc import Iterator

import tensorflow as tf


def check_semi_structured_pruning(model: tf.keras.Model) -> list:
    """Return the layers to mask, `Dense` and `Conv2D` without groups.

    Raises ValueError for a model without variables, one with masks and one without such layers;
    NotImplementedError where they cannot be masked.
    """
    layers = prunable(model)
    if is_tf_keras():
        _check_calls(model, layers)
    return layers


def check_masked(model: tf.keras.Model) -> list:
    """Return the layers with masks; ValueError where there are none."""
    layers = [layer for layer in model._flatten_layers() if _has_mask(layer)]
    if not layers:
        raise ValueError("the model has no masks: it comes from apply_two_to_four, and only once")
    return layers


def is_tf_keras() -> bool:
    """Whether `tf.keras` is tf_keras, and not Keras 3."""
    return tf.keras.Model.__module__.partition(".")[0] == "tf_keras"


def prunable(model: tf.keras.Model) -> list:
    """Return the dense and 2-D convolution layers; raise where they can't be pruned."""
    subclassed = not (isinstance(model, tf.keras.Sequential) or getattr(model, "inputs", None))
    if subclassed and is_tf_keras():
        raise NotImplementedError("tfmot prunes functional and Sequential models, not subclassed")
    if subclassed:
        raise NotImplementedError("a subclassed model says nothing of its inputs to copy it with")
    if not model.built:
        raise ValueError("the model has no variables yet: call it once on an example input")
    if any(_has_mask(layer) for layer in model._flatten_layers()):
        raise ValueError("the model has pruning masks already: finalize it first")
    kinds = (tf.keras.layers.Dense, tf.keras.layers.Conv2D)
    # Of these types exactly, as in tfmot: a subclass may use its kernel in another way.
    layers = [layer for layer in model._flatten_layers() if type(layer) in kinds]
    found = [layer for layer in layers if getattr(layer, "groups", 1) == 1]
    if not found:
        raise ValueError("the model has no Dense or Conv2D to prune")
    owners = Counter(id(w) for layer in model._flatten_layers() for w in _own_weights(layer))
    for layer in found:
        if getattr(layer, "lora_enabled", False) or getattr(layer, "quantization_mode", None):
            raise NotImplementedError(f"{layer.name!r} makes its kernel of others (LoRA, integers)")
        if owners[id(layer.kernel)] > 1:
            raise NotImplementedError(f"the kernel of {layer.name!r} has two owners")
    return found


def _check_calls(model: tf.keras.Model, layers: list) -> None:
    """Raise where tfmot can't prune the layers."""
    calls = Counter(_calls(model))
    for layer in layers:
        if calls[layer] != 1:
            where = "runs more than once" if calls[layer] else "is within another layer"
            raise NotImplementedError(
                f"tfmot prunes what a functional model runs once a step, but {layer.name!r} {where}"
            )


def _calls(model: tf.keras.Model) -> Iterator:
    """The layers that a forward pass calls, with those of models within the model."""
    for level in model._nodes_by_depth.values():
        for node in level:
            yield node.layer
            if getattr(node.layer, "_is_graph_network", False):
                yield from _calls(node.layer)


def _has_mask(layer) -> bool:
    """Whether it is wrapped by tfmot, or its `call` masks."""
    return hasattr(layer, "pruning_obj") or hasattr(vars(layer).get("call"), "mask")


def _own_weights(layer) -> list:
    """A layer's weights, not those of layers within it."""
    kept = getattr(layer, "_trainable_variables", None)  # Keras 3
    return list(kept if kept is not None else layer._trainable_weights)
