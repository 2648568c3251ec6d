"""Data parallelism on this machine: rates, what the exchange costs, memory and bytes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import numpy as np

from bench.harness.helpers import figure, once
from bench.harness.machine import usable_threads
from bench.harness.plan import Technique, Variant, Work, Workload, warm
from shared import datasets, parallel
from shared.specs import TASKS, parameter_count

SEED = 2026
REPLICAS = 2
STEPS = 60  # of each run, of which
WARM_STEPS = 10  # do not count
COMPARED = 10  # losses; after more steps, rounding alone drives runs apart

MICRO = {"variant": "accumulated", "micro_batches": 4}
UNSUPPORTED = {
    "pt": {"tpu": "PyTorch needs torch_xla for TPUs, which this project does not use"},
    "tf": {
        "apply_fsdp": "tf.distribute keeps whole variables on each replica: it has no ZeRO",
        "sharded": "tf.distribute keeps whole variables on each replica: it has no ZeRO",
    },
}


def _row(name: str, title: str, effort: str, **given) -> Variant:
    """A variant whose settings are what is no field of it; without them its name."""
    return warm(name, title, effort, **({"variant": name} | given))


TECHNIQUE = Technique(
    family="parallel",
    name="data_parallel",
    title="Data parallelism (DDP, FSDP): one and two replicas on one machine",
    remedies=("communication",),
    variants=(
        _row("one_replica", "one process", "default", role="baseline"),
        _row("processes", "a process a replica", "default"),
        _row("one_process", "replicas in one process", "ordinary"),
        _row("sharded", "sharded states", "ordinary"),
        _row(
            "synchronised_norm",
            "synchronised BatchNorm",
            "ordinary",
            variant="processes",
            synchronised_norm=True,
        ),
        _row("accumulated", "4 micro-batches, one exchange", "ordinary", **MICRO),
        _row(
            "accumulated_synchronised_each",
            "4 micro-batches, an exchange each",
            "ordinary",
            **MICRO,
            synchronise_each=True,
        ),
        *(
            _row(
                f"one_process_{name}",
                f"replicas in one process, {name.replace('_', ' ')}",
                "full",
                frameworks=("tf",),
                variant="one_process",
                communication=name,
            )
            for name in ("hierarchical_copy", "reduce_to_one_device")
        ),
        _row(
            "small_buckets", "exchange in small parts", "full", variant="processes", bucket_mb=0.05
        ),
        _row("tpu", "TPU", "full"),
        _row("compiled", "compiled", "full", requires="compiler"),
    ),
    workloads=(Workload("digits-cnn", "compute", timed=False),),
    differs_by_design=(
        "processes is DistributedDataParallel and MultiWorkerMirroredStrategy, with one process "
        "per replica. one_process is nn.DataParallel, which needs GPUs, and MirroredStrategy, "
        "here over two logical devices of the CPU. sharded is FSDP2, which TensorFlow lacks.",
    ),
    notes=(
        "With few cores this shows that replicas compute what one process computes, and what "
        "their exchange costs. Total threads and the global batch are the same for one replica "
        "and for two. Efficiency is the rate of two replicas over that of one: it is above 100% "
        "if one process leaves threads idle that two use. It says nothing about more hardware.",
        "A rate is the median of several runs, of one replica and of two in turns; each run's "
        f"rate is the median of {STEPS - WARM_STEPS} steps. Its range is over runs, which scatter "
        "more than steps of one run. The communication share is by how much a step of two "
        "replicas is longer than one of two separate runs at the same time, each with half of "
        "the batch and of the threads. It includes waiting for the other replica.",
        "Bytes are those that crossed the loopback interface per step, of all replicas together, "
        "with headers. A ring all-reduce sends 2 (n - 1) times the gradients' size, 2 (n - 1) / "
        "n per replica. Replicas in one process send nothing.",
        f"Losses apart is the largest relative difference of the first {COMPARED} losses from "
        "those of one replica. Without synchronised BatchNorm they train another function of the "
        "batch.",
    ),
    probes=True,
)


def probe(impl, work: Work, batches) -> dict[str, dict]:
    """Rates of one and two replicas, the exchange's share, bytes, memory and losses.

    Of the baseline, one replica, its rate and memory alone. Raises RuntimeError where the replicas
    did not train on each sample as often as one would.
    """
    settings = dict(work.settings)
    variant = settings.pop("variant")
    side = impl.__name__.removesuffix("_impl")
    if reason := UNSUPPORTED[side].get(variant):
        raise NotImplementedError(reason)
    digits = impl.kit.data.to_device(*datasets.load(Path(work.data), "train"))
    threads = max(REPLICAS, usable_threads())
    usual = {"global_batch": work.batch_size, "steps": STEPS, "seed": SEED, "threads": threads}

    def train(replicas: int, **changed) -> parallel.Result:
        kind = "processes" if variant == "one_replica" else variant
        make = f"{impl.__name__}.parallel.data_parallel:{kind}"
        build = f"{impl.__name__}.kit.examples:digits_cnn"
        options = usual | changed
        if variant in ("one_process", "tpu"):
            settings["replicas"], options["processes"] = replicas, 1
        run = parallel.Run(replicas, **options)
        launch = parallel.find(f"{impl.__name__}.kit.replicas:launch")
        return launch(make, build, digits, run, settings)

    if variant == "one_replica":
        runs = [train(1) for _ in range(work.repetitions)]
        seen = {"samples": len(runs[0].seen), "losses": runs[0].losses[:COMPARED].tolist()}
        return {"samples_per_s": _rate(work, runs), "evidence": seen} | _memory(runs[0])
    pairs = [(train(REPLICAS), train(1)) for _ in range(work.repetitions)]
    two, one = pairs[0]
    if not np.array_equal(two.seen, one.seen):
        raise RuntimeError("the shards of the replicas are not those of the global batches")
    alone = {"global_batch": work.batch_size // REPLICAS, "threads": threads // REPLICAS}
    alone["steps"] = 10 * STEPS  # long enough that they are under way together
    with ThreadPoolExecutor(REPLICAS) as pool:
        separate = [pool.submit(train, 1, **alone) for _ in range(REPLICAS)]
        apart_s = median(_middle_s(run.result()) for run in separate)
    two_s = median(_step_s(run) for run, _ in pairs)
    efficiency = [100 * _step_s(alone) / _step_s(run) for run, alone in pairs]
    gradients = 4 * parameter_count(TASKS["digits-cnn"].model)
    return {
        "samples_per_s": _rate(work, [run for run, _ in pairs]),
        "one_replica": _rate(work, [run for _, run in pairs]),
        "efficiency": figure("%", efficiency),
        "communication_share": once("%", 100 * (1 - apart_s / two_s)),
        "bytes_a_step": once("bytes", two.loopback_bytes),
        "ring_bytes_a_step": once("bytes", 2.0 * (REPLICAS - 1) * gradients),
        **_memory(two),
        "losses_apart": once("ppm", 1e6 * _apart(one.losses, two.losses)),
        "evidence": {
            "samples": len(two.seen),
            "each_seen": [int(two.seen.min()), int(two.seen.max())],
            "losses": two.losses[:COMPARED].tolist(),
            "losses_of_one_replica": one.losses[:COMPARED].tolist(),
        },
    }


def _rate(work: Work, runs: list[parallel.Result]) -> dict:
    """The samples a second of each run, whose processes scatter more than their steps do."""
    return figure("samples/s", [work.batch_size / _step_s(run) for run in runs])


def _memory(run: parallel.Result) -> dict[str, dict]:
    return {
        "peak_a_process": once("bytes", float(run.peak_bytes.max())),
        "above_imports": once("bytes", float((run.peak_bytes - run.import_bytes).max())),
    }


def _apart(one: np.ndarray, two: np.ndarray) -> float:
    return float(np.max(np.abs(two - one)[:COMPARED] / np.abs(one[:COMPARED])))


def _step_s(run: parallel.Result) -> float:
    return float(np.median(run.step_s[WARM_STEPS:]))


def _middle_s(run: parallel.Result) -> float:
    """Of the steps in the middle, when the other run has begun and has not ended."""
    quarter = len(run.step_s) // 4
    return float(np.median(run.step_s[quarter:-quarter]))
