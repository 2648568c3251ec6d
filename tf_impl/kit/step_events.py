"""What the profiler saw of some steps: operators with their layers, and the shapes of products.

What it holds: a profile as events that nest, for `twinbench why`. No technique needs it.
Twin: `pt_impl/kit/step_events.py`.
Where the frameworks differ: here the name of an operator has the scopes in which it was made, that
of its layer, `gradient_tape` of the backward pass, the optimizer's; without `tf.function`, what
Python calls has no scope. There hooks mark the layers, and a gradient has its operator's number.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from shared import step_events as kinds
from shared.cgroups import usable_threads
from shared.profiles import STEP, WAITING, Taken, fastest, run_steps
from shared.step_events import Event, Ready, Steps
from tf_impl.kit import graph_products

_OPERATOR = re.compile(r"^(?!Iterator::)(?P<scope>[^:\s]+):(?P<type>[A-Za-z_]\w*)$")
_NUMBER = re.compile(r"_\d+$")
# They run other operators, which are recorded themselves.
_CALLS = re.compile(
    r"^(Stateful|Stateless)?(PartitionedCall|While|If|Case)$|^_(Arg|Retval)$|^NoOp$"
)
_ABOUT = ("id", "is_func", "eager_op")  # what has to be known of an event


def profile(
    step: Callable, batches: Iterator, model: Any, *, count: int
) -> tuple[list[Event], Steps, list[Taken]]:
    """The events of so many steps, the marks of these, and how long they took."""
    with tempfile.TemporaryDirectory() as folder:
        with tf.profiler.experimental.Profile(f"{folder}/first"):
            run_steps(step, batches, count=1)  # the first use of the profiler sets it up
        with tf.profiler.experimental.Profile(f"{folder}/log"):
            run_steps(step, batches, count=1)
            ready = Ready(_mark)
            taken = run_steps(step, batches, count=count, mark=ready.mark)
            # One step more: threads of the last one still have to say that they ran.
            run_steps(step, batches, count=1)
        path = max(Path(folder, "log").rglob("*.xplane.pb"))
        space = xplane_pb2.XSpace.FromString(path.read_bytes())
    of_class = {name: type(layer).__name__ for name, layer in _layers(model).items()}
    lines = {
        f"{line.name}/{line.id}": _read(plane, line)
        for plane in space.planes
        if plane.name == "/host:CPU"
        for line in plane.lines
    }
    return (*_events_of(lines, of_class), ready.added(taken))


def layers(model: Any) -> dict[str, list[int]]:
    """The names of the layers, each with the lengths of its first weight; none without one.

    A layer that has others has none: its weights are theirs.
    """
    return {
        name: sorted(one.weights[0].shape) if one.weights and not _inner(one) else []
        for name, one in _layers(model).items()
    }


def weights(model: Any) -> list[np.ndarray]:
    """The weights as arrays."""
    return model.get_weights() if hasattr(model, "get_weights") else []


def threads() -> int:
    """How many threads compute an operator."""
    return tf.config.threading.get_intra_op_parallelism_threads() or usable_threads()


def flush_denormals(*, on: bool) -> bool:
    """Whether it can be chosen that denormal numbers are flushed to zero: they always are."""
    return False


def product_seconds(a: np.ndarray, b: np.ndarray, *, dtype: str, seconds: float) -> float:
    """The fastest of the products of two matrices in `dtype` that fit into so many seconds."""
    left, right = (tf.cast(tf.constant(one), dtype) for one in (a, b))
    multiply = tf.function(tf.matmul)
    return fastest(lambda: multiply(left, right), seconds=seconds)


def convolution_seconds(
    shape: tuple[int, ...], *, dtype: str, train: bool, seconds: float
) -> float:
    """The fastest of the convolutions that fit into so many seconds, with gradients if `train`.

    shape: as an event has it, see `_convolution`.
    """
    n, h, w, c, kh, kw, kc, co, *stride, ph, _, _ = shape
    depthwise, padding = kc == 1 < c, "SAME" if ph else "VALID"
    kernel = (kh, kw, c, co // c) if depthwise else (kh, kw, kc, co)
    convolve = tf.nn.depthwise_conv2d if depthwise else tf.nn.conv2d
    strides = [1, *stride, 1]
    inputs = [_random(size, dtype) for size in ((n, h, w, c), kernel)]
    return _seconds(lambda x, k: convolve(x, k, strides, padding), inputs, train, seconds)


def attention_seconds(shape: tuple[int, ...], *, dtype: str, train: bool, seconds: float) -> float:
    """The same of self-attention without a mask. shape: (batch, length, width)."""
    qkv = [_random(shape[:3], dtype) for _ in range(3)]

    def compute(q: tf.Tensor, k: tf.Tensor, v: tf.Tensor) -> tf.Tensor:
        return tf.nn.softmax(tf.matmul(q, k, transpose_b=True) * shape[2] ** -0.5) @ v

    return _seconds(compute, qkv, train, seconds)


def _random(size: tuple[int, ...], dtype: str) -> tf.Tensor:
    return tf.cast(tf.random.stateless_normal(size, seed=(0, 0)), dtype)


def _seconds(compute: Callable, inputs: list, train: bool, seconds: float) -> float:
    @tf.function
    def call(*inputs: tf.Tensor) -> Any:
        if not train:
            return compute(*inputs)
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            y = compute(*inputs)
        return tape.gradient(y, inputs)

    return fastest(lambda: call(*inputs), seconds=seconds)


def _layers(model: Any) -> dict[str, Any]:
    """Layer by name, in their order; those of models within the model, too."""
    known: dict[str, Any] = {}
    for layer in _inner(model):
        known[layer.name] = layer
        known |= _layers(layer)
    return known


def _inner(layer: Any) -> list:
    if isinstance(layer, tf.keras.layers.RNN):
        return []  # its cell has its weights
    return getattr(layer, "layers", None) or getattr(layer, "_layers", None) or []


def _events_of(
    lines: dict[str, list[tuple]], of_class: dict[str, str]
) -> tuple[list[Event], Steps]:
    """The events of the steps' own runs, and the marks of the steps."""
    main = next((n for n, line in lines.items() if any(e[0] == STEP for e in line)), None)
    if main is None:
        raise ValueError("the profiler's trace lacks the marks of the steps")
    own = {about["id"] for name, *_, about in lines[main] if name == "FunctionRun"}
    called = {about.get("eager_op") for line in lines.values() for *_, about in line} - {None}
    graphs = graph_products.graphs_of(called)
    shape = cache(lambda scope, kind: _product(graphs, scope, kind))
    optimizers = _optimizer_scopes()
    marks, events = [], []
    for thread, line in lines.items():
        running, eager = (0.0, None), None
        for name, start, end, about in line:
            if name in (STEP, WAITING):
                marks.append(Event(name, start, end, thread))
            if name == "ExecutorState::Process":
                running = end, about.get("id")
            if name == "EagerExecute":
                eager = None if about.get("is_func") else about.get("eager_op")
            alone = eager is not None and name == "KernelAndDeviceFunc::Run"
            operator = _OPERATOR.match(f"eager:{eager}" if alone else name)
            if not operator or _CALLS.match(operator["type"]):
                continue
            if thread == main or (running[0] >= end and running[1] in own):
                scope, kind = operator["scope"], operator["type"]
                events.append(_event(scope, kind, start, end, thread, of_class, optimizers, shape))
    marks.sort(key=lambda mark: mark.start)
    return events, list(zip(marks[::2], marks[1::2], strict=False))


