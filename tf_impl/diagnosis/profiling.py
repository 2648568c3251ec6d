"""Profiling: where the time of a train step goes, by the framework's own profiler.

What it changes: nothing but the time that the profiled steps take. Steps with and without the
profiler take turns over the same batches. What the profiler recorded becomes one breakdown of the
time that passed, the same on both sides: waiting for data, host to device, forward, backward,
optimizer, communication, the framework between operators, idle. It adds up to the step as it was
timed without the profiler: what the profiler added is reported (`profiler_cost`), and taken away
from the parts in proportion to the events that it recorded in each.

Its twin: `pt_impl/diagnosis/profiling.py`.

Where the frameworks differ and why:
- The step is one graph, in which the names of scopes say what an operator is for: those of
  `gradient_tape` are backward, those of an optimizer's class its update. One that was given
  another `name` counts as forward, and so does a custom gradient, unless its operators stand in
  `tf.name_scope("gradient_tape")`. PyTorch's profiler has ranges of the autograd engine and of
  optimizers.
- Without `tf.function` operators have no scope, and all count as forward.
- The profiler is one of the process, and writes an `XSpace` (a protocol buffer that comes with
  TensorFlow) for TensorBoard. The Chrome trace is made from it. PyTorch writes one itself.
- Allocations are recorded on a GPU only; PyTorch records those of a CPU, too.
- What XLA compiled (`jit_compile=True`) is one operator, and its parts are not told apart: it is
  refused, but for an update by an optimizer of its own. `torch.compile` leaves forward and backward
  apart.
- The profiler tells no shapes: what a product computes follows from those of the graph, in which it
  has the same name. So it has a share of the machine's peak where a function was traced for one set
  of shapes that are all known, but not without `tf.function`, nor on a GPU. PyTorch's profiler
  records shapes with each operator.
- Operators run in a pool of threads, and some at the same time: these share the moment. What
  `tf.data` runs in that pool is not the step's. PyTorch's run in the step's own thread.

When it helps and when it hurts: it says which part is worth a technique, before one is tried. It
hurts small operators: each recorded event costs about a microsecond, so that a step of many small
ones is slower under the profiler; that is why its cost stands beside the breakdown. On a CPU
nothing crosses to a device, and that part is 0. "idle" is what the step's thread spent asleep, or
waiting for a core that others use.

Run it alone: `python -m tf_impl.diagnosis.profiling` prints the breakdown of the digits CNN.

Copy with it: `shared/profiles.py`.
"""

import gc
import inspect
import math
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path

import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from shared.profiles import (
    STEP,
    WAITING,
    Breakdown,
    Span,
    break_down,
    convolution_flops,
    endless,
    fastest,
    product_flops,
    run_steps,
    settle,
    write_chrome_trace,
    write_stacks,
)

_TURNS = 4  # of steps without and steps with the profiler
_OPERATOR = re.compile(r"^(?!Iterator::)(?P<scope>[^:\s]+):(?P<type>[A-Za-z_]\w*)$")
_COMMUNICATION = re.compile(r"^_?(Collective|Nccl)")
# They run other operators, which are recorded themselves.
_CALLS = {
    "PartitionedCall",
    "StatefulPartitionedCall",
    "While",
    "StatelessWhile",
    "If",
    "StatelessIf",
    "Case",
    "StatelessCase",
    "NoOp",
    "_Arg",
    "_Retval",
}
_XLA = ("XlaLaunch", "_XlaRun", "_XlaCompile", "XlaLaunchV2")
# Products, and the setting that says whether the first input is transposed.
_PRODUCTS = {"MatMul": "transpose_a", "BatchMatMul": "adj_x"}
_CONVOLUTION = re.compile(r"(Conv2D|Conv3D|DepthwiseConv2d)(BackpropInput|BackpropFilter)?")
_FUSED = 4  # operators at most, of which grappler makes one: a product, its bias, a sum, a ReLU


