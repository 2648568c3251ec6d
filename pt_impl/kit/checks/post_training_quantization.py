"""What post-training quantization refuses: models, calibration data and files that are far off.

And the one repair of torchao's PT2E that it needs, `name_sources`.
"""

import contextlib
import copy
import operator
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map  # torch has no public one

from pt_impl.kit.tracing import input_tensors, outputs

_ATEN, _CALLS = torch.ops.aten, nn.functional
_LAYERS = tuple(
    getattr(_ATEN, name)
    for name in ("linear", *(f"conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3)))
)
# An operator of a graph -> what torchao's quantizer looks for, whichever way a model calls it.
_SOURCES = {
    _ATEN.conv2d.default: _CALLS.conv2d,
    _ATEN.linear.default: _CALLS.linear,
    _ATEN.relu.default: _CALLS.relu,
    _ATEN.relu_.default: _CALLS.relu,
    _ATEN.add.Tensor: operator.add,
    _ATEN.add_.Tensor: operator.add,
}


def check_post_training_quantization(model: nn.Module, inputs, activation_bits: int = 8) -> None:
    """Refuse other bits, and calibration data that is empty, not finite or not the model's."""
    if activation_bits == 16:
        raise NotImplementedError("oneDNN's integer kernels take activations of 8 bits, not of 16")
    if activation_bits != 8:
        raise ValueError(f"activation_bits must be 8 or 16, not {activation_bits!r}")
    tensors = input_tensors(inputs)
    if not all(isinstance(part, Tensor) and part.ndim for part in tensors):
        kinds = ", ".join(type(part).__name__ for part in tensors)
        raise ValueError(f"inputs must be tensors with samples along an axis, not {kinds}")
    counts = [len(part) for part in tensors]
    if not counts or min(counts) == 0 or len(set(counts)) > 1:
        raise ValueError(f"inputs must have samples, as many in each tensor, not {counts}")
    if not all(part.isfinite().all() for part in tensors):
        raise ValueError("inputs hold values that are not finite")
    _check_call(model, inputs)


def _check_call(model: nn.Module, inputs) -> None:
    try:
        copied = copy.deepcopy(model).cpu().eval()
    except Exception as error:  # of tensors that are no leaves, and of whatever a module holds
        raise NotImplementedError(f"the model cannot be copied: {_one_line(error)}") from error
    try:
        with torch.no_grad():
            output = outputs(copied, tree_map(lambda part: part[[0, 0]].cpu(), inputs))
    except Exception as error:
        tensors = input_tensors(inputs)
        given = ", ".join(f"{str(part.dtype)[6:]} {list(part.shape[1:])}" for part in tensors)
        raise ValueError(f"the model takes no samples of {given}: {_one_line(error)}") from error
    for part in tree_leaves(output):
        if not isinstance(part, Tensor):
            raise NotImplementedError(
                f"the model returns {type(part).__name__}, which is no tensor"
            )


def name_sources(graph: fx.GraphModule) -> None:
    """Tell torchao's quantizer which function each operator is, whichever way a model calls it.

    Symptom, in torchao 0.18: what a subclass of a layer or a function computes stays in float32,
    since the quantizer goes by what `torch.export` notes of the caller. It can go once the
    quantizer goes by operators. Refuses a graph where two operators read one weight.
    """
    weights = set()
    for node in graph.graph.nodes:
        layer = node.target in (_ATEN.conv2d.default, _ATEN.linear.default)
        if layer and node.args[1].op == "get_attr":
            weight = node.args[1].target
            if weight in weights:
                raise NotImplementedError(f"a layer is called twice, the one of {weight}")
            weights.add(weight)
        if node.target in _SOURCES:
            node.meta["source_fn_stack"] = [(node.name, _SOURCES[node.target])]


def layer_modules(graph: fx.GraphModule) -> list[str]:
    """Return the name of the module that each convolution and linear layer of a graph is in."""
    layers = [
        n for n in graph.graph.nodes if n.target in (_ATEN.conv2d.default, _ATEN.linear.default)
    ]
    return [[*node.meta["nn_module_stack"].values()][-1][0] for node in layers]


@contextlib.contextmanager
def refusals(what: str) -> Iterator[None]:
    """Let what upstream raises, of many kinds, be a NotImplementedError of one line."""
    try:
        yield
    except Exception as error:
        raise NotImplementedError(f"{what}: {_one_line(error)}") from error


def check_quantized(quantized: fx.GraphModule) -> None:
    """Refuse a graph without integers."""
    if not any("dequantize" in str(node.target) for node in quantized.graph.nodes):
        raise NotImplementedError("the model has no layer that torchao quantizes")


def warn_of_float_layers(quantized: fx.GraphModule) -> None:
    """Warn of the convolutions and linear layers that torchao left over float32 weights."""
    left = []
    for node in quantized.graph.nodes:
        if getattr(node.target, "overloadpacket", None) in _LAYERS:
            weight = node.args[1]
            if "dequantize" not in str(weight.target):
                left.append(weight.target if weight.op == "get_attr" else node.name)
    if left:
        warnings.warn(
            f"left in float32: {', '.join(map(str, left))}: torchao rounds Conv2d and Linear, and "
            "Conv1d only before ReLU",
            stacklevel=3,
        )


def keep_if_near(part: Path, path, load: Callable, graph: fx.GraphModule, x, most: float) -> Path:
    """Give the file `part` its name if it predicts what the graph of `trace` does, nearly.

    Else it is removed. most: relative L2, on the first 32 samples of x.
    """
    few = tree_map(lambda tensor: tensor[:32].cpu(), x)
    try:
        with torch.no_grad(), refusals("the runtime cannot run the file"):
            found, wanted = load(part)(few), outputs(graph, few)
        if not (apart := _apart(found, wanted)) <= most:
            with torch.no_grad():  # some models amplify all rounding
                moved = _apart(outputs(graph, tree_map(_to_8_bits, few)), wanted)
            raise RuntimeError(
                f"outputs of the file are {apart:.2%} off the model's, which move by "
                f"{moved:.2%} where its inputs alone have 8 bits"
            )
        return part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _to_8_bits(x: Tensor) -> Tensor:
    if not x.is_floating_point():
        return x
    scale = (x.max().clamp(min=0) - x.min().clamp(max=0)).clamp(min=1e-12) / 255
    return (x / scale).round() * scale


def _apart(ours, theirs) -> float:
    """The largest relative L2 difference of an output; inf where a shape or an infinity differs."""
    ours, theirs = tree_leaves(ours), tree_leaves(theirs)
    if [part.shape for part in ours] != [part.shape for part in theirs]:
        return float("inf")
    return max(map(_distance, ours, theirs), default=0.0)


def _distance(ours: Tensor, theirs: Tensor) -> float:
    ours, theirs = (v.to(torch.promote_types(v.dtype, torch.float64)) for v in (ours, theirs))
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    difference = torch.where(same, 0.0, ours - theirs).norm().item()
    whole = torch.where(theirs.isfinite(), theirs, 0.0).norm().item() or 1.0
    return difference / whole if difference == difference else float("inf")


def _one_line(error: Exception) -> str:
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))  # torch.onnx's has colours, and advice first
    text = text.rpartition("## Exception summary")[2]
    return " ".join(text.split())[:300] or type(error).__name__
