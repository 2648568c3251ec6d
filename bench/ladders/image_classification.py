"""The ladder of image classification: photos from disk, ResNet-18 at 64 pixels.

On a GPU it is ResNet-50 at 224 pixels.

Fixed before anything was measured: the pipeline, mixed precision, memory format and the compiler
are judged by the time of an iteration, accumulation by peak memory, averaged weights by accuracy,
the pruned and the int8 model by the latency of one prediction. `rule.py` says when a technique
hurts.

The classes are the parts of two photos; test photos are other crops of the same two. So accuracy
shows whether a technique kept what the training learned, not how good a network is at photos in
general.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from bench.harness.plan import Work
from bench.ladders import training
from bench.ladders.ladder import MIXED_PRECISION, UNNAMED, Ladder, Published, Rung
from shared import datasets, photos
from shared.epochs import MEAN, STD, ImageForm
from shared.images import decode_rgb, list_images
from shared.specs import TASKS

BATCH = 16  # photos: 24 steps an epoch
TRAINED, TESTED = 384, 768  # photos: of fewer, accuracy tells no two points apart
FILE_SIZE = 1.5  # pixels of a file, times those of the network's input
EPOCHS = 3


def materialise(folder: Path, task: str) -> tuple[Path, dict]:
    """Write photos to train on and to test with, and the arrays of the certificate."""
    spec = TASKS[task]
    size = spec.model.input_shape[0]
    written = [
        photos.make_photos(folder, images=count, size=round(FILE_SIZE * size), seed=seed)
        for count, seed in ((TRAINED, 1), (TESTED, 2))
    ]
    arrays = datasets.materialise(spec.dataset, folder)
    return arrays, {"photos": str(written[0]), "test": str(written[1]), "epochs": EPOCHS}


LADDER = Ladder(
    name="image_classification",
    title="Image classification: a ResNet on photos from disk",
    module=__name__,
    task="photos-resnet18",
    gpu_task="photos-resnet50",
    materialise=materialise,
    about=f"A run trains {EPOCHS} epochs of {TRAINED} crops of two photos, whose parts are the "
    f"classes, and tests on {TESTED} others: accuracy says whether a rung kept what was learned, "
    "not how good such a network is.",
    seconds=15.0,
    batch_size=BATCH,
    rungs=(
        Rung("input_pipeline", "input pipeline", judged="iteration"),
        MIXED_PRECISION,
        Rung(
            "memory_format",
            "memory format (channels last)",
            judged="iteration",
            nothing={"tf": "channels last is TensorFlow's default"},
        ),
        Rung("accumulation", "accumulation (2 micro-batches)", judged="memory", changes=True),
        Rung("compiled", "compiled", judged="iteration", compiles=("pt",)),
        Rung("averaged_weights", "averaged weights", judged="quality"),
        Rung("pruned", "pruned (30% of the channels)", judged="latency"),
        Rung("int8", "exported in int8, served", judged="latency"),
    ),
    published=(
        Published("ResNet-50, an iteration: 1.5 → 0.3 s", 0.3 / 1.5, "iteration", UNNAMED),
        Published("ResNet-50, memory: 10 → 4 GB", 4 / 10, "memory", UNNAMED),
        Published("ResNet-50, a prediction, int8: 200 → 15 ms", 15 / 200, "latency", UNNAMED),
    ),
)


def probe(impl, work: Work, batches: list) -> dict[str, dict]:
    """One training with `work.settings["rungs"]`."""
    settings, recipe = work.settings, work.task.recipe
    size = work.task.model.input_shape[0]

    def make(build):
        return impl.ladders.image_classification.Training(
            build,
            settings["photos"],
            rungs=tuple(settings["rungs"]),
            image_size=size,
            batch_size=work.batch_size,
            learning_rate=recipe.learning_rate,
            momentum=recipe.momentum,
            seed=settings["seed"],
        )

    calibration, _ = arrays(settings["photos"], size, training.CALIBRATION)
    return training.measure(
        impl,
        work,
        batches,
        make,
        batch_size=work.batch_size,
        epochs=settings["epochs"],
        calibration=calibration,
        test=arrays(settings["test"], size),
    )


def arrays(folder: str, size: int, most: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Photos of a folder, each scaled to `size` pixels, and labels, in the network's layout."""
    paths, labels, _ = list_images(Path(folder))
    chosen = np.linspace(0, len(paths) - 1, most or len(paths)).astype(int)
    form = ImageForm(size, MEAN, STD)
    rows = [_scaled(paths[place], size) * form.scale + form.offset for place in chosen]
    return np.stack(rows).reshape(-1, size, size, 3).astype(np.float32), labels[chosen]


def _scaled(path: Path, size: int) -> np.ndarray:
    """A photo's pixels, 0 to 255, as rows (size, 3 * size)."""
    image = Image.fromarray(decode_rgb(path)).resize((size, size), Image.BILINEAR)
    return np.asarray(image, np.float32).reshape(size, 3 * size)
