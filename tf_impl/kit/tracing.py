"""A Keras model as one `tf.function`, for techniques that change or convert a graph.

Twin: `pt_impl/kit/tracing.py`.
Where the frameworks differ: a `tf.function` is traced with a signature and reads the model's
variables. `torch.export` follows one call, and its graph holds copies of the weights.
"""

import contextlib
import inspect
import re

import numpy as np
import tensorflow as tf

_LOOPS = {"While", "StatelessWhile"}
_LACKS = re.compile(r"'tf\.(\w+)' op is neither a custom op nor a flex op")


def outputs(model: tf.keras.Model, inputs, *, training: bool = False):
    """Return what the model gives; of an output with `.logits`, only these.

    As `fit` hands inputs over, a structure of tensors is one argument. Where `call` takes several,
    a tuple or list is `*inputs` and a dict, whose keys are names of arguments, `**inputs`.
    """
    taken = [
        argument
        for argument in inspect.signature(model.call).parameters.values()
        if argument.name not in ("training", "mask") and argument.kind is not argument.VAR_KEYWORD
    ]
    several = sum(one.default is one.empty for one in taken) > 1
    several = several or any(one.kind is one.VAR_POSITIONAL for one in taken)
    by_name = len(taken) > 1 and isinstance(inputs, dict)
    if isinstance(inputs, tuple | list) and several:
        output = model(*inputs, training=training)
    elif by_name and inputs.keys() <= {one.name for one in taken}:
        output = model(**inputs, training=training)
    else:
        output = model(inputs, training=training)
    return getattr(output, "logits", output)


def input_tensors(inputs) -> tuple[tf.Tensor, ...]:
    """Return the tensors of inputs: those of a dict in the order of its sorted keys."""
    return tuple(tf.nest.flatten(inputs))


def trace(model: tf.keras.Model, inputs, *, training: bool = False):
    """Return the model as a `tf.function`, in evaluation mode, traced once.

    inputs: as `check_example_inputs` takes them. The function takes any number of samples, and the
    tensors one by one, in the order of `input_tensors`. It reads the model's own variables.
    training: in training mode.

    Raises as `check_example_inputs` does, and NotImplementedError for a model that cannot be
    traced.
    """
    if not training:
        refuse_state(model)
    check_example_inputs(model, inputs)
    signature = [  # names in the order of the inputs: a converted file has no other order
        tf.TensorSpec([None, *part.shape[1:]], part.dtype, name=f"x{number:03}")
        for number, part in enumerate(input_tensors(inputs))
    ]

    @tf.function(input_signature=signature, jit_compile=False)
    def program(*tensors):
        given = tf.nest.pack_sequence_as(inputs, tensors)
        with contextlib.nullcontext() if training else _state_kept():
            return outputs(model, given, training=training)

    try:
        program.get_concrete_function()
    except Exception as error:
        raise NotImplementedError(f"tf.function cannot trace it: {one_line(error)}") from error
    return program


def check_example_inputs(model: tf.keras.Model, inputs):
    """Return what the model makes of one sample, in evaluation mode.

    inputs: a tensor, or a tuple, list or dict of tensors as `outputs` takes them; samples along the
    first axis.

    Raises ValueError for a model without variables, and for inputs without samples, with values
    that are not finite, or that the model does not take; NotImplementedError for a model that
    returns something else than tensors, in tuples, lists and dicts.
    """
    if not model.built:
        raise ValueError("the model has no variables yet: call it once on an example input")
    tensors = input_tensors(inputs)
    if not all(_is_dense(part) and part.shape.rank for part in tensors):
        kinds = ", ".join(type(part).__name__ for part in tensors)
        raise ValueError(f"inputs must be tensors with samples along an axis, not {kinds}")
    counts = [len(part) for part in tensors]
    if not counts or min(counts) == 0 or len(set(counts)) > 1:
        raise ValueError(f"inputs must have samples, as many in each tensor, not {counts}")
    if not all(np.isfinite(part).all() for part in tensors if part.dtype.is_floating):
        raise ValueError("inputs hold values that are not finite")
    try:
        _check_dtypes(model, inputs)
        output = outputs(model, tf.nest.map_structure(lambda part: part[:1], inputs))
    except Exception as error:
        given = ", ".join(f"{part.dtype.name} {list(part.shape[1:])}" for part in tensors)
        raise ValueError(f"the model takes no samples of {given}: {one_line(error)}") from error
    for part in tf.nest.flatten(output):
        if not _is_dense(part):
            raise NotImplementedError(
                f"the model returns {type(part).__name__}, which is no tensor"
            )
    return output


