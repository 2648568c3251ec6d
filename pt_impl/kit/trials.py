"""Trials: train steps at one batch size, in a process that leaves nothing behind.

Twin: `tf_impl/kit/trials.py`.
Where the frameworks differ: in how the peak of a GPU's memory is read, and in what running out of
it raises.
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


def run_trial(make_trial: str, size: int, budget: int, seconds: float) -> Trial:
    """Try a batch size in a fresh process, and return what was found.

    make_trial: "module:function", of which function(size) returns a step without arguments. budget:
    in bytes; it ends a trial that takes far more, but the first. seconds: it ends one that takes
    longer.

    Raises what the trial raised, as ValueError for an unknown module or function, as
    NotImplementedError, else as RuntimeError.
    """
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


# In the trial's own process -------------------------------------------------------------------


def _main(make_trial: str, size: str, budget: str, folder: str) -> None:
    """Take a trial's steps, in its own process, and write what was found to a file."""
    import torch
    import torch._dynamo  # which an optimizer's first step would import

    try:
        result = _measure(make_trial, int(size), int(budget), Path(folder)) | {"outcome": "fits"}
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        result = {"kind": type(error).__name__, "reason": reason}
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "CPUAllocator" in reason:
            result = {"outcome": "out of memory"}
    Path(folder, "result").write_text(json.dumps(result))
    os._exit(0)  # an interpreter that shuts down takes more memory


def _measure(make_trial: str, size: int, budget: int, folder: Path) -> dict:
    import torch

    module, _, name = make_trial.partition(":")
    make = getattr(importlib.import_module(module), name, None)
    if make is None:
        raise ValueError(f"module {module!r} has no function {name!r}")
    gpu = torch.cuda.is_available()
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
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() if gpu else _status("VmHWM") - before
    if gpu and not peak:
        raise ValueError("the trial took no memory of the GPU: hide it, or put the model there")
    return {"peak_bytes": peak, "samples_per_s": size * (len(seconds) - 1) / sum(seconds[1:])}


def _status(key: str) -> int:
    status = Path("/proc/self/status")
    if not status.exists():
        raise NotImplementedError("the peak of resident memory can only be read on Linux")
    return int(status.read_text().split(f"{key}:")[1].split()[0]) * 1024


if __name__ == "__main__":
    _main(*sys.argv[1:])
