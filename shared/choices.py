"""What an error says of a name that is unknown: the names that are known."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

MOST = 12  # names; of more, only the most similar are listed


def unknown(name: object, known: Iterable[str]) -> str:
    """The words "'tff' is unknown; choose from pt, tf"."""
    names = list(known)
    if len(names) <= MOST:
        return f"{name!r} is unknown; choose from {', '.join(names) or 'none'}"
    similar = get_close_matches(str(name), names, cutoff=0)
    return f"{name!r} is unknown; similar are {', '.join(similar)}"
