"""The machine and the settings under which processes run."""

from __future__ import annotations

import os
import platform
import shutil
from importlib import metadata
from math import floor
from pathlib import Path

import psutil

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
BENCH_PACKAGES = (
    *("twinbench", "numpy", "scipy", "scikit-learn", "pytest", "pytest-benchmark"),
    *("onnx", "onnxscript", "onnxruntime", "tf2onnx", "ai-edge-litert", "openvino"),
)


def usable_threads() -> int:
    """Cores that this process may use: its affinity, cut to the cgroup's CPU quota."""
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    else:
        count = os.cpu_count() or 1
    return max(1, floor(min(count, _cgroup_quota())))


def _cgroup_quota() -> float:
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return float(quota) / float(period)
    except (OSError, ValueError):  # no cgroup v2 here, or "max"
        return float("inf")


def compiler() -> str | None:
    """The C++ compiler that torch.compile would find."""
    return next(filter(None, map(shutil.which, (os.environ.get("CXX", "g++"), "clang++"))), None)


def process_environment(*, threads: int, flavour: str | None, allocator: str) -> dict[str, str]:
    """The variables of a parent or worker: threads, allocator, Keras flavour, quiet logs."""
    environment = {k: v for k, v in os.environ.items() if k not in TUNED_ALLOCATOR}
    environment |= dict.fromkeys(THREAD_VARIABLES, str(threads))
    environment |= {
        "TF_USE_LEGACY_KERAS": "1" if flavour == "tf_keras" else "0",
        "KERAS_BACKEND": "tensorflow",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "PYTHONHASHSEED": "0",
        "PYTHONUNBUFFERED": "1",
    }
    return environment | (TUNED_ALLOCATOR if allocator == "tuned" else {})


def describe(threads: int) -> dict:
    """What the report says of the machine."""
    cpu, flags = _cpu()
    governor = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    return {
        "cpu": cpu,
        "isa": [
            f for f in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16") if f in flags
        ],
        "physical_cores": psutil.cpu_count(logical=False),
        "logical_cores": psutil.cpu_count(),
        "threads": threads,
        "memory_bytes": psutil.virtual_memory().total,
        "os": platform.platform(),
        "governor": governor.read_text().strip() if governor.exists() else None,
        "load": psutil.getloadavg()[0],
        "python": platform.python_version(),
        "onednn": os.environ.get("TF_ENABLE_ONEDNN_OPTS", "on by default"),
        "compiler": compiler() is not None,
        "packages": {"bench": {name: _version(name) for name in BENCH_PACKAGES}},
    }


def _cpu() -> tuple[str, set[str]]:
    """The processor's name and its instruction set flags (flags on Linux only)."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine(), set()
    found = dict(line.split(":", 1) for line in reversed(lines) if ":" in line)
    found = {key.strip(): value.strip() for key, value in found.items()}
    return found.get("model name", platform.machine()), set(found.get("flags", "").split())


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
