"""What the tests of the input pipelines share: folders of images, what to expect, the workers."""

import contextlib
import functools
import os
import re
import struct
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from PIL import Image

from shared.epochs import Epochs, crop_box
from shared.images import decode_rgb, list_images
from shared.photos import make_photos
from tests import workers

MEAN, STD = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
SIZE, BATCH, SEED = 224, 4, 5
# Images of another form than ImageNet's.
FORM = {"image_size": 48, "mean": (0.1, 0.2, 0.3), "std": (0.5, 0.4, 0.6)}
RESUMED = 6  # batches: the third of the second epoch
BAD = (
    "16 bits.png",
    "animated.gif",
    "animated.webp",
    "empty.jpg",
    "huge.jpg",
    "no image.jpg",
    "really 16 bits.jpg",
    "really a png.jpg",
    "truncated.jpg",
    "unreadable.jpg",
)


@functools.cache
def evidence() -> SimpleNamespace:
    """What the worker of each framework found, and the folders that it read. Once a session."""
    keep = folder_for_all()
    top = Path(keep.name)
    good = make_photos(top, images=13, size=300, seed=0)
    bad = damaged(good, top / "Bilder 图 ß")
    (top / "empty").mkdir()
    (top / "one class" / "only").mkdir(parents=True)
    (top / "one class" / "only" / "photo.jpg").write_bytes(list_images(good)[0][0].read_bytes())
    found = run_workers("input.folder_worker", top, good, bad)
    return SimpleNamespace(keep=keep, good=good, bad=bad, found=found)


def run_workers(worker: str, top: Path, *arguments) -> dict[str, dict]:
    """What a worker of each framework found: both at once, images in files in `top`."""
    files = {name: top / f"{name}.npz" for name in ("pt", "tf")}
    found = workers.run(worker, files, lambda name: [*arguments, files[name]])
    return {name: found[name] | {"images": dict(np.load(file))} for name, file in files.items()}


def scenario(found: dict, side: str, name: str) -> dict:
    """What a scenario of a side found; fails with its traceback where it raised."""
    if "error" in found[side][name]:
        pytest.fail(found[side][name]["error"])
    return found[side][name]


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
    # The loaders decode JPEG alone; arrays are made of the others, see test_shards.
    deep = Image.fromarray(np.asarray(photo.convert("L")).astype(np.uint16) * 257)
    frames = {"save_all": True, "append_images": [photo.rotate(90)]}
    deep.save(first / "16 bits.png")
    photo.save(second / "animated.gif", **frames)
    photo.save(first / "animated.webp", **frames)
    (first / "empty.jpg").write_bytes(b"")
    (second / "huge.jpg").write_bytes(claiming(data, 65_000))
    (second / "no image.jpg").write_text("This is not a photo. " * 50)
    deep.save(second / "really 16 bits.jpg", "PNG")
    photo.save(first / "really a png.jpg", "PNG")
    (second / "truncated.jpg").write_bytes(data[: len(data) // 4])
    (first / "unreadable.jpg").write_bytes(data)
    (first / "unreadable.jpg").chmod(0)
    return folder


def claiming(jpeg: bytes, size: int) -> bytes:
    """A JPEG whose header tells of so many rows and columns."""
    frame = jpeg.index(b"\xff\xc0") + 5
    return jpeg[:frame] + struct.pack(">HH", size, size) + jpeg[frame + 4 :]


def folder_for_all() -> tempfile.TemporaryDirectory:
    """A folder that `ordinary_user` may read, outside the session's own, which lets nobody in."""
    folder = tempfile.TemporaryDirectory(dir=os.environ["PYTEST_DEBUG_TEMPROOT"])
    Path(folder.name).chmod(0o755)
    return folder


@contextlib.contextmanager
def ordinary_user():
    """The superuser may read everything; lay that down for a while.

    Sockets of a loader's processes then go where everybody may write, since the session's own
    folder lets nobody else in.
    """
    if os.geteuid() != 0:
        yield
        return
    scratch, tempfile.tempdir = tempfile.tempdir, os.environ["PYTEST_DEBUG_TEMPROOT"]
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)
        tempfile.tempdir = scratch


@functools.cache
def expected(folder: Path, epoch: int, size: int = SIZE) -> SimpleNamespace:
    """What every loader has to give in an epoch, from Pillow: grey levels, labels, paths."""
    paths, labels, _ = list_images(folder)
    images, kept = [], []
    for rows, numbers in Epochs(len(paths), batch_size=1, seed=SEED).batches(epoch):
        path = paths[rows[0]]
        if path.name not in BAD:
            images.append(reference(path, numbers[0].tolist(), size))
            kept.append(rows[0])
    return SimpleNamespace(
        images=np.stack(images), labels=labels[kept].tolist(), paths=[paths[row] for row in kept]
    )


def reference(path: Path, numbers: list[float], size: int = SIZE) -> np.ndarray:
    """The crop of a file in grey levels, float64 (size, size, 3)."""
    pixels = decode_rgb(path)
    top, left, height, width = crop_box(*pixels.shape[:2], numbers)
    crop = Image.fromarray(pixels[top : top + height, left : left + width])
    image = crop.resize((size, size), Image.Resampling.BILINEAR)
    if numbers[-1] < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return np.asarray(image, dtype=np.float64)


def levels(x: np.ndarray, mean: tuple = MEAN, std: tuple = STD) -> np.ndarray:
    """Normalised images (n, size, size, 3) in grey levels."""
    return (x * np.array(std) + np.array(mean)) * 255


def shared_memory() -> set[str]:
    """What lies in /dev/shm, but for what other programs' living processes have there."""
    if not os.path.isdir("/dev/shm"):
        return set()
    ours = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}

    def is_others(name: str) -> bool:
        of_torch = re.match(r"torch_(\d+)_", name)  # the process that made it
        return (
            bool(of_torch) and int(of_torch[1]) not in ours and psutil.pid_exists(int(of_torch[1]))
        )

    return {name for name in os.listdir("/dev/shm") if not is_others(name)}
