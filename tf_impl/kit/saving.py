"""A graph as a file of data, which is read without executing code from it.

Twin: `pt_impl/kit/saving.py`.
Where the frameworks differ: TensorFlow's graphs are data by nature: the file holds a MetaGraphDef,
one protocol buffer with the graph and a signature that names its inputs and its outputs, in a zip
archive for its checksum. PyTorch's are Python objects, which have to be written node by node. A
graph may hold operators that read and write files or call back into Python; both sides refuse
these.
"""

import json
import re
import zipfile
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path

import tensorflow as tf
from tensorflow.core.protobuf import meta_graph_pb2
from tensorflow.python.framework import op_def_registry
from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

_functions = attrgetter("library.function")  # of a GraphDef
_SIGNATURE, _MEMBER, _STRUCTURE = "predict", "program.pb", "outputs.json"
# Calls and loops have what state their functions have, and these are looked at, too.
_HARMLESS = {"Placeholder", "StatefulPartitionedCall", "While", "If"}
_FILES = re.compile("File|Save|Restore|PyFunc|Directory")


def save(program, path) -> Path:
    """Write a function, as `trace` returns it, with its variables as constants to `path`.

    Returns the path. Raises NotImplementedError, and writes nothing, for a graph with operators
    that have a state.
    """
    concrete = program.get_concrete_function()
    try:
        frozen = convert_variables_to_constants_v2(concrete)
    except Exception as error:  # of CTC's loss, whose loop has two definitions
        line = _one_line(error)
        raise NotImplementedError(
            f"TensorFlow makes no constants of its variables: {line}"
        ) from error
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
        raise ValueError(f"{path} is not a complete program file: {_one_line(error)}") from None


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


def _one_line(error: Exception) -> str:
    words = str(error).partition(" Previous definition: ")[0].split()  # of a function, in full
    return " ".join(words)[:300] or type(error).__name__
