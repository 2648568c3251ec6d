"""The scatter of figures of which a row has one process or a few.

Peaks of memory and first calls are mostly measured in one process a row. A run measures some rows
in several: what these scatter, pooled, is what a single one can be wrong by.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log
from typing import Any

from bench.analysis import pairing
from bench.analysis.values import at, is_number
from bench.analysis.verdicts import quantile

# Where the values of the rows that were repeated stand.
SCATTERED = {
    "memory": ("memory", "samples", "above_import_bytes"),
    "first_call": ("metrics", "cold_first_calls_s", "samples"),
}


@dataclass(frozen=True)
class Scatter:
    """The sd of a figure's logarithm over processes, and its degrees of freedom."""

    sd: float
    freedom: int

    def bounds(self, ratio: float, counts: tuple[int, int]) -> tuple[float, float] | None:
        """The 95% interval of a ratio of two rows, of so many processes each; None without any."""
        if not self.freedom:
            return None
        share = sum(1 / count for count in counts)
        wide = exp(quantile(0.95, self.freedom) * self.sd * share**0.5)
        return ratio / wide, ratio * wide


def scatters(record: dict[str, Any]) -> dict[str, Scatter]:
    """Of each scattered figure, from the rows that were repeated."""
    return {figure: _pooled(record, path) for figure, path in SCATTERED.items()}


def processes(case: dict, figure: str) -> int:
    """How many processes a row's figure is of."""
    return len(at(case, *SCATTERED[figure]) or ()) or 1


def _pooled(record: dict[str, Any], path: tuple[str, ...]) -> Scatter:
    squares, freedom = 0.0, 0
    for case in record["cases"]:
        own = [log(v) for v in at(case, *path) or () if is_number(v) and v > 0]
        if len(own) > 1 and pairing.program(case) == case["id"]:
            mean = sum(own) / len(own)
            squares += sum((each - mean) ** 2 for each in own)
            freedom += len(own) - 1
    return Scatter((squares / freedom) ** 0.5 if freedom else 0.0, freedom)