def _mark(name: str) -> Any:
    return tf.profiler.experimental.Trace(name)


def _read(plane: Any, line: Any) -> list[tuple]:
    """A thread's events in order: name, start, end and what is told about each."""
    names = {key: entry.name for key, entry in plane.event_metadata.items()}
    stats = {key: entry.name for key, entry in plane.stat_metadata.items()}
    events = []
    for event in line.events:
        about = {}
        for one in event.stats:
            if stats[one.metadata_id] in _ABOUT and (kind := one.WhichOneof("value")):
                value = getattr(one, kind)
                value = stats.get(value) if kind == "ref_value" else value
                about[stats[one.metadata_id]] = value
        start = line.timestamp_ns / 1e9 + event.offset_ps / 1e12
        end = start + event.duration_ps / 1e12
        events.append((names[event.metadata_id], start, end, about))
    return sorted(events, key=lambda event: (event[1], -event[2]))


def _optimizer_scopes() -> set[str]:
    """What the classes of Keras's optimizers call their scopes."""
    scopes, waiting = set(), [tf.keras.optimizers.Optimizer]
    while waiting:
        name = (optimizer := waiting.pop()).__name__
        snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=.)(?=[A-Z][a-z])", "_", name).lower()
        scopes |= {name, name.lower(), snake}
        waiting += optimizer.__subclasses__()
    return scopes


