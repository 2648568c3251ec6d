"""What the workers of the family found, once for all of its modules."""

from __future__ import annotations

import pytest

from tests import workers

WORKERS = ("pt", "tf", pytest.param("tf_keras", marks=pytest.mark.campaign))


@pytest.fixture(scope="session")
def evidence():
    """{"pt": {"technique scenario": ...}, "tf": ...}, "tf_keras" in campaigns."""
    return workers.run("adaptation.worker", ("pt", *workers.keras()))


@pytest.fixture(params=WORKERS)
def every(request, evidence):
    """What one worker found."""
    return evidence[request.param]
