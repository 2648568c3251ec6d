"""Measures facts in new processes: of each framework, and of other runtimes.

A process that takes too long is stopped; what it has reported is kept.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from bench.harness.machine import KERAS_BACKEND
from bench.record import FRAMEWORKS
from shared.health import MARK, Facts
from shared.onednn import VARIABLE

QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "KINETO_LOG_LEVEL": "99", "PYTHONUNBUFFERED": "1"}
MISSING = "ModuleNotFoundError: No module named "
LEFT_OUT = "it is not checked"
RUNTIMES_S = 8.0


class Clock:
    """The time that is left to a command."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds, at least 0."""
        return max(0.0, self._end - time.monotonic())


def facts(framework: str, path: Path | None, clock: Clock, share: float) -> tuple[Facts, str]:
    """A framework's facts, and why some are missing, or "".

    share: of the remaining time that it may use.
    """
    command = [sys.executable, "-m", f"{framework}_impl.kit.health"]
    command += [str(path)] if path else []
    backend = {"KERAS_BACKEND": KERAS_BACKEND} if framework == "tf" else {}
    code, out, error = _run(command, QUIET | dict(os.environ) | backend, share * clock.left)
    told = decoded(out)
    why, title = "", FRAMEWORKS[framework]
    if code is None:
        why = f"{title} was stopped before its last checks: time was over"
    elif code:
        last = error.strip().splitlines()[-1:] or [f"it ended with status {code}"]
        missing = last[0].startswith(MISSING)
        why = f"{title} is not installed" if missing and not told.version else last[0]
        why = f"{why}: {LEFT_OUT}" if missing else f"{title}: {why.rpartition('BadFile: ')[2]}"
    return told, why


def decoded(text: str) -> Facts:
    """The facts among what a process printed."""
    told = {"skipped": {}}
    for line in text.splitlines():
        with suppress(ValueError):
            if line.startswith(MARK):
                group = json.loads(line.removeprefix(MARK))
                told["skipped"] |= group.pop("skipped", {})
                told |= group
    return msgspec.convert(told, Facts)


def runtimes(clock: Clock) -> dict[str, int]:
    """Thread counts of ONNX Runtime and OpenVINO, if installed."""
    command = [sys.executable, "-m", "bench.doctor.runtimes"]
    _, out, _ = _run(command, dict(os.environ), min(RUNTIMES_S, clock.left))
    counted = {}
    for line in out.splitlines():
        with suppress(ValueError):
            counted |= json.loads(line.removeprefix(MARK)) if line.startswith(MARK) else {}
    return counted


def with_onednn(clock: Clock) -> float | None:
    """Seconds of `tf_impl.kit.health.convolution` in a process where TensorFlow uses oneDNN."""
    command = [sys.executable, "-c", "from tf_impl.kit import health; print(health.convolution())"]
    _, out, _ = _run(command, QUIET | dict(os.environ) | {VARIABLE: "1"}, clock.left)
    with suppress(ValueError, IndexError):
        return float(out.split()[-1])
    return None


def keras_speeds(model: str, batch: int, backend: str, clock: Clock) -> dict[str, float]:
    """Seconds of a Keras model's train step on the backend asked for and on TensorFlow."""
    seconds = {}
    command = [sys.executable, "-m", "tf_impl.kit.keras_speed", str(batch)]
    for name in (backend, KERAS_BACKEND):
        variables = QUIET | dict(os.environ) | {"KERAS_BACKEND": name}
        _, out, _ = _run(command, variables, clock.left, model)
        with suppress(ValueError, IndexError, KeyError):
            seconds[name] = float(json.loads(out.strip().splitlines()[-1])["step_s"])
    return seconds


def _run(
    command: list[str], variables: dict[str, str], seconds: float, given: str = ""
) -> tuple[int | None, str, str]:
    """(exit status, or None where it was stopped, what it printed, its errors)."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as error:
        pipes = {"stdin": subprocess.PIPE, "stdout": out, "stderr": error, "text": True}
        process = subprocess.Popen(command, env=variables, **pipes)
        try:
            process.communicate(given, timeout=max(seconds, 0.1))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        except BaseException:
            process.kill()
            raise
        stopped = process.returncode < 0
        out.seek(0)
        error.seek(0)
        return None if stopped else process.returncode, out.read(), error.read()
