"""What the workers of the ladders found, once for all modules."""

from __future__ import annotations

import pytest

from tests import workers


@pytest.fixture(scope="session")
def evidence():
    """{"pt": {"ladder scenario": ...}, "tf": ...}."""
    return workers.run("ladders.worker", ("pt", "tf"))


@pytest.fixture(params=("pt", "tf"))
def every(request, evidence):
    """What one worker found."""
    return evidence[request.param]
