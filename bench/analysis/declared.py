"""Adds to older records what benchmark files declare of a row today.

A run writes `price`, `stacking`, `remedies` and `against` of each row into its record. Older
records get them when they are read. A row that its benchmark file no longer has gets the
technique's price and is in no stack; a technique that no longer exists has no price. Titles are
today's, too: old ones did not name the runtime.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from bench.record import Case, Price


def complete(case: Case) -> Case:
    """The case with these fields."""
    known = of_row(case.technique, case.variant)
    if case.price is not None and case.remedies is not None:
        known = {"against": case.against or known["against"]}
    return case.but(title=_title(case), **known)


def of_row(technique: str, variant: str) -> dict[str, Any]:
    """The fields of a row that a benchmark file has today."""
    declared = _technique(technique)
    if declared is None:
        return {"price": Price(), "stacking": None, "remedies": [], "against": None}
    known = next((one for one in _variants(declared) if one.name == variant), None)
    return {
        "price": declared.price_of(known) if known else declared.price,
        "stacking": known.stacking if known else None,
        "remedies": list(declared.remedies),
        "against": known.against if known else None,
    }


def _title(case: Case) -> str | None:
    """Today's title of a row whose runtime it names, or the row's."""
    declared = _technique(case.technique)
    for one in _variants(declared) if declared else ():
        if one.name == case.variant and case.framework in one.runtimes:
            return one.called(case.framework, case.mode)
    return case.title


def _variants(technique: Any) -> list:
    """Those of a technique, and those that only a user's own model has."""
    more = technique.user_model.of(()) if technique.is_measured_of_users else []
    return [*technique.variants, *more]


@cache
def _technique(name: str) -> Any:
    for path in (Path(__file__).parents[1]).glob(f"*/bench_{name}.py"):
        return import_module(f"bench.{path.parent.name}.{path.stem}").TECHNIQUE
    return None
