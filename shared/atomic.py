"""Folders that are there complete or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Give an empty folder to fill, which becomes `target` when the block ends.

    If the block raises, nothing is left; if the process is killed, a hidden folder beside `target`
    that nothing reads. If another process made `target` meanwhile, its folder stays and this one
    is dropped: use it for what comes out the same whoever makes it.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=target.parent, prefix=".partial-") as partial:
        whole = Path(partial) / "data"
        whole.mkdir()
        yield whole
        try:
            whole.rename(target)
        except OSError:
            if not target.is_dir():
                raise
