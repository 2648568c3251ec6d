"""What benchmark files declare of a row, in records that were written before records said so.

A run writes `price`, `stacking`, `remedies` and `against` of each row into its record. Older
records get them here when they are read, from today's benchmark file of their technique. A row that
it no longer has gets the technique's price and is in no stack; a technique that is gone has no
price. Titles of old rows did not name the runtime of each framework: those get today's.
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
