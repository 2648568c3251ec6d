"""Handwritten digits over photos: scikit-learn's 1,797 digits and its two sample photos.

No original digit and no pixel of a photo is in both splits. A digit is blended into a photo as
MNIST-M was made (Ganin et al., 2016, "Domain-Adversarial Training of Neural Networks", section
5.2.4): each channel becomes its distance from the digit's value.
"""

from __future__ import annotations

import numpy as np
from PIL import Image

PHOTOS = ("china", "flower")
TRAINED = 0.75  # share of a photo's columns, from the left, that the training split is cut from

Splits = dict[str, list[np.ndarray]]


def originals() -> tuple[np.ndarray, np.ndarray]:
    """The digits, float32 (1797, 8, 8) in [0, 1], and their labels, int64."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return (images.reshape(-1, 8, 8) / 16.0).astype(np.float32), labels.astype(np.int64)


def split_originals(count: int, random: np.random.Generator) -> dict[str, np.ndarray]:
    """Give each of `count` originals to one split, in random order: a third to the test split."""
    order = random.permutation(count)
    return {"test": order[: count // 3], "train": order[count // 3 :]}


def photo_parts() -> Splits:
    """Of each photo a part for each split, float32 (height, width, 3) in [0, 1].

    Two photos are too few to give each split its own, so each is cut in two.
    """
    from sklearn.datasets import load_sample_image

    parts: Splits = {"train": [], "test": []}
    for name in PHOTOS:
        pixels = load_sample_image(f"{name}.jpg").astype(np.float32) / 255.0
        cut = round(TRAINED * pixels.shape[1])
        parts["train"].append(pixels[:, :cut])
        parts["test"].append(pixels[:, cut:])
    return parts


def background(parts: list[np.ndarray], size: int, random: np.random.Generator) -> np.ndarray:
    """A random square of `size` pixels of one of the parts, a copy, mirrored every other time."""
    part = parts[random.integers(len(parts))]
    top, left = (random.integers(0, free - size + 1) for free in part.shape[:2])
    square = part[top : top + size, left : left + size]
    return (square[:, ::-1] if random.integers(2) else square).copy()


def scaled(digit: np.ndarray, height: int, width: int) -> np.ndarray:
    """A digit in [0, 1] at another size, bilinear."""
    return np.asarray(Image.fromarray(digit).resize((width, height), Image.BILINEAR))


def blend(canvas: np.ndarray, digit: np.ndarray, top: int, left: int) -> None:
    """Draw a digit into a canvas (height, width, 3), in place: |canvas - digit|."""
    height, width = digit.shape
    region = canvas[top : top + height, left : left + width]
    np.abs(region - digit[..., None], out=region)
