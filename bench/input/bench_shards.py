"""Sharded input pipelines: photos from a few large files, in samples/s."""

from __future__ import annotations

from bench.harness.plan import Technique, Work, Workload, warm
from bench.probes import pipelines
from shared.conversion import convert

SAMPLES = 32  # a shard: there are enough of them for every worker

TECHNIQUE = Technique(
    family="input",
    name="shards",
    effort="ordinary",
    title="Input pipelines: photos in shards",
    remedies=("input",),
    variants=(
        warm("sequential", "shard after shard", role="baseline", loader="sequential"),
        warm("interleaved_auto", "interleaved, as many workers as cores", loader="interleaved"),
        warm(
            "any_order",
            "interleaved, in any order",
            "ordinary",
            loader="interleaved",
            deterministic=False,
        ),
        warm("workers_1", "interleaved, one worker", "full", loader="interleaved", workers=1),
        warm(
            "workers_1_5_a_core",
            "interleaved, 1.5 workers a core",
            "full",
            loader="interleaved",
            workers_a_core=1.5,
        ),
    ),
    workloads=(Workload("photos", "compute", timed=False),),
    differs_by_design=(
        "PyTorch reads tar files, TensorFlow TFRecord files, with the same JPEG files in them.",
        "PyTorch's workers are processes, each with its shards and buffer; TensorFlow's are "
        "threads that read shards in turns into one buffer. Without workers, PyTorch decodes in "
        "the training process, and TensorFlow in as many threads as tf.data chooses.",
        "Both draw the next sample from a buffer of 256, with different random generators.",
    ),
    notes=(
        f"Shards have {SAMPLES} photos, are made before anything is timed, and are in the page "
        "cache. The work limit is what one single-threaded process per core does of the same "
        "work per sample, without a pipeline and without checksums.",
        "Figures are explained under folder.",
    ),
    probes=True,
)


def probe(impl, work: Work, batches) -> dict[str, dict]:
    """Rates, limits, starts, CPU time and memory of a loader."""
    form = impl.input.shards.FORM
    folder = f"{work.data}-{form}"
    convert(work.data, folder, form=form, samples=SAMPLES)
    make = pipelines.maker(impl.input.shards, work, folder, **work.settings)
    return pipelines.measure(impl, work, make, technique="shards", source=folder)