def profile_steps(
    step: Callable,
    batches: Iterable,
    *,
    steps: int = 20,
    warmup: int = 5,
    folder: str = "",
) -> Breakdown:
    """Take steps in turns without and with the profiler; return where the time went.

    step: `step(*batch)`, whatever it does. batches: begun again when they run out; waiting for the
    next one is a part of the breakdown. steps: of either kind. warmup: steps before, which trace.
    folder: where the last turn's files go: `trace.json` (Chrome, Perfetto), `stacks.txt` (collapsed
    stacks, for flame graphs) and `tensorboard/` (a log for its profiler plug-in); "" writes none.

    The model is trained by `2 * steps` steps and some before and between, more where `batches` is
    no list: a loader makes some ahead in the pauses. Raises ValueError for no batches and settings
    out of range, NotImplementedError where XLA compiled the step.
    """
    if steps < _TURNS or warmup < 1:
        raise ValueError(
            f"profiling needs {_TURNS} steps and one of warm-up, or more: {steps}, {warmup}"
        )
    if getattr(step, "_jit_compile", None):
        raise NotImplementedError(_REFUSED)
    ahead = not isinstance(batches, list | tuple)  # made while nobody asks, perhaps
    take = {"batches": endless(batches), "synchronize": _synchronize}
    paused = time.perf_counter()
    run_steps(step, count=warmup, **take)
    plain, profiled, spans, memory, peaks = [], [], [], [], {}
    with tempfile.TemporaryDirectory() as own:
        with tf.profiler.experimental.Profile(f"{own}/first"):
            run_steps(step, count=1, **take)  # the first use of the profiler sets it up
        for turn in range(_TURNS):
            count = (turn + 1) * steps // _TURNS - turn * steps // _TURNS
            settle(step, since=paused if ahead else time.perf_counter(), **take)
            plain += run_steps(step, count=count, **take)
            log = Path(own) / str(turn)
            if folder and turn == _TURNS - 1:
                log = Path(folder) / "tensorboard"
            with tf.profiler.experimental.Profile(str(log)):
                run_steps(step, count=1, **take)
                profiled += run_steps(step, count=count, mark=_mark, **take)
                paused = time.perf_counter()
                time.sleep(0.002)  # threads of the last step still have to say that they ran
            begin = max(
                (span.end + 1 for span in spans), default=0.0
            )  # a session's clock begins at 0
            new, sizes = _read(log, begin)
            spans += new
            memory += sizes
            for dtype in sorted({span.dtype for span in new if span.flops}):
                peaks[dtype] = max(peaks.get(dtype, 0.0), _peak(dtype))
    if folder:
        write_chrome_trace(new, Path(folder) / "trace.json")
        write_stacks(new, Path(folder) / "stacks.txt")
    return break_down(spans, plain, profiled, memory, peaks)


@contextmanager
def named_range(*, name: str) -> Iterator[None]:
    """A range that the profiler shows, and Nsight, too, where there is a GPU (as an NVTX range).

    TensorFlow has NVTX ranges of its own operators (`TF_ENABLE_NVTX_RANGES=1`), not of a program.
    """
    with tf.profiler.experimental.Trace(name):
        yield


def _mark(name: str):
    about = {"step_num": 0, "_r": 1} if name == STEP else {}  # what TensorBoard takes for a step
    return tf.profiler.experimental.Trace(name, **about)


def _synchronize() -> None:
    if tf.config.list_physical_devices("GPU"):
        tf.test.experimental.sync_devices()


_REFUSED = (
    "XLA runs the whole step as one operator, whose parts the profiler does not tell apart: "
    "profile it without, by jit_compile=False"
)


def _read(log: Path, begin: float) -> tuple[list[Span], list[tuple[float, int]]]:
    """The spans of the newest trace in a log, and bytes allocated over time."""
    path = max(log.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime_ns)
    lines = {}  # (thread, whether of a device) -> (name, start, end, what is told about it)
    for plane in xplane_pb2.XSpace.FromString(path.read_bytes()).planes:
        device = plane.name.startswith("/device:GPU")
        if device or plane.name == "/host:CPU":
            for line in plane.lines:
                key = f"{plane.name}/{line.name}/{line.id}", device
                lines[key] = _events(plane, line, begin)
    own = _own_runs(lines)
    scopes = _optimizer_scopes()
    called = {about.get("eager_op") for events in lines.values() for *_, about in events}
    # On a GPU it is kernels that count, which do not tell whose they are in the graph.
    graphs = [] if any(device for _, device in lines) else _graphs(called - {None})
    count = cache(partial(_flops, graphs))
    spans = [
        span
        for (thread, device), events in lines.items()
        for span in _spans(events, thread, device, own, scopes, count)
    ]
    memory = [
        (start, int(about["bytes_allocated"]))
        for events in lines.values()
        for name, start, _, about in events
        if name in ("MemoryAllocation", "MemoryDeallocation") and "bytes_allocated" in about
    ]
    return spans, memory


def _events(plane, line, begin: float) -> list[tuple]:
    """A thread's events in order."""
    names = {key: entry.name for key, entry in plane.event_metadata.items()}
    stats = {key: entry.name for key, entry in plane.stat_metadata.items()}
    found = []
    for event in line.events:
        about = {}
        for one in event.stats:
            kind = one.WhichOneof("value")
            value = getattr(one, kind) if kind else None
            about[stats[one.metadata_id]] = stats.get(value) if kind == "ref_value" else value
        start = begin + line.timestamp_ns / 1e9 + event.offset_ps / 1e12
        found.append((names[event.metadata_id], start, start + event.duration_ps / 1e12, about))
    return sorted(found, key=lambda event: (event[1], -event[2]))


