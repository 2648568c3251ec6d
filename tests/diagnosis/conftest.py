"""What the workers of the family found, once for all of its modules."""

from __future__ import annotations

import pytest

from tests import workers

WORKERS = ("pt", "tf")


@pytest.fixture(scope="session")
def evidence():
    """{"pt": {"technique scenario": ...}, "tf": ...}.

    One after the other, and marked `alone`: where the time goes, others would move.
    """
    found = [workers.run("diagnosis.worker", (name,)) for name in WORKERS]
    return found[0] | found[1]


@pytest.fixture(params=WORKERS)
def every(request, evidence):
    """What one worker found."""
    return evidence[request.param]
