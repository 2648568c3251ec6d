"""Records that were published before, read from the history of the repository."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

import pytest

from bench.analysis.declared import complete
from bench.record import Record, decode

ROOT = Path(__file__).resolve().parent.parent


def _shown(revision: str) -> bytes | None:
    """docs/results.json as it was then; None where there is no such history."""
    shown = ["git", "-C", str(ROOT), "show", f"{revision}:docs/results.json"]
    try:
        return subprocess.run(shown, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None


@cache
def published(revision: str) -> Record:
    """The record that was published in a commit."""
    record = decode(_shown(revision))
    return record.but(cases=list(map(complete, record.cases)))


needs_history = pytest.mark.skipif(
    _shown("de5fbd6") is None, reason="this copy has no history with earlier records"
)
