"""The command line of a run: how the record shows it, and the interpreters that it names."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path


def find_interpreter(given: str) -> str | None:
    """The absolute path of a Python interpreter, by its path or command; None if it is none.

    It must answer like Python: many programs exit with status 0 whatever they are given.
    """
    path = shutil.which(given)
    if path is None:
        return None
    question = "import sys; print('Python', sys.version_info >= (3, 11))"
    try:
        answer = subprocess.run([path, "-c", question], capture_output=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return os.path.abspath(path) if answer.stdout.strip() == b"Python True" else None


def this_command() -> str:
    """The command line of this process, as a user would type it.

    Absolute paths are cut to their last part: records are published, and folders have names of
    people.
    """
    program = Path(sys.argv[0])
    name = f"python -m {program.parent.name}" if program.stem == "__main__" else program.name
    return without_folders(shlex.join([*name.split(), *sys.argv[1:]]))


def without_folders(command: str) -> str:
    """A command line whose absolute paths are cut to ".../" and their last part."""
    words = []
    for word in shlex.split(command):
        option, equals, value = word.rpartition("=")
        is_path = Path(value).is_absolute()
        words.append(f"{option}{equals}.../{Path(value).name}" if is_path else word)
    return shlex.join(words)
