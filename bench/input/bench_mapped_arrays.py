"""Mapped input pipelines: decoded photos from arrays that are mapped into memory, in samples/s."""

from __future__ import annotations

import importlib

from bench.harness.plan import Technique, Work, Workload, warm
from bench.probes import pipelines
from shared.conversion import convert

SAMPLES = 32  # a shard

TECHNIQUE = Technique(
    family="input",
    name="mapped_arrays",
    title="Input pipelines: decoded photos in mapped arrays",
    remedies=("input",),
    variants=(
        warm(
            "folder",
            "folder of photos, workers",
            role="baseline",
            program="folder of photos, workers",
            technique="folder",
            loader="parallel",
        ),
        warm("mapped_auto", "mapped arrays, as many workers as cores", loader="memory_mapped"),
        warm(
            "workers_1", "mapped arrays, one worker", "ordinary", loader="memory_mapped", workers=1
        ),
    ),
    workloads=(Workload("photos", "compute", timed=False),),
    differs_by_design=(
        "PyTorch's workers are processes; TensorFlow's are threads, which take turns in the "
        "Python code that cuts a crop from the mapped array.",
    ),
    notes=(
        "The work limit of a mapped row differs: crop, resize and normalise, without decoding. "
        "So compare samples/s between rows, and the share of the limit within one.",
        "The arrays are made before anything is timed, and are in the page cache. Figures are "
        "explained under folder.",
    ),
    probes=True,
)


def probe(impl, work: Work, batches) -> dict[str, dict]:
    """Rates, limits, starts, CPU time and memory of a loader."""
    settings = dict(work.settings)
    technique, source = settings.pop("technique", "mapped_arrays"), work.data
    module = importlib.import_module(f"{impl.__name__}.input.{technique}")
    if technique == "mapped_arrays":
        source = f"{work.data}-arrays"
        convert(work.data, source, form="arrays", samples=SAMPLES)
    make = pipelines.maker(module, work, source, **settings)
    return pipelines.measure(impl, work, make, technique=technique, source=source)
