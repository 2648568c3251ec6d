"""What the tests of the input pipelines share: folders of images, what to expect, the workers."""

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from PIL import Image

from shared.epochs import Epochs, crop_box
from shared.photos import decode_rgb, list_images, make_photos

ROOT = Path(__file__).resolve().parent.parent
MEAN, STD = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
SIZE, BATCH, SEED = 224, 4, 5
RESUMED = 6  # batches: the third of the second epoch
BAD = ("empty.jpg", "no image.jpg", "really a png.jpg", "truncated.jpg")
TIMEOUT_S = 300


@functools.cache
def evidence() -> SimpleNamespace:
    """What the worker of each framework found, and the folders that it read. Once a session."""
    keep = tempfile.TemporaryDirectory()
    top = Path(keep.name)
    good = make_photos(top, images=13, size=300, seed=0)
    bad = damaged(good, top / "Bilder 图 ß")
    workers = {name: _start(name, top, good, bad) for name in ("pt", "tf")}
    found = {}
    for name, worker in workers.items():
        try:
            output, errors = worker.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            worker.kill()
            output, errors = worker.communicate()
        assert worker.returncode == 0, f"{name}: {errors[-3000:]}"
        found[name] = json.loads(output.splitlines()[-1]) | {
            "images": dict(np.load(top / f"{name}.npz"))
        }
    return SimpleNamespace(keep=keep, good=good, bad=bad, found=found)


def _start(name: str, top: Path, good: Path, bad: Path) -> subprocess.Popen:
    environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_USE_LEGACY_KERAS": "0"}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.input_pipeline_worker", name, good, bad, top / f"{name}.npz"],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def damaged(good: Path, folder: Path) -> Path:
    """A folder with images that can be read, of every kind of JPEG, and some that can't."""
    paths, _, _ = list_images(good)
    first, second = folder / "a class", folder / "日本"
    first.mkdir(parents=True)
    second.mkdir()
    for number, path in enumerate(paths[:7]):
        (first if number % 2 else second).joinpath(f"photo {number}.jpg").write_bytes(
            path.read_bytes()
        )
    data = paths[0].read_bytes()
    photo = Image.open(paths[1])
    photo.convert("L").save(second / "gray.jpg", quality=90)
    photo.convert("CMYK").save(first / "cmyk.JPG", "JPEG", quality=90)
    photo.save(first / "progressive.jpeg", "JPEG", quality=90, progressive=True)
    (first / BAD[0]).write_bytes(b"")
    (second / BAD[1]).write_text("This is not a photo. " * 50)
    photo.save(first / BAD[2], "PNG")
    (second / BAD[3]).write_bytes(data[: len(data) // 4])
    return folder


@functools.cache
def expected(folder: Path, epoch: int) -> SimpleNamespace:
    """What every loader has to give in an epoch, from Pillow: grey levels, labels, paths."""
    paths, labels, _ = list_images(folder)
    images, kept = [], []
    for rows, numbers in Epochs(len(paths), batch_size=1, seed=SEED).batches(epoch):
        path = paths[rows[0]]
        if path.name not in BAD:
            images.append(reference(path, numbers[0].tolist()))
            kept.append(rows[0])
    return SimpleNamespace(
        images=np.stack(images), labels=labels[kept].tolist(), paths=[paths[row] for row in kept]
    )


def reference(path: Path, numbers: list[float]) -> np.ndarray:
    """The crop of a file in grey levels, float64 (SIZE, SIZE, 3)."""
    pixels = decode_rgb(path)
    top, left, height, width = crop_box(*pixels.shape[:2], numbers)
    crop = Image.fromarray(pixels[top : top + height, left : left + width])
    image = crop.resize((SIZE, SIZE), Image.Resampling.BILINEAR)
    if numbers[-1] < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return np.asarray(image, dtype=np.float64)


def levels(x: np.ndarray) -> np.ndarray:
    """Normalised images (n, SIZE, SIZE, 3) in grey levels."""
    return (x * STD + MEAN) * 255
