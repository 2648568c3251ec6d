"""Files of models over int8 activations: compared with the model first, and read compiled.

Twin: `tf_impl/kit/int8_files.py`.
Where the frameworks differ: what is quantized is a graph of operators here, written as names and
tensors (`kit/saving.py`), which TorchInductor compiles for each shape. There it is the content of a
LiteRT file, which is interpreted.
"""

import operator
from collections.abc import Callable
from pathlib import Path

import torch
from torch import fx, nn

from pt_impl.kit import quantized_files, saving
from pt_impl.kit.checks.post_training_quantization import (
    check_post_training_quantization,
    keep_if_near,
)
from pt_impl.kit.tracing import outputs, trace

SAME, MOST_APART = 1e-4, 0.5  # relative L2 of a file's outputs: in float32, in integers


def keep_float32(model: nn.Module, x, path) -> Path:
    """Write the model as it is, in float32, for `load_int8`; the model is left as it is.

    x: one sample or more: a tensor, a tuple of the model's positional arguments or a dict of those
    by name, tensors all; samples along the first axis. The file takes any number of samples of
    these sizes. Before it is there, it is read again and compared with the model.

    Returns the path. Raises, and writes nothing, ValueError for inputs that the model does not
    take; NotImplementedError for a model that torch.export cannot capture; RuntimeError where the
    file gives something else.
    """
    check_post_training_quantization(model, x)
    graph = trace(model, x)
    return keep_if_near(save_as_it_is(graph, f"{path}.part"), path, _load, graph, x, SAME)


def save_int8(quantized: fx.GraphModule, model: nn.Module, x, path) -> Path:
    """Write what `apply_static_int8` or `apply_dynamic_int8` made of the model, for `load_int8`.

    x: as for `keep_float32`. Returns the path. Raises, and writes nothing, RuntimeError where
    outputs for x are more than a relative `MOST_APART` off the model's.
    """
    part = save_as_it_is(quantized, f"{path}.part")
    return keep_if_near(part, path, _load, trace(model, x), x, MOST_APART)


def save_as_it_is(quantized: fx.GraphModule, path) -> Path:
    """Write what `convert_qat` returned, which it has compared, for `load_int8`; return the path.

    Raises NotImplementedError, and writes nothing, for a graph with operators that are not ATen's.
    """
    _spell_out_numel(quantized)
    return saving.save(quantized, path)


def _spell_out_numel(graph: fx.GraphModule) -> None:
    """Let the number of a tensor's elements be a product of its sizes.

    Symptom, in torch 2.15: `torch.export` writes `sym_numel` for `nn.EmbeddingBag`, and
    `torch.compile` cannot trace it. It can go once it can.
    """
    aten = torch.ops.aten
    for node in graph.graph.find_nodes(op="call_function", target=aten.sym_numel.default):
        (tensor,) = node.args
        with graph.graph.inserting_before(node):
            count = 1
            for axis in range(tensor.meta["val"].ndim):
                size = graph.graph.call_function(aten.sym_size.int, (tensor, axis))
                count = graph.graph.call_function(operator.mul, (count, size))
        node.replace_all_uses_with(count)
        graph.graph.erase_node(node)
        graph.recompile()


def load_int8(path, *, threads: int = 0) -> Callable:
    """Return `predict(x) -> output` over a file of this module, compiled, on the CPU.

    x: any number of samples, of the sizes of the example. The first call for a shape compiles,
    which needs a C++ compiler; weights are frozen into the graph, or int8 would be no faster than
    float32. `predict.threads` is PyTorch's number of threads.
    threads: 0 leaves that number; another one is set for the whole process, which has one pool.

    Raises FileNotFoundError, and ValueError for a file that is damaged or something else, before
    anything of it runs, and in a call for other sizes.
    """
    return quantized_files.load_quantized(path, threads=threads)


def _load(path) -> Callable:
    """`predict(x)` of the operators one by one, not compiled."""
    program = saving.load(path)
    return lambda x: outputs(program, x)
