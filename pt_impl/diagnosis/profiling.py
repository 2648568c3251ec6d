"""Profiling: where the time of a train step goes, by the framework's profiler.

    print(profile_steps(step, batches))  # a table of parts and operators

What it changes: only the time of the profiled steps. Steps with and without the profiler alternate
over the same batches. The breakdown has the same parts in both frameworks: waiting for data, host
to device, forward, backward, optimizer, communication, the framework between operators, idle. They
add up to the step without the profiler. The profiler's cost is reported (`profiler_cost`) and
subtracted.

Its twin: `tf_impl/diagnosis/profiling.py`.

Where the frameworks differ and why:
- PyTorch: an operator is backward if the autograd engine called it. It is the optimizer's within
  the optimizer's range.
- TensorFlow: the step is one graph, so scope names decide: `gradient_tape` is backward, an
  optimizer's class its update. Without `tf.function` everything counts as forward. So does an
  optimizer with another `name`, and a custom gradient outside of `tf.name_scope("gradient_tape")`.
- A region compiled by `torch.compile` is forward or backward as a whole. Code compiled by XLA is
  one operator, and is refused.
- PyTorch's operators run one after another in the step's thread. TensorFlow's run in a pool, and
  simultaneous operators share the time.
- TensorFlow's profiler writes an `XSpace` for TensorBoard, with memory allocations only of a GPU.

When it helps and when it hurts: it says which part of the step to improve, before you try a
technique. Each recorded event costs about a microsecond, so a step of many small operators is
slower under the profiler: look at its cost. On a CPU nothing is moved to a device. "idle" is time
in which the step's thread slept, or waited for a core that others use.

Run it alone: `python -m pt_impl.diagnosis.profiling` prints the breakdown of the digits CNN.

Copy with it: `pt_impl/kit/checks/profiling.py`, `pt_impl/kit/recorded_products.py`,
`shared/profiles.py`.
"""

import json
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from pt_impl.kit.checks.profiling import check_profiling
from pt_impl.kit.recorded_products import peak, with_operations
from shared.profiles import (
    Breakdown,
    Span,
    break_down,
    endless,
    nest,
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
    check_profiling(steps, warmup, _TURNS)
    ahead = not isinstance(batches, list | tuple)  # made while nobody asks, perhaps
    take = {"batches": endless(batches), "synchronize": _synchronize}
    paused = time.perf_counter()
    run_steps(step, count=warmup, **take)
    with _profiler():
        run_steps(step, count=1, **take)  # the first use of the profiler sets it up
    plain, profiled, spans, memory, peaks = [], [], [], [], {}
    with tempfile.TemporaryDirectory() as own:
        trace = Path(folder or own) / "trace.json"
        trace.parent.mkdir(parents=True, exist_ok=True)
        for turn in range(_TURNS):
            count = (turn + 1) * steps // _TURNS - turn * steps // _TURNS
            settle(step, since=paused if ahead else time.perf_counter(), **take)
            plain += run_steps(step, count=count, **take)
            with _profiler() as profiler:
                run_steps(step, count=1, **take)
                mark = torch.profiler.record_function
                profiled += run_steps(step, count=count, mark=mark, **take)
                paused = time.perf_counter()
            profiler.export_chrome_trace(str(trace))
            events = json.loads(trace.read_text("utf-8"))["traceEvents"]
            new = _spans(events)
            spans += new
            memory += _memory(events)
            for dtype in sorted({span.dtype for span in new if span.flops}):
                peaks[dtype] = max(peaks.get(dtype, 0.0), peak(dtype))
        if folder:
            _write(new, trace)
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


def _write(spans: list[Span], trace: Path) -> None:
    """Write stacks and a log for TensorBoard beside the trace."""
    write_stacks(spans, trace.with_name("stacks.txt"))
    log = trace.with_name("tensorboard")
    log.mkdir(exist_ok=True)
    # What TensorBoard's plug-in looks for; the profiler saves its trace once only.
    shutil.copy(trace, log / f"step.{time.time_ns()}.pt.trace.json")


def _spans(events: list[dict]) -> list[Span]:
    """The spans of a trace."""
    timed = [event for event in events if event.get("ph") == "X" and "dur" in event]
    host = [(event, _span(event)) for event in timed if event.get("cat") in _HOST]
    nodes = nest(span for _, span in host)
    event_of = {id(span): event for event, span in host}
    # A kernel is the work of the operator that launched it, which has the same number.
    operators = [node for node in nodes if event_of[id(node.span)]["cat"] == "cpu_op"]
    launched = {_number(event_of[id(node.span)]): node for node in operators}
    kernels = []
    for event in timed:
        if event.get("cat") in _DEVICE:
            caller = launched.get(_number(event))
            kernels.append((_span(event, caller.part if caller else None), caller))
    spans = [span for _, span in host] + [span for span, _ in kernels]
    return with_operations(spans, nodes, event_of, kernels)


def _memory(events: list[dict]) -> list[tuple[float, int]]:
    """Bytes allocated over time, on all devices."""
    found, totals = [], {}
    for event in sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"]):
        about = event["args"]
        totals[about["Device Type"], about["Device Id"]] = about["Total Allocated"]
        found.append((event["ts"] / 1e6, sum(totals.values())))
    return found


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

    from pt_impl.kit import training
    from pt_impl.kit.demo import Demo

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler logs to the terminal
    demo = Demo("digits-cnn", batch_size=128)
    print(profile_steps(training.make_train_step(*demo.build()), demo.batches))


if __name__ == "__main__":
    main()
