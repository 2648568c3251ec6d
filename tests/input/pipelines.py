"""What the tests of the input pipelines share: folders of images, and what to expect of them."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import re
import struct
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import psutil
from PIL import Image

from shared.epochs import Epochs, crop_box
from shared.images import decode_rgb, list_images

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


class Epoch(NamedTuple):
    """The batches of an epoch: images (n, height, width, channels) and labels."""

    images: list[np.ndarray]
    labels: list[list[int]]

    @property
    def flat(self) -> list[int]:
        """All labels."""
        return [label for labels in self.labels for label in labels]

    def __eq__(self, other: Epoch) -> bool:
        """To the last bit."""
        same = all(map(np.array_equal, self.images, other.images))
        return same and self.labels == other.labels

    def __getitem__(self, batches: slice) -> Epoch:
        return Epoch(*(getattr(self, field)[batches] for field in self._fields))


def array(x) -> np.ndarray:
    """A copy of a batch of images with their channels last."""
    found = np.asarray(x)
    return (found.transpose(0, 2, 3, 1) if found.shape[1] in (1, 3) else found).copy()


def taken(batches) -> Epoch:
    """An epoch of a loader."""
    found = Epoch([], [])
    for x, y in batches:
        found.images.append(array(x))
        found.labels.append(np.asarray(y).tolist())
        assert (found.images[-1].dtype, np.asarray(y).dtype) == (np.float32, np.int64)
    return found


def children(others: Sequence[psutil.Process] = ()) -> list[psutil.Process]:
    """Processes of this one that live, but for others."""
    found = psutil.Process().children(recursive=True)
    return [c for c in found if c not in others and c.status() != psutil.STATUS_ZOMBIE]


def assert_ends_with_its_processes(make: Callable) -> None:
    """A loader with two processes that is left in an epoch leaves none, and no shared memory."""
    before, others, made = shared_memory(), children(), make()
    next(iter(made))
    workers = children(others)
    assert len(workers) == 2
    del made
    gc.collect()
    assert_gone(workers)
    assert shared_memory() <= before


def assert_gone(processes: list[psutil.Process], seconds: float = 10) -> None:
    """They end within so many seconds: who is no child is waited for, too."""
    deadline = time.monotonic() + seconds
    while left := [process for process in processes if _alive(process)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def _alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


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
