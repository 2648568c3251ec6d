"""What the workers of the family found, once for all of its modules."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from tests import workers

WORKERS = ("pt", "tf")
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where the time goes, others would move: the workers run during the first test that asks."""
    asking = (i for i in items if i.path.parent == HERE and "timed_evidence" in i.fixturenames)
    for item in islice(asking, 1):
        item.add_marker("alone")


@pytest.fixture(scope="session")
def evidence():
    """{"pt": {"technique scenario": ...}, "tf": ...}."""
    return workers.run("diagnosis.worker", WORKERS, lambda name: ["SCENARIOS"])


@pytest.fixture(scope="session")
def timed_evidence():
    """The same of scenarios in which times count, found one after the other."""
    found = [workers.run("diagnosis.worker", (n,), lambda name: ["TIMED"]) for n in WORKERS]
    return found[0] | found[1]


@pytest.fixture(params=WORKERS)
def every(request, evidence):
    """What one worker found."""
    return evidence[request.param]


@pytest.fixture(params=WORKERS)
def timed(request, timed_evidence):
    """What one worker found where times count."""
    return timed_evidence[request.param]