def _is_dense(part) -> bool:
    return tf.is_tensor(part) and not isinstance(part, tf.RaggedTensor | tf.SparseTensor)


def _check_dtypes(model, inputs) -> None:
    """Keras would cast in silence, and the program take another dtype than the model states."""
    stated, given = getattr(model, "inputs", None) or [], input_tensors(inputs)
    names = [tensor.name.split(":")[0] for tensor in stated]
    if isinstance(inputs, dict) and inputs.keys() == set(names):
        given = [inputs[name] for name in names]  # Keras goes by them, whatever their order
    wanted = [tf.as_dtype(tensor.dtype) for tensor in stated]
    if wanted and wanted != [part.dtype for part in given]:
        raise TypeError(f"it takes {', '.join(dtype.name for dtype in wanted)}")


def refuse_state(model: tf.keras.Model) -> None:
    """Raise NotImplementedError for a recurrent layer whose state a program would lose."""
    kind = tf.keras.layers.RNN
    layers = [layer for layer in model._flatten_layers() if isinstance(layer, kind)]
    if names := [layer.name for layer in layers if layer.stateful]:
        raise NotImplementedError(
            f"{', '.join(names)} would lose the state that it keeps from call to call: make the"
            " model with stateful=False"
        )


def _state_kept():
    """A context that drops changes of state: Keras 3 draws the dropout masks of an LSTM outside of
    training, too, and a graph that moves on the seed has a variable."""
    return getattr(tf.keras, "StatelessScope", contextlib.nullcontext)()


@contextlib.contextmanager
def inlined():
    """A context in which each `tf.function` within a model runs as Python: graphs know no change.

    The eager call of a model is eager as a whole then, and a trace has all in one graph.
    """
    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(before)


def litert_function(program) -> tf.types.experimental.ConcreteFunction:
    """Return the graph of a function of `trace`, as LiteRT's converter takes it.

    With a loop, such as an LSTM's, it is for one sample: the converter takes no other.
    """
    concrete = program.get_concrete_function()
    if not any(node.type in _LOOPS for node in concrete.graph.get_operations()):
        return concrete
    one = [tf.TensorSpec([1, *s.shape[1:]], s.dtype, s.name) for s in program.input_signature]
    return tf.function(program.python_function).get_concrete_function(*one)


def check_sizes(program, inputs) -> None:
    """Raise ValueError where inputs have other sizes than those of which a program was traced.

    What asks for a size has that of the example, and a graph that was read looks at none.
    inputs: their number of samples is open.
    """
    tensors = input_tensors(inputs)
    if len(tensors) != len(program.inputs):
        return  # whose own error tells the arguments
    pairs = list(zip(program.inputs, tensors, strict=True))
    if not all(own.shape.is_compatible_with(given.shape) for own, given in pairs):
        wanted = ", ".join(f"{own.dtype.name} {['any', *own.shape[1:]]}" for own, _ in pairs)
        found = ", ".join(
            f"{tf.as_dtype(given.dtype).name} {list(given.shape)}" for _, given in pairs
        )
        raise ValueError(
            f"inputs must be {wanted}, as those of the example, not {found}".replace("'", "")
        )


def one_line(error: Exception) -> str:
    """Return an error's words as one line; of LiteRT's converter, which operators are lacking."""
    if lacking := dict.fromkeys(_LACKS.findall(str(error))):
        kind = " in float64" if "xf64>" in str(error) else ""
        return f"there is no operator for {', '.join(lacking)}{kind}"
    words = str(error).partition(" Previous definition: ")[0].split()  # of a function, in full
    return " ".join(words)[:300] or type(error).__name__
