"""What a quantized model's predictions really run over: evidence, only for the benchmark.

What it holds: integer kernels of one prediction, the tensors of a file, and the integer weights
that a compiled graph reads.
Twin: `tf_impl/kit/integers.py`.
Where the frameworks differ: kernels are those of the profiler here, and the operators that stand in
LiteRT's file there. What a graph reads stands in what TorchInductor compiles, there in the graph
that grappler has optimized.
"""

import re
from collections import Counter
from collections.abc import Callable

import torch
from torch._functorch import config as functorch
from torch._inductor import config as inductor
from torch._inductor.compile_fx import compile_fx, compile_fx_inner

from pt_impl.kit import saving, tracing

_INTEGER = re.compile(
    r"^(onednn::q(conv|linear)\w*|quantized::(conv|linear)\w*|aten::_weight_int[48]pack_mm\w*)$"
)
_CHECK = torch.ops.aten._assert_tensor_metadata.default  # reads no values


def integer_operators(predict: Callable, path, x) -> dict[str, int]:
    """Count the integer kernels of a prediction by name; `path` is the file that it is of."""
    predict(x)  # compiles
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        predict(x)
    return dict(Counter(e.name for e in profile.events() if _INTEGER.match(e.name)))


def tensor_bytes(path) -> dict[str, int]:
    """Bytes of the tensors in a file of `saving.save`, by dtype."""
    held = Counter()
    for tensor in saving.load(path).buffers():
        held[_name(tensor)] += tensor.nbytes
    return dict(held)


def integer_bytes_read(path, x) -> dict[str, int]:
    """Bytes by dtype of the integer weights that a prediction of a file computes with.

    Of the graph that TorchInductor compiles of it, after constants were folded.
    """
    program, read = saving.load(path), Counter()
    integers = any(tensor.dtype is torch.int8 for tensor in program.buffers())

    def inner(graph, inputs, **options):
        weights = options.get("static_input_idxs", ())  # where they are not constants
        for place, node in enumerate(graph.graph.nodes):
            used = any(user.target is not _CHECK for user in node.users)
            if used and (node.op == "get_attr" or place in weights):
                tensor = getattr(graph, node.target, None)
                tensor = node.meta["val"] if tensor is None else tensor
                if tensor.dtype in (torch.int8, torch.uint8):
                    read[_name(tensor)] += tensor.nbytes
        return compile_fx_inner(graph, inputs, **options)

    def backend(graph, inputs):
        with functorch.patch(enable_autograd_cache=False):  # one that is warm skips `inner`
            return compile_fx(graph, inputs, inner_compile=inner)

    with torch.inference_mode(), inductor.patch(freezing=not integers):
        tracing.outputs(torch.compile(program, backend=backend), x)
    return dict(read)


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
