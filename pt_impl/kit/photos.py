"""Photos: the work on one, what becomes of a file that can't be read, and loaders of their batches.

Twin: `tf_impl/kit/photos.py`.
Where the frameworks differ: workers here are Python, which goes on after an error; a graph ends at
one, so that there a file that can't be read is found afterwards.
"""

import os
import struct
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.io import decode_jpeg
from torchvision.transforms.v2 import functional as F

from shared.epochs import ImageForm, crop_box

MAX_PIXELS = 1024**3 // 4 // 3  # as Pillow warns at: 256 MiB of RGB
UNREADABLE = (OSError, RuntimeError, SyntaxError, ValueError, Image.DecompressionBombError)
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # JPEG's markers of a size
_WITHOUT_LENGTH = frozenset([0x00, 0x01, *range(0xD0, 0xDA), 0xFF])


def load_photo(path: str, numbers: Sequence[float], size: int, decoder: str) -> np.ndarray:
    """Return the photo in a file as `decode_photo` does.

    Raises ValueError with the path and the reason for a file that can't be read. What libjpeg mends
    in silence, such as flipped bits within an image, goes unnoticed.
    """
    try:
        return decode_photo(path, numbers, size, decoder)
    except UNREADABLE as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{path}: {type(error).__name__}: {reason}") from None


def decode_photo(
    jpeg, numbers: Sequence[float], size: int, decoder: str = "standard"
) -> np.ndarray:
    """Decode, crop, resize and flip a photo: uint8 (size, size, 3).

    jpeg: a path, or for the "standard" decoder (Pillow) also an open file. The "fast" one is
    torchvision's. numbers: those of its row from `shared.epochs.draw`.
    """
    if decoder == "fast":
        data = np.fromfile(jpeg, np.uint8)
        refuse_huge_jpeg(data)
        image = decode_jpeg(torch.from_numpy(data), mode="RGB")
        height, width = image.shape[1:]
    else:
        with Image.open(jpeg, formats=["JPEG"]) as file:
            image = file if file.mode == "RGB" else file.convert("RGB")
            image.load()
        width, height = image.size
    image = F.resized_crop(image, *crop_box(height, width, numbers), [size, size])
    image = F.horizontal_flip(image) if numbers[-1] < 0.5 else image
    return image.permute(1, 2, 0).numpy() if decoder == "fast" else np.asarray(image)


def crop_photo(pixels: np.ndarray, numbers: np.ndarray, size: int) -> np.ndarray:
    """Crop, resize and flip a decoded photo, uint8 (height, width, 3). Reads its crop only."""
    top, left, high, wide = crop_box(*pixels.shape[:2], numbers.tolist())
    crop = Image.fromarray(pixels[top : top + high, left : left + wide])
    found = np.asarray(crop.resize((size, size), Image.Resampling.BILINEAR))
    return found[:, ::-1] if numbers[-1] < 0.5 else found


def normalise_into(out: np.ndarray, pixels: np.ndarray, form: ImageForm) -> None:
    """Write pixels, uint8 (size, size, 3), to `out`, float32 (size, 3 * size), normalised."""
    np.multiply(pixels.reshape(out.shape), form.scale, out=out)
    np.add(out, form.offset, out=out)


def refuse_huge_jpeg(data: np.ndarray) -> None:
    """Raise ValueError where the header of a JPEG (uint8) tells of more than MAX_PIXELS pixels.

    For torchvision's decoder, which has no limit. The decoder itself refuses an incomplete header.
    What is between two markers is skipped, as in libjpeg.
    """
    raw, place = data.tobytes(), 2
    while 0 <= (place := raw.find(b"\xff", place)) <= len(raw) - 9:
        marker = raw[place + 1]
        if marker in _FRAMES:
            height, width = struct.unpack_from(">HH", raw, place + 5)
            if width * height > MAX_PIXELS:
                raise ValueError(f"its header: {width} x {height} pixels, {MAX_PIXELS:,} at most")
            return
        single = marker in _WITHOUT_LENGTH
        place += 1 if single else 2 + struct.unpack_from(">H", raw, place + 2)[0]


class PhotoLoader:
    """Gives batches (x, y) on the GPU if there is one; an iteration is an epoch.

    Attributes:
        skipped: the lines that say which samples were left out, and why.
    """

    def __init__(self, batches: Iterable, on_error: str, form: ImageForm | None = None) -> None:
        """Take the batches of a DataLoader: images, their labels, and lines on what is left out.

        on_error: "raise" ends at the first line, with a ValueError. form: the images are bytes,
        uint8 (n, size, size, 3), which are normalised here, on the GPU if there is one.
        """
        self.skipped: list[str] = []
        self.batches, self._raises = batches, on_error == "raise"
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._form = form and [
            torch.from_numpy(row).to(self._device) for row in (form.scale, form.offset)
        ]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for x, labels, failures in _from_workers(self.batches):
            if failures and self._raises:
                raise ValueError(failures[0])
            self.skipped += failures
            if labels:
                x = x.to(self._device, non_blocking=True)
                y = torch.tensor(labels).to(self._device, non_blocking=True)
                yield self._normalised(x) if self._form else x, y

    def _normalised(self, x: Tensor) -> Tensor:
        """Float32 (n, 3, size, size), channels last in memory."""
        scale, offset = self._form
        # As rows of 3 * size values: over a last axis of three it takes several times as long.
        rows = torch.addcmul(offset, x.view(-1, len(scale)).float(), scale)
        return rows.view(x.shape).permute(0, 3, 1, 2)


def _from_workers(batches: Iterable) -> Iterator:
    """The batches; torch says that a worker died, or else what broke as it handed one over."""
    try:
        yield from batches
    except (EOFError, ConnectionError) as error:
        raise RuntimeError("DataLoader worker ended while it handed over a batch") from error


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