def _event(
    scope: str,
    operator: str,
    start: float,
    end: float,
    thread: str,
    of_class: dict[str, str],
    optimizers: set[str],
    shape: Callable,
) -> Event:
    names = scope.split("/")
    layer = _layer(names, of_class)
    phase = kinds.FORWARD
    if any(re.fullmatch(r"gradient_tape(_\d+)?|gradients", name) for name in names):
        phase = kinds.BACKWARD
    elif any(_NUMBER.sub("", name) in optimizers for name in names):
        phase, layer = kinds.OPTIMIZER, ""
    kind = kinds.within(kinds.of_tensorflow(operator), of_class.get(layer, ""))
    product = (
        shape(scope, operator)
        if kind in (kinds.PRODUCTS, kinds.CONVOLUTIONS, kinds.ATTENTION)
        else None
    )
    if phase == kinds.OPTIMIZER:
        kind, product = kinds.OPTIMIZER, None
    return Event(operator, start, end, thread, layer, phase, kind, product)


def _layer(names: list[str], of_class: dict[str, str]) -> str:
    """The innermost layer in a scope, whose name may have a number behind it."""
    for name in reversed(names):
        for known in (name, _NUMBER.sub("", name)):
            if known in of_class:
                return known
    return ""


def _product(graphs: list, scope: str, kind: str) -> tuple[tuple[int, ...], float, str] | None:
    """Shape, operations and dtype, from the graph, in which it has the same name."""
    counted = graph_products.operations(graphs, scope, kind)
    if counted is None:
        return None
    flops, dtype = counted
    computes = graph_products._kind(kind)
    meant = [one for graph in graphs for one in graph_products._named(graph, scope, computes)]
    return _shape(meant[0]) if meant else (), flops, dtype


def _shape(operation: tf.Operation) -> tuple[int, ...]:
    """(m, k, n) of a product; of a convolution see `_convolution`."""
    shapes = [list(value.shape.as_list()) for value in operation.inputs][:2]
    if "MatMul" not in operation.type or len(shapes) < 2:
        return _convolution(operation, *shapes)
    a, b = shapes
    names = ("adj_x", "adj_y") if "Batch" in operation.type else ("transpose_a", "transpose_b")
    flips = [operation.get_attr(name) for name in names]
    a = a[:-2] + a[-2:][::-1] if flips[0] else a
    b = b[:-2] + b[-2:][::-1] if flips[1] else b
    return a[-2], a[-1], b[-1]


def _convolution(operation: tf.Operation, x: list, weights: list, *_: list) -> tuple[int, ...]:
    """(n, h, w, c, kernel h, w, c / groups, outputs, stride h, w, padding h, w, channels last).

    Of the forward pass in two dimensions without dilation; of others ().
    """
    forward = operation.type in ("Conv2D", "DepthwiseConv2dNative")
    if not forward or operation.get_attr("data_format") != b"NHWC":
        return ()
    if None in (*x, *weights) or any(one != 1 for one in operation.get_attr("dilations")):
        return ()
    *kernel, inner, outputs = weights
    if operation.type != "Conv2D":
        inner, outputs = 1, inner * outputs
    same = operation.get_attr("padding") == b"SAME"
    padding = [(length - 1) // 2 if same else 0 for length in kernel]
    return *x, *kernel, inner, outputs, *operation.get_attr("strides")[1:3], *padding, 1
