"""Measures training on several devices from outside, by an observing thread.

It notes CPU time, resident memory and written bytes of every training process, from the end of the
first step to that of the last. Afterwards one process trains on the same batches: losses and
weights must agree.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import psutil

from bench.harness.helpers import figure
from bench.harness.machine import usable_threads
from bench.harness.plan import Work
from shared import parallel
from shared.datasets import first_batches

SEED = 2026
STEPS = 6  # what counts are the five after the first
BUILD = "kit.examples:text_gpt_wide"
EVERY_S = 0.05


@dataclass(frozen=True)
class Glance:
    """What the training processes had used at `at`, a time of `time.monotonic`.

    `written`: bytes of system calls, which on a CPU are messages between processes; None if
    unknown.
    """

    at: float
    cpu_s: float
    resident: list[int]
    written: int | None


def measure(
    impl,
    work: Work,
    batches: list,
    make: str | None,
    settings: dict | None = None,
    devices: dict | None = None,
    **reference: float,
) -> dict[str, dict]:
    """The figures of a run of `make`, "module:function", or of one process if it is None.

    `devices`: replicas and parts of the run. `reference`: bytes and percentages by theory, by name.

    Raises RuntimeError if losses or weights differ from those of one process.
    """
    dataset = tuple(map(np.concatenate, zip(*batches, strict=True)))
    amount = {"global_batch": work.batch_size, "steps": STEPS, "seed": SEED}
    with watched() as glances:
        if make:
            threads = max(devices["replicas"] * devices["parts"], usable_threads())
            run = parallel.Run(**devices, **amount, threads=threads)
            data = impl.kit.data.to_device(*dataset)
            build = f"{impl.__name__}.{BUILD}"
            launch = parallel.find(f"{impl.__name__}.kit.replicas:launch")
            trained = launch(make, build, data, run, settings)
        else:
            trained = alone(impl, dataset, **amount)
    evidence = {"losses": list(map(float, trained.losses))}
    if make:
        reference_run = alone(impl, dataset, **amount)
        evidence |= {"losses_of_one_process": reference_run.losses}
        evidence |= {"differ_at_most": check(impl, work, trained, reference_run)}
    units = {name: "bytes" if name.endswith("bytes") else "%" for name in reference}
    expected = {name: figure(units[name], [value]) for name, value in reference.items()}
    measured = figures(glances, list(trained.ended), work.batch_size)
    return measured | expected | {"evidence": evidence}


def figures(glances: list[Glance], ended: list[float], batch_size: int) -> dict[str, dict]:
    """The figures between the first and the last step; bytes are per step, of all processes."""
    until = [[glance for glance in glances if glance.at <= end] for end in (ended[0], ended[-1])]
    inside = until[1][len(until[0]) :]
    if not until[0] or not inside:
        raise RuntimeError(f"{len(ended)} steps took too little time to be looked at")
    # Both are just before the end of a step, when nothing is on the way.
    first, last = until[0][-1], until[1][-1]
    used = (last.cpu_s - first.cpu_s) / ((last.at - first.at) * usable_threads())
    metrics = {
        "samples_per_s": figure("samples/s", [batch_size / step for step in np.diff(ended)]),
        "cores_idle": figure("%", [100 * max(0.0, 1 - used)]),
        "memory_each": figure("bytes", [max(max(glance.resident) for glance in inside)]),
        "memory_all": figure("bytes", [max(sum(glance.resident) for glance in inside)]),
    }
    if len(last.resident) > 1 and None not in (first.written, last.written):
        each = (last.written - first.written) / (len(ended) - 1)
        metrics["sent_bytes"] = figure("bytes", [each])
    return metrics


@contextlib.contextmanager
def watched() -> Iterator[list[Glance]]:
    """Look at the training processes every `EVERY_S`: started ones, or this one."""
    glances, done = [], threading.Event()
    process = psutil.Process()
    others = {child.pid for child in process.children(recursive=True)}

    def watch() -> None:
        while not done.wait(EVERY_S):
            started = [c for c in process.children(recursive=True) if c.pid not in others]
            with contextlib.suppress(psutil.Error):  # one has just ended: no step is under way
                glances.append(glance([c for c in started if trains(c)] or [process]))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield glances
    finally:
        done.set()
        watcher.join()


def trains(process: psutil.Process) -> bool:
    """Whether it is a training process of a run, and not torchrun."""
    words = process.cmdline()
    return any(word.endswith(".kit.replicas") for word in words) and "--nnodes=1" not in words


def glance(processes: list[psutil.Process]) -> Glance:
    """What these processes have used so far."""
    cpu, resident, written = 0.0, [], 0
    for process in processes:
        with process.oneshot():
            times = process.cpu_times()
            cpu += times.user + times.system
            resident.append(process.memory_info().rss)
            counters = process.io_counters() if hasattr(process, "io_counters") else None
            written = None if None in (counters, written) else written + counters.write_chars
    return Glance(time.monotonic(), cpu, resident, written)


# The same work ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Alone:
    """The result of one process: canonical weights, losses, and the end of each step."""

    weights: dict[str, np.ndarray]
    losses: list[float]
    ended: list[float]


def alone(impl, dataset: tuple, *, global_batch: int, steps: int, seed: int) -> Alone:
    """Train in this process with the baseline's step."""
    model, optimizer, loss_fn = parallel.find(f"{impl.__name__}.{BUILD}")()
    step = impl.kit.training.make_train_step(model, optimizer, loss_fn)
    losses, ended = [], []
    for x, y in first_batches(*dataset, global_batch, steps, seed=seed):
        losses.append(impl.kit.runtime.to_float(step(*impl.kit.data.to_device(x, y))))
        ended.append(time.monotonic())
    return Alone(impl.kit.models.export_weights(model), losses, ended)


def check(impl, work: Work, trained, wanted: Alone) -> float:
    """The largest relative difference of losses and weights.

    Raises RuntimeError if it exceeds the task's parity bar. The framework's names are in the order
    of the layers, like the canonical ones.
    """
    bar = work.task.parity
    pairs = zip(wanted.weights.items(), trained.weights.values(), strict=True)
    differences = {
        name: float(np.linalg.norm(impl.kit.models.to_canonical(name, own) - weight))
        / (float(np.linalg.norm(weight)) or 1.0)
        for (name, weight), own in pairs
    }
    losses = np.array([trained.losses, wanted.losses])
    differences["the losses"] = float(np.max(np.abs(losses[0] - losses[1]) / np.abs(losses[1])))
    # What is no number is worse than any.
    worst = max(differences, key=lambda name: np.nan_to_num(differences[name], nan=np.inf))
    if not differences[worst] <= bar:
        raise RuntimeError(
            f"not the work of one process: {worst} differ by {differences[worst]:.1e}, not {bar:g}"
        )
    return differences[worst]
