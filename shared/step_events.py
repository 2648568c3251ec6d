"""What a profiler saw of a step, and what kind of work an operator is, by its name.

`pt_impl/kit/step_events.py` and its twin read the frameworks' traces.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from shared.profiles import STEP, Taken

PRODUCTS, CONVOLUTIONS, ELEMENTWISE = "products", "convolutions", "element-wise"
NORMALISATION, ATTENTION, RECURRENT = "normalisation", "attention", "recurrent layers"
REDUCTIONS, INDEXING, COPIES = "sums and losses", "lookups", "copies and casts"
OPTIMIZER, COMPILED, PYTHON = "optimizer", "compiled kernels", "Python in the graph"
DISPATCH, READING, WAITING = "dispatch", "reading results", "waiting for threads"
DELAYED = "waiting for a processor"
INPUT, FAULTS, RECOMPILATION = "input", "page faults", "recompilation"
RUNTIME = "runtime of a file"
REST = "not attributed"
KINDS = (
    *(PRODUCTS, CONVOLUTIONS, ATTENTION, RECURRENT, NORMALISATION, ELEMENTWISE, REDUCTIONS),
    *(INDEXING, COPIES, COMPILED, OPTIMIZER, DISPATCH, PYTHON, READING, WAITING, DELAYED),
    *(INPUT, FAULTS, RECOMPILATION, RUNTIME),
)
FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True, eq=False)
class Event:
    """What ran from `start` to `end`, in seconds: the innermost is what counts.

    product: (shape, operations, dtype) of a product or a convolution.
    """

    name: str
    start: float
    end: float
    thread: str
    layer: str = ""
    phase: str = FORWARD
    kind: str = DISPATCH
    product: tuple[tuple[int, ...], float, str] | None = None


Steps = list[tuple[Event, Event]]  # the marks of (waiting, step) of each


class Ready:
    """Marks steps for a profiler; adds what their thread waited for a processor to its CPU time.

    So a thread that others kept from running counts as busy, and only one that slept as asleep.
    """

    def __init__(self, mark: Callable) -> None:
        self._mark = mark
        self._delays: list[float] = []

    @contextmanager
    def mark(self, name: str) -> Iterator[None]:
        """A mark around a part of a step."""
        before = _delay()
        with self._mark(name):
            yield
        if name == STEP:
            self._delays.append(_delay() - before)

    def added(self, taken: list[Taken]) -> list[Taken]:
        """The steps that were marked, with the time that their thread was ready."""
        both = zip(taken, self._delays, strict=True)
        return [replace(one, cpu=one.cpu + delay) for one, delay in both]


def _delay() -> float:
    """Seconds that this thread was ready and had no processor; 0 where the system tells nothing."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


# The first that matches the name without `aten::`; None: it moves no value, and is dispatch.
_PYTORCH = (
    (r"scaled_dot_product|flash_attention|efficient_attention|_softmax|^softmax|^bmm|^baddbmm", 1),
    (r"lstm|gru|rnn", RECURRENT),
    (r"conv(olution|\d|_depthwise)|^_?slow_conv|thnn_conv", CONVOLUTIONS),
    (r"mm$|mm_|^addmm|^matmul|^linear|einsum|mkl(dnn)?_linear|^(add)?m?v$|^dot$", PRODUCTS),
    (r"norm(?!al)", NORMALISATION),
    (r"_local_scalar_dense|^item$|^is_nonzero|^equal$|^nonzero", READING),
    (r"^(_to_copy|to|copy_?|_?contiguous|clone|_?cat|stack|to_dense|to_mkldnn|pad)$", COPIES),
    (r"reorder|constant_pad|^roll|^flip|^repeat|^_?to_", COPIES),
    (r"embedding|^index|gather|scatter|^take", INDEXING),
    (r"^(sum|mean|amax|amin|max|min|argmax|cumsum|prod)$|nll|cross_entropy|log_softmax", 2),
    (r"_log_softmax|logsumexp|mse_loss|_loss", 2),
    (r"^(view|_?reshape|_unsafe_view|t|transpose|permute|expand|as_strided|unsqueeze)", 3),
    (r"^(squeeze|slice|select|detach|split|chunk|narrow|alias|unflatten|flatten|unbind)", 3),
    (r"^(empty|resize|result_type|resolve_|lift|set_|is_|_has|size|numel|new_empty|unfold)", 3),
)
_TENSORFLOW = (
    # A function that XLA compiles is an operator, whose type is the function's name.
    (r"XlaLaunch|_XlaRun|XlaCompile|^__(inference|forward|backward)_", COMPILED),
    (r"PyFunc", PYTHON),
    (r"Conv\d?D|Conv2D|Conv3D|DepthwiseConv", CONVOLUTIONS),
    (r"BatchMatMul|^Softmax|FusedSoftmax|_MklFusedBatchMatMul", 1),
    (r"MatMul|Einsum", PRODUCTS),
    (r"LSTM|GRU|RNN", RECURRENT),
    (r"Norm", NORMALISATION),
    (r"Transpose|Cast|Concat|^Pack|^Unpack|Tile|Pad|Slice|Split|MklToTf|ToTf|Copy", COPIES),
    (r"Gather|Scatter|SegmentSum|OneHot", INDEXING),
    (r"^(Sum|Mean|Max|Min|Prod|ArgMax|L2Loss)$|CrossEntropy|LogSoftmax|Cumsum", 2),
    (r"ReadVariable|^Identity|^Const|Shape|Reshape|Squeeze|ExpandDims|NoOp|_Arg|_Retval", 3),
    (r"^(Switch|Merge|Enter|Exit|NextIteration|LoopCond|Fill|Range)$|Print|Assert", 3),
)
_SHORT = {1: ATTENTION, 2: REDUCTIONS, 3: DISPATCH}
_OF_LAYERS = ((r"Norm", NORMALISATION), (r"Attention", ATTENTION), (r"LSTM|GRU", RECURRENT))
# What a layer of its kind computes itself, where the framework has no one operator for it.
_WITHIN = (ELEMENTWISE, REDUCTIONS, ATTENTION)


def of_pytorch(name: str) -> str:
    """The kind of an operator of PyTorch, such as `aten::mm`."""
    if "dynamo_timed" in name or name.startswith("TorchDynamo Cache Miss"):
        return RECOMPILATION
    if "CompiledFxGraph" in name or name.startswith(("graph_", "cpp_fused")):
        return COMPILED
    if name.startswith(("autograd::", "torch::", "Torch", "## ", "layer ")):
        return DISPATCH
    if "::" not in name and not name.startswith("detach"):
        return DISPATCH  # a range, which marks what happens and computes nothing
    name = name.rpartition("::")[2]
    if "log_softmax" in name:
        return REDUCTIONS
    return _first(_PYTORCH, name)


def of_tensorflow(kind: str) -> str:
    """The kind of an operator of TensorFlow by its type, such as `MatMul`."""
    return _first(_TENSORFLOW, kind)


def within(kind: str, layer_class: str) -> str:
    """The kind of an operator within a layer: normalisation is made of sums and products there.

    All that a recurrent layer computes is its own, as where one kernel does it.
    """
    for pattern, whole in _OF_LAYERS:
        all_of_it = whole == RECURRENT and kind != DISPATCH
        if (all_of_it or kind in _WITHIN) and re.search(pattern, layer_class):
            return whole
    return kind


def _first(table: tuple, name: str) -> str:
    for pattern, kind in table:
        if re.search(pattern, name):
            return _SHORT.get(kind, kind)
    return ELEMENTWISE
