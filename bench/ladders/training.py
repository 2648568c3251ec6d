"""What is measured of a run: a whole training, from building the model to using it.

The first ten steps are on the same batches in both frameworks: their losses are the run's
certificate, and the first of them is the first step. Then come the epochs on the program's input
pipeline, what the program does after them, and the deployed model. All of it is in one process and
its children.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from statistics import median, pstdev

import psutil

from bench.harness import machine, memory
from bench.harness.accuracy import even_batch
from bench.harness.helpers import once
from bench.harness.plan import Work
from shared.utilization import Gpu, watch_utilization
from shared.weights import checksum

WINDOW_S = 0.5  # over which utilisation is taken, at least
CALLS, WARM_CALLS = 30, 5  # predictions of one sample
CALIBRATION = 64  # samples


@dataclass
class Watched:
    """What was seen of epochs: seconds and steps of each, and use of the cores in windows."""

    seconds: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    losses: list = field(default_factory=list)
    beside: int = 0  # bytes of the processes that the training has started

    def watch(self, losses: Iterable, synchronize: Callable[[], None]) -> None:
        """Take all steps of an epoch."""
        cores, count = machine.usable_threads(), 0
        start = since = time.perf_counter()
        used = machine.own_cpu_s()
        for loss in losses:
            count += 1
            self.losses.append(loss)
            now = time.perf_counter()
            if now - since >= WINDOW_S:
                then, used = used, machine.own_cpu_s()
                self.shares.append((used - then) / ((now - since) * cores))
                since = now
        synchronize()
        self.seconds.append(time.perf_counter() - start)
        self.steps.append(count)
        self.beside = max(self.beside, _beside())


def _beside() -> int:
    """Bytes that the processes started by this one hold beside it; 0 where that is unknown."""
    own = psutil.Process()
    started = [process.pid for process in own.children(recursive=True)]
    both, alone = memory.together(own.pid, *started), memory.resident()
    return 0 if None in (both, alone) else max(0, both - alone)


def measure(
    impl,
    work: Work,
    batches: list,
    make: Callable[[Callable], object],
    *,
    batch_size: int,
    epochs: int,
    calibration,
    test: tuple,
) -> Generator[None, None, dict[str, dict]]:
    """Train once; returns all figures of the run.

    It pauses before each epoch, after the last one, and before predictions are timed: the runs that
    it is measured with then take their turn.

    make: `make(build) -> program`; `build()` gives the model with the initial weights. batch_size:
    of the program and of `batches`. calibration: training inputs; test: inputs and labels; arrays.
    """
    kit = impl.kit
    kit.runtime.reset_device_peak()
    imported, resets = memory.resident(), memory.reset_peak()
    start, whole = time.perf_counter(), 0.0
    # No closure: a program may send it to separate processes.
    program = make(partial(kit.models.build, work.task.model, work.weights))
    try:
        certificate, first = _first_steps(kit, program, batches)
        watched, on_gpu = Watched(), kit.runtime.device_peak() is not None
        for _ in range(epochs):
            whole += time.perf_counter() - start
            yield
            start = time.perf_counter()
            with watch_utilization(interval=WINDOW_S) if on_gpu else nullcontext() as used:
                watched.watch(program.epoch(), kit.runtime.synchronize)
        # Of training alone: predictions for all test samples would count on a GPU.
        trained, device = memory.peak(), kit.runtime.device_peak()
        whole += time.perf_counter() - start
        yield
        start = time.perf_counter()
        calibration, _ = kit.data.to_device(calibration, test[1])
        after = Watched()
        after.watch(program.finish(calibration), kit.runtime.synchronize)
        path = work.folder / "deployed"
        predict = program.deploy(path, calibration)
        whole += time.perf_counter() - start
        peak = memory.peak()
    finally:
        program.close()
    x, y = kit.data.to_device(*test)
    quality = kit.training.evaluate(
        predict, x, y, metric=work.task.metric, batch_size=even_batch(len(y))
    )
    yield
    metrics = {
        **_pace(watched, batch_size),
        "first_step": once("s", first),
        "whole": once("s", whole),
        "quality": once(work.task.metric, quality),
        "latency": once("s", _latency(kit, predict, x[:1])),
        "size": once("bytes", path.stat().st_size),
        "evidence": {"losses": certificate, "weights_sha256": _weights(impl, work)},
    }
    if resets:
        host = once("bytes", trained - imported + watched.beside)
        metrics["host_memory" if device else "memory"] = host
        most = peak - imported + max(watched.beside, after.beside)
        metrics["whole_memory"] = once("bytes", most)
    if device:
        metrics["memory"] = once("bytes", device["allocated"])
    if on_gpu:
        metrics |= _busiest(used.gpus)
    return metrics


def _first_steps(kit, program, batches: list) -> tuple[list[float], float]:
    """The losses of the first steps, on batches of both frameworks, and the time of the first."""
    resident = kit.data.resident_batches(batches)
    start = time.perf_counter()
    losses = [program.step(*resident[0])]
    kit.runtime.synchronize()
    first = time.perf_counter() - start
    losses += [program.step(*batch) for batch in resident[1:]]
    return [kit.runtime.to_float(loss) for loss in losses], first


def _pace(watched: Watched, batch_size: int) -> dict[str, dict]:
    """Time and utilisation; the first epoch starts the pipeline and counts only where alone."""
    steady = slice(1, None) if len(watched.seconds) > 1 else slice(None)
    seconds, steps = watched.seconds[steady], watched.steps[steady]
    seconds_a_step = sum(seconds) / sum(steps)
    metrics = {
        "iteration": once("s", seconds_a_step),
        "epoch": once("s", median(seconds)),
        "samples_per_s": once("samples/s", batch_size / seconds_a_step),
    }
    if watched.shares:
        metrics["utilisation"] = once("%", 100 * sum(watched.shares) / len(watched.shares))
        metrics["fluctuation"] = once("%", 100 * pstdev(watched.shares))
    return metrics


def _busiest(gpus: Iterable[Gpu]) -> dict[str, dict]:
    """How busy the GPU was: the busiest that NVML told of, which knows those of others, too."""
    told = [gpu for gpu in gpus if gpu.mean is not None]
    if not told:
        return {}
    ours = max(told, key=lambda gpu: gpu.mean)
    return {
        "device_utilisation": once("%", 100 * ours.mean),
        "device_fluctuation": once("%", 100 * ours.sd),
    }


def _latency(kit, predict: Callable, x) -> float:
    """Median seconds of a prediction for one sample."""
    taken = []
    for _ in range(WARM_CALLS + CALLS):
        start = time.perf_counter()
        predict(x)
        kit.runtime.synchronize()
        taken.append(time.perf_counter() - start)
    return median(taken[WARM_CALLS:])


def _weights(impl, work: Work) -> str:
    """The checksum of the initial weights, as the framework has them."""
    model = impl.kit.models.build(work.task.model, work.weights)
    return checksum(impl.kit.models.export_weights(model))
