"""What a quantized model's predictions really run over: evidence, only for the benchmark.

What it holds: integer operators of a file, its tensors, and the integer weights that an optimized
graph reads.
Twin: `pt_impl/kit/integers.py`.
Where the frameworks differ: operators are those that stand in LiteRT's file here, and kernels of
the profiler there. What a graph reads stands in the graph that grappler has optimized, there in
what TorchInductor compiles.
"""

from collections import Counter
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path

import tensorflow as tf
from tensorflow.python.eager import context

from tf_impl.kit import saving

_functions = attrgetter("library.function")  # of a GraphDef


def integer_operators(predict: Callable, path, x) -> dict[str, int]:
    """Count the operators with integer weights in the LiteRT file that a prediction is of, by name.

    None in other files: a graph of TensorFlow makes floats of integers before it multiplies.
    """
    from ai_edge_litert.interpreter import Interpreter, OpResolverType

    content = Path(path).read_bytes()
    if content[4:8] != b"TFL3":
        return {}
    # As it is in the file, without the parts that XNNPACK would take together.
    plain = OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
    interpreter = Interpreter(model_content=content, experimental_op_resolver_type=plain)
    kinds = {one["index"]: one["dtype"].__name__ for one in interpreter.get_tensor_details()}
    found = Counter()
    for operator in interpreter._get_ops_details():  # LiteRT has no public list
        weights = kinds.get(operator["inputs"][1], "") if len(operator["inputs"]) > 1 else ""
        if weights.startswith("int") and weights not in ("int32", "int64"):
            found[f"{operator['op_name']}({kinds[operator['inputs'][0]]}, {weights})"] += 1
    return dict(found)


def tensor_bytes(path) -> dict[str, int]:
    """Bytes of the tensors in a file of `saving.save`, by dtype; int4 lies in pairs in int8."""
    return dict(_constants(saving.load(path).graph.as_graph_def()))


def integer_bytes_read(path, x) -> dict[str, int]:
    """Bytes by dtype of the integer weights that a prediction of a file computes with.

    Of the graph once grappler has optimized it.
    """
    with context.collect_graphs(optimized=True) as graphs:
        saving.load(path)(*tf.nest.flatten(x))
    read = sum((_constants(graph) for graph in graphs), Counter())
    return {dtype: size for dtype, size in read.items() if dtype in ("int8", "uint8")}


def _constants(graph) -> Counter:
    """The bytes of a graph's constants by dtype."""
    found = Counter()
    functions = _functions(graph)
    for node in [*graph.node, *(node for inside in functions for node in inside.node_def)]:
        if node.op == "Const":
            value = tf.make_ndarray(node.attr["value"].tensor)
            found[value.dtype.name] += value.nbytes
    return found
