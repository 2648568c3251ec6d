"""What activation checkpointing refuses: blocks that cannot run twice, and names of none."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import tensorflow as tf

from tf_impl.kit.submodels import find_blocks

_ADVICE = "anew in the second run: use keras.random with a SeedGenerator of its layer"


def check_activation_checkpointing(
    model: tf.keras.Model, blocks: str, recomputed: Callable
) -> tuple[list, dict[str, list]]:
    """Return the single layers and, by name, the groups of layers that `blocks` names.

    recomputed: the function that takes the place of the `call` of a recomputed layer.

    Raises ValueError for a model without variables, names of nothing, and blocks that are
    recomputed already; NotImplementedError for tf_keras, and a layer that writes to a weight.
    """
    if not model.built:
        raise ValueError("the model has no variables yet: call it once on an example input")
    if blocks.strip(", ") and not hasattr(tf.keras, "StatelessScope"):
        raise NotImplementedError("tf_keras would draw other dropout masks again: use Keras 3")
    layers, groups = find_blocks(model, blocks)
    for layer in layers:
        if getattr(layer.call, "func", None) is recomputed:
            raise ValueError(f"blocks: {layer.name!r} is recomputed already")
    for block in [*layers, *(layer for group in groups.values() for layer in group)]:
        for layer in block._flatten_layers():
            if isinstance(layer, tf.keras.layers.SpectralNormalization):
                raise NotImplementedError(_writes(layer, "it wraps"))
    return layers, groups


def check_inputs(layer, inputs: list) -> None:
    """Raise for inputs of a block through which `tf.recompute_grad` takes no gradient."""
    _check_complex(layer, inputs)
    if not any(tf.is_tensor(one) and tf.as_dtype(one.dtype).is_floating for one in inputs):
        raise ValueError(f"{layer.name!r} has no floating-point input: it can't be recomputed")


@contextmanager
def check_first_run(layer) -> Iterator[None]:
    """Raise NotImplementedError for what happens inside that a second run would get wrong."""
    graph = tf.compat.v1.get_default_graph()
    operations_before = len(graph.get_operations())
    losses_before = _count_losses(layer)
    yield
    if _count_losses(layer) > losses_before:
        raise NotImplementedError(f"{layer.name!r} adds a loss, which no gradient would get out of")
    for operation in graph.get_operations()[operations_before:]:
        if operation.op_def.is_stateful and re.search("Random|Rng|Multinomial", operation.type):
            raise NotImplementedError(f"{layer.name!r} draws with {operation.type}, {_ADVICE}")


def check_outputs(layer, outputs) -> None:
    """Raise NotImplementedError for complex outputs of a block."""
    _check_complex(layer, tf.nest.flatten(outputs))


def second_run_scope(state: list, values: list):
    """Return a `keras.StatelessScope` in which the variables of a block have these values.

    What the block assigns to them is a constant to the gradient, as it is in a variable: the scope
    by itself would hand back the tensor that was assigned.
    """

    class Scope(tf.keras.StatelessScope):
        def add_update(self, update):
            variable, value = update
            super().add_update((variable, tf.stop_gradient(value)))

    return Scope(list(zip(state, values, strict=True)))


def check_second_run(layer, changed: set[int], own: list) -> None:
    """Raise NotImplementedError where a second run changed other variables than the block's own.

    own: its state. changed: the `id` of each variable that it changed.
    """
    weights = {id(variable): variable.path for variable in layer.trainable_variables}
    if written := [weights[key] for key in changed if key in weights]:
        raise NotImplementedError(_writes(layer, written[0]))
    if changed - {id(variable) for variable in own}:
        raise NotImplementedError(f"{layer.name!r} changes state of others, {_ADVICE}")


def _writes(layer, weight: str) -> str:
    return (
        f"{layer.name!r} writes to the weight {weight} in its forward pass: a second run would find"
        " another one"
    )


def _check_complex(layer, values: list) -> None:
    if any(tf.is_tensor(value) and tf.as_dtype(value.dtype).is_complex for value in values):
        raise NotImplementedError(
            f"{layer.name!r} takes or gives complex numbers, whose gradient tf.recompute_grad loses"
        )


def _count_losses(layer) -> int:
    return sum(len(part._losses) for part in layer._flatten_layers())
