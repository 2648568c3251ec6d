"""Files that are written completely or not at all, and the folder of a run."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows, where nobody is kept off
    fcntl = None


def replace_file(path: Path, text: str) -> None:
    """Replace `path` atomically: it keeps its old text or gets all of the new one.

    Raises OSError with its name if it can't be written.
    """
    partial = path.with_suffix(".partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        with contextlib.suppress(OSError):  # as a disk that can't be written says it once more
            partial.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from None


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Lock `folder` while this process measures into it; ValueError if another process does."""
    if fcntl is None:
        yield
        return
    lock = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # no locks in this file system
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(f"{folder}: another process is still measuring it") from None
        yield
    finally:
        os.close(lock)


def written_once(place: Path, write: Callable[[Path], object]) -> tuple[Path, bool]:
    """The file or folder that `write(path)` makes in `place`, and whether it was made just now.

    Processes may write at the same time: each writes into a new folder and marks it when complete.
    """
    for mark in place.glob("*/whole"):
        return mark.with_name("model"), False
    place.mkdir(parents=True, exist_ok=True)
    path = Path(tempfile.mkdtemp(dir=place)) / "model"
    write(path)
    path.with_name("whole").touch()
    return path, True


def new_folder(results: Path) -> Path:
    """Make `results/<UTC time>` and point `results/latest` at it.

    Raises OSError, and makes nothing, if `latest` is a folder, such as the copy of a link.
    """
    latest = results / "latest"
    if latest.is_dir() and not latest.is_symlink():
        why = "is a folder, not a link to the last run: rename it"
        raise FileExistsError(errno.EEXIST, why, str(latest))
    results.mkdir(parents=True, exist_ok=True)
    stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H-%M-%SZ")
    for number in itertools.count(1):
        folder = results / (stamp if number == 1 else f"{stamp}-{number}")
        with contextlib.suppress(FileExistsError):  # another run started in the same second
            folder.mkdir()
            break
    link = results / f".latest-{folder.name}"
    try:
        link.symlink_to(folder.name, target_is_directory=True)
    except OSError:  # no symbolic links here (Windows without the right): a file with the name
        link.write_text(folder.name, encoding="utf-8")
    os.replace(link, results / "latest")
    return folder
