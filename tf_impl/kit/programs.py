"""Any model: called as `fit` does, copied, compared, traced, and its graph as a file of data.

What it holds: what techniques do with a Keras model whatever it is, and the way from it to a graph
of operators, to a file that is read without executing code from it, and back.
Twin: `pt_impl/kit/programs.py`.
Where the frameworks differ: TensorFlow's graphs are data by nature: the file holds a MetaGraphDef,
one protocol buffer with the graph and a signature that names its inputs and its outputs, in a zip
archive for its checksum. PyTorch's are Python objects, which have to be written node by node. A
graph may hold operators that read and write files or call back into Python; both sides refuse
these.
"""

import contextlib
import inspect
import json
import math
import re
import tempfile
import zipfile
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from pathlib import Path

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import meta_graph_pb2
from tensorflow.python.framework import op_def_registry
from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

_functions = attrgetter("library.function")  # of a GraphDef
_SIGNATURE, _MEMBER, _STRUCTURE = "predict", "program.pb", "outputs.json"
# Calls and loops have what state their functions have, and these are looked at, too.
_HARMLESS = {"Placeholder", "StatefulPartitionedCall", "While", "If"}
_SIZES = (32, 128, 512, 2048, 16384, 262144)  # of an image side, of words, of sound
_UNDECAYED = "_exclude_from_weight_decay"  # of an optimizer: variables; with more behind it, names
_ROUNDING = 1e-5  # relative: the same operators in another order
_LACKS = re.compile(r"'tf\.(\w+)' op is neither a custom op nor a flex op")
_FILES = re.compile("File|Save|Restore|PyFunc|Directory")


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


def parts(inputs) -> tuple[tf.Tensor, ...]:
    """Return the tensors of inputs: those of a dict in the order of its sorted keys."""
    return tuple(tf.nest.flatten(inputs))


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


def trace(model: tf.keras.Model, inputs, *, training: bool = False):
    """Return the model as a `tf.function`, in evaluation mode, traced once.

    inputs: as `check` takes them. The function takes any number of samples, and the tensors one by
    one, in the order of `parts`. It reads the model's own variables. training: in training mode.

    Raises ValueError and NotImplementedError as `check` does, NotImplementedError for a model that
    cannot be traced.
    """
    if not training:
        refuse_state(model)
    check(model, inputs)
    signature = [  # names in the order of the inputs: a converted file has no other order
        tf.TensorSpec([None, *part.shape[1:]], part.dtype, name=f"x{number:03}")
        for number, part in enumerate(parts(inputs))
    ]

    @tf.function(input_signature=signature, jit_compile=False)
    def program(*tensors):
        given = tf.nest.pack_sequence_as(inputs, tensors)
        with contextlib.nullcontext() if training else _state_kept():
            return _output(model, given, training)

    try:
        program.get_concrete_function()
    except Exception as error:
        raise NotImplementedError(f"tf.function cannot trace it: {one_line(error)}") from error
    return program


def refuse_state(model: tf.keras.Model) -> None:
    """Raise NotImplementedError for a recurrent layer whose state a program would lose."""
    kind = tf.keras.layers.RNN
    layers = [layer for layer in model._flatten_layers() if isinstance(layer, kind)]
    if names := [layer.name for layer in layers if layer.stateful]:
        raise NotImplementedError(
            f"{', '.join(names)} would lose the state that it keeps from call to call: make the"
            " model with stateful=False"
        )


def tables(model: tf.keras.Model) -> list:
    """What layers look values up in, as `StringLookup` and `IntegerLookup` do."""
    kind = tf.saved_model.experimental.TrackableResource
    parts = [part for layer in model._flatten_layers() for part in vars(layer).values()]
    return [part for part in parts if isinstance(part, kind)]


def _state_kept():
    """A context that drops changes of state: Keras 3 draws the dropout masks of an LSTM outside of
    training, too, and a graph that moves on the seed has a variable."""
    return getattr(tf.keras, "StatelessScope", contextlib.nullcontext)()


