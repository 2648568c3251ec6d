"""Real photos without a download: crops of scikit-learn's two sample photos.

`make_photos` writes JPEG files, a sub-folder a class, so that a pipeline has real files to decode;
`images.py` reads such folders, and the user's own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import numpy as np
from PIL import Image

from shared.atomic import whole_folder

PHOTOS = ("china", "flower")  # scikit-learn's, 427 x 640 pixels
SIDES = ("left", "middle", "right")
CLASSES = tuple(f"{photo}-{side}" for photo in PHOTOS for side in SIDES)


def make_photos(folder: Path, *, images: int, size: int, seed: int) -> Path:
    """Write JPEG crops of two real photos below `folder` unless they are there; return where.

    It has a sub-folder for each of the six classes (which photo, and the left, middle or right part
    of it), each with its share of the `images`. Height and width are drawn apart, from 3/4 to 5/4
    of `size`; quality 90, chroma halved in both directions (4:2:0). The same settings give the same
    bytes. The name of the folder stands for the settings, for this code and for the versions of
    Pillow and scikit-learn. It appears only when it is complete, whatever interrupts this and
    whoever else makes the same images.

    Raises ValueError for fewer images than classes, and for a size that the photos are too small
    for.
    """
    if images < len(CLASSES):
        raise ValueError(f"images must be at least {len(CLASSES)}, one a class, not {images}")
    if not 8 <= size <= 342:
        raise ValueError(f"size must be from 8 to 342 (photos of 427 x 640 pixels), not {size}")
    made_by = hashlib.sha256(Path(__file__).read_bytes())
    versions = version("pillow"), version("scikit-learn")
    made_by.update(repr((images, size, seed, versions)).encode())
    target = Path(folder) / f"photos-{made_by.hexdigest()[:12]}"
    if target.is_dir():
        return target
    photos = _photos()
    with whole_folder(target) as whole:
        for name in CLASSES:
            (whole / name).mkdir()
        for number, (name, photo, box) in enumerate(_crops(images, size, seed)):
            crop = photos[photo].crop(box)
            path = whole / name / f"{number:06}.jpg"
            crop.save(path, "JPEG", quality=90, subsampling="4:2:0")
    return target


def _photos() -> dict[str, Image.Image]:
    from sklearn.datasets import load_sample_image

    return {name: Image.fromarray(load_sample_image(f"{name}.jpg")) for name in PHOTOS}


def _crops(images: int, size: int, seed: int) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Class, photo and box (left, top, right, bottom) of each image."""
    random = np.random.default_rng(seed)
    for number in range(images):
        name = CLASSES[number % len(CLASSES)]
        photo, side = name.split("-")
        height, width = (int(n) for n in random.integers(size * 3 // 4, size * 5 // 4 + 1, 2))
        free = 640 - width
        first = free * SIDES.index(side) // len(SIDES)
        last = free * (SIDES.index(side) + 1) // len(SIDES)
        left = int(random.integers(first, last + 1))
        top = int(random.integers(0, 427 - height + 1))
        yield name, photo, (left, top, left + width, top + height)


def crop_arrays(images: int, *, size: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Such crops as arrays, each scaled to `size` by `size` pixels, without files.

    Returns uint8 (images, size, size, 3) and labels, int64: places in CLASSES.
    """
    photos, pixels, labels = _photos(), [], []
    for name, photo, box in _crops(images, size, seed):
        pixels.append(np.asarray(photos[photo].resize((size, size), Image.BILINEAR, box)))
        labels.append(CLASSES.index(name))
    return np.stack(pixels), np.array(labels, np.int64)
