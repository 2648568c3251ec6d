"""Which layers torchao has left in float32, without a word of its own."""

import warnings

import torch
from torch import fx

_LAYERS = tuple(
    getattr(torch.ops.aten, name)
    for name in ("linear", *(f"conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3)))
)


def warn_of_float_layers(program: fx.GraphModule) -> None:
    """Warn of the convolutions and linear layers that torchao left over float32 weights."""
    left = []
    for node in program.graph.nodes:
        if getattr(node.target, "overloadpacket", None) in _LAYERS:
            weight = node.args[1]
            if "dequantize" not in str(weight.target):
                left.append(weight.target if weight.op == "get_attr" else node.name)
    if left:
        warnings.warn(
            f"left in float32: {', '.join(map(str, left))}: torchao rounds Conv2d and Linear, and "
            "Conv1d only before ReLU",
            stacklevel=4,
        )
