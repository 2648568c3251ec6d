"""Graphs as data: a traced model in one file, which is read without executing code from it.

What it holds: the way from a model to a graph of operators, to a file, and back.
Twin: `pt_impl/kit/programs.py`.
Where the frameworks differ: TensorFlow's graphs are data by nature: the file holds a MetaGraphDef,
one protocol buffer with the graph and a signature that names its inputs and its output, in a zip
archive for its checksum. PyTorch's are Python objects, which have to be written node by node. A
graph may hold operators that read and write files or call back into Python; both sides refuse
these.
"""

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

_SIGNATURE, _MEMBER = "predict", "program.pb"
_FILES = re.compile("File|Save|Restore|PyFunc|Directory")


def trace(model: tf.keras.Model, inputs):
    """Return the model as a `tf.function`, in evaluation mode, traced once.

    inputs: as `check` takes them. The function takes any number of samples, and the tensors one by
    one. It reads the model's own variables.

    Raises ValueError as `check` does; NotImplementedError for a model that does not return one
    tensor.
    """
    output = check(model, inputs)
    if not tf.is_tensor(output):
        raise NotImplementedError(f"the model returns {type(output).__name__}, not one tensor")
    signature = [  # names in the order of the inputs: a converted file has no other order
        tf.TensorSpec([None, *part.shape[1:]], part.dtype, name=f"x{number:03}")
        for number, part in enumerate(tf.nest.flatten(inputs))
    ]

    @tf.function(input_signature=signature, jit_compile=False)
    def program(*parts):
        return _call(model, tf.nest.pack_sequence_as(inputs, parts))

    try:
        program.get_concrete_function()
    except Exception as error:
        raise NotImplementedError(f"tf.function cannot trace it: {_line(error)}") from error
    return program


def check(model: tf.keras.Model, inputs):
    """Return what the model makes of one sample, in evaluation mode.

    inputs: a tensor, or a tuple of the model's positional arguments, or a list that is its one
    argument, tensors all; samples along the first axis.

    Raises ValueError for a model without variables, and for inputs without samples, with values
    that are not finite, or that the model does not take.
    """
    if not model.built:
        raise ValueError("the model has no variables yet: call it once on an example input")
    parts = tf.nest.flatten(inputs)
    if not all(tf.is_tensor(part) and part.shape.rank for part in parts):
        kinds = ", ".join(type(part).__name__ for part in parts)
        raise ValueError(f"inputs must be tensors with samples along an axis, not {kinds}")
    counts = [len(part) for part in parts]
    if not counts or min(counts) == 0 or len(set(counts)) > 1:
        raise ValueError(f"inputs must have samples, as many in each tensor, not {counts}")
    if not all(np.isfinite(part).all() for part in parts):
        raise ValueError("inputs hold values that are not finite")
    try:
        _check_dtypes(model, parts)
        return _call(model, tf.nest.map_structure(lambda part: part[:1], inputs))
    except Exception as error:
        given = ", ".join(f"{part.dtype.name} {list(part.shape[1:])}" for part in parts)
        raise ValueError(f"the model takes no samples of {given}: {_line(error)}") from error


def _call(model, x):
    return model(*x, training=False) if isinstance(x, tuple) else model(x, training=False)


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
    frozen = convert_variables_to_constants_v2(program.get_concrete_function())
    meta = meta_graph_pb2.MetaGraphDef(graph_def=frozen.graph.as_graph_def())
    if refused := _refused(meta.graph_def):
        raise NotImplementedError(f"the graph has {refused}, which a program may not have")
    signature = meta.signature_def[_SIGNATURE]
    for number, tensor in enumerate(frozen.inputs):
        signature.inputs[f"{number:03}"].name = tensor.name
    (output,) = frozen.outputs
    signature.outputs["output"].name = output.name
    with zipfile.ZipFile(path, "w") as archive:  # which keeps a checksum
        archive.writestr(_MEMBER, meta.SerializeToString())
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
        signature = meta.signature_def[_SIGNATURE]
        inputs = [signature.inputs[name].name for name in sorted(signature.inputs)]
        if refused := _refused(meta.graph_def):
            raise ValueError(f"it has {refused}, which a program may not have")
        whole = tf.compat.v1.wrap_function(
            lambda: tf.graph_util.import_graph_def(meta.graph_def, name=""), []
        )
        return whole.prune(inputs, signature.outputs["output"].name)
    except (DecodeError, ValueError, KeyError, tf.errors.OpError) as error:
        raise ValueError(f"{path} is no whole file of a program: {_line(error)}") from None


def _refused(graph) -> str | None:
    """The first operator that has a state, touches files or calls Python, or None."""
    nodes, functions = attrgetter("node", "library.function")(graph)
    names = {function.signature.name for function in functions}
    for node in [*nodes, *(node for function in functions for node in function.node_def)]:
        known = op_def_registry.get(node.op)
        if node.op in names or node.op == "Placeholder":
            continue
        if known is None or known.is_stateful or _FILES.search(node.op):
            return node.op
    return None


def _line(error: Exception) -> str:
    """An error's words as one line."""
    return " ".join(str(error).split())[:300] or type(error).__name__
