"""What the values of a record are: numbers, pairs of bounds, entries that may be missing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

LARGEST = 1e100  # beyond it nothing was measured, and arithmetic overflows
SMALLEST_LOSS = 1e-6  # of the largest of a training: what is less is rounding
MOST_STOLEN = 0.02  # share of the cores' time that a hypervisor may take from a block's rounds
MOST_OTHERS = 0.05  # and that other processes may use


def is_number(value: Any) -> bool:
    """Whether `value` is a number to reckon with: finite, and no truth value."""
    numeric = isinstance(value, int | float) and not isinstance(value, bool)
    return numeric and -LARGEST < value < LARGEST


def is_pair(bounds: Any) -> bool:
    """Whether `bounds` is a lower and an upper bound."""
    return isinstance(bounds, Sequence) and len(bounds) == 2 and all(map(is_number, bounds))


def at(entry: Any, *path: str) -> Any:
    """The value at `path` in nested dicts, or None where the path breaks off."""
    for key in path:
        entry = entry.get(key) if isinstance(entry, dict) else None
    return entry


def finite(value: Any) -> Any:
    """The same JSON value with null for NaN, infinities and floats beyond `LARGEST`."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float) and not is_number(value):
        return None
    return value
