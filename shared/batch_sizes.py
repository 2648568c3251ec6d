"""The largest batch size within a memory budget: a search by trials, each in a fresh process.

Neither framework is known here: a program of the kit takes the steps and knows the device.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

_MARGIN = 64 << 20  # bytes above the budget at which a running trial is killed
_RESERVE = 256 << 20  # bytes of the machine's memory that no trial may touch
_STEPS, _SECONDS = 3, 1.0  # the steps that a trial times, fewer if they take longer
_ERRORS = {
    "ModuleNotFoundError": ValueError,
    "NotImplementedError": NotImplementedError,
    "ValueError": ValueError,
}


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
class LargestBatch:
    """The largest batch size that fits and what its trial measured.

    limit: what keeps it from being larger, "budget", "maximum" or "time limit". trials: in order.
    """

    batch_size: int
    peak_bytes: int
    samples_per_s: float
    limit: str
    trials: list[Trial]


# The search -----------------------------------------------------------------------------------


def check_settings(make_trial: str, budget_bytes: int, maximum: int, trial_seconds: float) -> None:
    """Raise ValueError for a trial that is not named, and settings that are not positive."""
    if not all(str(make_trial).partition(":")):
        raise ValueError(f'make_trial must be "module:function", not {make_trial!r}')
    if min(budget_bytes, maximum, trial_seconds) <= 0:
        raise ValueError("budget_bytes, maximum and trial_seconds must be positive")


def find_largest(run: Callable[[int], Trial], budget: int, maximum: int) -> LargestBatch:
    """Find the largest batch size up to `maximum` of which `run(size)` fits into `budget` bytes.

    Raises ValueError where one sample takes more, RuntimeError where it takes too long.
    """
    trials: list[Trial] = []
    size = 1
    while size:
        trials.append(run(size))
        _check_first(trials[0], budget)
        size = _next_size(trials, budget, maximum)
    by_size = sorted(trials, key=lambda trial: trial.batch_size)
    best = [trial for trial in by_size if trial.outcome == "fits"][-1]
    limit = "maximum" if best.batch_size == maximum else "budget"
    if best is not by_size[-1] and by_size[by_size.index(best) + 1].outcome == "time limit":
        limit = "time limit"
    return LargestBatch(best.batch_size, best.peak_bytes, best.samples_per_s, limit, trials)


def _check_first(trial: Trial, budget: int) -> None:
    """Raise where one sample takes more than the budget (ValueError) or too long (RuntimeError)."""
    if trial.outcome == "time limit":
        raise RuntimeError("a trial at batch size 1 takes longer than trial_seconds")
    if trial.outcome != "fits":
        needs = f"{trial.peak_bytes:,} bytes" if trial.peak_bytes else "all memory there is"
        raise ValueError(f"batch size 1 takes {needs}, more than the budget of {budget:,}")


def _next_size(trials: list[Trial], budget: int, maximum: int) -> int | None:
    """The next batch size to try, or None when the answer is known."""
    first = trials[0]
    low = max(trial.batch_size for trial in trials if trial.outcome == "fits")
    failed = [trial.batch_size for trial in trials if trial.outcome != "fits"]
    high = min(failed, default=maximum + 1)
    step = max(1, low // 20)
    if low == maximum or (failed and high - low <= step):
        return None
    known = [t for t in trials if t.peak_bytes is not None and t.batch_size <= 2 * low]
    measured = sorted((t.batch_size, t.peak_bytes) for t in known)
    size, peak = measured[-1]
    # The other end of the line is well away, since neighbours differ only by noise.
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


# Trials ---------------------------------------------------------------------------------------


def run_trial(program: str, make_trial: str, size: int, budget: int, seconds: float) -> Trial:
    """Try a batch size in a fresh process, and return what was found.

    program: the file that is run there and calls `take_trial`. make_trial: "module:function", of
    which function(size) returns a step without arguments. budget: in bytes; it ends a trial that
    takes far more, but the first. seconds: it ends one that takes longer.

    Raises what the trial raised, as ValueError for an unknown module or function, as
    NotImplementedError, else as RuntimeError.
    """
    with tempfile.TemporaryDirectory(prefix="trial-") as name:
        folder = Path(name)
        # -P keeps the program's folder, where names are common ones, out of the trial's path.
        command = [sys.executable, "-P", program, make_trial, str(size), str(budget), name]
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
        result = {"reason": f"it ended with status {child.returncode}: {''.join(last)}"}
        with contextlib.suppress(FileNotFoundError):
            result = json.loads((folder / "result").read_text())
    if "reason" in result:
        kind = _ERRORS.get(result.get("kind"), RuntimeError)
        raise kind(f"the trial at batch size {size} failed: {result['reason']}")
    if result.get("peak_bytes", 0) > budget:
        result["outcome"] = "too large"
    return Trial(size, **result)


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


# In the trial's own process -------------------------------------------------------------------


class Gpu(NamedTuple):
    """What a trial asks of a GPU: to wait for it, and the most bytes that it gave out so far."""

    synchronize: Callable[[], None]
    peak: Callable[[], int]


def take_trial(arguments: list[str], gpu: Gpu | None, is_out_of_memory: Callable) -> None:
    """Take a trial's steps in its own process, write what was found to a file, and end it.

    arguments: those of the program. is_out_of_memory: of an error, whether it says so.
    """
    make_trial, size, budget, folder = arguments
    try:
        result = _measure(make_trial, int(size), int(budget), Path(folder), gpu)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        result = {"kind": type(error).__name__, "reason": reason}
        if is_out_of_memory(error):
            result = {"outcome": "out of memory"}
    Path(folder, "result").write_text(json.dumps(result))
    os._exit(0)  # an interpreter that shuts down takes more memory


def _measure(make_trial: str, size: int, budget: int, folder: Path, gpu: Gpu | None) -> dict:
    module, _, name = make_trial.partition(":")
    make = getattr(importlib.import_module(module), name, None)
    if make is None:
        raise ValueError(f"module {module!r} has no function {name!r}")
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
            gpu.synchronize()
        seconds.append(time.perf_counter() - start)
    peak = gpu.peak() if gpu else _status("VmHWM") - before
    if gpu and not peak:
        raise ValueError("the trial took no memory of the GPU: hide it, or put the model there")
    rate = size * (len(seconds) - 1) / sum(seconds[1:])
    return {"outcome": "fits", "peak_bytes": peak, "samples_per_s": rate}


def _status(key: str) -> int:
    status = Path("/proc/self/status")
    if not status.exists():
        raise NotImplementedError("the peak of resident memory can only be read on Linux")
    return int(status.read_text().split(f"{key}:")[1].split()[0]) * 1024
