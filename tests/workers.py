"""Workers: the processes in which tests run the frameworks, all of a module at the same time."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 600


KIT = ("models", "data", "training", "runtime")


def implementation(framework: str, *modules: str):
    """The package of "pt" or "tf" with its kit and, for example, "compression.pruning" imported."""
    package = f"{framework}_impl"
    for module in (*(f"kit.{name}" for name in KIT), *modules):
        importlib.import_module(f"{package}.{module}")
    return importlib.import_module(package)


class Scenarios(dict):
    """What a worker found by scenario; a look-up fails with the traceback where it raised one."""

    def __init__(self, name: str, found: dict) -> None:
        super().__init__(found)
        self.name = name
        self.framework = "pt" if name == "pt" else "tf"

    def __getitem__(self, scenario: str):
        found = super().__getitem__(scenario)
        if isinstance(found, dict) and "error" in found:
            pytest.fail(found["error"])
        return found


def run(
    worker: str,
    names: Collection[str] = ("pt", "tf", "tf_keras"),
    arguments: Callable[[str], Sequence] = lambda name: (),
    **environment: str,
) -> dict[str, Scenarios]:
    """What `python -m tests.WORKER NAME ARGUMENTS` prints in its last line, by name.

    "tf_keras" is TensorFlow with legacy Keras; `arguments` gives those of a name.
    """
    others = {key: value for key, value in os.environ.items() if key != "TF_USE_LEGACY_KERAS"}
    others |= {"TF_CPP_MIN_LOG_LEVEL": "3"} | environment

    def one(name: str) -> Scenarios:
        done = subprocess.run(
            [sys.executable, "-m", f"tests.{worker}", name, *arguments(name)],
            cwd=ROOT,
            env=others | ({"TF_USE_LEGACY_KERAS": "1"} if name == "tf_keras" else {}),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, f"{name}: {done.stderr[-3000:]}"
        return Scenarios(name, json.loads(done.stdout.splitlines()[-1]))

    with ThreadPoolExecutor(len(names)) as pool:
        return dict(zip(names, pool.map(one, names), strict=True))
