"""Folders for what a run writes beside its results: private, gone with it, swept if it was killed.

A shared temporary folder holds files of other users. A scratch folder has a new name that nobody
could foresee and is readable only by its owner, so nothing that it holds is theirs. Its run keeps
it locked, and so do processes that it forks; the kernel lets go when the last of them ends, however
it ended. What nobody holds any more is removed by the owner's next run.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows, where nothing tells a killed run's folder from another's
    fcntl = None

PREFIX = "twinbench-run-"


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """An empty folder of this run, removed with all that it holds; sweeps before."""
    sweep()
    path, lock = made()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def environment(path: Path) -> dict[str, str]:
    """The variables by which a process writes its own temporary files to a scratch folder."""
    return dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(path))


def made(place: Path | None = None, prefix: str = PREFIX) -> tuple[Path, int | None]:
    """A new folder in `place`, or in the temporary one, and the lock that holds it while open."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=place))  # readable only by its owner
        if fcntl is None:
            return path, None
        # Until it is locked another run may sweep it, and holds the lock while it does.
        try:
            lock = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            continue
        with contextlib.suppress(OSError):  # no locks in this file system: nobody sweeps there
            fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            return path, lock
        os.close(lock)


def sweep(place: Path | None = None, prefix: str = PREFIX) -> list[Path]:
    """Remove this user's folders that no run holds any more; those of others are not touched."""
    if fcntl is None:
        return []
    with contextlib.suppress(OSError):
        entries = os.scandir(place or tempfile.gettempdir())
        found = [Path(entry.path) for entry in entries if _ours(entry, prefix)]
        return [path for path in found if _removed(path)]
    return []


def _ours(entry: os.DirEntry, prefix: str) -> bool:
    """Whether it is a folder, no link to one, which this user made and nobody else may write."""
    if not entry.name.startswith(prefix):
        return False
    with contextlib.suppress(OSError):
        found = entry.stat(follow_symlinks=False)
        private = stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o077
        return private and found.st_uid == os.geteuid()
    return False


def _removed(path: Path) -> bool:
    """Remove a folder unless its run holds it."""
    try:
        lock = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        shutil.rmtree(path, ignore_errors=True)
        return True
    finally:
        os.close(lock)
