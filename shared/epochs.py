"""The order in which epochs visit the samples, and the random numbers of their augmentations.

Everything follows from (seed, epoch), a sample's numbers also from its row in the data set. So both
frameworks see the same samples in the same order and cut the same crops, an epoch can be repeated,
and one that was interrupted goes on where it ended.

The numbers are those of a random resized crop (Szegedy et al., 2015, "Going Deeper with
Convolutions", section 6, in the form of torchvision's RandomResizedCrop) and of a horizontal flip.
A sample has `DRAWS` of them, float32:

- `TRIES` areas of the crop as a share of the image, uniform in [0.08, 1);
- `TRIES` aspect ratios, width to height, log-uniform in [3/4, 4/3);
- where the crop begins, from top and left, as shares in [0, 1) of the places there are;
- one in [0, 1): below 1/2 the image is flipped.

Small images, which are in memory, are shifted instead: padded by `SHIFT` pixels on each side and
cut to their size again, as He et al. do (2015, "Deep Residual Learning for Image Recognition",
section 4.2). `shifts` gives the places.

`ImageForm` says what images have in the end: a size, and values less a mean and over a deviation.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

TRIES = 10
DRAWS = 2 * TRIES + 3
SMALLEST_AREA = 0.08
RATIOS = (3 / 4, 4 / 3)
SHIFT = 2
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's, of pixels in [0, 1]


@dataclass(frozen=True)
class ImageForm:
    """What becomes of pixels, 0 to 255: `size` x `size` of them, less `mean` and over `std`.

    mean, std: of red, green and blue, of values in [0, 1]. That is `row * scale + offset` for the
    3 * `size` values of a row: over a last axis of three channels the same arithmetic takes ten
    times as long.

    Raises ValueError for a size below 1, and where there are not three of each or a `std` is not
    positive.
    """

    size: int
    mean: tuple
    std: tuple
    scale: np.ndarray = field(init=False, repr=False, compare=False)
    offset: np.ndarray = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.size < 1 or len(self.mean) != 3 or len(self.std) != 3 or min(self.std) <= 0:
            raise ValueError(
                "image_size must be 1 at least, mean and std three numbers, std positive, not "
                f"{self.size}, {self.mean} and {self.std}"
            )
        mean, std = np.float32(self.mean), np.float32(self.std)
        object.__setattr__(self, "scale", np.tile(1 / (255 * std), self.size))
        object.__setattr__(self, "offset", np.tile(-mean / std, self.size))


def draw(size: int, *, seed: int, epoch: int) -> np.ndarray:
    """The numbers of every row in one epoch, (size, DRAWS) float32."""
    # Another stream: that of the order is [seed, epoch].
    numbers = np.random.default_rng([seed, epoch, 1]).random((size, DRAWS), dtype=np.float32)
    areas, ratios = numbers[:, :TRIES], numbers[:, TRIES : 2 * TRIES]
    low, high = map(math.log, RATIOS)
    areas[:] = SMALLEST_AREA + (1 - SMALLEST_AREA) * areas
    ratios[:] = np.exp(low + (high - low) * ratios)
    return numbers


def shifts(size: int, *, seed: int, epoch: int) -> np.ndarray:
    """Where every row's cut begins in one epoch, from top and left: (size, 2) int64."""
    return np.random.default_rng([seed, epoch, 1]).integers(0, 2 * SHIFT + 1, (size, 2))


class Epochs:
    """The batches of epoch after epoch: pairs of rows (int64) and their numbers from `draw`.

    Every iteration is the next epoch; `epoch` is the number of the one to come. `start_batch` is
    the number of batches that have been seen before, over all epochs: the first iteration is what
    is left of its epoch. The last batch of an epoch may be smaller.

    Raises ValueError where there is no sample, batch_size is below 1 or start_batch negative.
    """

    def __init__(
        self,
        size: int,
        *,
        batch_size: int,
        seed: int,
        start_batch: int = 0,
        draw: Callable[..., np.ndarray] = draw,
    ) -> None:
        if min(size, batch_size) < 1 or start_batch < 0:
            raise ValueError(
                "size and batch_size must be 1 at least and start_batch 0 at least, not "
                f"{size}, {batch_size} and {start_batch}"
            )
        self.size, self.batch_size, self.seed, self.draw = size, batch_size, seed, draw
        self.epoch, self.start = divmod(start_batch, -(-size // batch_size))

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        # With the first batch, since a DataLoader makes iterators that it does not use.
        epoch, start = self.epoch, self.start
        self.epoch, self.start = epoch + 1, 0
        yield from self.batches(epoch, start)

    def batches(self, epoch: int, start: int = 0) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The batches of one epoch from its batch `start` on; changes nothing."""
        # The order that `datasets.batch_order` has.
        order = np.random.default_rng([self.seed, epoch]).permutation(self.size)
        numbers = self.draw(self.size, seed=self.seed, epoch=epoch)
        for first in range(start * self.batch_size, self.size, self.batch_size):
            rows = order[first : first + self.batch_size]
            yield rows, numbers[rows]


def crop_box(height: int, width: int, numbers: Sequence[float]) -> tuple[int, int, int, int]:
    """Top, left, height and width of the crop that a row's numbers cut from an image.

    It has round(sqrt(area * ratio)) by round(sqrt(area / ratio)) pixels, of the first try that lies
    within the image. Where none does, it is the largest centred one with a ratio within bounds.
    """
    for area, ratio in zip(numbers[:TRIES], numbers[TRIES : 2 * TRIES], strict=True):
        pixels = height * width * area
        wide, high = round(math.sqrt(pixels * ratio)), round(math.sqrt(pixels / ratio))
        if 0 < wide <= width and 0 < high <= height:
            top, left = numbers[2 * TRIES : 2 * TRIES + 2]
            return int(top * (height - high + 1)), int(left * (width - wide + 1)), high, wide
    high = min(height, max(1, round(width / RATIOS[0])))
    wide = min(width, max(1, round(height * RATIOS[1])))
    return (height - high) // 2, (width - wide) // 2, high, wide


def open_arrays(
    source: str | Path, batch_size: int, seed: int, start_batch: int = 0
) -> tuple[np.ndarray, np.ndarray, Epochs]:
    """Images and labels of a folder's training split, mapped, and their epochs, with `shifts`.

    Labels are int64, whatever whole numbers the file has. Raises FileNotFoundError for a folder
    without train_x.npy or train_y.npy, and ValueError for images that are not float32 (n, height,
    width, channels), for another number of labels or other labels, and where `Epochs` does.
    """
    x, y = (
        np.load(Path(source) / f"train_{part}.npy", mmap_mode="r", allow_pickle=False)
        for part in ("x", "y")
    )
    if x.ndim != 4 or x.dtype != np.float32 or y.shape != x.shape[:1]:
        raise ValueError(
            f"{source}: needs float32 images (n, height, width, channels) and n labels, not "
            f"{x.dtype} {x.shape} and {y.shape}"
        )
    if y.dtype.kind not in "iu":
        raise ValueError(f"{source}: needs labels that are whole numbers, not {y.dtype}")
    y = y.astype(np.int64, copy=False)
    settings = {"batch_size": batch_size, "seed": seed, "start_batch": start_batch}
    return x, y, Epochs(len(x), **settings, draw=shifts)


def fingerprint(source: str | Path) -> str:
    """The first digits of a checksum over the images of a folder's training split."""
    with open(Path(source) / "train_x.npy", "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]
