"""Folders of images, one sub-folder a class: `photos.py` makes one, others are the user's own.

`list_images` reads any folder of this form. `decode_rgb` is the reference that every decoder in
both frameworks is compared with, and says why a file can't be decoded.

What becomes of images that are not plain 8-bit RGB:
- Grayscale: the value goes into all three channels. 16 bits a channel: the upper eight are kept, as
  libpng does (a plain conversion by Pillow turns 16-bit grayscale white).
- Palette: its colours. An alpha channel or a transparent colour is dropped, as both frameworks'
  decoders do when asked for three channels; nothing is blended.
- CMYK: (255 - C)(255 - K) / 255 for red, and likewise green and blue; colour profiles are ignored.
- Animated GIF, WebP and PNG: the first frame.
- EXIF orientation is ignored: the pixels come as they are stored. TensorFlow has no operator that
  applies it, and a pipeline that turns images in only one framework would not do the same work.
- The content decides, not the name: a PNG named .jpg is decoded. Only the formats in FORMATS are,
  whatever else Pillow knows, since some of those run other programs.
- More than MAX_PIXELS pixels are refused before they are decoded: a small file can hold a huge one.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image, UnidentifiedImageError

from shared.epochs import Epochs

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp")
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP")
MAX_PIXELS = 1024**3 // 4 // 3  # as Pillow warns at: 256 MiB of RGB
_STARTS = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"BM", b"GIF8")


def list_images(folder: Path) -> tuple[list[Path], np.ndarray, list[str]]:
    """Return the images of `folder`, sorted, their labels (int64) and the names of the classes.

    Each sub-folder is a class; a label is the place of its class among the sorted names. Images lie
    in it at any depth; links are followed, each real folder once. An image is what has one of
    SUFFIXES, in any case. Hidden files and folders and all other files are ignored. Nothing is
    opened.

    One class is allowed: a pipeline can be run and timed on it, and whether a task needs a second
    class is for the task to say.

    Raises FileNotFoundError, NotADirectoryError or PermissionError with the folder's name; and
    ValueError for a folder that is empty or has no sub-folder, for a class without images, for
    images beside the sub-folders, which have no class, and for a link or pipe named as an image
    that leads to no file.
    """
    folder = Path(folder)
    entries = _entries(folder)
    classes = [entry.name for entry in entries if _leads(entry.is_dir)]
    loose = [entry.name for entry in entries if _named_as_image(entry) and not _leads(entry.is_dir)]
    if not entries:
        raise ValueError(f"{folder}: is empty, it needs a sub-folder of images for each class")
    if loose:
        raise ValueError(
            f"{folder}: {len(loose)} images such as {loose[0]!r} are in no class: put each into a "
            "sub-folder with the name of its class"
        )
    if not classes:
        raise ValueError(f"{folder}: has no sub-folder, it needs one with images for each class")
    by_class = [list(_images_below(folder / name, set())) for name in classes]
    empty = [name for name, paths in zip(classes, by_class, strict=True) if not paths]
    if empty:
        raise ValueError(
            f"{folder}: {len(empty)} of {len(classes)} classes without images, such as "
            f"{empty[0]!r} (an image ends with {', '.join(SUFFIXES)})"
        )
    labels = np.repeat(np.arange(len(classes), dtype=np.int64), [len(paths) for paths in by_class])
    return [path for paths in by_class for path in paths], labels, classes


def _entries(folder: Path) -> list[os.DirEntry]:
    """What `folder` holds and does not hide, by name."""
    try:
        with os.scandir(folder) as found:
            return sorted((e for e in found if not e.name.startswith(".")), key=lambda e: e.name)
    except FileNotFoundError:
        raise FileNotFoundError(f"{folder}: no such folder") from None
    except NotADirectoryError:
        raise NotADirectoryError(f"{folder}: is not a folder") from None
    except PermissionError:
        raise PermissionError(f"{folder}: no permission to read this folder") from None


def _named_as_image(entry: os.DirEntry) -> bool:
    return entry.name.lower().endswith(SUFFIXES)


def _leads(to: Callable[[], bool]) -> bool:
    """What an entry's `is_dir` or `is_file` says; a link to itself leads to neither."""
    try:
        return to()
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return False


