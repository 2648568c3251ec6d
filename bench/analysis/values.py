"""Checks of numbers, and limits that several modules share."""

from __future__ import annotations

from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from bench.record import LARGEST

SMALLEST_LOSS = 1e-6  # of the largest of a training: what is less is rounding
MOST_STOLEN = 0.02  # share of the cores' time that a hypervisor may take from a block's rounds
MOST_OTHERS = 0.05  # and that other processes may use


def is_number(value: Any) -> bool:
    """Whether `value` is a finite number, and no bool."""
    numeric = isinstance(value, int | float) and not isinstance(value, bool)
    return numeric and -LARGEST < value < LARGEST


def finite(value: Any) -> Any:
    """The same value with None for NaN, infinities and floats beyond `LARGEST`.

    Other floats become Python's, which JSON can write.
    """
    if isinstance(value, float):
        return float(value) if is_number(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(finite, value))
    if isinstance(value, Struct):
        return replace(value, **{k: finite(getattr(value, k)) for k in value.__struct_fields__})
    return value
