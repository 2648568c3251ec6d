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

When it helps and when it hurts: it says which part is worth a technique, before one is tried. It
hurts small operators: each recorded event costs about a microsecond, so that a step of many small
ones is slower under the profiler; that is why its cost stands beside the breakdown. On a CPU
nothing crosses to a device, and that part is 0. "idle" is what the step's thread spent asleep, or
waiting for a core that others use.

Run it alone: `python -m pt_impl.diagnosis.profiling` prints the breakdown of the digits CNN.

Copy with it: `shared/profiles.py`.
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

from shared.profiles import Breakdown, Span, break_down, endless, nest, run_steps, write_stacks

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

    The model is trained by `2 * steps` steps and some before. Raises ValueError for no batches and
    settings out of range.
    """
    if steps < _TURNS or warmup < 1:
        raise ValueError(
            f"profiling needs {_TURNS} steps and one of warm-up, or more: {steps}, {warmup}"
        )
    batches = endless(batches)
    take = {"batches": batches, "synchronize": _synchronize}
    run_steps(step, count=warmup, **take)
    with _profiler():
        run_steps(step, count=1, **take)  # the first use of the profiler sets it up
    plain, profiled, spans, memory = [], [], [], []
    with tempfile.TemporaryDirectory() as own:
        place = Path(folder or own)
        place.mkdir(parents=True, exist_ok=True)
        for turn in range(_TURNS):
            count = (turn + 1) * steps // _TURNS - turn * steps // _TURNS
            run_steps(step, count=1, **take)
            plain += run_steps(step, count=count, **take)
            with _profiler() as profiler:
                run_steps(step, count=1, **take)
                mark = torch.profiler.record_function
                profiled += run_steps(step, count=count, mark=mark, **take)
            profiler.export_chrome_trace(str(place / "trace.json"))
            new, sizes = _read(place / "trace.json")
            spans += new
            memory += sizes
        if folder:
            write_stacks(new, place / "stacks.txt")
            # What TensorBoard's plug-in looks for; the profiler saves its trace once only.
            (place / "tensorboard").mkdir(exist_ok=True)
            log = place / "tensorboard" / f"step.{time.time_ns()}.pt.trace.json"
            shutil.copy(place / "trace.json", log)
    return break_down(spans, plain, profiled, memory)


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
    return torch.profiler.profile(activities=activities, profile_memory=True)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _read(path: Path) -> tuple[list[Span], list[tuple[float, int]]]:
    """The spans of a trace, and bytes allocated over time."""
    events = json.loads(path.read_text("utf-8"))["traceEvents"]
    timed = [event for event in events if event.get("ph") == "X" and "dur" in event]
    host = [(event, _span(event)) for event in timed if event.get("cat") in _HOST]
    spans = [span for _, span in host]
    # A kernel's part is that of the operator that launched it, which has the same number.
    parts = {id(node.span): node.part for node in nest(spans)}
    callers = {_number(e): parts[id(span)] for e, span in host if e["cat"] == "cpu_op"}
    for event in timed:
        if event.get("cat") in _DEVICE:
            spans.append(_span(event, callers.get(_number(event))))
    memory, totals = [], {}
    for event in sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"]):
        about = event["args"]
        totals[about["Device Type"], about["Device Id"]] = about["Total Allocated"]
        memory.append((event["ts"] / 1e6, sum(totals.values())))
    return spans, memory


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
    import numpy as np

    from pt_impl.kit import data, models, training
    from shared.specs import TASKS

    task, random = TASKS["digits-cnn"], np.random.default_rng(0)
    model = models.build(task.model)
    optimizer = training.make_optimizer(model, task.recipe)
    step = training.make_train_step(model, optimizer, training.cross_entropy)
    images = random.normal(size=(128, *task.model.input_shape)).astype(np.float32)
    batch = data.to_device(images, random.integers(0, 10, 128))
    print(profile_steps(step, [batch]))


if __name__ == "__main__":
    main()
