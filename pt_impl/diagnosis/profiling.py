"""Profiling: where the time of a train step goes, by the framework's own profiler.

What it changes: nothing but the time that the profiled steps take. Steps with and without the
profiler take turns over the same batches. What the profiler recorded becomes one breakdown of the
time that passed, the same on both sides: waiting for data, host to device, forward, backward,
optimizer, communication, the framework between operators, idle. It adds up to the step as it was
timed without the profiler: what the profiler added is reported (`profiler_cost`), and taken away
from the parts in proportion to the events that it recorded in each.

Its twin: `tf_impl/diagnosis/profiling.py`.

Where the frameworks differ and why:
- An operator is backward where the autograd engine called it, the optimizer's where the optimizer's
  own range is around it. TensorFlow has one graph, in which only the names of the scopes say that.
- The profiler is a context of this process, and its trace is JSON. TensorFlow writes an `XSpace`.
- Allocations are recorded on a CPU and on a GPU; TensorFlow's profiler has those of a GPU.
- What `torch.compile` compiled is forward or backward as a whole; inside, its kernels have names of
  their own. What TensorFlow compiled with XLA is one operator.
- Operators run one after the other in the step's own thread; TensorFlow's run in a pool of threads,
  and some at the same time: these share the moment.
- What a product computes follows from the shapes that the profiler records with each operator, also
  with those that a compiled step calls; kernels that the compiler wrote itself, fused attention and
  recurrent layers have none. TensorFlow needs the step's graph for it.

When it helps and when it hurts: it says which part is worth a technique, before one is tried. It
hurts small operators: each recorded event costs about a microsecond, so that a step of many small
ones is slower under the profiler; that is why its cost stands beside the breakdown. On a CPU
nothing crosses to a device, and that part is 0. "idle" is what the step's thread spent asleep, or
waiting for a core that others use.

Run it alone: `python -m pt_impl.diagnosis.profiling` prints the breakdown of the digits CNN.

Copy with it: `shared/profiles.py`.
"""

import ast
import json
import math
import re
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from shared.profiles import (
    Breakdown,
    Node,
    Span,
    break_down,
    convolution_flops,
    endless,
    fastest,
    nest,
    product_flops,
    run_steps,
    settle,
    write_stacks,
)

