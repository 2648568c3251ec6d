"""The ladder of domain adaptation: DANN from digits on black to the same digits over photos.

Fixed before anything was measured: the pipeline, mixed precision and the compiler are judged by the
time of an iteration, clipping by accuracy. `rule.py` says when a technique hurts.

Accuracy is on digits over photos, without labels of these in training. Images are standardised one
by one and shifted at random, at every rung.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from bench.harness.plan import Work
from bench.harness.worker import RESIDENT_BATCHES
from bench.ladders import training
from bench.ladders.ladder import MIXED_PRECISION, UNNAMED, Ladder, Published, Rung
from shared import datasets
from shared.specs import TASKS


def materialise(folder: Path, task: str) -> tuple[Path, dict]:
    """Write both domains, and the folders that they are trained from."""
    spec = TASKS[task]
    arrays = datasets.materialise(spec.dataset, folder)
    source, target, _ = datasets.domain_folders(spec.dataset, folder)
    settings = {"source": str(source), "target": str(target), "epochs": spec.recipe.epochs}
    return arrays, settings


LADDER = Ladder(
    name="domain_adaptation",
    title="Domain adaptation: DANN from digits on black to digits over photos",
    module=__name__,
    task="digits-to-photos",
    materialise=materialise,
    about="A run trains on digits on black with their labels and on digits over photos without; "
    "accuracy is that on digits over photos.",
    seconds=40.0,
    rungs=(
        Rung("input_pipeline", "input pipeline (batches, cached)", judged="iteration"),
        MIXED_PRECISION,
        Rung("clipping", "gradients clipped at 0.5", judged="quality"),
        Rung("compiled", "compiled", judged="iteration", compiles=("pt",)),
    ),
    published=(
        Published("VisDA, a training: 4.2 → 2.8 h", 2.8 / 4.2, "iteration", UNNAMED),
        Published("VisDA, a training: 22 → 12.5 h", 12.5 / 22, "iteration", UNNAMED),
        Published("VisDA, memory: 12 → 8.2 GB", 8.2 / 12, "memory", UNNAMED),
        Published("VisDA, accuracy on the target: 68.3 → 72.1%", 72.1 - 68.3, "quality", UNNAMED),
    ),
)


def probe(impl, work: Work, batches: list) -> dict[str, dict]:
    """One training with `work.settings["rungs"]`."""
    settings, recipe, spec = work.settings, work.task.recipe, work.task.dataset
    size, epochs = recipe.accuracy_batch_size, settings["epochs"]
    domains = [
        datasets.first_batches(
            *datasets.load(Path(work.data), split), size, RESIDENT_BATCHES, seed=settings["seed"]
        )
        for split in ("train", "target")
    ]
    both = [(np.concatenate([x, other]), y) for (x, y), (other, _) in zip(*domains, strict=True)]
    _, _, test = datasets.domain_folders(spec, Path(work.data).parent)

    def make(build):
        return impl.ladders.domain_adaptation.Training(
            partial(_split, impl, build),
            settings["source"],
            settings["target"],
            steps=epochs * (spec.train_size // size),
            rungs=tuple(settings["rungs"]),
            batch_size=size,
            learning_rate=recipe.learning_rate,
            momentum=recipe.momentum,
            seed=settings["seed"],
        )

    return training.measure(
        impl,
        work,
        both,
        make,
        batch_size=size,
        epochs=epochs,
        calibration=test[0][:1],
        test=test,
    )


def _split(impl, build) -> tuple:
    return impl.kit.models.split_head(build())
