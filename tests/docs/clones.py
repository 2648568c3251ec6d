"""Copies of this repository as its users have it, and commands that are run there."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

from tests import workers
from tests.docs.pages import ROOT


def copy_to(folder: Path) -> None:
    ignored = shutil.ignore_patterns(
        ".git", ".venv*", "results", "__pycache__", ".*_cache", "*.egg-info", "build"
    )
    shutil.copytree(ROOT, folder, ignore=ignored)
    for environment in (".venv", ".venv-pt", ".venv-tf", ".venv-edge"):
        (programs := folder / environment / "bin").mkdir(parents=True)
        for name, start in (
            ("python", ""),
            ("pytest", "-m pytest -p no:cacheprovider"),
            ("twinbench", "-m bench"),
        ):
            (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {start} "$@"\n')
            (programs / name).chmod(0o755)


PROGRAMS = {"twinbench": ("bench",), "pytest": ("pytest", "-p", "no:cacheprovider")}


@cache
def parent(folder: Path) -> workers.Parent:
    """What forks the processes of the project's own commands, which else are mostly imports."""
    return workers.Parent("commands", folder)


def run(text: str, folder: Path) -> subprocess.CompletedProcess:
    """Run a command as a user would who stands in `folder` and has its environment activated."""
    path = f"{folder / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    others = {"PATH": path, "COLUMNS": "80", "PYTEST_ADDOPTS": ""}
    others["OMP_WAIT_POLICY"] = "passive"  # threads that wait leave the core to others
    program, *words = shlex.split(text)
    if (name := Path(program).name) in PROGRAMS and "&&" not in words:
        return parent(folder).run(*PROGRAMS[name], *words, folder=folder, timeout=230, **others)
    return subprocess.run(
        ["sh", "-c", text],
        cwd=folder,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | others,
        capture_output=True,
        text=True,
        timeout=230,
    )


def elsewhere(module: str, *given: object) -> list[str]:
    """What `elsewhere_worker.py` says of a file, where this repository is not installed."""
    side = module.partition("_")[0]
    return workers.run("elsewhere_worker", (side,), lambda _: (module, *given))[side]["said"]
