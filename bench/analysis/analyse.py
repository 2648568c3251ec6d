"""A record from what was measured: every figure, ratio and verdict that is shown anywhere.

Nothing here starts a process, reads a clock or imports a framework: the same raw part gives the
same record, today and on any machine.
"""

from __future__ import annotations

from math import isfinite
from typing import Any

from bench.analysis import cases, comparisons

DERIVED = ("noise_floor", "comparisons")
DERIVED_OF_CASE = ("memory", "metrics", "certificate", "artifact_bytes")


def analyse(measured: dict) -> dict:
    """The whole record of what was measured, as JSON values."""
    measured = measured | {"environment": _finite(measured["environment"])}
    tasks, found = measured["tasks"], comparisons.fits(measured["cases"])
    made = comparisons.compare_all(measured["cases"], tasks, found)
    own = {c["numerator"]: c for c in made if c["kind"] == "baseline"}
    whole = []
    for case in measured["cases"]:
        base = comparisons.baseline(case, measured["cases"])
        fit = found.get(comparisons.work_of(case))
        metrics = cases.metrics(
            case, base, measured["environment"], {"fit": fit, "comparison": own.get(case["id"])}
        )
        derived = {
            "timing": cases.timing(case, fit),
            "memory": cases.memory(case),
            "accuracy": cases.accuracy(case, base, tasks),
            "artifact_bytes": metrics.get("artifact", {}).get("value"),
            "metrics": metrics,
            "certificate": cases.certificate(case),
        }
        whole.append(case | derived)
    floor = comparisons.noise_floor(measured["cases"], made)
    return _finite(measured | {"cases": whole, "noise_floor": floor, "comparisons": made})


def raw(record: dict) -> dict:
    """What was measured, of a record: `analyse` makes the whole record of it again."""
    found = {name: value for name, value in record.items() if name not in DERIVED}
    return found | {"cases": [_raw(case) for case in record["cases"]]}


def _raw(case: dict) -> dict:
    found = {name: value for name, value in case.items() if name not in DERIVED_OF_CASE}
    accuracy = case["accuracy"]
    return found | {
        "timing": {"step_s": case["timing"]["step_s"]},
        "accuracy": accuracy and {name: accuracy[name] for name in ("metric", "per_seed")},
    }


def _finite(value: Any) -> Any:
    """The same JSON value with null for NaN and infinities, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not isfinite(value):
        return None
    return value
