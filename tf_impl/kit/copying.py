"""A copy of any Keras model, with all of its state, compared with the model.

Twin: `pt_impl/kit/copying.py`.
Where the frameworks differ: `copy.deepcopy` copies any module. Keras makes each layer anew.
"""

import inspect
import tempfile
from contextlib import nullcontext
from functools import partial
from textwrap import shorten

import numpy as np
import tensorflow as tf

_SIZES = (32, 128, 512, 2048, 16384, 262144)  # of an image side, of words, of sound
_ROUNDING = 1e-5  # relative L2: the same operators in another order


def copy_model(model: tf.keras.Model, x=None) -> tf.keras.Model:
    """Return a copy of any built Keras model that shares nothing with it, not compiled.

    All state goes with it: weights, what preprocessing layers adapted, seeds, `trainable`; not what
    was put on an instance, such as another `call`. The outputs of both are compared on x, or on an
    input made from the shapes of a functional model's.

    Raises ValueError for a model that is not built or that x does not fit; NotImplementedError
    where Keras cannot rebuild the model or the copy computes something else.
    """
    if not model.built:
        raise ValueError("the model has no variables yet: call it once on an example input")
    given, x = x is not None, _example(model) if x is None else x
    seeds_kept = getattr(tf.keras, "StatelessScope", nullcontext)  # what draws does so twice alike
    try:
        with seeds_kept():
            wanted = output_arrays(model, x)
    except Exception as error:
        made = ", ".join(str(list(part.shape)) for part in tf.nest.flatten(x))
        what = "the example input" if given else f"one made from its input shapes, of {made}"
        raise ValueError(shorten(f"the model does not take {what}: {error}", 400)) from error
    try:
        copy, twins = _rebuilt(model)
        if not copy.built:
            output_arrays(copy, x)
        copy_state(twins)
        with seeds_kept():
            difference = max(map(distance, output_arrays(copy, x), wanted), default=0.0)
    except Exception as error:
        reason = shorten(f"Keras cannot rebuild the model: {error}", 400)
        raise NotImplementedError(reason) from error
    if len(copy.weights) != len(model.weights):
        what = f"of {len(copy.weights)} weights, not {len(model.weights)}"
    elif difference > _ROUNDING:
        what = f"outputs are {difference:.1e} off"
    else:
        return copy
    raise NotImplementedError(f"Keras rebuilds another model than this one: {what}")


def copy_state(twins: list[tuple]) -> None:
    """Hand over what each layer would save, in the order in which twins hold the layers in them."""
    pairs = _pairs(twins)
    for layer, twin in pairs:
        twin.trainable = layer.trainable  # and of all inside, whose turn comes later
    for layer, twin in pairs:
        if layer.trainable and hasattr(tf.keras, "StatelessScope"):
            for ours, theirs in zip(layer.weights, twin.weights, strict=True):
                if theirs.trainable and not ours.trainable:  # frozen by itself, in Keras 3
                    theirs.trainable = False
        if getattr(layer, "lora_enabled", False):  # Keras would save the sum, and no factors
            twin.set_weights(layer.get_weights())
            continue
        store = {}
        layer.save_own_variables(store)
        if store:
            twin.load_own_variables(store)
            getattr(twin, "finalize_state", int)()  # what preprocessing layers compute from them
        if hasattr(layer, "load_assets") and hasattr(layer, "get_vocabulary"):
            with tempfile.TemporaryDirectory() as folder:
                layer.save_assets(folder)
                twin.load_assets(folder)
        seeds = (getattr(part, "_seed_generators", ()) for part in (layer, twin))  # of Keras 3
        for ours, theirs in zip(*seeds, strict=False):  # none of a dropout that was set to 0
            theirs.state.assign(ours.state)


def retrace(model: tf.keras.Model) -> None:
    """Give a model's methods that are a `tf.function` new graphs, which know what has changed."""
    kind = tf.types.experimental.PolymorphicFunction
    for layer in model._flatten_layers():
        own = [item for each in type(layer).__mro__ for item in vars(each).items()]
        for name in {name for name, value in own if isinstance(value, kind)}:
            old = getattr(layer, name)
            function = getattr(old, "func", old)  # of one that was made anew before
            if not isinstance(function, kind):
                continue  # a technique's own call
            new = tf.function(function.python_function, jit_compile=function._jit_compile)
            new = partial(new)  # Keras would track the function itself
            new.__signature__ = inspect.signature(old)
            setattr(layer, name, new)


