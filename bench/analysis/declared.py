"""What benchmark files declare of a row, in records that were written before records said so.

A run writes `price`, `stacking` and `remedies` of each row into its record. Older records get them
here when they are read, from today's benchmark file of their technique. A row that it no longer has
gets the technique's price and is in no stack; a technique that is gone has no price.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from bench.analysis.prices import Price


def complete(record: dict[str, Any]) -> dict[str, Any]:
    """The record, whose rows all have these fields."""
    for case in record["cases"]:
        if any(case.get(name) is None for name in ("price", "remedies")):
            case.update(of_row(case["technique"], case["variant"]))
    return record


def of_row(technique: str, variant: str) -> dict[str, Any]:
    """The fields of a row that a benchmark file has today."""
    declared = _technique(technique)
    if declared is None:
        return {"price": asdict(Price()), "stacking": None, "remedies": []}
    known = next((one for one in _variants(declared) if one.name == variant), None)
    price = declared.price_of(known) if known else declared.price
    return {
        "price": asdict(price),
        "stacking": known.stacking if known else None,
        "remedies": list(declared.remedies),
    }


def _variants(technique: Any) -> list:
    """Those of a technique, and those that only a user's own model has."""
    more = technique.user_model.of(()) if technique.is_measured_of_users else []
    return [*technique.variants, *more]


@cache
def _technique(name: str) -> Any:
    for path in (Path(__file__).parents[1]).glob(f"*/bench_{name}.py"):
        return import_module(f"bench.{path.parent.name}.{path.stem}").TECHNIQUE
    return None
