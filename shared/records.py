"""Samples in files that are read from front to back, or mapped: tar, TFRecord and arrays.

A sample is a row of its data set, an image and a label. What each form holds:

- "tar": POSIX ustar with two members a sample, `000000012.jpg` and `000000012.cls` (the label in
  digits), as the webdataset convention has it. Images are the bytes of JPEG files.
- "tfrecord": TensorFlow's record files of `tf.train.Example`, with the features `image/encoded`
  (the bytes of a JPEG file), `image/class/label` and `image/row`. They are written here without
  TensorFlow: the framing is described in its guide "TFRecord and tf.train.Example", the messages in
  `tensorflow/core/example/example.proto`, CRC-32C in RFC 3720, appendix B.4.
- "arrays": the pixels of all images, one after the other, as one uint8 array, and an int64 array of
  (row, label, height, width), both as .npy, so that they can be mapped into memory. Pixels are
  those of `images.decode_rgb`; nothing is resized.

`write` makes the files of one shard, `read_tar` and `map_arrays` read them. TFRecord files are read
by TensorFlow.
"""

from __future__ import annotations

import re
import struct
import tarfile
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import BinaryIO

import numpy as np

SUFFIXES = {
    "tar": (".tar",),
    "tfrecord": (".tfrecord",),
    "arrays": (".pixels.npy", ".index.npy"),
}
MAX_BYTES = 1 << 28  # of one image's file: more is no photo

Sample = tuple[int, int, bytes | np.ndarray]  # row, label, and a JPEG file or its pixels


def write(form: str, files: list[BinaryIO], samples: Iterable[Sample]) -> list[int]:
    """Write samples into the files of one shard, opened in the order of SUFFIXES; return rows."""
    return {"tar": _write_tar, "tfrecord": _write_tfrecord, "arrays": _write_arrays}[form](
        *files, samples
    )


# Tar ----------------------------------------------------------------------------------------


def _write_tar(file: BinaryIO, samples: Iterable[Sample]) -> list[int]:
    rows = []
    for row, label, image in samples:
        for name, data in ((f"{row:09}.jpg", image), (f"{row:09}.cls", b"%d" % label)):
            member = tarfile.TarInfo(name)  # of 1970, of nobody: the same bytes each time
            member.size = len(data)
            file.write(member.tobuf(tarfile.USTAR_FORMAT))
            file.write(data + bytes(-len(data) % tarfile.BLOCKSIZE))
        rows.append(row)
    file.write(bytes(2 * tarfile.BLOCKSIZE))
    return rows


def read_tar(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Row, label and JPEG of each sample of a tar, as it is read from front to back.

    Nothing is unpacked, and only what `write` makes is taken: regular members with these names, in
    this order, whose headers have the right checksum. ValueError for anything else, with the path
    and the reason. What it does not notice is a flipped bit within an image; `shards.py` keeps a
    checksum for that.
    """
    with open(path, "rb") as file:
        while (header := file.read(tarfile.BLOCKSIZE)) != bytes(tarfile.BLOCKSIZE):
            row, image = _member(path, file, header, "jpg")
            same, label = _member(path, file, file.read(tarfile.BLOCKSIZE), "cls")
            if same != row or not re.fullmatch(rb"\d{1,18}", label):
                raise ValueError(f"{path}: sample {row:09} has no label")
            yield row, int(label), image


def _member(path: Path, file: BinaryIO, header: bytes, kind: str) -> tuple[int, bytes]:
    try:
        member = tarfile.TarInfo.frombuf(header, "ascii", "strict")
    except (tarfile.HeaderError, UnicodeError) as error:
        raise ValueError(f"{path}: at byte {file.tell() - len(header)}: {error}") from None
    name = re.fullmatch(rf"(\d{{9}})\.{kind}", member.name)
    if not name or member.type != tarfile.REGTYPE or not 0 < member.size <= MAX_BYTES:
        raise ValueError(f"{path}: member {member.name!r} is no sample's .{kind}")
    data = file.read(member.size)
    padding = -member.size % tarfile.BLOCKSIZE
    if len(data) + len(file.read(padding)) < member.size + padding:
        raise ValueError(f"{path}: is truncated within {member.name!r}")
    return int(name[1]), data


# TFRecord -----------------------------------------------------------------------------------


def _write_tfrecord(file: BinaryIO, samples: Iterable[Sample]) -> list[int]:
    rows = []
    for row, label, image in samples:
        data = _example({"image/class/label": label, "image/encoded": image, "image/row": row})
        length = struct.pack("<Q", len(data))
        file.write(length + _masked_crc(length) + data + _masked_crc(data))
        rows.append(row)
    return rows


def _masked_crc(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def crc32c(data: bytes) -> int:
    """The Castagnoli checksum of `data`, two bytes at a time."""
    table, crc = _crc_table(), 0xFFFFFFFF
    for (pair,) in struct.iter_unpack("<H", data[: len(data) & ~1]):
        crc = table[(crc ^ pair) & 0xFFFF] ^ crc >> 16
    for byte in data[len(data) & ~1 :]:
        crc = table[((crc ^ byte) & 0xFF) << 8] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


@cache
def _crc_table() -> list[int]:
    """What 16 bits do to the checksum. Eight bits alone do what they do as the upper half."""
    table = np.arange(1 << 16, dtype=np.uint32)
    for _ in range(16):
        table = table >> 1 ^ np.where(table & 1, np.uint32(0x82F63B78), np.uint32(0))
    return table.tolist()


def _example(features: dict[str, int | bytes]) -> bytes:
    """A `tf.train.Example` in protobuf's wire format, with one value a feature."""
    entries = b""
    for name, value in features.items():
        # Feature is a oneof: bytes_list is field 1, int64_list field 3 with a packed varint.
        kind = _field(1, _field(1, value)) if isinstance(value, bytes) else None
        feature = kind or _field(3, _field(1, _varint(value)))
        entries += _field(1, _field(1, name.encode()) + _field(2, feature))
    return _field(1, entries)


def _field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


# Arrays -------------------------------------------------------------------------------------


def _write_arrays(pixels: BinaryIO, index: BinaryIO, samples: Iterable[Sample]) -> list[int]:
    """How many pixels there are is known at the end: NumPy's header leaves room for that."""
    entries, size = [], 0
    _pixels_header(pixels, 0)
    for row, label, image in samples:
        pixels.write(image.tobytes())
        entries.append((row, label, *image.shape[:2]))
        size += image.size
    pixels.seek(0)
    _pixels_header(pixels, size)
    np.save(index, np.array(entries, np.int64).reshape(-1, 4), allow_pickle=False)
    return [entry[0] for entry in entries]


def _pixels_header(file: BinaryIO, size: int) -> None:
    form = {"descr": "|u1", "fortran_order": False, "shape": (size,)}
    np.lib.format.write_array_header_1_0(file, form)


def map_arrays(pixels: Path, index: Path) -> tuple[np.ndarray, np.ndarray]:
    """The pixels (bytes,) uint8, mapped read-only, and the entries (n, 4) int64 of a shard.

    An image is the next height * width * 3 of the pixels, (height, width, 3). Nothing is executed
    (no pickle). ValueError where the two do not fit each other, with the path.
    """
    entries = np.load(index, allow_pickle=False)
    mapped = np.load(pixels, mmap_mode="r", allow_pickle=False)
    expected = int(entries[:, 2:].prod(axis=1).sum()) * 3
    if mapped.dtype != np.uint8 or mapped.shape != (expected,):
        raise ValueError(f"{pixels}: has {mapped.shape} of {mapped.dtype}, not {expected} bytes")
    return mapped, entries
