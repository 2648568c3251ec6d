"""What the profiler saw of some steps: operators with their layers, and the shapes of products.

What it holds: a profile as events that nest, for `twinbench why`. No technique needs it.
Twin: `tf_impl/kit/step_events.py`.
Where the frameworks differ: here hooks mark where a module's forward begins and ends, and what
autograd computes has the number of the forward operator that it is the gradient of; there the names
of operators have the scopes. A compiled model has no such marks, since hooks would have it compiled
anew: all of it belongs to no layer.
"""

from __future__ import annotations

import ast
import json
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from pt_impl.kit import recorded_products
from shared import step_events as kinds
from shared.profiles import STEP, WAITING, Taken, fastest, run_steps
from shared.step_events import Event, Ready, Steps

_LAYER = "layer "
_ENGINE, _ACCUMULATES = "autograd::engine::evaluate_function", "torch::autograd::AccumulateGrad"
_COMPILED = "CompiledFxGraph"
# Where the two matrices stand among the inputs of a product.
_OPERANDS = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2)}
_OPERANDS["_addmm_activation"] = (1, 2)
_FLASH = "_scaled_dot_product_flash_attention_for_cpu"


def profile(
    step: Callable, batches: Iterator, model: torch.nn.Module | None, *, count: int
) -> tuple[list[Event], Steps, list[Taken]]:
    """The events of so many steps, the marks of these, and how long they took."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        with torch.profiler.profile(activities=activities) as first:  # sets the profiler up
            run_steps(step, batches, count=1)
        named = [event.name for event in first.events()]
        compiled = any(_COMPILED in name or "Torch-Compiled" in name for name in named)
        with _marked(None if compiled else model):
            run_steps(step, batches, count=1)
            with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
                run_steps(step, batches, count=1)
                ready = Ready(torch.profiler.record_function)
                taken = run_steps(step, batches, count=count, mark=ready.mark)
        profiler.export_chrome_trace(str(trace))
        read = json.loads(trace.read_text("utf-8"))["traceEvents"]
    return (*_events_of(read), ready.added(taken))


def layers(model: torch.nn.Module | None) -> dict[str, list[int]]:
    """The names of the modules, each with the lengths of its first weight; none without one."""
    modules = model.named_modules() if model else ()
    first = ((name, next(module.parameters(False), None)) for name, module in modules if name)
    return {name: [] if one is None else sorted(one.shape) for name, one in first}


def weights(model: torch.nn.Module | None) -> list[np.ndarray]:
    """The parameters as arrays of float32."""
    return [one.detach().float().cpu().numpy() for one in model.parameters()] if model else []


def threads() -> int:
    """How many threads compute an operator."""
    return torch.get_num_threads()


def flush_denormals(*, on: bool) -> bool:
    """Have denormal numbers flushed to zero, or not; whether that can be chosen."""
    return torch.set_flush_denormal(on)


def product_seconds(a: np.ndarray, b: np.ndarray, *, dtype: str, seconds: float) -> float:
    """The fastest of the products of two matrices in `dtype` that fit into so many seconds."""
    left, right = (torch.from_numpy(one).to(getattr(torch, dtype)) for one in (a, b))
    return fastest(lambda: torch.mm(left, right), seconds=seconds)


def convolution_seconds(
    shape: tuple[int, ...], *, dtype: str, train: bool, seconds: float
) -> float:
    """The fastest of the convolutions that fit into so many seconds, with gradients if `train`.

    shape: as an event has it, see `_convolution`.
    """
    n, h, w, c, kh, kw, kc, co, *stride, ph, pw, last = shape
    layout = torch.channels_last if last else torch.contiguous_format
    x, weight = (
        torch.randn(size, dtype=getattr(torch, dtype)).to(memory_format=layout)
        for size in ((n, c, h, w), (co, kc, kh, kw))
    )

    def compute(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, weight, None, stride, (ph, pw), 1, c // kc)

    return _seconds(compute, (x, weight), train, seconds)


def attention_seconds(shape: tuple[int, ...], *, dtype: str, train: bool, seconds: float) -> float:
    """The same of self-attention without a mask. shape: (batch, length, width), and for the fused
    kernel whether it is causal."""
    qkv = [torch.randn((1, *shape[:3]), dtype=getattr(torch, dtype)) for _ in range(3)]

    def compute(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if len(shape) > 3:
            return F.scaled_dot_product_attention(q, k, v, is_causal=bool(shape[3]))
        return torch.softmax(q @ k.mT * shape[2] ** -0.5, dim=-1) @ v

    return _seconds(compute, qkv, train, seconds)


def _seconds(compute: Callable, inputs: Sequence, train: bool, seconds: float) -> float:
    for one in inputs:
        one.requires_grad_(train)

    def call() -> None:
        with torch.set_grad_enabled(train):
            y = compute(*inputs)
            if train:
                torch.autograd.grad(y, inputs, torch.ones_like(y))

    return fastest(call, seconds=seconds)


def _events_of(trace: list[dict]) -> tuple[list[Event], Steps]:
    """The events of the step's own thread, and the marks of the steps."""
    timed = [
        e for e in trace if e.get("ph") == "X" and e.get("cat") in ("cpu_op", "user_annotation")
    ]
    timed.sort(key=lambda event: (event["ts"], -event["dur"]))
    threads = [event["tid"] for event in timed if event["name"] == STEP]
    if not threads:
        raise ValueError("the profiler's trace lacks the marks of the steps")
    timed = [event for event in timed if event["tid"] == threads[0]]
    of_forward: dict[int, str] = {}
    events, marks = [], []
    stack: list[tuple[float, Event]] = []
    last = ""  # the layer of the gradient that was computed last
    for raw in timed:
        start, end = raw["ts"] / 1e6, (raw["ts"] + raw["dur"]) / 1e6
        while stack and stack[-1][0] <= start:
            stack.pop()
        above = stack[-1][1] if stack else None
        event = _event(raw, start, end, above, of_forward, last)
        if raw["name"].startswith(_ENGINE):
            last = event.layer
        if raw["name"] in (STEP, WAITING):
            marks.append(event)
        else:
            events.append(event)
        stack.append((end, event))
    return events, list(zip(marks[::2], marks[1::2], strict=False))


