"""What a call really ran: the evidence that benchmarks and tests want of a technique of the step.

What it holds: formats of convolutions, operators of an update, graphs of a step. No technique
needs it.
Twin: `pt_impl/kit/operators.py`.
Where the frameworks differ: TensorFlow's run time hands out the graphs that it ran; PyTorch's
profiler and hooks see operators as they run.
"""

from collections import Counter
from collections.abc import Callable
from operator import attrgetter

import tensorflow as tf
from tensorflow.python.eager import context

functions = attrgetter("library.function")  # of a GraphDef
_FORMATS = {"NHWC": "channels_last", "NCHW": "channels_first"}
# What moves and names values, and what calls a function whose operators are counted themselves.
_PLUMBING = {"Const", "NoOp", "_Arg", "_Retval", "Identity", "ReadVariableOp"}


def convolution_formats(model: tf.keras.Model, call: Callable) -> dict[str, int]:
    """Count the 2-D convolutions of `call()`, forward and backward, by memory format.

    Returns for example {"channels_last": 11}. `call` runs a `tf.function` that is not XLA; what
    counts is the graph that was executed, after grappler rewrote it. The program of XLA has no such
    formats: there nothing is counted.
    """
    call()  # may trace
    names = [n.attr["data_format"].s.decode() for n in _executed_nodes(call) if "Conv2" in n.op]
    return dict(Counter(_FORMATS.get(name, "other") for name in names))


def onednn_operators(call: Callable) -> int:
    """Count the operators of oneDNN that `call()` ran, in the graphs that were executed."""
    call()  # may trace
    return sum(node.op.startswith("_Mkl") for node in _executed_nodes(call))


def update_operators(update: Callable) -> dict[str, int]:
    """Count the operators of one update, by name; a program of XLA counts as "compiled".

    Returns for example {"AssignSubVariableOp": 70, "Mul": 140}: what is in the graphs that were
    executed, after grappler rewrote them. Calls the update twice, since the first call may trace.
    """
    update()
    library = functions(update.get_concrete_function().graph.as_graph_def())
    programs = {f.signature.name for f in library if f.attr["_XlaMustCompile"].b}
    counts = Counter()
    for node in _executed_nodes(update):
        if "_XlaMustCompile" in node.attr or node.attr["f"].func.name in programs:
            counts["compiled"] += 1
        elif node.op not in _PLUMBING:
            counts[node.op] += 1
    return dict(counts)


def _executed_nodes(call: Callable) -> list:
    """The nodes of the graphs of one call, as they were instantiated."""
    runtime = context.context()
    # The runtime hands out a graph when it instantiates it, so the call has to do that again.
    runtime.clear_kernel_cache()
    runtime.enable_graph_collection()
    try:
        call()
        graphs = runtime.export_run_metadata().function_graphs
    finally:
        runtime.disable_graph_collection()
    return [node for graph in graphs for part in graph.partition_graphs for node in part.node]


def executed_graphs(function: Callable, *inputs) -> dict:
    """Say what a call of `function` runs in traced graphs, and what not in programs of XLA.

    Returns for example {"graphs": 1, "compiled": 1, "outside": {}, "breaks": []}: the graph and the
    functions that it calls, those that XLA must compile (or TensorFlow raises), and the operators
    in the others. An eager function has no graphs, and its operators are not seen.
    """
    counts, outside = Counter(), Counter()
    if hasattr(function, "get_concrete_function"):
        traced = function.get_concrete_function(*inputs)
        library = {f.signature.name: f for f in functions(traced.graph.as_graph_def())}
        _count(traced.function_def, library, counts, outside, inside_xla=False)
    return {
        "graphs": counts["graphs"],
        "compiled": counts["compiled"],
        "outside": dict(outside),
        "breaks": [],
    }


def _count(function, library: dict, counts: Counter, outside: Counter, *, inside_xla: bool) -> None:
    """Count `function` and what it calls, operators where XLA does not compile them."""
    marked = "_XlaMustCompile" in function.attr and function.attr["_XlaMustCompile"].b
    if not inside_xla:  # what a compiled function calls becomes part of its program
        counts["graphs"] += 1
        counts["compiled"] += int(marked)
    for node in function.node_def:
        called = [library[v.func.name] for v in node.attr.values() if v.func.name in library]
        if not (called or inside_xla or marked):
            outside[node.op] += 1
        for callee in called:
            _count(callee, library, counts, outside, inside_xla=inside_xla or marked)
