"""A folder of images as shards: a few large files in place of many small ones.

    twinbench shards FOLDER TARGET --format tar|tfrecord|arrays

`convert` writes them, with as many processes as there are cores, and can be interrupted at any
moment and started again: finished shards stay. `shards.py` reads them, and says what they hold.

Images are dealt to the shards in an order drawn from `seed`: a loader that reads shards one after
the other mixes what is near in the files, and a folder's order has each class by itself. Images are
the bytes of JPEG files, or, in arrays, the pixels of `images.decode_rgb`; nothing is resized.

TARGET holds the shards and `manifest.json`, with a fingerprint of the source (names, sizes and
times of change of its files). Files get their names when they are complete.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import signal
import struct
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import BinaryIO

import numpy as np

from shared.cgroups import usable_threads
from shared.images import ImageError, decode_rgb, list_images
from shared.shards import (
    MANIFEST,
    SUFFIXES,
    VERSION,
    Shards,
    checksum,
    open_shards,
    read_manifest,
    shard_of,
)

try:
    import fcntl
except ImportError:  # Windows: there, two processes must not write to one target
    fcntl = None

_SAVE_S = 1.0  # the manifest is written at most so often: it grows with the shards

Sample = tuple[int, int, bytes | np.ndarray]  # row, label, and a JPEG file or its pixels


def convert(
    folder: str | Path,
    target: str | Path,
    *,
    form: str,
    samples: int = 256,
    seed: int = 0,
    workers: int = 0,
    on_error: str = "raise",
    progress: Callable[[int, int, int], None] | None = None,
) -> Shards:
    """Write the images of `folder`, a sub-folder a class, as shards into `target`; return them.

    form: "tar", "tfrecord" or "arrays". samples: images a shard; the last one may have fewer.
    workers: processes, 0 for one a core. on_error: "raise" ends at an image that can't be decoded
    or, in a tar or TFRecord file, is no JPEG; "skip" leaves it out and records it. progress: is
    told the finished shards, all shards, and the images skipped so far.

    A `target` that holds shards of the same source and settings is taken up: shards whose files
    have their size and checksum stay, the others are written. Where none has skipped an image,
    `on_error` may be another.

    Raises ValueError for settings that don't exist, for an image that can't be stored, for a target
    that holds something else or lies within the source, and where no image is left; RuntimeError
    where another process writes to `target`, or a worker died. What is finished stays.
    """
    folder, target = Path(folder), Path(target)
    if form not in SUFFIXES or on_error not in ("raise", "skip"):
        raise ValueError(
            f"form must be {', '.join(SUFFIXES)}, and on_error raise or skip, not "
            f"{form!r} and {on_error!r}"
        )
    if samples < 1 or workers < 0:
        raise ValueError(f"samples must be 1 at least and workers 0, not {samples} and {workers}")
    if target.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{target}: lies within the source {folder}: choose a folder outside")
    paths, labels, classes = list_images(folder)
    order = np.random.default_rng(seed).permutation(len(paths))
    settings = {"form": form, "samples": samples, "seed": seed, "on_error": on_error}
    settings["source"] = _fingerprint(folder, paths)
    with _alone(target):
        manifest = _take_up(target, settings) or {
            "version": VERSION,
            "settings": settings,
            "size": len(paths),
            "classes": classes,
            "shards": [None] * -(-len(paths) // samples),
        }
        jobs = {}
        for number, done in enumerate(manifest["shards"]):
            if done is None or shard_of(target, done).damage():
                manifest["shards"][number] = None
                rows = order[number * samples : (number + 1) * samples].tolist()
                chosen = [(row, int(labels[row]), paths[row]) for row in rows]
                jobs[number] = (target / f"shard-{number:05}", form, chosen, on_error == "skip")
        _convert(target, manifest, jobs, workers, progress or (lambda *_: None))
    return open_shards(target, form)


def _fingerprint(folder: Path, paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        entry = path.stat()
        facts = (path.relative_to(folder).as_posix(), entry.st_size, entry.st_mtime_ns)
        digest.update(repr(facts).encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


@contextmanager
def _alone(target: Path) -> Iterator[None]:
    """Nobody else converts into `target`; the lock ends with its process."""
    target.mkdir(parents=True, exist_ok=True)
    if fcntl is None:
        yield
        return
    with open(target / ".lock", "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RuntimeError(f"{target}: another process writes shards here") from None
        yield


def _take_up(target: Path, settings: dict) -> dict | None:
    """The manifest that an earlier run left, None in an empty target."""
    manifest = read_manifest(target)
    if manifest is None:
        others = [path.name for path in target.iterdir() if not path.name.startswith(".")]
        if others:
            raise ValueError(f"{target}: holds no shards, but {others[0]!r}: choose a new folder")
        return None
    old = manifest["settings"]
    if not any(shard["skipped"] for shard in manifest["shards"] if shard):
        old["on_error"] = settings["on_error"]  # what ended at a bad image may go on without it
    differing = [name for name, value in settings.items() if old.get(name) != value]
    if differing:
        raise ValueError(
            f"{target}: holds shards of another {' and '.join(differing)}: choose a new folder, or "
            "delete this one"
        )
    for partial in target.glob(".*.partial"):  # of a process that was killed
        partial.unlink()
    return manifest


def _convert(target: Path, manifest: dict, jobs: dict, workers: int, progress: Callable) -> None:
    """Write what is missing; record each shard as it is finished."""
    shards, saved = manifest["shards"], 0.0

    def tell() -> None:
        done = [shard for shard in shards if shard is not None]
        progress(len(done), len(shards), sum(len(shard["skipped"]) for shard in done))

    _save(target, manifest)
    tell()
    try:
        for number, entry in _written(jobs, workers or usable_threads()):
            shards[number] = entry
            if time.monotonic() - saved > _SAVE_S:
                _save(target, manifest)
                saved = time.monotonic()
            tell()
    except BrokenProcessPool:
        raise RuntimeError(
            f"{target}: a worker died, perhaps for lack of memory; a script that converts has to "
            "stand under `if __name__ == '__main__':`, since each worker imports it"
        ) from None
    finally:
        _save(target, manifest)


def _save(target: Path, manifest: dict) -> None:
    with _whole(target / MANIFEST) as file:
        file.write(json.dumps(manifest).encode())


@contextmanager
def _whole(path: Path):
    """A file to write, which gets its name when it is complete and on disk."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with open(partial, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _written(jobs: dict, workers: int) -> Iterator[tuple[int, dict]]:
    """The shards as they are finished. Fresh processes: whoever calls may have threads."""
    if workers == 1:
        yield from ((number, _write_shard(*job)) for number, job in jobs.items())
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(workers, len(jobs) or 1), context, _end_with_the_parent)
    try:
        futures = {pool.submit(_write_shard, *job): number for number, job in jobs.items()}
        for future in as_completed(futures):
            yield futures[future], future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _end_with_the_parent() -> None:
    """Ctrl-C reaches all processes of a terminal: the parent ends the work, even if killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def wait() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _write_shard(
    stem: Path, form: str, chosen: list[tuple[int, int, Path]], skips: bool
) -> dict[str, object]:
    """Write one shard; return what the manifest says of it."""
    skipped: list[str] = []

    def samples() -> Iterator[Sample]:
        for row, label, path in chosen:
            try:
                yield row, label, _stored(path, form)
            except ImageError as error:
                if not skips:
                    raise ValueError(str(error)) from None
                skipped.append(str(error))

    paths = [stem.with_name(stem.name + suffix) for suffix in SUFFIXES[form]]
    with ExitStack() as stack:
        rows = write(form, [stack.enter_context(_whole(path)) for path in paths], samples())
    files = {path.name: {"bytes": path.stat().st_size, "sha256": checksum(path)} for path in paths}
    return {"rows": rows, "skipped": skipped, "files": files}


def _stored(path: Path, form: str) -> bytes | np.ndarray:
    """An image as its form stores it. All of it is decoded: what is stored can be read."""
    pixels = decode_rgb(path)
    if form == "arrays":
        return pixels
    data = path.read_bytes()
    if not data.startswith(b"\xff\xd8\xff"):
        raise ImageError(str(path), "is not a JPEG: only --format arrays stores other images")
    return data


# Forms -------------------------------------------------------------------------------------------


def write(form: str, files: list[BinaryIO], samples: Iterable[Sample]) -> list[int]:
    """Write samples into the files of one shard, opened in the order of SUFFIXES; return rows."""
    return {"tar": _write_tar, "tfrecord": _write_tfrecord, "arrays": _write_arrays}[form](
        *files, samples
    )


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


def _write_tfrecord(file: BinaryIO, samples: Iterable[Sample]) -> list[int]:
    """Write records without TensorFlow.

    Its guide "TFRecord and tf.train.Example" describes their framing,
    `tensorflow/core/example/example.proto` the messages, RFC 3720, appendix B.4, CRC-32C.
    """
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
    """What 16 bits do to the checksum. Eight bits do what they do as the upper half."""
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
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


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


# The command --------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    """Convert a folder; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="twinbench shards",
        description="Convert a folder of images, with a sub-folder per class, to shards.",
    )
    parser.add_argument("folder", metavar="FOLDER", help="the images")
    parser.add_argument("target", metavar="TARGET", help="a new folder, or one to go on with")
    parser.add_argument(
        "--format", required=True, choices=tuple(SUFFIXES), dest="form", help="of the shards"
    )
    parser.add_argument("--samples", type=int, default=256, help="images per shard (default: 256)")
    parser.add_argument("--seed", type=int, default=0, help="of the order of images (default: 0)")
    parser.add_argument("--workers", type=int, default=0, help="processes (default: one per core)")
    parser.add_argument(
        "--on-error",
        choices=("raise", "skip"),
        default="raise",
        help="end at an image that can't be stored, or leave it out (default: raise)",
    )
    given = vars(parser.parse_args(arguments))
    done = (0, 0, 0)

    def progress(*counts: int) -> None:
        nonlocal done
        done = counts
        end = "\r" if sys.stderr.isatty() and counts[0] < counts[1] else "\n"
        print("{} of {} shards, {} images skipped".format(*counts), end=end, file=sys.stderr)

    try:
        manifest = convert(given.pop("folder"), given.pop("target"), **given, progress=progress)
    except (OSError, ValueError, RuntimeError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(
            "\ninterrupted: {} of {} shards are finished, the same command goes on".format(*done),
            file=sys.stderr,
        )
        return 130
    for line in manifest.skipped:
        print(f"skipped {line}", file=sys.stderr)
    print(f"{manifest.samples} images in {len(manifest.shards)} shards")
    return 0
