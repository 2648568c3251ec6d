"""Replicas and stages in a framework's process."""

from __future__ import annotations

from types import ModuleType

import pytest

from tests import workers
from tests.parallel.replicas import Forks


@pytest.fixture(scope="module")
def impl(framework: str) -> ModuleType:
    """Not configured, since that may run an operator, before `forks` is made."""
    return workers.implementation(framework)


@pytest.fixture(scope="module")
def forks(framework: str, tmp_path_factory) -> Forks:
    """Launches runs of several processes."""
    return Forks(framework, tmp_path_factory.mktemp("runs"))
