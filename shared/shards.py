"""A folder of images as shards: a few large files in place of many small ones.

    twinbench shards FOLDER TARGET --format tar|tfrecord|arrays

`convert` writes them, with as many processes as there are cores, and can be interrupted at any
moment and started again: finished shards stay. `open_shards` opens what is complete. `records.py`
says what the files hold.

Images are dealt to the shards in an order drawn from `seed`: a loader that reads shards one after
the other mixes what is near in the files, and a folder's order has each class by itself. Every
sample keeps its row in the sorted folder (`images.list_images`), from which its augmentations
follow (`epochs.draw`).

TARGET holds the shards and `manifest.json`: settings, a fingerprint of the source (names, sizes and
times of change of its files), the classes, and for each finished shard its rows, what was skipped,
and the size and SHA-256 of its files. Files get their names when they are complete.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shared.images import ImageError, decode_rgb, list_images
from shared.records import SUFFIXES, Sample, map_arrays, write

try:
    import fcntl
except ImportError:  # Windows: there, two processes must not write to one target
    fcntl = None

MANIFEST = "manifest.json"
VERSION = 1
_SAVE_S = 1.0  # the manifest is written at most so often: it grows with the shards


# Reading ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shard:
    """The files of a shard in the order of `records.SUFFIXES`, and the rows in their order."""

    files: tuple[Path, ...]
    sizes: tuple[int, ...]
    sha256: tuple[str, ...]
    rows: np.ndarray

    def damage(self) -> str | None:
        """Which file is not what was written, and how; None if all are. Reads them."""
        for path, size, sha256 in zip(self.files, self.sizes, self.sha256, strict=True):
            try:
                found = path.stat().st_size
                if found != size:
                    kind = "is truncated" if found < size else "is too long"
                    return f"{path}: {kind}: {found} bytes, not {size}"
                if _sha256(path) != sha256:
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
        # A stream of its own: [seed, epoch] is that of `Epochs`, [seed, epoch, 1] that of `draw`.
        order = np.random.default_rng([seed, epoch, 2]).permutation(len(self.shards))
        return [self.shards[number] for number in order]


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
    manifest = _read_manifest(folder)
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


def _read_manifest(folder: Path) -> dict | None:
    """None where there is no manifest."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text("utf-8"))
        version = manifest["version"]
        if version == VERSION:
            _finished(folder, manifest)  # has all that is read of it
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{path}: is damaged: make the shards anew") from None
    if version != VERSION:
        raise ValueError(f"{path}: has version {version}, this is {VERSION}: make the shards anew")
    return manifest


def _finished(folder: Path, manifest: dict) -> Shards:
    """The shards of a manifest, but those that are missing."""
    entries = [entry for entry in manifest["shards"] if entry is not None]
    shards = tuple(_shard(folder, entry) for entry in entries)
    count = len(SUFFIXES[manifest["settings"]["form"]])
    if any(len(shard.files) != count for shard in shards):
        raise KeyError
    skipped = tuple(line for entry in entries for line in entry["skipped"])
    return Shards(int(manifest["size"]), tuple(manifest["classes"]), shards, skipped)


def _shard(folder: Path, entry: dict) -> Shard:
    names, facts = zip(*entry["files"].items(), strict=True)
    if any(Path(name).name != name for name in names):  # a path to elsewhere
        raise KeyError
    sizes, sha256 = zip(*((fact["bytes"], fact["sha256"]) for fact in facts), strict=True)
    rows = np.array(entry["rows"], np.int64)
    return Shard(tuple(folder / name for name in names), sizes, sha256, rows)


def _sha256(path: Path) -> str:
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


# Converting ---------------------------------------------------------------------------------


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
    have their size and checksum stay, the others are written.

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
        raise ValueError(f"{target}: lies within the source {folder}, of which it is no class")
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
            if done is None or _shard(target, done).damage():
                manifest["shards"][number] = None
                rows = order[number * samples : (number + 1) * samples].tolist()
                chosen = [(row, int(labels[row]), paths[row]) for row in rows]
                jobs[number] = (target / f"shard-{number:05}", form, chosen, on_error == "skip")
        _convert(target, manifest, jobs, workers, progress or (lambda *_: None))
    return open_shards(target, form)


def _fingerprint(folder: Path, paths: list[Path]) -> str:
    found = hashlib.sha256()
    for path in paths:
        entry = path.stat()
        facts = (path.relative_to(folder).as_posix(), entry.st_size, entry.st_mtime_ns)
        found.update(repr(facts).encode("utf-8", "surrogateescape"))
    return found.hexdigest()


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
    manifest = _read_manifest(target)
    if manifest is None:
        others = [path.name for path in target.iterdir() if not path.name.startswith(".")]
        if others:
            raise ValueError(f"{target}: holds no shards, but {others[0]!r}: choose a new folder")
        return None
    old = manifest["settings"]
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
        for number, entry in _written(jobs, workers or _cores()):
            shards[number] = entry
            if time.monotonic() - saved > _SAVE_S:
                _save(target, manifest)
                saved = time.monotonic()
            tell()
    except BrokenProcessPool:
        raise RuntimeError(f"{target}: a worker died, perhaps for lack of memory") from None
    finally:
        _save(target, manifest)


def _save(target: Path, manifest: dict) -> None:
    with _whole(target / MANIFEST) as file:
        file.write(json.dumps(manifest).encode())


@contextmanager
def _whole(path: Path):
    """A file to write, which gets its name when it is complete and on disk."""
    partial = path.with_name(f".{path.name}.partial")
    with open(partial, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


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
    files = {path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in paths}
    return {"rows": rows, "skipped": skipped, "files": files}


def _stored(path: Path, form: str) -> bytes | np.ndarray:
    """An image as its form stores it. All of it is decoded: what is stored can be read."""
    pixels = decode_rgb(path)
    if form == "arrays":
        return pixels
    data = path.read_bytes()
    if not data.startswith(b"\xff\xd8\xff"):
        raise ImageError(str(path), "is no JPEG: only --format arrays stores other images")
    return data


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


# The command --------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    """Convert a folder; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="twinbench shards",
        description="Write a folder of images, a sub-folder for each class, as shards.",
    )
    parser.add_argument("folder", metavar="FOLDER")
    parser.add_argument("target", metavar="TARGET", help="a new folder, or one to go on with")
    parser.add_argument("--format", required=True, choices=tuple(SUFFIXES), dest="form")
    parser.add_argument("--samples", type=int, default=256, help="images a shard (256)")
    parser.add_argument("--seed", type=int, default=0, help="of the order of images (0)")
    parser.add_argument("--workers", type=int, default=0, help="processes (0: one a core)")
    parser.add_argument("--on-error", choices=("raise", "skip"), default="raise")
    given = vars(parser.parse_args(arguments))
    done = (0, 0, 0)

    def progress(*counts: int) -> None:
        nonlocal done
        done = counts
        end = "\r" if sys.stderr.isatty() and counts[0] < counts[1] else "\n"
        print("{} of {} shards, {} images skipped".format(*counts), end=end, file=sys.stderr)

    try:
        found = convert(given.pop("folder"), given.pop("target"), **given, progress=progress)
    except (OSError, ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(
            "\ninterrupted: {} of {} shards are finished, the same command goes on".format(*done),
            file=sys.stderr,
        )
        return 130
    for line in found.skipped:
        print(f"skipped {line}", file=sys.stderr)
    print(f"{found.samples} images in {len(found.shards)} shards")
    return 0
