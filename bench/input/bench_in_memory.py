"""In-memory input pipelines: small images a sample at a time, a batch at a time, in samples/s."""

from __future__ import annotations

from pathlib import Path

from bench.harness.plan import Technique, Work, Workload, warm
from bench.probes import pipelines

UNSUPPORTED = {
    "pt": {"snapshot_loader": "PyTorch does not store a pipeline's output: use disk_cached"}
}
CACHED = ("memory_cached", "disk_cached", "snapshot")

TECHNIQUE = Technique(
    family="input",
    name="in_memory",
    title="Input pipelines: small images in memory",
    remedies=("input",),
    variants=(
        warm("naive", "a sample at a time", role="baseline", loader="naive"),
        warm("vectorised", "a batch at a time", loader="vectorised"),
        warm("memory_cached", "a batch at a time, cached", loader="memory_cached"),
        warm("parallel_auto", "workers, as many as cores", "ordinary", loader="parallel"),
        warm("workers_1", "one worker", "full", loader="parallel", workers=1),
        warm("disk_cached", "a batch at a time, cached on disk", "ordinary", loader="disk_cached"),
        warm("snapshot", "a batch at a time, in a snapshot", "full", loader="snapshot"),
    ),
    workloads=(Workload("digits-cnn", "compute", timed=False),),
    differs_by_design=(
        "PyTorch's workers are processes, which must send each batch back; TensorFlow's are "
        "threads. TensorFlow's vectorised may use them, too: tf.data decides.",
        "PyTorch's cache on disk is mapped, TensorFlow's is read again in every epoch.",
    ),
    notes=(
        "The work limit is what one single-threaded process per core does of the vectorised work "
        "on batches, without a pipeline; for cached rows, without what the cache saves. It is "
        "measured before and after each repetition, which has enough epochs to take 0.3 s.",
        "Other figures are explained under folder.",
    ),
    probes=True,
)


def probe(impl, work: Work, batches) -> dict[str, dict]:
    """Rates, limits, starts, CPU time and memory of a loader."""
    settings = dict(work.settings)
    name = settings["loader"]
    if impl.__name__ == "pt_impl" and name == "snapshot":
        raise NotImplementedError(UNSUPPORTED["pt"]["snapshot_loader"])
    if name in ("disk_cached", "snapshot"):
        settings["cache"] = str(Path(work.data).with_name(f"{name}-{impl.__name__}"))
    return pipelines.measure(
        impl,
        work,
        pipelines.maker(impl.input.in_memory, work, work.data, **settings),
        technique="in_memory",
        source=work.data,
        batch_size=work.batch_size,
        cached=name in CACHED,
    )
