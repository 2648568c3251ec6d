"""The class of a run's GPU, and tasks large enough for it.

On a fast GPU, a step of a model with ten million parameters mostly launches kernels, whatever the
technique. There such tasks are replaced by larger ones: ResNet-50 at 224 pixels, and a GPT and a
BERT of base size. A table by memory and speed has their batch sizes. These were chosen by FLOPs,
before anything was measured, so that a float32 step takes 20 to 200 ms.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace

from bench.harness.plan import FRAMEWORKS, Case, Technique, Variant, Workload
from bench.harness.processes import ROOT
from bench.harness.worker import on_cpu
from shared.specs import kept_activations, lasting_values, parameter_count

LARGER = {
    "photos-resnet18": "photos-resnet50",
    "text-gpt-10m": "text-gpt-base",
    "text-bert-10m": "text-bert-base",
    "text-gpt-wide": "text-gpt-base",
}
GIB = 2**30
# What a process holds beside its tensors (context, kernels), and what its allocator rounds up.
CONTEXT_BYTES, ROUNDED_UP = 600 * 2**20, 1.25
SHARE_OF_MEMORY = 0.8  # that the contenders of a match may hold together
ASKING_S = 120.0
SM_CLOCK = 1  # NVML_CLOCK_SM


@dataclass(frozen=True)
class Gpu:
    """A GPU as its driver describes it.

    `float32`: FLOP/s of all cores at the highest clock, without tensor cores, which no float32 row
    uses because TF32 is off.
    """

    name: str
    memory_bytes: int
    float32: float

    def holds(self, cases: Iterable[Case]) -> bool:
        """Whether the contenders fit into its memory together."""
        return sum(map(bytes_of, cases)) <= SHARE_OF_MEMORY * self.memory_bytes


@dataclass(frozen=True)
class GpuClass:
    """GPUs with at least so many GiB and float32 FLOP/s, and their batch sizes."""

    memory: float
    float32: float
    photos: int
    sequences: int

    def batch_of(self, task: str) -> int:
        """The batch size of one of the larger tasks."""
        return self.photos if task == "photos-resnet50" else self.sequences


# The first that fits counts. Smaller GPUs have the tasks of a CPU.
CLASSES = (
    GpuClass(75, 40e12, photos=128, sequences=32),  # H100, H200, B200
    GpuClass(38, 19e12, photos=64, sequences=16),  # A100, L40S
    GpuClass(22, 30e12, photos=64, sequences=16),  # RTX 3090, RTX 4090
    GpuClass(14, 10e12, photos=32, sequences=8),  # V100, RTX 4080
)


def class_of(gpu: Gpu) -> GpuClass | None:
    """The class of a GPU; None if it is too small for the larger tasks."""
    for one in CLASSES:
        if gpu.memory_bytes >= one.memory * GIB and gpu.float32 >= one.float32:
            return one
    return None


def bytes_of(case: Case) -> float:
    """An estimate of the memory of a contender on the GPU."""
    model, values = case.task.model, 0
    if not model.from_file:
        values = parameter_count(model)
        if case.workload.mode == "train":
            values += lasting_values(case.task)  # and gradients
            values += kept_activations(model, case.workload.batch_size)
    return CONTEXT_BYTES + 4 * ROUNDED_UP * values


def of_its_size(technique: Technique, gpu_class: GpuClass | None) -> Technique:
    """A technique with larger tasks in place of those that are too small for a GPU."""
    if gpu_class is None:
        return technique
    workloads = dict.fromkeys(_larger(workload, gpu_class) for workload in technique.workloads)
    variants = tuple(map(_of_larger, technique.variants))
    return replace(technique, workloads=tuple(workloads), variants=variants)


def _of_larger(variant: Variant) -> Variant:
    """A row with the larger ones of its tasks."""
    tasks = tuple(LARGER.get(task, task) for task in variant.measured.tasks)
    return replace(variant, measured=replace(variant.measured, tasks=tasks))


def _larger(workload: Workload, gpu_class: GpuClass) -> Workload:
    task = LARGER.get(workload.task)
    if task is None:
        return workload
    samples = gpu_class.batch_of(task) if workload.batch == "compute" else None
    return replace(workload, task=task, samples=samples)


# The GPU that is there ---------------------------------------------------------------------------


def used_gpu(frameworks: Iterable[str], interpreters: dict[str, str]) -> Gpu | None:
    """The first GPU that the frameworks use; None if one of them uses the CPU.

    interpreters: framework -> its interpreter, if it is not this process's.
    """
    gpu = first_gpu()
    if gpu is None or class_of(gpu) is None:
        return None
    devices = [_device(FRAMEWORKS[name].package, interpreters.get(name)) for name in frameworks]
    return None if any(map(on_cpu, devices)) else gpu


def _device(package: str, interpreter: str | None) -> str:
    """The device that a framework computes on; "cpu" where it does not start."""
    asked = f"from {package}.kit import runtime; print(runtime.device())"
    command = [interpreter or sys.executable, "-c", asked]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=ASKING_S)
    except (OSError, subprocess.TimeoutExpired):
        return "cpu"
    lines = done.stdout.split()
    return lines[-1] if done.returncode == 0 and lines else "cpu"


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


def first_gpu() -> Gpu | None:
    """The first visible GPU, by NVIDIA's management library; None without one."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    if not visible.isdigit():  # none, or a part of one
        return None
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    handle, memory, name = ctypes.c_void_p(), _Memory(), ctypes.create_string_buffer(96)
    cores, clock = ctypes.c_uint(), ctypes.c_uint()
    refused = (
        library.nvmlInit_v2()
        or library.nvmlDeviceGetHandleByIndex_v2(int(visible), ctypes.byref(handle))
        or library.nvmlDeviceGetName(handle, name, len(name))
        or library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
        or library.nvmlDeviceGetNumGpuCores(handle, ctypes.byref(cores))
        or library.nvmlDeviceGetMaxClockInfo(handle, SM_CLOCK, ctypes.byref(clock))
    )
    if refused:
        return None
    speed = 2.0 * cores.value * clock.value * 1e6  # a multiplication and an addition a cycle
    return Gpu(name.value.decode(), memory.total, speed)
