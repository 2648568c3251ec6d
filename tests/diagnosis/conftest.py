"""What the workers of the family found, once for all of its modules."""

from __future__ import annotations

import pytest

from tests import workers

WORKERS = ("pt", "tf")


@pytest.fixture(scope="session")
def evidence():
    """{"pt": {"technique scenario": ...}, "tf": ...}."""
    return workers.run("diagnosis.worker", WORKERS)


@pytest.fixture(params=WORKERS)
def every(request, evidence):
    """What one worker found."""
    return evidence[request.param]
