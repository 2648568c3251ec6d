"""A record from what was measured: every figure, ratio and verdict that is shown anywhere.

Nothing here starts a process, reads a clock or imports a framework: the same raw part gives the
same record, today and on any machine.
"""

from __future__ import annotations

from bench.analysis import cases, comparisons, pairing
from bench.analysis.values import finite

DERIVED = ("noise_floor", "comparisons")
DERIVED_OF_CASE = ("memory", "metrics", "certificate", "artifact_bytes")


def analyse(measured: dict) -> dict:
    """The whole record of what was measured, as JSON values."""
    measured = measured | {"environment": finite(measured["environment"])}
    every, looks = _with_accuracy(measured), measured.get("looks")
    found = comparisons.fits(every)
    made = _compared(measured, every, found)
    own = {c["numerator"]: c for c in made if c["kind"] == "baseline"}
    whole = []
    for given, case in zip(measured["cases"], every, strict=True):
        fit = found.get(pairing.work_of(case))
        about = {"fit": fit, "comparison": own.get(case["id"]), "looks": looks}
        about["seed_looks"] = measured.get("seed_looks")
        metrics = cases.metrics(case, pairing.baseline(case, every), measured["environment"], about)
        whole.append(
            case
            | {
                "timing": cases.timing(case, about) | {"step_s": given["timing"]["step_s"]},
                "blocks": given["blocks"],
                "cold_starts": given["cold_starts"],
                "memory": cases.memory(case),
                "artifact_bytes": metrics.get("artifact", {}).get("value"),
                "metrics": metrics,
            }
        )
    floor = comparisons.noise_floor(every, made)
    return finite(measured | {"cases": whole, "noise_floor": floor, "comparisons": made})


def compared(measured: dict) -> list[dict]:
    """The comparisons alone."""
    every = _with_accuracy(measured)
    return _compared(measured, every, comparisons.fits(every))


def _compared(measured: dict, every: list[dict], found: comparisons.Fits) -> list[dict]:
    looks, seed_looks = measured.get("looks"), measured.get("seed_looks")
    return comparisons.compare_all(every, measured["tasks"], found, looks, seed_looks)


def _with_accuracy(measured: dict) -> list[dict]:
    """The cases with what was measured of their programs, and their accuracy judged."""
    every, looks = pairing.resolved(measured["cases"]), measured.get("seed_looks")
    certified = [case | {"certificate": cases.certificate(case)} for case in every]
    return [
        case
        | {
            "accuracy": cases.accuracy(
                case, pairing.baseline(case, every), measured["tasks"], looks
            ),
            "reason": case.get("reason") or cases.not_finite(case),
        }
        for case in certified
    ]


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
