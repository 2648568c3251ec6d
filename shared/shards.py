"""Photos in shards, a few large files in place of many small ones: what loaders read of them.

`conversion.py` makes them of a folder of images. A folder of shards holds `manifest.json`: its
settings and classes, and for each shard its rows, what was skipped, and the size and SHA-256 of its
files. `open_shards` opens what is complete. What each form holds, of a row an image and a label:

- "tar": POSIX ustar with two members a sample, `000000012.jpg` and `000000012.cls` (the label in
  digits), as the webdataset convention has it. `read_tar` reads it from front to back.
- "tfrecord": TensorFlow's record files of `tf.train.Example`, with the features `image/encoded`
  (the bytes of a JPEG file), `image/class/label` and `image/row`, which TensorFlow reads.
- "arrays": the pixels of all images, one after the other, as one uint8 array, and an int64 array of
  (row, label, height, width), both as .npy, which `MappedImages` maps into memory.

Every sample keeps its row in the sorted folder, from which its augmentations follow
(`epochs.draw`).
"""

from __future__ import annotations

import hashlib
import json
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import BinaryIO

import numpy as np

SUFFIXES = {
    "tar": (".tar",),
    "tfrecord": (".tfrecord",),
    "arrays": (".pixels.npy", ".index.npy"),
}
MANIFEST = "manifest.json"
VERSION = 1
MAX_BYTES = 1 << 28  # of one image's file: more is no photo


@dataclass(frozen=True)
class Shard:
    """The files of a shard in the order of `SUFFIXES`, and the rows in their order."""

    files: tuple[Path, ...]
    sizes: tuple[int, ...]
    sha256: tuple[str, ...]
    rows: np.ndarray

    def damage(self) -> str | None:
        """Which file is not what was written, and how; None if all are. Reads them."""
        for path, size, sha256 in zip(self.files, self.sizes, self.sha256, strict=True):
            try:
                actual = path.stat().st_size
                if actual != size:
                    kind = "is truncated" if actual < size else "is too long"
                    return f"{path}: {kind}: {actual} bytes, not {size}"
                if checksum(path) != sha256:
                    return f"{path}: is damaged: its SHA-256 is not that of the manifest"
            except OSError as error:
                return f"{path}: {error.strerror}"
        return None


@dataclass(frozen=True)
class Shards:
    """All shards of a folder. `size`: images in it, of which some may have been skipped."""

    size: int
    classes: tuple[str, ...]
    shards: tuple[Shard, ...]
    skipped: tuple[str, ...]

    @property
    def samples(self) -> int:
        """How many there are."""
        return sum(len(shard.rows) for shard in self.shards)

    def order(self, *, seed: int, epoch: int) -> list[Shard]:
        """The shards in the order in which an epoch reads them."""
        # Another stream: [seed, epoch] is that of `Epochs`, [seed, epoch, 1] that of `draw`.
        order = np.random.default_rng([seed, epoch, 2]).permutation(len(self.shards))
        return [self.shards[number] for number in order]


