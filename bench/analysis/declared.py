"""What benchmark files declare of a row, in records that were written before records said so.

A run writes `price`, `stacking` and `remedies` of each row into its record. Older records get them
here when they are read, from the benchmark file that has the row today; a row that none has any
more has no price, is in no stack and remedies nothing.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from bench.analysis.prices import Price

FIELDS = ("price", "stacking", "remedies")


def complete(record: dict[str, Any]) -> dict[str, Any]:
    """The record, whose rows all have these fields."""
    for case in record["cases"]:
        if not all(name in case for name in FIELDS):
            case.update(of_row(case["technique"], case["variant"]) | case)
    return record


def of_row(technique: str, variant: str) -> dict[str, Any]:
    """The fields of a row that a benchmark file has today."""
    declared = _technique(technique)
    known = [one for one in declared.variants if one.name == variant] if declared else []
    price = declared.price_of(known[0]) if known else Price()
    return {
        "price": asdict(price),
        "stacking": known[0].stacking if known else None,
        "remedies": list(declared.remedies) if declared else [],
    }


@cache
def _technique(name: str) -> Any:
    for path in (Path(__file__).parents[1]).glob(f"*/bench_{name}.py"):
        return import_module(f"bench.{path.parent.name}.{path.stem}").TECHNIQUE
    return None
