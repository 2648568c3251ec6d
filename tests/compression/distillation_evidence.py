"""What each framework's worker found, for the tests of both kinds of distillation.

Each runs once a session, in a process of its own (`distillation_worker.py`), tf_keras in a third.
"""

from __future__ import annotations

import functools

import numpy as np

from tests import workers

WORKERS = ("pt", *workers.keras())


@functools.cache
def evidence() -> dict[str, workers.Scenarios]:
    """{"pt": {scenario: ...}, ...}."""
    return workers.run("compression.distillation_worker", WORKERS)


def side(name: str) -> workers.Scenarios:
    """What one worker found."""
    return evidence()[name]


def apart(ours, theirs) -> float:
    """The largest relative L2 difference of a tensor, or relative difference of a loss."""
    assert ours.keys() == theirs.keys()
    pairs = [(np.array(ours[n], float), np.array(theirs[n], float)) for n in theirs]
    return max(np.linalg.norm(a - b) / (np.linalg.norm(b) or 1.0) for a, b in pairs)