_TURNS = 4  # of steps without and steps with the profiler
_COMMUNICATION = re.compile(r"^(gloo|nccl|mpi|ucc|c10d|record_param_comms|_?c10d_functional)[:_]?")
_HOST_TO_DEVICE = re.compile(r"HtoD|Host ?-> ?Device|Pinned ?-> ?Device")
_ON_THE_WAY = re.compile(r"^(autograd::|TorchDynamo|Pregraph)")  # to operators
_HOST = ("cpu_op", "user_annotation", "cuda_runtime")
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
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
    next one is a part of the breakdown. steps: of either kind. warmup: steps before, which compile.
    folder: where the last turn's files go: `trace.json` (Chrome, Perfetto), `stacks.txt` (collapsed
    stacks, for flame graphs) and `tensorboard/` (a log for its profiler plug-in); "" writes none.

    The model is trained by `2 * steps` steps and some before and between, more where `batches` is
    no list: a loader makes some ahead in the pauses. Raises ValueError for no batches and settings
    out of range.
    """
    if steps < _TURNS or warmup < 1:
        raise ValueError(
            f"profiling needs {_TURNS} steps and one of warm-up, or more: {steps}, {warmup}"
        )
    ahead = not isinstance(batches, list | tuple)  # made while nobody asks, perhaps
    take = {"batches": endless(batches), "synchronize": _synchronize}
    paused = time.perf_counter()
    run_steps(step, count=warmup, **take)
    with _profiler():
        run_steps(step, count=1, **take)  # the first use of the profiler sets it up
    plain, profiled, spans, memory, peaks = [], [], [], [], {}
    with tempfile.TemporaryDirectory() as own:
        place = Path(folder or own)
        place.mkdir(parents=True, exist_ok=True)
        for turn in range(_TURNS):
            count = (turn + 1) * steps // _TURNS - turn * steps // _TURNS
            settle(step, since=paused if ahead else time.perf_counter(), **take)
            plain += run_steps(step, count=count, **take)
            with _profiler() as profiler:
                run_steps(step, count=1, **take)
                mark = torch.profiler.record_function
                profiled += run_steps(step, count=count, mark=mark, **take)
                paused = time.perf_counter()
            profiler.export_chrome_trace(str(place / "trace.json"))
            new, sizes = _read(place / "trace.json")
            spans += new
            memory += sizes
            for dtype in sorted({span.dtype for span in new if span.flops}):
                peaks[dtype] = max(peaks.get(dtype, 0.0), _peak(dtype))
        if folder:
            write_stacks(new, place / "stacks.txt")
            # What TensorBoard's plug-in looks for; the profiler saves its trace once only.
            (place / "tensorboard").mkdir(exist_ok=True)
            log = place / "tensorboard" / f"step.{time.time_ns()}.pt.trace.json"
            shutil.copy(place / "trace.json", log)
    return break_down(spans, plain, profiled, memory, peaks)


@contextmanager
def named_range(*, name: str) -> Iterator[None]:
    """A range that the profiler shows, and Nsight, too, where there is a GPU (as an NVTX range)."""
    with torch.profiler.record_function(name):
        if not torch.cuda.is_available():
            yield
            return
        with torch.cuda.nvtx.range(name):
            yield


def _profiler() -> torch.profiler.profile:
    kinds = torch.profiler.ProfilerActivity
    activities = [kinds.CPU] + ([kinds.CUDA] if torch.cuda.is_available() else [])
    return torch.profiler.profile(activities=activities, profile_memory=True, record_shapes=True)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _read(path: Path) -> tuple[list[Span], list[tuple[float, int]]]:
    """The spans of a trace, and bytes allocated over time."""
    events = json.loads(path.read_text("utf-8"))["traceEvents"]
    timed = [event for event in events if event.get("ph") == "X" and "dur" in event]
    host = [(event, _span(event)) for event in timed if event.get("cat") in _HOST]
    nodes = nest(span for _, span in host)
    event_of = {id(span): event for event, span in host}
    # A kernel is the work of the operator that launched it, which has the same number.
    launched = {}
    for node in nodes:
        event = event_of[id(node.span)]
        if event["cat"] == "cpu_op":
            launched[_number(event)] = node
    kernels = [
        (span, caller)
        for event in timed
        if event.get("cat") in _DEVICE
        for caller in [launched.get(_number(event))]
        for span in [_span(event, caller.part if caller else None)]
    ]
    counted = _count(nodes, event_of, kernels)
    spans = []
    for span in [span for _, span in host] + [span for span, _ in kernels]:
        if id(span) in counted:
            flops, dtype = counted[id(span)]
            span = replace(span, flops=flops, dtype=dtype)
        spans.append(span)
    memory, totals = [], {}
    for event in sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"]):
        about = event["args"]
        totals[about["Device Type"], about["Device Id"]] = about["Total Allocated"]
        memory.append((event["ts"] / 1e6, sum(totals.values())))
    return spans, memory


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


def _peak(dtype: str) -> float:
    """Operations a second of the best product in `dtype`; 0 where its memory is lacking.

    That is a large one, but for a dtype that the CPU lacks: its plain loops like small ones.
    """
    if torch.cuda.is_available():
        return _product(dtype, "cuda", 8192)
    return max(_product(dtype, "cpu", size) for size in (128, 1024))


def _product(dtype: str, place: str, size: int) -> float:
    """Operations a second of a square product; 0 where its memory is lacking."""
    own = torch.Generator(place).manual_seed(0)  # and not the one that the training draws from
    try:
        with torch.no_grad():
            a, b, out = torch.randn(
                3, size, size, generator=own, device=place, dtype=torch.float32
            ).to(getattr(torch, dtype))

            def multiply() -> None:
                torch.mm(a, b, out=out)
                _synchronize()

            return product_flops(a.shape, b.shape, size) / fastest(multiply, seconds=0.1)
    except torch.OutOfMemoryError:
        return 0.0


def _number(event: dict) -> int | None:
    return event.get("args", {}).get("External id")


def _span(event: dict, caller: str | None = None) -> Span:
    name, device = event["name"], event["cat"] in _DEVICE
    operator = event["cat"] == "cpu_op" and not _ON_THE_WAY.match(name)
    operator |= device or bool(_COMMUNICATION.match(name))  # which gloo's threads mark as a range
    return Span(
        name,
        event["ts"] / 1e6,
        (event["ts"] + event["dur"]) / 1e6,
        f"{event['pid']}/{event['tid']}",
        _part(name) or caller,
        operator=operator,
        device=device,
    )


def _part(name: str) -> str | None:
    """The part that a name says; None: that of what is around it."""
    if name.startswith("autograd::engine"):
        return "backward"
    if name.startswith("Optimizer."):
        return "optimizer"
    if _COMMUNICATION.match(name):
        return "communication"
    return "transfer" if _HOST_TO_DEVICE.search(name) else None


def main() -> None:
    """Print where a step of the digits CNN goes."""
    import os

    import numpy as np

    from pt_impl.kit import data, models, training
    from shared.specs import TASKS

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler logs to the terminal
    task, random = TASKS["digits-cnn"], np.random.default_rng(0)
    model = models.build(task.model)
    optimizer = training.make_optimizer(model, task.recipe)
    step = training.make_train_step(model, optimizer, training.cross_entropy)
    images = random.normal(size=(128, *task.model.input_shape)).astype(np.float32)
    batch = data.to_device(images, random.integers(0, 10, 128))
    print(profile_steps(step, [batch]))


if __name__ == "__main__":
    main()
