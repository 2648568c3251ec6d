"""The machine, and the settings of processes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import shutil
import signal
import sys
import time
from importlib import metadata
from math import inf
from pathlib import Path

import psutil

from bench.analysis.values import MOST_OTHERS
from bench.harness import processor
from bench.harness.energy import Meter
from bench.record import Attempt, Environment
from shared import cgroups
from shared.cgroups import usable_threads

# glibc gives freed memory back and faults it in again, which makes two identical processes differ
# by 14%; kept memory brings that to 2-5.5%. Other libcs ignore these.
TUNED_ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": str(4 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(8 << 30),
    "MALLOC_TOP_PAD_": str(256 << 20),
}
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "TF_NUM_INTRAOP_THREADS",
    "TF_NUM_INTEROP_THREADS",
)
KERAS_BACKEND = "tensorflow"
# What limits the instructions that oneDNN, PyTorch's own kernels and MKL use.
ISA_LIMITS = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS")
BENCH_PACKAGES = (
    *("twinbench", "numpy", "scipy", "scikit-learn", "pytest", "pytest-benchmark"),
    *("onnx", "onnxscript", "onnxruntime", "tf2onnx", "ai-edge-litert", "openvino"),
)


def end_with_parent() -> None:
    """On Linux, kill this process when its parent dies, even in a call that never returns."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 is PR_SET_PDEATHSIG


def free_memory() -> int:
    """Bytes that new processes may take: the system's free memory, within the cgroup's limit."""
    return int(min(psutil.virtual_memory().available, cgroups.free_memory()))


def load() -> float | None:
    """The load average of the last minute, if the system has one."""
    return psutil.getloadavg()[0] if hasattr(os, "getloadavg") else None


class Watch:
    """Measures what other programs use of the cores of this process, from now until `stop`.

    It reads /proc/stat, in steps of 10 ms; elsewhere it is unknown. If a quota gives this process
    fewer cores than it may run on, the use by others is unknown: they may have used the rest.
    """

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._before, self._own = _cores(), own_cpu_s()

    def stop(self) -> Attempt:
        """Shares of the cores' time: `stolen` by the hypervisor, used by `others`; `seconds`."""
        seconds, now = time.monotonic() - self._start, _cores()
        if not now or not self._before:
            return Attempt(seconds=seconds)
        cores, busy, stolen = now
        whole, others = cores * max(seconds, 1e-3), None
        if cores <= usable_threads():
            used = busy - self._before[1] - (own_cpu_s() - self._own)
            others = max(0.0, used / whole)
        return Attempt(stolen=(stolen - self._before[2]) / whole, others=others, seconds=seconds)


def _cores() -> tuple[int, float, float] | None:
    """How many cores this process may run on, and seconds that they were busy and stolen."""
    try:
        lines = Path("/proc/stat").read_text().splitlines()
        allowed = os.sched_getaffinity(0)
        found = [line.split() for line in lines if line[:3] == "cpu" and line[3:4].isdigit()]
        ticks = [list(map(int, each[1:9])) for each in found if int(each[0][3:]) in allowed]
        user, nice, system, _, _, irq, softirq, stolen = map(sum, zip(*ticks, strict=True))
    except (OSError, ValueError, AttributeError):
        return None
    second = os.sysconf("SC_CLK_TCK")
    return len(ticks), (user + nice + system + irq + softirq) / second, stolen / second


def busy(others: float | None) -> str | None:
    """A warning if other programs use more of the cores than figures allow, else None."""
    if not others or others <= MOST_OTHERS:
        return None
    return f"Other programs use {others:.0%} of this machine's cores"


def own_cpu_s() -> float:
    """CPU seconds of this process and all its descendants, including ended children."""
    own, found = psutil.Process(), 0.0
    for process in (own, *own.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            found += sum(process.cpu_times()[:4])  # user, system, and those of reaped children
    return found


def compiler() -> str | None:
    """The C++ compiler that torch.compile would use."""
    return next(filter(None, map(shutil.which, (os.environ.get("CXX", "g++"), "clang++"))), None)


def process_environment(*, threads: int, flavour: str | None, allocator: str) -> dict[str, str]:
    """The variables of a parent or worker: threads, allocator, Keras flavour, quiet logs."""
    environment = {k: v for k, v in os.environ.items() if k not in TUNED_ALLOCATOR}
    if paths := environment.get("PYTHONPATH"):  # relative to where the user is, not to the process
        places = map(os.path.abspath, paths.split(os.pathsep))
        environment["PYTHONPATH"] = os.pathsep.join(places)
    environment |= dict.fromkeys(THREAD_VARIABLES, str(threads))
    environment["KERAS_BACKEND"] = KERAS_BACKEND if flavour else "torch"
    environment |= {
        "TF_USE_LEGACY_KERAS": "1" if flavour == "tf_keras" else "0",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "PYTHONHASHSEED": "0",
        "PYTHONUNBUFFERED": "1",
    }
    return environment | (TUNED_ALLOCATOR if allocator == "tuned" else {})


def overruled(threads: int, keras_backend: str | None) -> list[str]:
    """The user's settings that a run ignores, with what is measured instead.

    keras_backend: the backend asked for; None if nothing of Keras is measured.
    """
    ignored = []
    asked = {name: os.environ.get(name, str(threads)) for name in THREAD_VARIABLES}
    if others := [f"{name}={value}" for name, value in asked.items() if value != str(threads)]:
        ignored.append(
            f"{', '.join(others)} is ignored: every row uses {threads} threads, one per core that "
            "this process may use; start it with taskset to use fewer"
        )
    if keras_backend not in (None, KERAS_BACKEND):
        ignored.append(
            f"KERAS_BACKEND={keras_backend} is ignored: Keras is measured on TensorFlow, with "
            "tf.function"
        )
    return ignored


def describe(threads: int) -> Environment:
    """The machine, before a framework is asked."""
    entries = processor.told()
    allowed = cgroups.processors()
    quota = cgroups.cpu_quota()
    governor = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    return Environment(
        cpu=entries.get("model name") or platform.processor() or platform.machine(),
        isa=processor.instructions(entries),
        isa_limits={name: os.environ[name] for name in ISA_LIMITS if name in os.environ},
        physical_cores=psutil.cpu_count(logical=False),
        logical_cores=psutil.cpu_count(),
        threads=threads,
        processor=processor.processor(entries),
        cores=processor.cores(allowed),
        affinity=len(allowed) or None,
        quota=None if quota == inf else quota,
        hypervisor=processor.hypervisor(entries),
        memory_bytes=psutil.virtual_memory().total,
        os=platform.platform(),
        governor=governor.read_text().strip() if governor.exists() else None,
        load=load(),
        python=platform.python_version(),
        compiler=compiler() is not None,
        energy=Meter().names,
        packages={"bench": {name: _version(name) for name in BENCH_PACKAGES}},
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