def check(model: tf.keras.Model, inputs):
    """Return what the model makes of one sample, in evaluation mode.

    inputs: a tensor, or a tuple, list or dict of tensors as `call` takes them; samples along the
    first axis.

    Raises ValueError for a model without variables, and for inputs without samples, with values
    that are not finite, or that the model does not take; NotImplementedError for a model that
    returns something else than tensors, in tuples, lists and dicts.
    """
    if not model.built:
        raise ValueError("the model has no variables yet: call it once on an example input")
    tensors = parts(inputs)
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
        output = call(model, tf.nest.map_structure(lambda part: part[:1], inputs))
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


def to_tensors(inputs):
    """Return inputs as tensors; ValueError for those that a file can't take, sparse or ragged."""
    found = {type(part).__name__ for part in parts(inputs) if tf.is_tensor(part)}
    if other := found & {"SparseTensor", "RaggedTensor"}:
        raise ValueError(f"inputs must be dense tensors, not {', '.join(sorted(other))}")
    return tf.nest.map_structure(tf.convert_to_tensor, inputs)


def apart(ours, theirs) -> float:
    """Return the largest relative L2 difference of an output of `ours` to its one of `theirs`.

    Outputs are tensors, or tuples, lists and dicts of them, which some runtimes return as a tuple.
    inf where their number, a shape or what is finite differs.
    """
    ours = [np.asarray(part) for part in tf.nest.flatten(ours)]
    theirs = [np.asarray(part) for part in tf.nest.flatten(theirs)]
    if [part.shape for part in ours] != [part.shape for part in theirs]:
        return math.inf
    return max((_distance(*pair) for pair in zip(ours, theirs, strict=True)), default=0.0)


