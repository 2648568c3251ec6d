"""A finding, and its lines."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from bench.record import FRAMEWORKS

WIDTH = 80


@dataclass(frozen=True)
class Finding:
    """A mistake, or, if not `wrong`, a limit of the machine worth knowing.

    `check`: its short name. `framework`: "pt", "tf", or "" for both. `what`, `evidence` and
    `advice`: sentences without a full stop. `technique`: of this suite, that is the remedy. `gain`:
    its gain by a record.
    """

    check: str
    framework: str
    what: str
    evidence: str
    advice: str
    technique: str = ""
    gain: str = ""
    wrong: bool = True


def lines(finding: Finding) -> list[str]:
    """The finding as lines of 80 columns."""
    side = f"{FRAMEWORKS[finding.framework]}: " if finding.framework else ""
    mark = "!! " if finding.wrong else "-- "
    parts = [f"{mark}{side}{finding.what}."]
    labelled = {"measured": finding.evidence, "do": finding.advice, "gain": finding.gain}
    parts += [f"   {label}: {words}" for label, words in labelled.items() if words]
    return [line for part in parts for line in _wrapped(part)]


def _wrapped(text: str) -> list[str]:
    uncut = {"break_on_hyphens": False, "break_long_words": False}
    return textwrap.wrap(text, WIDTH, subsequent_indent=" " * 6, drop_whitespace=True, **uncut)
