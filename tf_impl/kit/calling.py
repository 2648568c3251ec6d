"""How techniques call any Keras model: inputs as `fit` hands them over, its own losses, float32.

Twin: `pt_impl/kit/calling.py`.
Where the frameworks differ: a Keras model is told its mode in the call; a module has a mode, which
is set for a call and put back. Keras models have losses of their own, modules have none.
"""

import inspect
from collections.abc import Callable

import tensorflow as tf


def call_arguments(model: tf.keras.Model, x) -> tuple[tuple, dict]:
    """Return the positional and the named arguments with which a model is called for x.

    As `fit` hands them over, a structure of tensors is one argument. Where `call` takes several, a
    tuple or list is `*x` and a dict, whose keys are names of arguments, `**x`.
    """
    taken = input_arguments(model)
    if isinstance(x, dict) and len(taken) > 1 and x.keys() <= {one.name for one in taken}:
        return (), x
    needed = sum(2 if one.kind is one.VAR_POSITIONAL else one.default is one.empty for one in taken)
    if isinstance(x, tuple | list) and needed > 1:
        return tuple(x), {}
    return (x,), {}


def input_arguments(model: tf.keras.Model) -> list[inspect.Parameter]:
    """Return the arguments of the model's `call` that are inputs."""
    return [
        argument
        for argument in inspect.signature(model.call).parameters.values()
        if argument.name not in ("training", "mask") and argument.kind is not argument.VAR_KEYWORD
    ]


def call(model: tf.keras.Model, x, *, training: bool = False):
    """Return what the model gives for x."""
    arguments, named = call_arguments(model, x)
    return model(*arguments, **named, training=training)


def add_own_losses(loss: tf.Tensor, model: tf.keras.Model) -> tf.Tensor:
    """Add the model's own losses (of regularisers, of `add_loss`) as `fit` does, in float32."""
    loss = tf.cast(loss, tf.float32) if loss.dtype.size < 4 else loss
    return sum((tf.cast(term, loss.dtype) for term in model.losses), loss)


def scale_loss(loss: tf.Tensor, optimizer: tf.keras.optimizers.Optimizer) -> tf.Tensor:
    """Return the loss to take gradients of: Keras 3's LossScaleOptimizer divides them again."""
    return optimizer.scale_loss(loss) if hasattr(optimizer, "scale_loss") else loss


def layers(model: tf.keras.Model) -> list[tf.keras.layers.Layer]:
    """Return the model and all layers in it, at any depth, each once.

    `model.layers` ends at the first level: what custom layers contain is listed only here.
    """
    return list(model._flatten_layers())


def logits(output):
    """Return what an output has as `.logits` or under "logits", else all of it."""
    if isinstance(output, dict):
        return output.get("logits", output)
    return getattr(output, "logits", output)


def at_least_float32(tensor: tf.Tensor) -> tf.Tensor:
    """Return a half-precision tensor in float32, any other as it is."""
    return _leaf_to_float32(tensor)


def to_float32(tree):
    """Cast the bfloat16 and float16 tensors of a tensor, tuple, list or dict to float32."""
    return tf.nest.map_structure(_leaf_to_float32, tree)


def tensors(tree) -> list[tf.Tensor]:
    """Return the tensors of a tensor, or of nested tuples, lists and dicts."""
    return [leaf for leaf in tf.nest.flatten(tree) if tf.is_tensor(leaf)]


def map_tensors(function: Callable, tree):
    """Return the structure with `function` of each of its tensors; what is no tensor stays."""
    return tf.nest.map_structure(lambda leaf: function(leaf) if tf.is_tensor(leaf) else leaf, tree)


def rows(tree, start: int, stop: int):
    """Return the samples from `start` to `stop` of each tensor in nested tuples, lists and dicts.

    What is no tensor, or has no first axis, goes with every part.
    """
    return map_tensors(lambda leaf: leaf if leaf.shape.rank == 0 else leaf[start:stop], tree)


def _leaf_to_float32(leaf):
    is_half = getattr(leaf, "dtype", None) in (tf.bfloat16, tf.float16)  # None may be one of many
    return tf.cast(leaf, tf.float32) if is_half else leaf