def _distance(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Relative L2; what is not a finite number has to be the same in both."""
    if theirs.dtype.kind in "OSU":  # texts
        return 0.0 if np.array_equal(ours, theirs) else math.inf
    ours, theirs = ours.astype(np.float64), theirs.astype(np.float64)
    finite = np.isfinite(theirs)
    same = np.array_equal(np.isfinite(ours), finite)
    if not same or not np.array_equal(ours[~finite], theirs[~finite], equal_nan=True):
        return math.inf
    difference = np.linalg.norm(ours[finite] - theirs[finite])
    return float(difference / (np.linalg.norm(theirs[finite]) or 1.0))


def copy_model(model: tf.keras.Model, x=None) -> tf.keras.Model:
    """Return a copy of any built Keras model that shares nothing with it, not compiled.

    Functional, Sequential and subclassed models, in Keras 3 and tf_keras. All state goes with it:
    weights, what preprocessing layers adapted (`Normalization`, vocabularies), Keras 3's seeds,
    `trainable`. Not what was put on an instance, such as another `call`. The outputs of both are
    compared on `x`, an example input as the model takes it (a tuple where `call` takes several
    arguments); without it, on one made from the model's input shapes, where it has them.

    Raises ValueError for a model that is not built or that `x` does not fit; NotImplementedError
    where Keras cannot rebuild the model or the copy computes something else. `model` stays as it
    is.
    """
    if not model.built:
        raise ValueError("the model has no variables yet: call it once on an example input")
    given, x = x is not None, _example(model) if x is None else x
    try:
        with _state_kept():  # seeds, too: what draws has to draw the same in the copy
            wanted = call(model, x)
    except Exception as error:
        made = ", ".join(str(list(part.shape)) for part in parts(x))
        what = "the example input" if given else f"one made from its input shapes, of {made}"
        raise ValueError(f"the model does not take {what}: {one_line(error)}") from error
    try:
        copy, twins = _rebuilt(model)
        if not copy.built:
            call(copy, x)
        copy_state(twins)
        with _state_kept():
            difference = apart(call(copy, x), wanted)
    except Exception as error:
        raise NotImplementedError(f"Keras cannot rebuild the model: {one_line(error)}") from error
    if len(copy.weights) != len(model.weights):
        raise NotImplementedError(
            f"Keras rebuilds another model than this one: of {len(copy.weights)} weights, not"
            f" {len(model.weights)}"
        )
    if difference > _ROUNDING:
        raise NotImplementedError(
            f"Keras rebuilds another model than this one: outputs are {difference:.1e} off"
        )
    return copy


def copy_optimizer(optimizer, variables: list, originals: list | None = None):
    """An optimizer of the same settings, built for `variables`.

    Its configuration lacks which variables no weight decay takes (`exclude_from_weight_decay`).
    originals: those of the model that it was made for, in the same order, where names differ.
    Raises NotImplementedError where a variable is left out that is not among them.
    """
    if not hasattr(optimizer, "build"):
        raise NotImplementedError(
            "a legacy optimizer: take the one of its name in keras.optimizers"
        )
    copy = type(optimizer).from_config(_settings(optimizer))
    ours, theirs = (getattr(each, "inner_optimizer", each) for each in (optimizer, copy))
    told = {name: value for name, value in vars(ours).items() if name.startswith(_UNDECAYED)}
    if told:
        originals = variables if originals is None else originals
        known = {theirs._var_key(variable) for variable in originals}
        if not known.issuperset(told.get(_UNDECAYED) or ()):
            raise NotImplementedError(
                "exclude_from_weight_decay: variables of another model; give names (var_names)"
            )
        vars(theirs).update(told, _exclude_from_weight_decay_cache={})
        pairs = zip(variables, originals, strict=True)
        left_out = [own for own, original in pairs if not theirs._use_weight_decay(original)]
        theirs.exclude_from_weight_decay(var_list=left_out)
    copy.build(variables)
    return copy


def _settings(optimizer) -> dict:
    """Its configuration, with a schedule itself: one of the user's may have none of its own."""
    rate = getattr(optimizer, "_learning_rate", None)
    if not isinstance(rate, tf.keras.optimizers.schedules.LearningRateSchedule):
        return optimizer.get_config()
    optimizer._learning_rate = 0.0
    try:
        return optimizer.get_config() | {"learning_rate": rate}
    finally:
        optimizer._learning_rate = rate


def _example(model):
    """An input of two samples in the structure, shapes and dtypes of a model's inputs."""
    inputs = getattr(model, "inputs", None)
    if not inputs:
        raise ValueError("a subclassed model does not say what it takes: pass an example input x")
    layers = model._flatten_layers(include_self=False)
    words = [w for layer in layers for w in getattr(layer, "get_vocabulary", list)()][-8:]
    random = np.random.default_rng(0)
    # Where it was built by a call, a Sequential model has no `input`.
    structure = inputs[0] if isinstance(model, tf.keras.Sequential) else model.input
    open_size = _open_size(model, structure)

    def made(tensor):
        shape = _sized(tensor, open_size)
        dtype = tf.as_dtype(tensor.dtype)
        if dtype == tf.string:
            return tf.constant(random.choice([str(word) for word in words] or ["a"], shape))
        if dtype.is_floating:
            return tf.cast(random.normal(size=shape), dtype)
        return tf.cast(random.integers(0, 2, shape), dtype)

    return tf.nest.map_structure(made, structure)


def _open_size(model, structure) -> int:
    """The smallest of some sizes of which each layer leaves something (Keras 3 tells), else 32."""
    most_open = max(list(tensor.shape[1:]).count(None) for tensor in tf.nest.flatten(structure))
    sizes = [size for size in _SIZES if size**most_open <= _SIZES[-1]]
    for size in sizes if most_open else ():
        try:
            model.compute_output_shape(
                tf.nest.map_structure(lambda t, s=size: _sized(t, s), structure)
            )
        except Exception:  # TensorFlow itself computes on, with what is not there
            continue
        return size
    return 32


def _sized(tensor, size: int) -> tuple:
    """The shape of two samples, with `size` in place of what is open."""
    return (2, *(size if length is None else length for length in tensor.shape[1:]))


def _rebuilt(model) -> tuple:
    """A new model of the same configuration, and its layers as pairs with the model's own.

    Classes that nobody registered are found, too.
    """
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

        # A functional model is copied as one, whatever its class, and may hold layers in another
        # order than that class: KerasHub's tasks do.
        copy = tf.keras.models.clone_model(model, clone_function=clone)
        copy.trainable = model.trainable
        return copy, twins


def _clone_layer(layer):
    kind = tf.keras.layers.Lambda
    if type(layer) is kind:  # its code, read anew by Keras 3, would not know its module
        given = layer.function, layer._output_shape, layer.mask, layer.arguments
        return kind(*given, **tf.keras.layers.Layer.get_config(layer))
    config = layer.get_config()
    if "activation" in config and inspect.isfunction(getattr(layer, "activation", None)):
        config["activation"] = layer.activation  # not by its name, which others may have
    return type(layer).from_config(config)


def _pairs(twins: list[tuple]) -> list[tuple]:
    """Twins and what is in them."""
    return [
        pair
        for layer, twin in twins
        for pair in zip(layer._flatten_layers(), twin._flatten_layers(), strict=True)
    ]


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


def retrace(model: tf.keras.Model) -> None:
    """Give a model's methods that are a `tf.function` new graphs, which know what has changed."""
    kind = tf.types.experimental.PolymorphicFunction
    for layer in model._flatten_layers():
        own = [vars(each) for each in type(layer).__mro__]
        for name in {name for each in own for name in each if isinstance(each[name], kind)}:
            old = getattr(layer, name)
            function = getattr(old, "func", old)  # of one that was made anew before
            if not isinstance(function, kind):
                continue  # a technique's own call
            new = tf.function(function.python_function, jit_compile=function._jit_compile)
            new = partial(new)  # Keras would track the function itself
            new.__signature__ = inspect.signature(old)
            setattr(layer, name, new)


def copy_state(twins: list[tuple]) -> None:
    """Hand over what each layer would save, in the order in which twins hold the layers in them."""
    pairs = _pairs(twins)
    for layer, twin in pairs:
        twin.trainable = layer.trainable  # and of all inside, whose turn comes later
    for layer, twin in pairs:
        _copy_frozen(layer, twin)
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


def _copy_frozen(layer, twin) -> None:
    """Freeze the variables that are frozen by themselves within a layer of Keras 3 that trains."""
    if not layer.trainable or not hasattr(tf.keras, "StatelessScope"):
        return
    # Not all variables: a dropout that was set to 0 has a seed, and its twin none.
    for ours, theirs in zip(layer.weights, twin.weights, strict=True):
        if theirs.trainable and not ours.trainable:
            theirs.trainable = False


def _check_dtypes(model, inputs) -> None:
    """Keras would cast in silence, and the program take another dtype than the model states."""
    stated, given = getattr(model, "inputs", None) or [], parts(inputs)
    names = [tensor.name.split(":")[0] for tensor in stated]
    if isinstance(inputs, dict) and inputs.keys() == set(names):
        given = [inputs[name] for name in names]  # Keras goes by them, whatever their order
    wanted = [tf.as_dtype(tensor.dtype) for tensor in stated]
    if wanted and wanted != [part.dtype for part in given]:
        raise TypeError(f"it takes {', '.join(dtype.name for dtype in wanted)}")


def save(program, path) -> Path:
    """Write a function, as `trace` returns it, with its variables as constants to `path`.

    Returns the path. Raises NotImplementedError, and writes nothing, for a graph with operators
    that have a state.
    """
    concrete = program.get_concrete_function()
    frozen = convert_variables_to_constants_v2(concrete)
    meta = meta_graph_pb2.MetaGraphDef(graph_def=frozen.graph.as_graph_def())
    if refused := _refused(meta.graph_def):
        raise NotImplementedError(f"the graph has {refused}, which a program may not have")
    signature = meta.signature_def[_SIGNATURE]
    for number, tensor in enumerate(frozen.inputs):
        signature.inputs[f"{number:03}"].name = tensor.name
    for number, tensor in enumerate(frozen.outputs):
        signature.outputs[f"{number:03}"].name = tensor.name
    structure = json.dumps(_written(concrete.structured_outputs))
    with zipfile.ZipFile(path, "w") as archive:  # which keeps a checksum
        archive.writestr(_MEMBER, meta.SerializeToString())
        archive.writestr(_STRUCTURE, structure)
    try:
        load(path)
    except ValueError as error:
        Path(path).unlink()
        raise NotImplementedError(f"the graph cannot be written: {error}") from error
    return Path(path)


def load(path) -> Callable:
    """Read what `save` wrote: a function of the inputs. Executes no code of the file.

    Raises FileNotFoundError, and ValueError for a file that is damaged or something else.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        with zipfile.ZipFile(path) as archive:
            if damaged := archive.testzip():
                raise ValueError(f"{damaged} in it is damaged")
            meta = meta_graph_pb2.MetaGraphDef.FromString(archive.read(_MEMBER))
            structure = _read(json.loads(archive.read(_STRUCTURE)))
        signature = meta.signature_def[_SIGNATURE]
        inputs = [signature.inputs[name].name for name in sorted(signature.inputs)]
        if refused := _refused(meta.graph_def):
            raise ValueError(f"it has {refused}, which a program may not have")
        whole = tf.compat.v1.wrap_function(
            lambda: tf.graph_util.import_graph_def(meta.graph_def, name=""), []
        )
        outputs = [signature.outputs[name].name for name in sorted(signature.outputs)]
        return whole.prune(inputs, tf.nest.pack_sequence_as(structure, outputs))
    except Exception as error:  # damage may raise anything in zipfile
        raise ValueError(f"{path} is no whole file of a program: {one_line(error)}") from None


def check_sizes(program, inputs) -> None:
    """Raise ValueError where inputs have other sizes than those of which a program was traced.

    What asks for a size has that of the example, and a graph that was read looks at none.
    inputs: their number of samples is open.
    """
    tensors = parts(inputs)
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


def _written(output):
    """The structure of outputs in terms of JSON."""
    if isinstance(output, dict):
        return {"dict": {str(name): _written(part) for name, part in output.items()}}
    if isinstance(output, (tuple, list)):
        kind = "list" if isinstance(output, list) else "tuple"
        return {kind: [_written(part) for part in output]}
    return None


def _read(written):
    if written is None:
        return 0
    ((kind, inside),) = written.items()
    if kind == "dict":
        return {name: _read(part) for name, part in inside.items()}
    return {"tuple": tuple, "list": list}[kind](_read(part) for part in inside)


def _refused(graph) -> str | None:
    """The first operator that has a state, touches files or calls Python, or None."""
    functions = _functions(graph)
    names = {function.signature.name for function in functions}
    for node in [*graph.node, *(node for function in functions for node in function.node_def)]:
        known = op_def_registry.get(node.op)
        if node.op in names or node.op in _HARMLESS:
            continue
        if known is None or known.is_stateful or _FILES.search(node.op):
            return node.op
    return None


def one_line(error: Exception) -> str:
    """Return an error's words as one line; of LiteRT's converter, which operators are lacking."""
    if lacking := dict.fromkeys(_LACKS.findall(str(error))):
        return f"there is no operator for {', '.join(lacking)}"
    return " ".join(str(error).split())[:300] or type(error).__name__
