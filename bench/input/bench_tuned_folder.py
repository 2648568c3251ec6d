"""Tuned input pipelines: how close photos from a folder come to the limit of the work itself."""

from __future__ import annotations

import importlib

from bench.harness.plan import Technique, Work, Workload, warm
from bench.probes import pipelines

UNSUPPORTED = {
    "pt": {"service_loader": "DataLoader's workers run only on the machine that trains"},
    "tf": {"threads_loader": "tf.data's workers are always threads: see tuned_loader"},
}

TECHNIQUE = Technique(
    family="input",
    name="tuned_folder",
    title="Tuned input pipelines: a folder of photos",
    remedies=("input",),
    variants=(
        warm(
            "parallel",
            "workers, as many as cores",
            role="baseline",
            program="folder of photos, workers",
            technique="folder",
            loader="parallel",
        ),
        warm("tuned", "tuned", loader="tuned"),
        warm(
            "tuned_one_op_thread",
            "tuned, operators on one thread",
            "ordinary",
            frameworks=("tf",),
            loader="tuned",
            op_threads=1,
        ),
        warm(
            "tuned_kept_memory",
            "tuned, freed memory kept",
            "ordinary",
            allocator="tuned",
            loader="tuned",
            op_threads=1,
        ),
        warm(
            "tuned_fast_decoder",
            "tuned, the fast decoder",
            "ordinary",
            loader="tuned",
            decoder="fast",
        ),
        warm("threads", "threads in place of processes", "ordinary", loader="threads"),
        warm(
            "threads_fast_decoder",
            "threads, the fast decoder",
            "full",
            loader="threads",
            decoder="fast",
        ),
    ),
    workloads=(Workload("photos", "compute", timed=False),),
    differs_by_design=(
        "PyTorch's workers are processes that write into a shared ring of batches; TensorFlow has "
        "more calls of a fused map in flight than threads.",
        "A batch of PyTorch's ring is lent until the next but one is asked for.",
    ),
    notes=(
        "The work limit is what one single-threaded process per core does of the same work per "
        "sample, without a pipeline. It is measured before and after each timed epoch. The share "
        "is the epoch's rate, once the pipeline is filled, over the mean of both.",
        "tuned_one_op_thread: TensorFlow's operators run on one thread each, as in a process "
        "that trains on a GPU, also in the step of its data stall. PyTorch's workers always do "
        "so. tuned_kept_memory does the same, and glibc keeps freed memory "
        "(MALLOC_MMAP_THRESHOLD_, MALLOC_TRIM_THRESHOLD_ and MALLOC_TOP_PAD_ are set), so that "
        "the kernel need not clear it for each batch. The processes of its limit do so, too.",
        "Figures are explained under folder.",
    ),
    probes=True,
)


def probe(impl, work: Work, batches) -> dict[str, dict]:
    """Rates, limits, starts, CPU time and memory of a loader."""
    settings = dict(work.settings)
    name = f"{impl.__name__}.input.{settings.pop('technique', 'tuned_folder')}"
    if impl.__name__ == "tf_impl" and settings["loader"] == "threads":
        raise NotImplementedError(UNSUPPORTED["tf"]["threads_loader"])
    if threads := settings.pop("op_threads", None):  # TensorFlow has not run anything yet
        impl.kit.runtime.configure(threads=threads, seed=pipelines.SEED)
    make = pipelines.maker(importlib.import_module(name), work, work.data, **settings)
    decoder = settings.get("decoder", "standard")
    return pipelines.measure(
        impl, work, make, technique="folder", source=work.data, decoder=decoder
    )