def _own_runs(lines: dict) -> set[int]:
    """Numbers of the runs of functions that the step's thread began."""
    main = next((own for own in lines.values() if any(event[0] == STEP for event in own)), [])
    return {about["id"] for name, *_, about in main if name == "FunctionRun"}


def _spans(
    events: list, thread: str, device: bool, own: set[int], scopes: set[str], count: Callable
) -> list[Span]:
    """A thread's spans. What runs for others than the step, such as `tf.data`, is no operator."""
    main = any(event[0] == STEP for event in events)
    found, running = [], (0.0, None)  # the run that the thread works for: until when, and which
    eager, waits = None, 0.0  # the operator that Python called; until when it waits for a batch
    for name, start, end, about in events:
        if name == "ExecutorState::Process":
            running = end, about.get("id")
        if name == "EagerExecute":
            eager = None if about.get("is_func") else about.get("eager_op")
        if name == WAITING:
            waits = end
        alone = eager is not None and name == "KernelAndDeviceFunc::Run" and start >= waits
        said = (about.get("tf_op") or "") if device else f"eager:{eager}" if alone else name
        operator, part = _OPERATOR.match(said), None
        if operator:
            part = _part(operator["scope"], operator["type"], scopes)
            if operator["type"] in _XLA and part != "optimizer":
                raise NotImplementedError(_REFUSED)
        if "HtoD" in name or "MemcpyH2D" in name:
            part = "transfer"
        ours = main or (running[0] >= end and running[1] in own)
        works = device or part == "communication"  # which has a thread of its own
        works |= bool(operator and operator["type"] not in _CALLS and ours)
        short, flops = name, None
        if operator and not device:
            short = operator["type"]
            flops = count(operator["scope"], short) if works and not alone else None
        found.append(Span(short, start, end, thread, part, works, device, *(flops or ())))
    return found


def _graphs(called: set[str]) -> list[tf.Graph]:
    """The graphs of the functions of these names, and of loops and functions in them."""
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


def _flops(graphs: list[tf.Graph], name: str, kind: str) -> tuple[float, str] | None:
    """Operations and dtype of a product or a convolution; None where they are not known.

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
    """Operations of the product of two; what one of them alone has is summed before, if at all."""
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


def _peak(dtype: str) -> float:
    """Operations a second of the best large product in `dtype`; 0 where its memory is lacking."""
    size = 8192 if tf.config.list_physical_devices("GPU") else 1024
    try:
        # Random, but not of the generator that the training draws from.
        a, b = tf.cast(tf.random.stateless_normal((2, size, size), seed=(0, 0)), dtype)

        def multiply() -> None:
            tf.matmul(a, b)
            _synchronize()

        return product_flops(a.shape, b.shape, size) / fastest(multiply, seconds=0.1)
    except tf.errors.ResourceExhaustedError:
        return 0.0


def _part(scope: str, kind: str, optimizers: set[str]) -> str:
    names = scope.split("/")
    if _COMMUNICATION.match(kind):
        return "communication"
    if any(re.fullmatch(r"gradient_tape(_\d+)?|gradients", name) for name in names):
        return "backward"
    ours = any(re.sub(r"_\d+$", "", name) in optimizers for name in names)
    return "optimizer" if ours else "forward"


def _optimizer_scopes() -> set[str]:
    """What all classes of optimizers call their scopes, of the flavours of Keras in use."""
    flavours = [sys.modules[name] for name in ("keras", "tf_keras") if name in sys.modules]
    found, new = set(), [flavour.optimizers.Optimizer for flavour in flavours]
    new += [one.optimizers.legacy.Optimizer for one in flavours if one.__name__ == "tf_keras"]
    while new:
        optimizer = new.pop()
        name = optimizer.__name__
        snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=.)(?=[A-Z][a-z])", "_", name).lower()
        given = inspect.signature(optimizer.__init__).parameters.get("name")
        found |= {name, name.lower(), snake, *([given.default] if given else [])}
        new += optimizer.__subclasses__()
    return found


def main() -> None:
    """Print where a step of the digits CNN goes."""
    import numpy as np

    from shared.specs import TASKS
    from tf_impl.kit import data, models, training

    task, random = TASKS["digits-cnn"], np.random.default_rng(0)
    model = models.build(task.model)
    optimizer = training.make_optimizer(model, task.recipe)
    step = training.make_train_step(model, optimizer, training.cross_entropy)
    images = random.normal(size=(128, *task.model.input_shape)).astype(np.float32)
    batch = data.to_device(images, random.integers(0, 10, 128))
    print(profile_steps(step, [batch]))


if __name__ == "__main__":
    main()
