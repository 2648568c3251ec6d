"""Threads and processes: latency of one caller and answers a second for many, by pools' sizes."""

from __future__ import annotations

from functools import partial

import numpy as np

from bench.harness.examples import examples
from bench.harness.folders import written_once
from bench.harness.helpers import figure, need_cpu
from bench.harness.plan import Measure, Technique, Variant, Work, Workload, row
from bench.probes import callers, serving
from bench.probes.serving import Route
from shared.cgroups import usable_threads

SAMPLES, BATCHES = 8, 2  # that callers send in turn: of predictions, of train steps
ROUTES = {
    name: Route(
        export=f"{{impl}}.deployment.export:export_{name}",
        load=f"shared.runtimes:load_{name}",
        file=file,
    )
    for name, file in (("onnx", "model.onnx"), ("openvino", "model.xml"))
}
PREDICTS = Measure(cold=False, modes=("predict",))
BOTH = Measure(cold=False)
predicts = partial(row, measured=PREDICTS)
# A runtime's pools are the same whichever framework wrote its file.
of_runtime = partial(row, measured=PREDICTS, frameworks=("pt",))

TECHNIQUE = Technique(
    family="deployment",
    name="serving_threads",
    title="Threads and processes for serving",
    user_model="it needs server processes: use search of the technique file",
    variants=(
        Variant(
            "as_installed",
            {"fill": "as installed"},
            role="baseline",
            measured=BOTH,
            title="a thread a caller, pools as installed",
        ),
        row("sized", "one at a time, on all cores", fill="one at a time", measured=BOTH),
        predicts("a_thread_each", "a thread a request, one process", fill="a thread each"),
        row("instances", "an instance a core", fill="an instance a core", measured=BOTH),
        predicts("searched", "the best of a search", fill="searched"),
        predicts("quota_ignored", "half the cores, as installed", fill="as installed", quota=0.5),
        predicts(
            "quota_sized",
            "half the cores, sized",
            fill="one at a time",
            quota=0.5,
            against="quota_ignored",
        ),
        of_runtime(
            "onnx_as_installed", "ONNX Runtime as installed", runtime="onnx", fill="as installed"
        ),
        of_runtime(
            "onnx_instances",
            "ONNX Runtime, one a core",
            runtime="onnx",
            fill="an instance a core",
            against="onnx_as_installed",
        ),
        of_runtime(
            "onnx_quota_ignored",
            "ONNX Runtime, half the cores, as installed",
            runtime="onnx",
            fill="as installed",
            quota=0.5,
            against="onnx_as_installed",
        ),
        of_runtime(
            "onnx_quota_sized",
            "ONNX Runtime, half the cores, sized",
            runtime="onnx",
            fill="one at a time",
            quota=0.5,
            against="onnx_quota_ignored",
        ),
        of_runtime(
            "openvino_as_installed",
            "OpenVINO as installed",
            runtime="openvino",
            fill="as installed",
        ),
        of_runtime(
            "openvino_instances",
            "OpenVINO, one a core",
            runtime="openvino",
            fill="an instance a core",
            against="openvino_as_installed",
        ),
        of_runtime(
            "openvino_quota_ignored",
            "OpenVINO, half the cores, as installed",
            runtime="openvino",
            fill="as installed",
            quota=0.5,
            against="openvino_as_installed",
        ),
        of_runtime(
            "openvino_quota_sized",
            "OpenVINO, half the cores, sized",
            runtime="openvino",
            fill="one at a time",
            quota=0.5,
            against="openvino_quota_ignored",
        ),
    ),
    workloads=(
        Workload("digits-cnn", "single", effort="ordinary", mode="predict", timed=False),
        Workload("digits-cnn", "compute", effort="ordinary", timed=False),
        Workload("photos-resnet18", "single", effort="full", mode="predict", timed=False),
    ),
    differs_by_design=(
        "In PyTorch each thread that calls a model has a team of threads; in TensorFlow all "
        "callers share the pools of the process.",
        "As installed, a pool has one thread per physical core in PyTorch, and one per logical "
        "core in TensorFlow.",
    ),
    notes=(
        "Instances are processes that a parent asks through pipes, even if there is one. There "
        "are twice as many callers as cores, and each asks again when it has its answer. In "
        "training a caller asks any free instance for a step, and as installed there is one "
        "instance.",
        "Latency is the median of one caller; waiting is the 95th percentile of many. Cores is "
        "the CPU time of all instances per second. Threads counts the threads of an instance "
        "that do at least a twentieth of its busiest one's work.",
        "Half the cores is the quota of a cgroup, which needs root. Sized pools there are "
        "compared with those as installed there, and a runtime's rows with that runtime as "
        "installed. The best setting of a search is started again and measured like the others; "
        "the evidence has all that it tried.",
    ),
    probes=True,
)


def probe(impl, work: Work, batches) -> dict[str, dict]:
    """What one caller and many see, and what the instances used for it."""
    need_cpu(impl)
    settings = work.settings
    runtime, fill = settings.get("runtime"), settings["fill"]
    training = work.mode == "train"
    if training and fill == "as installed":
        fill = "one at a time, as installed"  # two steps at once would train one model
    weights, samples = work.folder / "weights.npz", work.folder / "samples.npz"
    np.savez(weights, **work.weights)
    np.savez(samples, *_samples(impl, work))
    request = {
        "samples": str(samples),
        "runtime": runtime,
        "path": _file(impl, work, runtime) if runtime else None,
        "package": impl.__name__,
        "given": {"task": work.task.name, "weights": str(weights), "mode": work.mode},
        "how": {"fill": fill, "repetitions": work.repetitions, "shared": not training},
    }
    quota = max(1, round(settings["quota"] * usable_threads())) if "quota" in settings else None
    seen = callers.ask(request, work.folder, quota=quota)
    if quota and seen["evidence"]["cores"] != quota:
        raise RuntimeError(f"a quota of {quota} cores was read as {seen['evidence']['cores']}")
    rates = [work.batch_size * rate for rate in seen["rate"]]
    return {
        "samples_per_s": figure("samples/s", rates),
        "latency": figure("ms", [1e3 * s for s in seen["latency"]]),
        "waiting_p95": figure("ms", [1e3 * s for s in seen["waiting_p95"]]),
        "cores": figure("", seen["cores"]),
        "threads": figure("", seen["threads"]),
        "start": figure("s", seen["start"]),
        "memory": figure("bytes", seen["memory"]),
        "evidence": seen["evidence"],
    }


def _samples(impl, work: Work) -> list[np.ndarray]:
    """What callers send: arrays of single samples, or of batches with their labels."""
    training = work.mode == "train"
    count = BATCHES if training else SAMPLES
    parts = examples(work, count * work.batch_size, "train" if training else "test")
    if "runtime" in work.settings:  # its file has the framework's order of axes
        parts = [np.asarray(part) for part in impl.kit.data.to_device(*parts)]
    shaped = [part.reshape(count, work.batch_size, *part.shape[1:]) for part in parts]
    return shaped if training else shaped[:1]


def _file(impl, work: Work, runtime: str) -> str:
    """The model's file for a runtime."""
    route = ROUTES[runtime]
    prepared = serving.prepare(impl, work, route)
    folder, _ = written_once(work.files, prepared.write)
    return str(folder / route.file)
