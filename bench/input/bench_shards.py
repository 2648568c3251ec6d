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
        "PyTorch's workers are processes with shards and a buffer of their own; TensorFlow's are "
        "threads that read shards in turn into one buffer. Without workers PyTorch decodes in the "
        "process that trains, and TensorFlow in as many threads as tf.data sees fit.",
        "Both draw the next of 256 samples from a buffer, each with a generator of its own.",
    ),
    notes=(
        f"Shards of {SAMPLES} photos, in the page cache; they are made before anything is timed. "
        "The work limit reads them with one single-threaded process a core and does the same work "
        "per sample, with nothing around it and no checksums.",
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
