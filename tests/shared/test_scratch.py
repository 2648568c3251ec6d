"""Scratch folders: private, gone with their run, swept after a killed one, and nobody else's."""

import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from shared import scratch

ROOT = Path(__file__).resolve().parents[2]
HOLDING = """
import os, sys, time
from shared import scratch
with scratch.folder() as folder:
    (folder / "file").touch()
    if sys.argv[1:] and not os.fork():
        time.sleep(600)
    print(folder, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def temporary(tmp_path, monkeypatch) -> Path:
    """The folder in which this test's runs make theirs."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def held(*arguments: str) -> tuple[subprocess.Popen, Path]:
    """A run that holds a folder until it is killed."""
    run = subprocess.Popen(
        [sys.executable, "-c", HOLDING, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    return run, Path(run.stdout.readline().strip())


def kill(run: subprocess.Popen) -> None:
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    run.stdout.close()


def test_a_run_that_ends_leaves_nothing(temporary):
    with scratch.folder() as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "file").touch()
        assert folder.stat().st_mode & 0o777 == 0o700
        assert scratch.environment(folder)["TMPDIR"] == str(folder)
    assert list(temporary.iterdir()) == []


def test_what_a_killed_run_left_is_swept_by_the_next(temporary):
    run, left = held()
    try:
        assert scratch.sweep() == []  # it runs
    finally:
        kill(run)
    assert (left / "file").exists()
    with scratch.folder():
        assert not left.exists()


def test_a_folder_is_held_as_long_as_a_forked_process_of_its_run_lives(temporary):
    run, left = held("fork")
    try:
        run.kill()
        run.wait()
        assert scratch.sweep() == []
    finally:
        kill(run)
    deadline = time.monotonic() + 20  # it ends as a child of nobody
    while not (swept := scratch.sweep()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert swept == [left]


def test_other_folders_and_links_are_not_touched(temporary, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside")
    (outside / "file").touch()
    (temporary / f"{scratch.PREFIX}link").symlink_to(outside, target_is_directory=True)
    others = [temporary / "twinbench-other", temporary / f"{scratch.PREFIX}open"]
    for path in others:
        path.mkdir(mode=0o700)
    others[1].chmod(0o777)  # anybody may have written there
    (temporary / f"{scratch.PREFIX}file").touch()
    assert scratch.sweep() == []
    assert (outside / "file").exists()
    assert all(path.exists() for path in others)


def test_a_folder_of_another_user_is_not_touched(temporary, monkeypatch):
    path = temporary / f"{scratch.PREFIX}theirs"
    path.mkdir(mode=0o700)
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert scratch.sweep() == []
    monkeypatch.setattr(os, "geteuid", lambda: owner)
    assert scratch.sweep() == [path]


def before_open(folder: Path, monkeypatch) -> None:
    folder.rmdir()


def after_open(folder: Path, monkeypatch) -> None:
    opened = os.open

    def opening(path, flags, *rest):
        number = opened(path, flags, *rest)
        if Path(path) == folder:
            folder.rmdir()
        return number

    monkeypatch.setattr(os, "open", opening)


def while_it_locks(folder: Path, monkeypatch) -> None:
    """Another run has it locked, and removes it only then: who does not wait, has it still."""
    held, lock = os.open(folder, os.O_RDONLY), fcntl.flock
    lock(held, fcntl.LOCK_EX)

    def locking(file, how):
        try:
            lock(file, how | fcntl.LOCK_NB)
        except BlockingIOError:
            if how & fcntl.LOCK_NB:
                raise
            folder.rmdir()
            os.close(held)
            lock(file, how)

    monkeypatch.setattr(fcntl, "flock", locking)


@pytest.mark.parametrize("swept", [before_open, after_open, while_it_locks])
def test_a_folder_that_is_swept_before_it_is_locked_is_made_anew(temporary, monkeypatch, swept):
    made = []

    def mkdtemp(prefix: str, dir: Path | None) -> str:
        made.append(temporary / f"{prefix}{len(made)}")
        made[-1].mkdir(mode=0o700)
        if len(made) == 1:
            swept(made[0], monkeypatch)
        return str(made[-1])

    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    with scratch.folder() as folder:
        assert folder == made[1]
        assert folder.exists()
    assert not made[0].exists()
