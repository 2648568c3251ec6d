"""What each framework's worker found, for the tests of both kinds of distillation.

Each runs once a session, in a process of its own (`distillation_worker.py`), tf_keras in a third.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).resolve().parent
WORKERS = ("pt", "tf", "tf_keras")


class Scenarios:
    """Looks up a scenario, and fails with its traceback where it raised."""

    def __init__(self, scenarios, framework):
        self.scenarios, self.framework = scenarios, framework

    def __getitem__(self, name):
        scenario = self.scenarios[name]
        if isinstance(scenario, dict) and "error" in scenario:
            pytest.fail(scenario["error"])
        return scenario


@functools.cache
def evidence() -> dict[str, Scenarios]:
    """{"pt": {scenario: ...}, ...}. The workers run at the same time."""
    environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(HERE.parent)}
    environment.pop("TF_USE_LEGACY_KERAS", None)
    flavour = {"tf_keras": {"TF_USE_LEGACY_KERAS": "1"}}
    running = {
        name: subprocess.Popen(
            [sys.executable, HERE / "distillation_worker.py", name],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment | flavour.get(name, {}),
        )
        for name in WORKERS
    }
    found = {}
    for name, process in running.items():
        out, err = process.communicate()
        scenarios = {} if process.returncode else json.loads(out.splitlines()[-1])
        found[name] = Scenarios(scenarios, name) if scenarios else err[-3000:]
    return found


def side(name: str) -> Scenarios:
    """What one worker found; fails where it died."""
    found = evidence()[name]
    if isinstance(found, str):
        pytest.fail(found)
    return found


def apart(ours, theirs) -> float:
    """The largest relative L2 difference of a tensor, or relative difference of a loss."""
    assert ours.keys() == theirs.keys()
    pairs = [(np.array(ours[n], float), np.array(theirs[n], float)) for n in theirs]
    return max(np.linalg.norm(a - b) / (np.linalg.norm(b) or 1.0) for a, b in pairs)
