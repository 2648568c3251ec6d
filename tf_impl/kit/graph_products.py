"""What products in a profile of a TensorFlow step compute, and the machine's peak.

The profiler tells no shapes: what a product computes follows from those of the graph, in which it
has the same name. So it is known where a function was traced for one set of shapes that are all
known, but not without `tf.function`.
"""

import gc
import math
import re
from collections import Counter
from contextlib import suppress

import tensorflow as tf

from shared.profiles import convolution_flops, fastest, product_flops

# Products, and the setting that says whether the first input is transposed.
_PRODUCTS = {"MatMul": "transpose_a", "BatchMatMul": "adj_x"}
_CONVOLUTION = re.compile(r"(Conv2D|Conv3D|DepthwiseConv2d)(BackpropInput|BackpropFilter)?")
_FUSED = 4  # operators at most, of which grappler makes one: a product, its bias, a sum, a ReLU


def graphs_of(called: set[str]) -> list[tf.Graph]:
    """Return the graphs of the functions of these names, and of loops and functions in them."""
    known = gc.get_objects()
    graphs = {
        id(found.graph): found.graph
        for found in known
        if issubclass(type(found), tf.types.experimental.ConcreteFunction)
        and tf.compat.as_str(found.name) in called
    }
    inner = [found for found in known if issubclass(type(found), tf.Graph)]
    count = None
    while count != len(graphs):  # until no graph lies in one of those found
        count = len(graphs)
        for graph in inner:
            if id(getattr(graph, "outer_graph", None)) in graphs:
                graphs[id(graph)] = graph
    return list(graphs.values())


def operations(graphs: list[tf.Graph], name: str, kind: str) -> tuple[float, str] | None:
    """Return operations and dtype of a product or a convolution; None where they are not known.

    The trace tells its name and type. Where a function was traced for several shapes, or its graph
    lacks one, nobody knows which ran. What was called and then inlined has the call's name first.
    """
    kind, meant = _kind(kind), []
    if kind != "Einsum" and kind not in _PRODUCTS and not _CONVOLUTION.fullmatch(kind):
        return None
    while name and not meant:
        meant = [one for graph in graphs for one in _named(graph, name, kind)]
        name = name.partition("/")[2]
    found = {(_operations(kind, one), one.outputs[0].dtype) for one in meant}
    flops, dtype = found.pop() if len(found) == 1 else (None, None)
    return (flops, dtype.name) if flops is not None and dtype.is_floating else None


def peak(dtype: str) -> float:
    """Return operations a second of a large product in `dtype`; 0 where its memory is lacking."""
    size = 8192 if tf.config.list_physical_devices("GPU") else 1024
    try:
        # Random, but not of the generator that the training draws from.
        a, b = tf.cast(tf.random.stateless_normal((2, size, size), seed=(0, 0)), dtype)

        def multiply() -> None:
            tf.matmul(a, b)
            if tf.config.list_physical_devices("GPU"):
                tf.test.experimental.sync_devices()

        return product_flops(a.shape, b.shape, size) / fastest(multiply, seconds=0.1)
    except tf.errors.ResourceExhaustedError:
        return 0.0


def _kind(kind: str) -> str:
    """What an operator's type computes, without how: `_FusedMatMul` is a `MatMul`."""
    return re.sub(r"^_|Mkl|Native|Fused|WithBias|V\d$", "", kind)


def _named(graph: tf.Graph, name: str, kind: str) -> list[tf.Operation]:
    """The operation of this name, or the nearest before: those fused have the last one's name."""
    near = []
    with suppress(KeyError):
        near = [graph.get_operation_by_name(name)]
    for _ in range(_FUSED):
        alike = [one for one in near if _kind(one.type) == kind]
        if alike:
            return alike
        near = [value.op for one in near for value in one.inputs]
    return []


def _operations(kind: str, operation: tf.Operation) -> float | None:
    """Operations by the shapes of the graph; None where it lacks one."""
    values = [*operation.inputs, operation.outputs[0]]
    shapes = [[None] if v.shape.rank is None else v.shape.as_list() for v in values]
    of_weights = kind.endswith("BackpropFilter")
    one, two = (2, -1) if of_weights else (1, 2) if kind.endswith("BackpropInput") else (1, -1)
    if kind in _PRODUCTS or kind == "Einsum":
        one, two = 0, 1
    first, second = shapes[one], shapes[two]
    if None in (*first, *second):
        return None
    if kind == "Einsum":
        return _einsum(operation.get_attr("equation").decode(), first, second)
    if kind in _PRODUCTS:
        inner = first[-2 if operation.get_attr(_PRODUCTS[kind]) else -1]
        return product_flops(first, second, inner)
    y, weights = (first, second) if of_weights else (second, first)
    channels = math.prod(weights[-2:]) if kind.startswith("Depthwise") else weights[-1]
    return convolution_flops(weights, math.prod(y) // channels)


def _einsum(equation: str, *shapes: list) -> float:
    """Operations of the product of two; what only one of them has is summed before, if at all."""
    inputs, _, output = equation.partition("->")
    sizes, seen = {}, Counter()
    for term, shape in zip(inputs.split(","), shapes, strict=True):
        before, _, after = term.partition("...")
        hidden = range(len(shape) - len(before) - len(after), 0, -1)  # what "..." stands for
        labels = [*before, *hidden, *after]
        seen.update(set(labels))
        for label, length in zip(labels, shape, strict=True):
            sizes[label] = max(length, sizes.get(label, 1))
    kept = (n for n in sizes if isinstance(n, int) or n in output or seen[n] == 2)
    return 2.0 * math.prod(sizes[label] for label in kept)
