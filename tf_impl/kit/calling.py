"""How techniques call any Keras model: inputs as `fit` hands them over, its own losses, float32.

Twin: `pt_impl/kit/calling.py`.
Where the frameworks differ: a Keras model is told its mode in the call; a module has a mode, which
is set for a call and put back. Keras models have losses, modules have none.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

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


def infer(model: tf.keras.Model, x):
    """Return what the model gives for x in evaluation mode, in which none of its variables changes.

    Keras 3 moves the seeds of an LSTM's dropout on in evaluation mode, too: that is dropped.
    """
    with getattr(tf.keras, "StatelessScope", nullcontext)():  # of Keras 3
        return call(model, x)


@contextmanager
def unchanged(model: tf.keras.Model) -> Iterator[None]:
    """Let a model run inside; its variables and the global generator are then as before."""
    # All variables: SpectralNormalization writes to its kernel.
    written = [*model.variables, tf.random.get_global_generator().state]
    kept = [tf.identity(variable) for variable in written]
    try:
        yield
    finally:
        for variable, value in zip(written, kept, strict=True):
            variable.assign(value)


def call_loss(loss: Callable, output, y) -> tf.Tensor:
    """Return `loss(output, y)`; Keras's own losses take the labels first."""
    where = getattr(loss, "__module__", None) or ""
    keras_has_it = "keras" in where and ".losses" in where
    if keras_has_it or isinstance(loss, tf.keras.losses.Loss):
        return loss(y, output)
    return loss(output, y)


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


class Retracing:
    """New graphs for methods of a model's layers that are a `tf.function`.

    Their own graphs are those of the policy or momentum that they were first traced with.
    """

    def __init__(self, model: tf.keras.Model) -> None:
        kind = tf.types.experimental.PolymorphicFunction
        self.functions = []
        for layer in layers(model):
            own = [{"call": vars(layer).get("call")}, *map(vars, type(layer).__mro__)]
            for name in {name for each in own for name in each if isinstance(each[name], kind)}:
                given = getattr(layer, name)
                function = getattr(given, "func", given)  # of one that was made anew before
                anew = tf.function(function.python_function, jit_compile=function._jit_compile)
                anew = partial(anew)  # Keras would track the function itself
                anew.__signature__ = inspect.signature(given)
                self.functions.append((layer, name, anew))

    @contextmanager
    def new_graphs(self) -> Iterator[None]:
        """Let the layers call the new functions inside, and their own again afterwards."""
        before = [vars(layer).get(name) for layer, name, _ in self.functions]
        try:
            for layer, name, anew in self.functions:
                setattr(layer, name, anew)
            yield
        finally:
            for (layer, name, _), function in zip(self.functions, before, strict=True):
                delattr(layer, name)
                if function is not None:
                    setattr(layer, name, function)


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

    What has no first axis (numbers, None, scalars) goes with every part.
    """

    def part(leaf):
        return leaf if getattr(leaf, "shape", ()) == () else leaf[start:stop]

    return tf.nest.map_structure(part, tree)


def concatenate(parts: list):
    """Return one structure of several alike, such as of `rows`: their tensors one after another.

    What is no tensor is that of the first part.
    """

    def join(*leaves):
        return tf.concat(leaves, 0) if tf.is_tensor(leaves[0]) else leaves[0]

    return tf.nest.map_structure(join, *parts)


def _leaf_to_float32(leaf):
    is_half = getattr(leaf, "dtype", None) in (tf.bfloat16, tf.float16)  # None may be one of many
    return tf.cast(leaf, tf.float32) if is_half else leaf
