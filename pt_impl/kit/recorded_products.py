"""What products in a trace of PyTorch's profiler compute, and the machine's peak.

What a product computes follows from the shapes that the profiler records with each operator, also
with those that a compiled step calls. Kernels that the compiler wrote itself, fused attention and
recurrent layers have none.
"""

import ast
import math
import re
from collections import defaultdict
from dataclasses import replace

import torch

from shared.profiles import Node, Span, convolution_flops, fastest, product_flops

# Products, and where their two matrices stand among their inputs.
_PRODUCTS = {
    **dict.fromkeys(("aten::mm", "aten::bmm"), (0, 1)),
    **dict.fromkeys(("aten::addmm", "aten::baddbmm", "aten::_addmm_activation"), (1, 2)),
}
_WORKS = re.compile(r"conv(?!ert)|mm(?![a-z])")  # what a product calls to do the work
_DTYPES = {
    **{"float": "float32", "double": "float64"},
    **{"c10::BFloat16": "bfloat16", "c10::Half": "float16"},
}


def with_operations(
    spans: list[Span],
    nodes: list[Node],
    event_of: dict[int, dict],
    kernels: list[tuple[Span, Node | None]],
) -> list[Span]:
    """Return the spans; those in which products are computed with their operations and dtype.

    nodes: the spans of the host, nested. event_of: id(span) -> event of the trace. kernels: the
    spans of a device, each with what launched it.
    """
    counted = _count(nodes, event_of, kernels)
    return [
        replace(span, flops=counted[id(span)][0], dtype=counted[id(span)][1])
        if id(span) in counted
        else span
        for span in spans
    ]


def peak(dtype: str) -> float:
    """Return operations a second of the best product in `dtype`; 0 where its memory is lacking.

    That is a large one, but for a dtype that the CPU lacks: its plain loops like small ones.
    """
    if torch.cuda.is_available():
        return _time_product(dtype, "cuda", 8192)
    return max(_time_product(dtype, "cpu", size) for size in (128, 1024))


def _count(
    nodes: list[Node], event_of: dict[int, dict], kernels: list[tuple[Span, Node | None]]
) -> dict[int, tuple[float, str]]:
    """id(span) -> operations and dtype, of the spans in which products are computed.

    An operator such as `aten::convolution` mostly calls others, and computes itself where it calls
    none of its kind. The innermost compute, and have a part each by their seconds, those around
    them none; on a device it is the longest kernel.
    """
    product, known, caller, passing = {}, {}, {}, set()
    works, longest = defaultdict(list), {}
    for node in nodes:  # what is around a span comes before it
        around = product.get(id(node.parent))
        if around is None:
            work = _flops(event_of[id(node.span)])
            if work is not None:
                around, known[id(node)] = node, work
        product[id(node)] = around
        caller[id(node)] = above = caller.get(id(node.parent))
        if around is not None and _WORKS.search(node.span.name):
            works[id(around)].append(node)
            passing.add(above)
            caller[id(node)] = id(node)
    for span, launcher in kernels:
        around = product.get(id(launcher))
        if around is not None and not span.name.startswith("Mem"):
            longest[id(around)] = max(longest.get(id(around), span), span, key=_seconds)
    found = {}
    for key, (flops, dtype) in known.items():
        own = {
            id(n.span): 0.0 if id(n) in passing else _seconds(n.span) - n.inside for n in works[key]
        }
        whole = math.fsum(own.values())
        if key in longest:
            found[id(longest[key])] = flops, dtype
        else:
            found |= {k: (flops * s / whole if whole else 0.0, dtype) for k, s in own.items()}
    return found


def _seconds(span: Span) -> float:
    return span.end - span.start


def _flops(event: dict) -> tuple[float, str] | None:
    """Operations and dtype of a product or a convolution, from the shapes that were recorded."""
    name, about = event["name"], event.get("args", {})
    shapes, dtypes = about.get("Input Dims"), about.get("Input type")
    dtype = _DTYPES.get(dtypes[1]) if shapes and len(dtypes) > 1 else None
    if dtype is None:
        return None
    if name in _PRODUCTS:
        a, b = (shapes[at] for at in _PRODUCTS[name])
        return product_flops(a, b, a[-1]), dtype
    if name not in ("aten::convolution", "aten::convolution_backward"):
        return None
    settings = [ast.literal_eval(said or "None") for said in about["Concrete Inputs"]]
    if name == "aten::convolution":
        (x, weights), transposed, passes = shapes[:2], settings[6], 1
        used = x if transposed else _convolved(x, weights, *settings[3:6])
    else:
        (y, x, weights), transposed, passes = shapes[:3], settings[7], sum(settings[10][:2])
        used = x if transposed else y
    return passes * convolution_flops(weights, used[0] * math.prod(used[2:])), dtype


def _convolved(x: list, weights: list, *settings: list) -> list:
    """The shape of a convolution's output. Settings: stride, padding, dilation.

    One number may stand for all dimensions.
    """
    each = (values * (len(x) - 2) if len(values) == 1 else values for values in settings)
    lengths = [
        (length + 2 * pad - apart * (kernel - 1) - 1) // stride + 1
        for length, kernel, stride, pad, apart in zip(x[2:], weights[2:], *each, strict=True)
    ]
    return [x[0], weights[0], *lengths]


def _time_product(dtype: str, place: str, size: int) -> float:
    """Operations a second of a square product; 0 where its memory is lacking."""
    own = torch.Generator(place).manual_seed(0)  # and not the one that the training draws from
    try:
        with torch.no_grad():
            a, b, out = torch.randn(
                3, size, size, generator=own, device=place, dtype=torch.float32
            ).to(getattr(torch, dtype))

            def multiply() -> None:
                torch.mm(a, b, out=out)
                if torch.cuda.is_available():
                    torch.cuda.synchronize()

            return product_flops(a.shape, b.shape, size) / fastest(multiply, seconds=0.1)
    except torch.OutOfMemoryError:
        return 0.0