class Shares:
    """The shards of epochs in `count` shares, for processes whose batches are taken in turn.

    A share is every `count`-th shard of the epoch's order, and its last batch may be smaller. Where
    one share is at its end, the turn is the next one's. `images`: in the folder, `Shards.size`.
    `start_batch`: batches seen before, over all epochs.
    """

    def __init__(
        self, shards: Shards, count: int, *, batch_size: int, seed: int, start_batch: int = 0
    ) -> None:
        self.images, self.batch_size, self.seed = shards.size, batch_size, seed
        self._shards, self._count = shards, count
        self._epoch, self._start = 0, start_batch
        # Epochs differ in length: which shards a share has decides how many batches they make.
        while self._start >= sum(self._lengths(self._epoch)):
            self._start -= sum(self._lengths(self._epoch))
            self._epoch += 1

    def next_epoch(self) -> tuple[int, int]:
        """Return the number of the epoch that begins, and of its first batch that was not seen."""
        epoch, start = self._epoch, self._start
        self._epoch, self._start = epoch + 1, 0
        return epoch, start

    def of(self, epoch: int, share: int) -> list[Shard]:
        """The shards of one share."""
        return self._shards.order(seed=self.seed, epoch=epoch)[share :: self._count]

    def turn(self, epoch: int, start: int, place: int = 0) -> tuple[int, int]:
        """The share whose turn comes `place` after that of batch `start`, and what is seen of it.

        That is a number of batches.
        """
        lengths, turn = self._lengths(epoch), 0
        seen = [0 for _ in lengths]
        while sum(seen) < start or seen[turn] == lengths[turn]:
            if seen[turn] < lengths[turn]:
                seen[turn] += 1
            turn = (turn + 1) % self._count
        share = (turn + place) % self._count
        return share, seen[share]

    def _lengths(self, epoch: int) -> list[int]:
        """Batches of each share."""
        shares = (self.of(epoch, share) for share in range(self._count))
        return [ceil(sum(len(s.rows) for s in share) / self.batch_size) for share in shares]


def open_shards(
    folder: str | Path,
    form: str,
    on_error: str = "raise",
    *,
    batch_size: int = 1,
    shuffle_buffer: int = 1,
    start_batch: int = 0,
) -> Shards:
    """Open a complete set of shards of the given form; a loader's settings are checked.

    The shards themselves are not read yet.

    Raises FileNotFoundError where there is no manifest, and ValueError for one that is damaged, not
    finished, of another form or without samples, for an `on_error` other than "raise" or "skip",
    batch_size and shuffle_buffer below 1 and a negative start_batch.
    """
    if on_error not in ("raise", "skip"):
        raise ValueError(f"on_error must be raise or skip, not {on_error!r}")
    if min(batch_size, shuffle_buffer) < 1 or start_batch < 0:
        raise ValueError(
            "batch_size and shuffle_buffer must be 1 at least and start_batch 0 at least, not "
            f"{batch_size}, {shuffle_buffer} and {start_batch}"
        )
    folder = Path(folder)
    manifest = read_manifest(folder)
    if manifest is None:
        raise FileNotFoundError(f"{folder}: holds no {MANIFEST}: make shards with twinbench shards")
    found, entries = manifest["settings"]["form"], manifest["shards"]
    if found != form:
        raise ValueError(f"{folder}: holds shards of the form {found}, not {form}")
    if missing := entries.count(None):
        raise ValueError(
            f"{folder}: {missing} of {len(entries)} shards are missing: run the conversion again"
        )
    opened = _finished(folder, manifest)
    if not opened.samples:
        raise ValueError(f"{folder}: has no samples: none of its images could be stored as {form}")
    return opened