def _images_below(folder: Path, seen: set[str]) -> Iterator[Path]:
    """In the order of `sorted`, since each folder comes in the order of its names."""
    real = os.path.realpath(folder)
    if real in seen:  # a link back up, which would never end, or a second link to one folder
        return
    seen.add(real)
    for entry in _entries(folder):
        if _leads(entry.is_dir):
            yield from _images_below(Path(entry.path), seen)
        elif _named_as_image(entry):
            if not _leads(entry.is_file):
                raise ValueError(f"{entry.path}: is named like an image, but is not a file")
            yield Path(entry.path)


def open_folder(
    source: str | Path,
    batch_size: int,
    seed: int,
    decoder: str = "standard",
    on_error: str = "raise",
    start_batch: int = 0,
) -> tuple[list[str], np.ndarray, Epochs]:
    """Paths and labels (int64) of a folder's images, and their epochs; settings are checked.

    Raises ValueError for a decoder other than "standard" or "fast", an on_error other than "raise"
    or "skip", and where the folder or `Epochs` does.
    """
    for name, value, choices in (
        ("decoder", decoder, ("standard", "fast")),
        ("on_error", on_error, ("raise", "skip")),
    ):
        if value not in choices:
            raise ValueError(f"{name} must be {' or '.join(choices)}, not {value!r}")
    paths, labels, _ = list_images(Path(source))
    epochs = Epochs(len(paths), batch_size=batch_size, seed=seed, start_batch=start_batch)
    return [str(path) for path in paths], labels, epochs


# Decoding -----------------------------------------------------------------------------------


class ImageError(ValueError):
    """An image that can't be decoded. `reason` says why; the message also says which."""

    def __init__(self, name: str, reason: str):
        super().__init__(name, reason)  # both, so that it can be pickled
        self.reason = reason

    def __str__(self) -> str:
        return ": ".join(self.args)


def decode_rgb(source: Path | str | bytes) -> np.ndarray:
    """Decode a file, or the bytes of one, to uint8 (height, width, 3).

    With Pillow: libjpeg-turbo's accurate integer DCT and smooth ("fancy") chroma upsampling, no
    scaling while decoding. The docstring of the module says what becomes of other kinds of images.

    Raises ImageError. Damage is what the decoder notices: PNG has checksums, but a flipped bit
    among JPEG's coefficients is as good as any other value.
    """
    if isinstance(source, bytes):
        return _decode(io.BytesIO(source), "these bytes")
    name = os.fspath(source)
    try:
        # Opening a pipe would wait for somebody to write into it.
        if not stat.S_ISREG(os.stat(name).st_mode):
            raise ImageError(name, "not a regular file")
        file = open(name, "rb")  # noqa: SIM115
    except OSError as error:
        raise ImageError(name, error.strerror or str(error)) from None
    with file:
        return _decode(file, name)


def _decode(file: BinaryIO, name: str) -> np.ndarray:
    start = file.read(16)
    if not start:
        raise ImageError(name, "empty")
    try:
        with Image.open(file, formats=FORMATS) as image:
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise ImageError(name, _too_large(f"{width} x {height}"))
            return _rgb(image)
    except (ImageError, MemoryError):
        raise
    except UnidentifiedImageError:
        known = start.startswith(_STARTS) or start[8:12] == b"WEBP"
        reason = "its header is damaged" if known else f"none of {', '.join(FORMATS)}"
    except Image.DecompressionBombError:
        reason = _too_large("far more")
    except Exception as error:  # a damaged file may raise anything in a decoder
        truncated = "truncated" in str(error).lower()
        reason = "truncated" if truncated else f"damaged ({str(error) or type(error).__name__})"
    raise ImageError(name, reason)


def _too_large(pixels: str) -> str:
    return f"{pixels} pixels, {MAX_PIXELS:,} at most"


def _rgb(image: Image.Image) -> np.ndarray:
    if image.mode.startswith("I;16"):
        gray = (np.asarray(image) >> 8).astype(np.uint8)
        return np.repeat(gray[..., None], 3, axis=2)
    image.info.pop("transparency", None)  # else Pillow warns that it is lost
    return np.array(image.convert("RGB"))
