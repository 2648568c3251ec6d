"""Input pipelines as documented: photos from a folder, decoded and augmented, in samples/s."""

from __future__ import annotations

from bench.harness.plan import Technique, Work, Workload, warm
from bench.probes import pipelines

GPUS = 1  # this suite trains on one

TECHNIQUE = Technique(
    family="input",
    name="folder",
    title="Input pipelines: a folder of photos",
    remedies=("input",),
    variants=(
        warm("naive", "as in the tutorials, no workers", role="baseline", loader="naive"),
        warm(
            "parallel_auto",
            "workers, as many as cores",
            program="folder of photos, workers",
            loader="parallel",
        ),
        warm(
            "fast_decoder",
            "workers, the fast decoder",
            "ordinary",
            loader="parallel",
            decoder="fast",
        ),
        warm("uint8", "workers that hand over uint8", "ordinary", loader="uint8"),
        warm("workers_1", "one worker", "ordinary", loader="parallel", workers=1),
        warm("workers_2", "two workers", "full", loader="parallel", workers=2),
        warm(
            "workers_1_5_a_core",
            "1.5 workers a core",
            "full",
            loader="parallel",
            workers_a_core=1.5,
        ),
        warm(
            "workers_4_a_gpu",
            "four workers a GPU",
            "full",
            requires="cuda",
            loader="parallel",
            workers=4 * GPUS,
        ),
    ),
    workloads=(Workload("photos", "compute", timed=False),),
    differs_by_design=(
        "PyTorch decodes with Pillow, or with torchvision in fast_decoder. TensorFlow decodes in "
        "its graph; in fast_decoder only what the crop needs. Pixels agree within one grey "
        "level.",
        "PyTorch's workers are processes, TensorFlow's are parallel calls in threads. naive has "
        "none in PyTorch, and as many as tf.data chooses in TensorFlow.",
    ),
    notes=(
        "The work limit is what one single-threaded process per core does of the same work per "
        "sample, without a pipeline. It is measured before and after each timed epoch. The share "
        "is the epoch's rate, once the pipeline is filled, over the mean of both.",
        "A later first batch is that of an epoch after the first. CPU seconds are those of all "
        "processes for 1,000 samples. Memory is the peak of the training process, imports "
        "included, plus its workers. Data stall is the share of a small CNN's train steps that "
        "waits for a batch, on the same cores. Files are in the page cache.",
    ),
    probes=True,
)


def probe(impl, work: Work, batches) -> dict[str, dict]:
    """Rates, limits, starts, CPU time and memory of a loader."""
    make = pipelines.maker(impl.input.folder, work, work.data, **work.settings)
    decoder = work.settings.get("decoder", "standard")
    return pipelines.measure(
        impl, work, make, technique="folder", source=work.data, decoder=decoder
    )