def read_manifest(folder: Path) -> dict | None:
    """Return what a folder's manifest says, None where there is none."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text("utf-8"))
        version = manifest["version"]
        if version == VERSION:
            _finished(folder, manifest)  # has all that is read of it
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise ValueError(f"{path}: is damaged: make the shards again") from None
    if version != VERSION:
        raise ValueError(f"{path}: has version {version}, this is {VERSION}: make the shards again")
    return manifest


def _finished(folder: Path, manifest: dict) -> Shards:
    """The shards of a manifest, but those that are missing."""
    entries = [entry for entry in manifest["shards"] if entry is not None]
    shards = tuple(shard_of(folder, entry) for entry in entries)
    count = len(SUFFIXES[manifest["settings"]["form"]])
    if any(len(shard.files) != count for shard in shards):
        raise KeyError
    skipped = tuple(line for entry in entries for line in entry["skipped"])
    return Shards(int(manifest["size"]), tuple(manifest["classes"]), shards, skipped)


def shard_of(folder: Path, entry: dict) -> Shard:
    """Return the shard that an entry of the manifest describes."""
    names, facts = zip(*entry["files"].items(), strict=True)
    if any(Path(name).name != name for name in names):  # a path to elsewhere
        raise KeyError
    sizes, sha256 = zip(*((fact["bytes"], fact["sha256"]) for fact in facts), strict=True)
    if not all(isinstance(size, int) for size in sizes):
        raise TypeError
    rows = np.array(entry["rows"], np.int64)
    if rows.ndim != 1:
        raise TypeError
    return Shard(tuple(folder / name for name in names), sizes, sha256, rows)


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class MappedImages:
    """The images of shards of arrays by their row in the folder, mapped when they are first used.

    All files are read once, for their checksums. `damaged`: row -> what is wrong with its shard.
    """

    def __init__(self, shards: Shards) -> None:
        self.size, self.damaged = shards.size, {}
        self._shards, self._maps = shards.shards, {}
        # Shard, place of the first byte, label, height and width; -1 for what is not there.
        self._table = np.full((shards.size, 5), -1)
        for number, shard in enumerate(shards.shards):
            if damage := shard.damage():
                self.damaged |= dict.fromkeys(shard.rows.tolist(), damage)
                continue
            _, entries = map_arrays(*shard.files)
            lengths = entries[:, 2:].prod(axis=1) * 3
            places = (np.full_like(lengths, number), np.cumsum(lengths) - lengths)
            self._table[entries[:, 0]] = np.column_stack((*places, entries[:, 1:]))

    def has(self, rows: np.ndarray) -> np.ndarray:
        """Which of the rows are there: neither damaged nor skipped by the conversion."""
        return self._table[rows, 0] >= 0

    def image(self, row: int) -> tuple[np.ndarray, int]:
        """Pixels, uint8 (height, width, 3), of which nothing is read until it is used; label."""
        number, first, label, height, width = self._table[row].tolist()
        if number not in self._maps:
            self._maps[number], _ = map_arrays(*self._shards[number].files)
        pixels = self._maps[number][first : first + height * width * 3]
        return pixels.reshape(height, width, 3), label

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_maps": {}}  # another process maps the files itself


def map_arrays(pixels: Path, index: Path) -> tuple[np.ndarray, np.ndarray]:
    """The pixels (bytes,) uint8, mapped read-only, and the entries (n, 4) int64 of a shard.

    An image is the next height * width * 3 of the pixels, (height, width, 3). Nothing is executed
    (no pickle). ValueError where one is damaged or the two do not fit each other, with the path.
    """
    entries, mapped = _array(index), _array(pixels, mmap_mode="r")
    if entries.ndim != 2 or entries.shape[1] != 4 or entries.dtype != np.int64:
        raise ValueError(f"{index}: has {entries.shape} of {entries.dtype}, not (n, 4) of int64")
    if (entries[:, 2:] < 0).any():
        raise ValueError(f"{index}: has images of a negative size")
    expected = int(entries[:, 2:].prod(axis=1).sum()) * 3
    if mapped.dtype != np.uint8 or mapped.shape != (expected,):
        raise ValueError(f"{pixels}: has {mapped.shape} of {mapped.dtype}, not {expected} bytes")
    return mapped, entries


def _array(path: Path, **settings: str) -> np.ndarray:
    try:
        return np.load(path, allow_pickle=False, **settings)
    except FileNotFoundError:
        raise
    except Exception as error:  # a damaged header may raise anything in NumPy
        words = str(error).splitlines() or [type(error).__name__]
        raise ValueError(f"{path}: is damaged: {words[0]}") from error


def read_tar(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Row, label and JPEG of each sample of a tar, as it is read from front to back.

    Nothing is unpacked, and only what `conversion.py` makes is taken: regular members with these
    names, in this order, whose headers have the right checksum. ValueError for anything else, with
    the path and the reason. It does not notice a flipped bit within an image: `Shard.damage` does.
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
