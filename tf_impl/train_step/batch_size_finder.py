"""Batch-size finder: the largest batch that trains within a memory budget.

What it changes: nothing in the model. It tries batch sizes, each in a process of its own, which
leaves nothing behind. Memory is close to affine in the batch size: after two sizes that differ
enough, a line says which one fills the budget, and a few more trials confirm it.

Its twin: `pt_impl/train_step/batch_size_finder.py`.

Where the frameworks differ and why:
- On a CPU the figure is the peak of resident memory above what the imports took, in both.
  TensorFlow frees gradients within its graph, whose trace takes memory at any batch size.
- On a GPU it is what the framework's allocator gave out (`tf.config.experimental.get_memory_info`
  here, `torch.cuda.max_memory_allocated` there), which holds more than that: leave a tenth of the
  device free.
- Out of memory is `ResourceExhaustedError` here and `torch.OutOfMemoryError` there.

When it helps and when it hurts: it helps where samples per second still rise with the batch size.
Each trial costs an import of the framework. It does not say whether so large a batch trains well.

Run it alone: `python -m tf_impl.train_step.batch_size_finder` tries the digits CNN with 256 MiB.

Copy with it: nothing.
"""

import contextlib
import importlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

_MARGIN = 64 << 20  # bytes above the budget at which a running trial is killed
_RESERVE = 256 << 20  # bytes of the machine's memory that no trial may touch
_STEPS, _SECONDS = 3, 1.0  # the steps that a trial times, fewer if they take longer
_ERRORS = {"ModuleNotFoundError": ValueError, "NotImplementedError": NotImplementedError}


@dataclass(frozen=True)
class Trial:
    """A batch size that was tried; the figures are None where the trial did not end.

    outcome: "fits", "too large" (above the budget), "out of memory", "killed" or "time limit".
    """

    batch_size: int
    outcome: str
    peak_bytes: int | None = None
    samples_per_s: float | None = None


@dataclass(frozen=True)
class Found:
    """The largest batch size that fits and what its trial measured.

    limit: what keeps it from being larger, "budget", "maximum" or "time limit". trials: in order.
    """

    batch_size: int
    peak_bytes: int
    samples_per_s: float
    limit: str
    trials: list[Trial]


def find_batch_size(
    make_trial, *, budget_bytes: int, maximum: int = 65536, trial_seconds: float = 120.0
) -> Found:
    """Find the largest batch size whose train steps stay within `budget_bytes`.

    make_trial: "module:function", importable from here. A trial imports the module in a fresh
    process, calls function(batch_size), which returns a step without arguments, and takes a few
    steps. Its peak counts from after the imports, and holds model and optimizer too. maximum: the
    largest size of interest. trial_seconds: a trial that takes longer counts as not fitting.

    The size found was tried and fits. The next one, larger by a sample or at most 5%, was tried and
    does not, or it does not by the line through two sizes that were measured.

    Raises ValueError for a budget that batch size 1 exceeds or that the machine does not have, an
    unknown module or function and settings that are not positive; NotImplementedError where a CPU's
    peak can't be read (other than Linux) and where the trial raises it; RuntimeError where a trial
    fails otherwise, or the first takes too long.
    """
    if not all(str(make_trial).partition(":")):
        raise ValueError(f'make_trial must be "module:function", not {make_trial!r}')
    if min(budget_bytes, maximum, trial_seconds) <= 0:
        raise ValueError("budget_bytes, maximum and trial_seconds must be positive")
    trials: list[Trial] = []
    size = 1
    while size:
        trials.append(_try(make_trial, size, budget_bytes, trial_seconds))
        size = _next_size(trials, budget_bytes, maximum)
    by_size = sorted(trials, key=lambda trial: trial.batch_size)
    best = [trial for trial in by_size if trial.outcome == "fits"][-1]
    limit = "maximum" if best.batch_size == maximum else "budget"
    if best is not by_size[-1] and by_size[by_size.index(best) + 1].outcome == "time limit":
        limit = "time limit"
    return Found(best.batch_size, best.peak_bytes, best.samples_per_s, limit, trials)


