"""Which pairs of a model's layers are split among devices: names, patterns, and their sizes."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase


def match_pairs(pairs: str, names: Sequence[str]) -> list[tuple[str, str]]:
    """The pairs of names that "first > second", separated by commas, mean.

    Each side is a name or a pattern with *, ? and [], whose matches are paired in order. Raises
    ValueError where there are none, or not as many on both sides.
    """
    matched = []
    for pair in pairs.split(","):
        sides = [side.strip() for side in pair.split(">")]
        matches = [[name for name in names if fnmatchcase(name, side)] for side in sides]
        if len(matches) != 2 or not matches[0] or len(matches[0]) != len(matches[1]):
            raise ValueError(
                f"pairs: {pair.strip()!r} matches {matches}: two lists of equal length"
            )
        matched += zip(*matches, strict=True)
    return matched


def check_pair(first: str, second: str, sizes: tuple[int, int], shards: int) -> None:
    """Raise ValueError where outputs of the first and inputs of the second can't be shared out."""
    if sizes[0] != sizes[1] or shards < 2 or sizes[0] % shards:
        raise ValueError(f"pairs: {first} > {second}: {sizes} do not go into {shards} shards")
