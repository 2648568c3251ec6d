"""What the inputs and outputs of an exported file are called.

Twin: `pt_impl/kit/signatures.py`.
Where the frameworks differ: `torch.export` knows the bounds of each size that is open; a
`tf.function` knows none.
"""

import inspect

import tensorflow as tf


def call_arguments(model: tf.keras.Model, inputs) -> tuple[tuple, dict]:
    """Return the positional and the named arguments with which a model is called for its inputs.

    As `fit` hands them over, a structure of tensors is one argument. Where `call` takes several, a
    tuple or list is `*x` and a dict, whose keys are names of arguments, `**x`.
    """
    taken = _input_arguments(model)
    several = sum(one.default is one.empty for one in taken) > 1
    several = several or any(one.kind is one.VAR_POSITIONAL for one in taken)
    if isinstance(inputs, tuple | list) and several:
        return tuple(inputs), {}
    names = {one.name for one in taken}
    if isinstance(inputs, dict) and len(taken) > 1 and inputs.keys() <= names:
        return (), inputs
    return (inputs,), {}


def _input_arguments(model: tf.keras.Model) -> list[inspect.Parameter]:
    """Return the arguments of the model's `call` that are inputs."""
    return [
        argument
        for argument in inspect.signature(model.call).parameters.values()
        if argument.name not in ("training", "mask") and argument.kind is not argument.VAR_KEYWORD
    ]


def call(model: tf.keras.Model, inputs):
    """Return the model's output in evaluation mode; of one with `.logits` these alone."""
    return _output(model, inputs, training=False)


def _output(model: tf.keras.Model, inputs, training: bool):
    arguments, named = call_arguments(model, inputs)
    output = model(*arguments, **named, training=training)
    return getattr(output, "logits", output)


def input_names(model: tf.keras.Model, inputs, count: int) -> list[str]:
    """Return what the `count` inputs are called: by a dict, by the model or by its `call`."""
    if isinstance(inputs, dict) and len(inputs) == count:
        return sorted(inputs)  # the order of `tf.nest`
    own = [tensor.name.split(":")[0] for tensor in getattr(model, "inputs", None) or []]
    numbered = any(name.startswith("keras_tensor") for name in own)  # by Keras, anew in a process
    if len(own) == count and not numbered:
        return own
    named = [argument.name for argument in _input_arguments(model)]
    if len(named) == count and not own:
        return named
    return [f"input_{place}" for place in range(count)]


def named_tensors(output, name: str = "") -> list[tuple[str, tf.Tensor]]:
    """Return the tensors of an output, each with the name of its place in a dict or tuple.

    Raises NotImplementedError where something in it is no tensor.
    """
    if isinstance(output, dict):
        inside = {f"{name}.{key}" if name else str(key): part for key, part in output.items()}
    elif isinstance(output, tuple | list):
        inside = {f"{name or 'output'}_{place}": part for place, part in enumerate(output)}
    elif output is None:
        return []
    elif tf.is_tensor(output):
        return [(name or "output", output)]
    else:
        raise NotImplementedError(f"a file's outputs are tensors, not {type(output).__name__}")
    return [pair for key, part in inside.items() for pair in named_tensors(part, key)]


def tables(model: tf.keras.Model) -> list:
    """What layers look values up in, as `StringLookup` and `IntegerLookup` do."""
    kind = tf.saved_model.experimental.TrackableResource
    parts = [part for layer in model._flatten_layers() for part in vars(layer).values()]
    return [part for part in parts if isinstance(part, kind)]


def to_tensors(inputs):
    """Return inputs as tensors; ValueError for those that a file can't take, sparse or ragged."""
    found = {type(part).__name__ for part in tf.nest.flatten(inputs) if tf.is_tensor(part)}
    if other := found & {"SparseTensor", "RaggedTensor"}:
        raise ValueError(f"inputs must be dense tensors, not {', '.join(sorted(other))}")
    return tf.nest.map_structure(tf.convert_to_tensor, inputs)


def refuse_state(model: tf.keras.Model) -> None:
    """Raise NotImplementedError for a recurrent layer whose state a program would lose."""
    kind = tf.keras.layers.RNN
    layers = [layer for layer in model._flatten_layers() if isinstance(layer, kind)]
    if names := [layer.name for layer in layers if layer.stateful]:
        raise NotImplementedError(
            f"{', '.join(names)} would lose the state that it keeps from call to call: make the"
            " model with stateful=False"
        )