def _next_size(trials: list[Trial], budget: int, maximum: int) -> int | None:
    """The next batch size to try, or None when the answer is known."""
    first = trials[0]
    if first.outcome == "time limit":
        raise RuntimeError("a trial at batch size 1 takes longer than trial_seconds")
    if first.outcome != "fits":
        needs = f"{first.peak_bytes:,} bytes" if first.peak_bytes else "all memory there is"
        raise ValueError(f"batch size 1 takes {needs}, more than the budget of {budget:,}")
    low = max(trial.batch_size for trial in trials if trial.outcome == "fits")
    failed = [trial.batch_size for trial in trials if trial.outcome != "fits"]
    high = min(failed, default=maximum + 1)
    step = max(1, low // 20)
    if low == maximum or (failed and high - low <= step):
        return None
    known = [t for t in trials if t.peak_bytes is not None and t.batch_size <= 2 * low]
    measured = sorted((t.batch_size, t.peak_bytes) for t in known)
    size, peak = measured[-1]
    # The other end of the line is well away, since neighbours differ by noise alone.
    base, least = [point for point in measured if point[0] <= max(1, size // 2)][-1]
    if peak - least < (budget - first.peak_bytes) / 20:  # too flat to tell
        guess = max(16 * low, budget // max(1, first.peak_bytes))
        return max(low + 1, min(math.isqrt(low * high) if failed else guess, high - 1))
    guess = int(base + (budget - least) * (size - base) / (peak - least))
    if guess < low + step:
        return None
    if failed and guess >= high:  # it failed where the line says that it fits
        return (low + high) // 2
    # Where the line is right, this size is the last trial: it fits, and 5% more does not.
    return min(max(low + step, int(0.975 * guess)), high - 1)


def _try(make_trial: str, size: int, budget: int, seconds: float) -> Trial:
    """Run one trial in a process of its own; raise what it raised."""
    with tempfile.TemporaryDirectory(prefix="trial-") as name:
        folder = Path(name)
        # -P keeps this file's folder, where names are common ones, out of the trial's path.
        command = [sys.executable, "-P", __file__, make_trial, str(size), str(budget), name]
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        settings = {"env": os.environ | {"PYTHONPATH": paths}, "stdin": subprocess.DEVNULL}
        with (folder / "log").open("wb") as log:
            child = subprocess.Popen(command, stdout=log, stderr=log, **settings)
        try:
            ended = _watch(child, folder, math.inf if size == 1 else budget + _MARGIN, seconds)
        finally:
            with contextlib.suppress(psutil.Error):
                for helper in psutil.Process(child.pid).children(recursive=True):
                    helper.kill()
            child.kill()
            child.wait()
        if ended or child.returncode == -9:  # the system, too, ends what takes too much
            return Trial(size, ended or "killed")
        last = (folder / "log").read_text(errors="replace").strip().splitlines()[-1:]
        said = {"reason": f"it ended with status {child.returncode}: {''.join(last)}"}
        with contextlib.suppress(FileNotFoundError):
            said = json.loads((folder / "result").read_text())
    if "reason" in said:
        kind = (_ERRORS | {"ValueError": ValueError}).get(said.get("kind"), RuntimeError)
        raise kind(f"the trial at batch size {size} failed: {said['reason']}")
    if said.get("peak_bytes", 0) > budget:
        said["outcome"] = "too large"
    return Trial(size, **said)


def _watch(child: subprocess.Popen, folder: Path, limit: float, seconds: float) -> str | None:
    """Wait for the trial to end; say why where it has to be ended."""
    # Not by a limit on its address space, of which frameworks reserve far more than they use.
    process, deadline = psutil.Process(child.pid), time.monotonic() + seconds
    while child.poll() is None:
        resident, imported = 0, math.inf
        with contextlib.suppress(psutil.Error, OSError, ValueError):  # ended, or not there yet
            resident = process.memory_info().rss
            imported = int((folder / "imported").read_text())
        if resident > imported + limit or psutil.virtual_memory().available < _RESERVE:
            return "killed"
        if time.monotonic() > deadline:
            return "time limit"
        time.sleep(0.005)
    return None


def _run_trial(make_trial: str, size: str, budget: str, folder: str) -> None:
    """Take a trial's steps, in its own process, and write what was found to a file."""
    import tensorflow as tf

    try:
        result = _measure(make_trial, int(size), int(budget), Path(folder)) | {"outcome": "fits"}
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        result = {"kind": type(error).__name__, "reason": reason}
        if isinstance(error, (MemoryError, tf.errors.ResourceExhaustedError)):
            result = {"outcome": "out of memory"}
    Path(folder, "result").write_text(json.dumps(result))
    os._exit(0)  # an interpreter that shuts down takes memory of its own


def _measure(make_trial: str, size: int, budget: int, folder: Path) -> dict:
    import tensorflow as tf

    module, _, name = make_trial.partition(":")
    make = getattr(importlib.import_module(module), name, None)
    if make is None:
        raise ValueError(f"module {module!r} has no function {name!r}")
    gpu = tf.config.list_physical_devices("GPU")
    if not gpu:
        if budget > psutil.virtual_memory().available - _RESERVE:
            raise ValueError(f"the budget of {budget:,} bytes is more than the machine has free")
        before = _status("VmRSS")
        (folder / "imported").write_text(str(before))
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew, see proc(5)
    step, seconds = make(size), []
    while len(seconds) < 2 or (len(seconds) <= _STEPS and sum(seconds) < _SECONDS):
        start = time.perf_counter()
        step()
        if gpu:
            tf.test.experimental.sync_devices()
        seconds.append(time.perf_counter() - start)
    info = tf.config.experimental.get_memory_info
    peak = info("GPU:0")["peak"] if gpu else _status("VmHWM") - before
    if gpu and not peak:
        raise ValueError("the trial took no memory of the GPU: hide it, or put the model there")
    return {"peak_bytes": peak, "samples_per_s": size * (len(seconds) - 1) / sum(seconds[1:])}


def _status(key: str) -> int:
    status = Path("/proc/self/status")
    if not status.exists():
        raise NotImplementedError("the peak of resident memory can only be read on Linux")
    return int(status.read_text().split(f"{key}:")[1].split()[0]) * 1024


def main() -> None:
    """Print the trials for the digits CNN in 256 MiB."""
    found = find_batch_size("tf_impl.kit.training:digits_cnn", budget_bytes=256 << 20)
    for trial in found.trials:
        print(f"{trial.batch_size:6}  {trial.outcome:12}  peak {trial.peak_bytes} bytes")
    print(f"largest: {found.batch_size}, limited by the {found.limit}")


if __name__ == "__main__":
    if sys.argv[1:]:
        _run_trial(*sys.argv[1:])
    else:
        main()
