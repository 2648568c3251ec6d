"""Records that were published before, read from the history of the repository."""

from __future__ import annotations

from functools import cache

import pytest

from bench.record import Record
from bench.validation import reproduce


@cache
def published(revision: str) -> Record:
    """The record that was published in a commit."""
    return reproduce.read(revision)[1]


needs_history = pytest.mark.skipif(
    reproduce.of_revision("de5fbd6") is None, reason="this copy has no history with earlier records"
)