def _event(
    raw: dict, start: float, end: float, above: Event | None, of_forward: dict, last: str
) -> Event:
    name, about = raw["name"], raw.get("args", {})
    number = about.get("Sequence number")
    layer, phase = (above.layer, above.phase) if above else ("", kinds.FORWARD)
    kind = kinds.of_pytorch(name) if raw["cat"] == "cpu_op" else kinds.DISPATCH
    if name.startswith(_LAYER):
        layer = name.removeprefix(_LAYER)
    elif name.startswith(_ENGINE):
        phase, layer = kinds.BACKWARD, last if _ACCUMULATES in name else of_forward.get(number, "")
    elif name.startswith("Optimizer."):
        phase, layer = kinds.OPTIMIZER, ""
    elif _COMPILED in name:
        kind = kinds.COMPILED
    elif "CompiledFunctionBackward" in name:
        phase = kinds.BACKWARD
    elif number is not None and phase == kinds.FORWARD:
        of_forward[number] = layer  # what needs no gradient has that of the next
    if phase == kinds.OPTIMIZER:
        kind = kinds.OPTIMIZER
    elif above and above.kind == kinds.RECOMPILATION:
        kind = kinds.RECOMPILATION
    elif above and above.kind == kinds.ATTENTION and kind != kinds.DISPATCH:
        kind = kinds.ATTENTION  # what it calls
    product = None if phase == kinds.OPTIMIZER else _product(raw)
    thread = f"{raw.get('pid')}/{raw['tid']}"
    return Event(name, start, end, thread, layer, phase, kind, product)


@contextmanager
def _marked(model: torch.nn.Module | None) -> Iterator[None]:
    """Hooks on each module that mark its forward pass."""
    open_: dict[int, list] = {}
    hooks = []

    def before(name: str) -> Callable:
        def enter(module, *_):
            mark = torch.profiler.record_function(f"{_LAYER}{name}")
            mark.__enter__()
            open_.setdefault(id(module), []).append(mark)

        return enter

    def leave(module, *_):
        if marks := open_.get(id(module)):
            marks.pop().__exit__(None, None, None)

    for name, module in model.named_modules() if model else ():
        if name and not isinstance(module, torch.jit.ScriptModule):
            hooks.append(module.register_forward_pre_hook(before(name)))
            hooks.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _product(raw: dict) -> tuple[tuple[int, ...], float, str] | None:
    """Shape, operations and dtype of what computes a product or a convolution."""
    name = raw["name"].rpartition("::")[2]
    if name == _FLASH:
        return _attention(raw["args"])
    counted = recorded_products._flops(raw)
    if counted is None:
        return None
    shapes = raw["args"]["Input Dims"]
    if name in _OPERANDS:
        a, b = (shapes[place] for place in _OPERANDS[name])
        return (a[-2], a[-1], b[-1]), *counted
    return _convolution(raw["args"]) if name == "convolution" else (), *counted


def _convolution(about: dict) -> tuple[int, ...]:
    """(n, h, w, c, kernel h, w, c / groups, outputs, stride h, w, padding h, w, channels last).

    Of two dimensions without dilation; of others ().
    """
    x, weight = about["Input Dims"][:2]
    said = [ast.literal_eval(one or "None") for one in about["Concrete Inputs"][3:7]]
    if len(x) != 4 or said[3] or any(one != 1 for one in said[2]):
        return ()
    stride, padding = (both * 2 if len(both) == 1 else both for both in said[:2])
    last = x[1] > 1 and about.get("Input Strides", [[0, 0]])[0][1] == 1
    (n, c, h, w), (outputs, inner, *kernel) = x, weight
    return n, h, w, c, *kernel, inner, outputs, *stride, *padding, int(last)


def _attention(about: dict) -> tuple[tuple[int, ...], float, str] | None:
    """(batch and heads, length, width, causal) of the fused kernel's self-attention."""
    dtype = recorded_products._DTYPES.get(about["Input type"][0])
    q, k = about["Input Dims"][:2]
    if dtype is None or q != k:
        return None
    causal = about["Concrete Inputs"][4] == "True"
    batch, length, width = math.prod(q[:-2]), *q[-2:]
    return (batch, length, width, int(causal)), 4.0 * batch * length**2 * width, dtype