def _rebuilt(model) -> tuple:
    """A new model of the same configuration, also of classes that nobody registered; its twins."""
    kinds = {type(layer).__name__: type(layer) for layer in model._flatten_layers()}
    with tf.keras.utils.custom_object_scope(kinds):
        if not getattr(model, "inputs", None):
            copy = type(model).from_config(model.get_config())
            return copy, [(model, copy)]
        twins = []

        def clone(layer):
            models = [pair for pair in twins if getattr(pair[1], "inputs", None)]
            for ours, theirs in _pairs(models):  # what a model inside holds as well stays tied
                if ours is layer:
                    return theirs
            twin = _clone_layer(layer)
            if isinstance(layer, tf.keras.layers.Layer):  # not an operator, such as a slice
                twins.append((layer, twin))
            return twin

        # As functional, whatever its class: that may have another order, as KerasHub's tasks do.
        copy = tf.keras.models.clone_model(model, clone_function=clone)
        copy.trainable = model.trainable
        return copy, twins


def _clone_layer(layer):
    if type(layer) is tf.keras.layers.Lambda:  # its code, read anew, would not know its module
        given = layer.function, layer._output_shape, layer.mask, layer.arguments
        return type(layer)(*given, **tf.keras.layers.Layer.get_config(layer))
    config = layer.get_config()
    if "activation" in config and inspect.isfunction(getattr(layer, "activation", None)):
        config["activation"] = layer.activation  # not by its name, which others may have
    return type(layer).from_config(config)


def _pairs(twins: list[tuple]) -> list[tuple]:
    """Twins and what is in them."""
    inside = ((one._flatten_layers(), other._flatten_layers()) for one, other in twins)
    return [pair for both in inside for pair in zip(*both, strict=True)]


def output_arrays(model, x) -> list[np.ndarray]:
    """Return what the model gives in evaluation mode for x, an input as `fit` hands it over."""
    taken = [
        one
        for name, one in inspect.signature(model.call).parameters.items()
        if name not in ("training", "mask") and one.kind is not one.VAR_KEYWORD
    ]
    needed = sum(2 if one.kind is one.VAR_POSITIONAL else one.default is one.empty for one in taken)
    if isinstance(x, dict) and len(taken) > 1 and x.keys() <= {one.name for one in taken}:
        output = model(**x, training=False)
    else:
        several = isinstance(x, tuple | list) and needed > 1
        output = model(*(x if several else (x,)), training=False)
    return [np.asarray(part) for part in tf.nest.flatten(getattr(output, "logits", output))]


def distance(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Return the relative L2; what is not a finite number has to be the same in both."""
    if theirs.dtype.kind in "OSU":  # texts
        return 0.0 if np.array_equal(ours, theirs) else np.inf
    ours, theirs = ours.astype(np.float64), theirs.astype(np.float64)
    finite = np.isfinite(theirs)
    same = np.array_equal(np.isfinite(ours), finite)
    if not same or not np.array_equal(ours[~finite], theirs[~finite], equal_nan=True):
        return np.inf
    difference = np.linalg.norm(ours[finite] - theirs[finite])
    return float(difference / (np.linalg.norm(theirs[finite]) or 1.0))


def _example(model):
    """A random input of two samples, of the smallest size of which each layer leaves something."""
    if not getattr(model, "inputs", None):
        raise ValueError("a subclassed model does not say what it takes: pass an example input x")
    # Where it was built by a call, a Sequential model has no `input`.
    structure = model.inputs[0] if isinstance(model, tf.keras.Sequential) else model.input

    def shape(tensor):
        return (2, *(size if length is None else length for length in tensor.shape[1:]))

    most_open = max(list(part.shape[1:]).count(None) for part in tf.nest.flatten(structure))
    for size in [size for size in _SIZES if size**most_open <= _SIZES[-1]]:
        try:  # a call would go on with what is not there
            model.compute_output_shape(tf.nest.map_structure(shape, structure))
            break
        except Exception:
            size = _SIZES[0]
    layers, random = model._flatten_layers(include_self=False), np.random.default_rng(0)
    words = [w for layer in layers for w in getattr(layer, "get_vocabulary", list)()][-8:]

    def drawn(tensor):
        dtype, sizes = tf.as_dtype(tensor.dtype), shape(tensor)
        if dtype == tf.string:
            return tf.constant(random.choice([str(word) for word in words] or ["a"], sizes))
        values = random.normal(size=sizes) if dtype.is_floating else random.integers(0, 2, sizes)
        return tf.cast(values, dtype)

    return tf.nest.map_structure(drawn, structure)
