"""Profiling: where the time of a train step goes, by the framework's profiler.

    print(profile_steps(step, batches))  # a table of parts and operators

What it changes: only the time of the profiled steps. Steps with and without the profiler alternate
over the same batches. The breakdown has the same parts in both frameworks: waiting for data, host
to device, forward, backward, optimizer, communication, the framework between operators, idle. They
add up to the step without the profiler. The profiler's cost is reported (`profiler_cost`) and
subtracted.

Its twin: `pt_impl/diagnosis/profiling.py`, which says where the frameworks differ.

When it helps and when it hurts: it says which part of the step to improve, before you try a
technique. Each recorded event costs about a microsecond, so a step of many small operators is
slower under the profiler: look at its cost. On a CPU nothing is moved to a device. "idle" is time
in which the step's thread slept, or waited for a core that others use.

Run it alone: `python -m tf_impl.diagnosis.profiling` prints the breakdown of the digits CNN.

Copy with it: `shared/profiles.py`, `tf_impl/kit/checks/profiling.py`,
`tf_impl/kit/graph_products.py`.
"""

import inspect
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
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
    endless,
    run_steps,
    settle,
    write_chrome_trace,
    write_stacks,
)
from tf_impl.kit.checks.profiling import check_operator, check_profiling
from tf_impl.kit.graph_products import graphs_of, operations, peak

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
    check_profiling(step, steps, warmup, _TURNS)
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
                # One step more: threads of the last one still have to say that they ran.
                run_steps(step, count=1, **take)
                paused = time.perf_counter()
                time.sleep(0.002)
            # A session's clock begins at 0.
            begin = max((span.end + 1 for span in spans), default=0.0)
            new, sizes = _read(log, begin)
            spans += new
            memory += sizes
            for dtype in sorted({span.dtype for span in new if span.flops}):
                peaks[dtype] = max(peaks.get(dtype, 0.0), peak(dtype))
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
    graphs = [] if any(device for _, device in lines) else graphs_of(called - {None})
    count = cache(partial(operations, graphs))
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
            check_operator(operator["type"], part)
        if "HtoD" in name or "MemcpyH2D" in name:
            part = "transfer"
        ours = main or (running[0] >= end and running[1] in own)
        works = device or part == "communication"  # which has its own thread
        works |= bool(operator and operator["type"] not in _CALLS and ours)
        short, flops = name, None
        if operator and not device:
            short = operator["type"]
            flops = count(operator["scope"], short) if works and not alone else None
        found.append(Span(short, start, end, thread, part, works, device, *(flops or ())))
    return found


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
    from tf_impl.kit import training
    from tf_impl.kit.demo import Demo

    demo = Demo("digits-cnn", batch_size=128)
    print(profile_steps(training.make_train_step(*demo.build()), demo.batches))


if __name__ == "__main__":
    main()
