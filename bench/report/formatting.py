"""Numbers as the report shows them: three significant digits; an em dash for what is missing."""

from __future__ import annotations

from math import floor, log10
from typing import Any

from bench.analysis.values import is_number

MISSING = "—"
Bounds = tuple[float | None, float | None] | None


def decimals(value: float, digits: int = 3) -> int:
    """How many decimals show `digits` significant digits of `value`."""
    if value == 0:
        return 0
    return min(6, max(0, digits - 1 - floor(log10(abs(value)))))


def number(value: float | None, *, places: int | None = None) -> str:
    """`value` with three significant digits, or with `places` decimals; large ones as 12,300."""
    if value is None:
        return MISSING
    if value and not 1e-4 <= abs(value) < 1e7:
        return f"{value:.2e}"
    if places is None:
        value = float(f"{value:.3g}")
        places = decimals(value)
    return f"{value:,.{places}f}"


def interval(bounds: Bounds, *, like: float | None = None) -> str:
    """A pair of bounds as low–high, with as many decimals as three digits of `like` take."""
    if bounds is None or None in bounds:
        return MISSING
    places = None if like is None else decimals(like)
    return "–".join(number(bound, places=places) for bound in bounds)


def with_bounds(value: float | None, bounds: Bounds, factor: float = 1) -> str:
    """A value and its bounds, each times `factor`: 5.23 (5.18–5.28)."""
    if bounds is None or None in bounds:
        return number(scaled(value, factor))
    value, low, high = (scaled(each, factor) for each in (value, *bounds))
    return f"{number(value)} ({interval((low, high), like=value)})"


def ratio(value: float | None, bounds: Bounds) -> str:
    """A ratio and its interval: 0.562 (0.541–0.583)."""
    if value is None:
        return MISSING
    places = 3 if value < 10 else None
    text = number(value, places=places)
    if bounds is None:
        return text
    return f"{text} ({'–'.join(number(bound, places=places) for bound in bounds)})"


def plus_minus(mean: float | None, bounds: Bounds, *, signed: bool = False) -> str:
    """A mean and half the width of its interval, to the half-width's second digit: 97.31 ± 0.24."""
    if mean is None:
        return MISSING
    half = (bounds[1] - bounds[0]) / 2 if bounds else None
    places = min(4, decimals(half, digits=2)) if half else 2
    sign = "+" if signed and mean > 0 else ""
    text = f"{sign}{number(mean, places=places)}"
    return text if half is None else f"{text} ± {number(half, places=places)}"


def scaled(value: float | None, factor: float) -> float | None:
    """`value` times `factor`, or None where it is missing."""
    return None if value is None else value * factor


def compact(value: Any) -> str:
    """Anything of the record in a few words: convolution: bfloat16 9; matmul: bfloat16 4."""
    if isinstance(value, dict):
        separator = (", ", "; ", " · ")[min(_depth(value), 3) - 1]
        return separator.join(map(_entry, value.items())) or MISSING
    if isinstance(value, list | tuple):
        return " ".join(map(compact, value)) or MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str) and value:
        return value
    if isinstance(value, int):
        return str(value)
    return f"{value:.3g}" if is_number(value) else MISSING


def _depth(value: Any) -> int:
    if not isinstance(value, dict):
        return 0
    return 1 + max(map(_depth, value.values()), default=0)


def _entry(item: tuple[Any, Any]) -> str:
    key, value = item
    return f"{key}{':' if isinstance(value, dict) else ''} {compact(value)}"
