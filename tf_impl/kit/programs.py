"""Graphs as data: a traced model in one file, which is read without executing code from it.

What it holds: the way from a model to a graph of operators, to a file, and back.
Twin: `pt_impl/kit/programs.py`.
Where the frameworks differ: TensorFlow's graphs are data by nature: the file holds a MetaGraphDef,
one protocol buffer with the graph and a signature that names its inputs and its outputs, in a zip
archive for its checksum. PyTorch's are Python objects, which have to be written node by node. A
graph may hold operators that read and write files or call back into Python; both sides refuse
these.
"""

import inspect
import json
import math
import re
import zipfile
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path

import numpy as np
import tensorflow as tf
from google.protobuf.message import DecodeError
from tensorflow.core.protobuf import meta_graph_pb2
from tensorflow.python.framework import op_def_registry
from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

from shared import archives

_SIGNATURE, _MEMBER, _STRUCTURE = "predict", "program.pb", "outputs.json"
# Calls and loops have what state their functions have, and these are looked at, too.
_HARMLESS = {"Placeholder", "StatefulPartitionedCall", "While", "If"}
_FILES = re.compile("File|Save|Restore|PyFunc|Directory")


def call(model: tf.keras.Model, inputs):
    """Return the model's output for inputs as `fit` hands them over: a structure is one argument.

    A tuple is `*x` and a dict `**x` where `call` takes several arguments. Of an output with
    `.logits` these alone.
    """
    return _call(model, inputs, training=False)


def _call(model: tf.keras.Model, inputs, *, training: bool):
    names = [
        p
        for p in inspect.signature(model.call).parameters.values()
        if p.name not in ("training", "mask") and p.kind != p.VAR_KEYWORD
    ]
    needed = sum(p.default is p.empty and p.kind != p.VAR_POSITIONAL for p in names)
    several = needed > 1 or any(p.kind == p.VAR_POSITIONAL for p in names)
    if isinstance(inputs, tuple) and several:
        output = model(*inputs, training=training)
    elif isinstance(inputs, dict) and len(names) > 1 and inputs.keys() <= {p.name for p in names}:
        output = model(**inputs, training=training)
    else:
        output = model(inputs, training=training)
    return getattr(output, "logits", output)


def parts(inputs) -> tuple[tf.Tensor, ...]:
    """Return the tensors of inputs: those of a dict in the order of its sorted keys."""
    return tuple(tf.nest.flatten(inputs))


def trace(model: tf.keras.Model, inputs, *, training: bool = False):
    """Return the model as a `tf.function`, in evaluation mode, traced once.

    inputs: as `check` takes them. The function takes any number of samples, and the tensors one by
    one, in the order of `parts`. It reads the model's own variables. training: in training mode.

    Raises ValueError and NotImplementedError as `check` does, NotImplementedError for a model that
    cannot be traced.
    """
    check(model, inputs)
    signature = [  # names in the order of the inputs: a converted file has no other order
        tf.TensorSpec([None, *part.shape[1:]], part.dtype, name=f"x{number:03}")
        for number, part in enumerate(parts(inputs))
    ]

    @tf.function(input_signature=signature, jit_compile=False)
    def program(*tensors):
        return _call(model, tf.nest.pack_sequence_as(inputs, tensors), training=training)

    try:
        program.get_concrete_function()
    except Exception as error:
        raise NotImplementedError(f"tf.function cannot trace it: {_line(error)}") from error
    return program


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
    if not all(tf.is_tensor(part) and part.shape.rank for part in tensors):
        kinds = ", ".join(type(part).__name__ for part in tensors)
        raise ValueError(f"inputs must be tensors with samples along an axis, not {kinds}")
    counts = [len(part) for part in tensors]
    if not counts or min(counts) == 0 or len(set(counts)) > 1:
        raise ValueError(f"inputs must have samples, as many in each tensor, not {counts}")
    if not all(np.isfinite(part).all() for part in tensors if part.dtype.is_floating):
        raise ValueError("inputs hold values that are not finite")
    try:
        _check_dtypes(model, tensors)
        output = call(model, tf.nest.map_structure(lambda part: part[:1], inputs))
    except Exception as error:
        given = ", ".join(f"{part.dtype.name} {list(part.shape[1:])}" for part in tensors)
        raise ValueError(f"the model takes no samples of {given}: {_line(error)}") from error
    for part in tf.nest.flatten(output):
        if not tf.is_tensor(part) or isinstance(part, tf.RaggedTensor | tf.SparseTensor):
            raise NotImplementedError(
                f"the model returns {type(part).__name__}, which is no tensor"
            )
    return output


def apart(ours, theirs) -> float:
    """Return the largest relative L2 difference of an output of `ours` to its one of `theirs`.

    Outputs are tensors, or tuples, lists and dicts of them, which some runtimes return as a tuple.
    inf where their number, a shape or what is finite differs.
    """
    ours, theirs = ([np.asarray(part) for part in tf.nest.flatten(one)] for one in (ours, theirs))
    if [part.shape for part in ours] != [part.shape for part in theirs]:
        return math.inf
    found = [0.0]
    for left, right in zip(ours, theirs, strict=True):
        left, right = left.astype("float64"), right.astype("float64")
        found.append(float(np.linalg.norm(left - right) / (np.linalg.norm(right) or 1.0)))
    return math.inf if any(math.isnan(value) for value in found) else max(found)


def _check_dtypes(model, parts) -> None:
    """Keras would cast in silence, and the program take another dtype than the model states."""
    wanted = [tf.as_dtype(tensor.dtype) for tensor in getattr(model, "inputs", None) or []]
    if wanted and wanted != [part.dtype for part in parts]:
        raise TypeError(f"it takes {', '.join(dtype.name for dtype in wanted)}")


def save(program, path) -> Path:
    """Write a function, as `trace` returns it, with its variables as constants to `path`.

    Raises NotImplementedError, and
    writes nothing, for a graph with operators that have a state. Returns the path.
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
        archives.check_zip(path)
        with zipfile.ZipFile(path) as archive:
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
    except (DecodeError, ValueError, KeyError, tf.errors.OpError) as error:
        raise ValueError(f"{path} is no whole file of a program: {_line(error)}") from None


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
    nodes, functions = attrgetter("node", "library.function")(graph)
    names = {function.signature.name for function in functions}
    for node in [*nodes, *(node for function in functions for node in function.node_def)]:
        known = op_def_registry.get(node.op)
        if node.op in names or node.op in _HARMLESS:
            continue
        if known is None or known.is_stateful or _FILES.search(node.op):
            return node.op
    return None


def _line(error: Exception) -> str:
    """An error's words as one line."""
    return " ".join(str(error).split())[:300] or type(error).__name__
