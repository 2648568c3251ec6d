"""Small records whose answers are known: rows with the effects that a test asks for."""

from __future__ import annotations

from bench.analysis.declared import complete
from bench.analysis.schema import check
from tests.report.test_report import record

SIDES = {"pt": None, "tf": "keras3"}


def planted(*cases: dict, gpu: object = None, isa: tuple[str, ...] = ()) -> dict:
    """A record of these cases, each with a baseline of its own technique and framework.

    A case: technique, variant, framework, and its effects: `time` (ratio, low, high), `accuracy`
    (mean, low, high) with its `seeds`, `memory`, `size` (ratios) and `metrics` (own value, the
    baseline's).
    """
    made = record()
    made["schema_version"] = 3
    made["environment"] |= {"gpu": gpu, "isa": list(isa)}
    made["cases"], made["comparisons"] = [], []
    made["tasks"] |= {case.get("task", "digits-cnn"): made["tasks"]["digits-cnn"] for case in cases}
    for each in cases:
        base = _case(each | {"variant": "base", "role": "baseline"}, own=1)
        if base["id"] not in {case["id"] for case in made["cases"]}:
            made["cases"].append(base)
        case = _case(each, own=0)
        made["cases"].append(case)
        if "time" in each and case["status"] == "OK":
            made["comparisons"].append(_comparison(case, base, each["time"]))
    check(made)
    return complete(made)


def _case(given: dict, own: int) -> dict:
    """`own`: 0 for the row itself, 1 for its baseline."""
    task, framework = given.get("task", "digits-cnn"), given.get("framework", "pt")
    name = f"{given['technique']}/{task}-64/{framework}/{given['variant']}"
    mean, *bounds = given.get("accuracy", (None,))
    peaks = given.get("peaks", [given.get("memory", 1.0) if own == 0 else 1.0])
    peaks = [1e8 * peak for peak in (peaks if own == 0 else [p / peaks[0] for p in peaks])]
    return {
        "id": name,
        "technique": given["technique"],
        "framework": framework,
        "flavour": SIDES[framework],
        "variant": given["variant"],
        "role": given.get("role", "variant"),
        "task": task,
        "batch_size": 64,
        "mode": given.get("mode", "train"),
        "status": given.get("status", "OK") if own == 0 else "OK",
        "reason": given.get("reason"),
        "program": name,
        "changes_math": given.get("changes_math", False),
        "changes_weights": given.get("changes_weights", False),
        "timing": {
            "cold_first_call_s": 0.5,
            "step_s": {},
            "median_s": 0.01 if "time" in given else None,
            "ci_s": [0.0099, 0.0101] if "time" in given else None,
        },
        "memory": {
            "import_bytes": 1e8,
            "steady_peak_bytes": 1e8 + peaks[0],
            "above_import_bytes": peaks[0],
            "samples": {"above_import_bytes": peaks},
        },
        "accuracy": {
            "metric": "accuracy",
            "per_seed": given.get("seeds", [90.0]),
            "difference": {"mean": mean, "ci": bounds or None, "verdict": None},
        }
        if "accuracy" in given and own == 0
        else None,
        "artifact_bytes": 1e6 * (given["size"] if own == 0 else 1) if "size" in given else None,
        "metrics": {
            metric: {"value": values[own], "unit": "1", "ci": None, "samples": None}
            if not isinstance(values[own], list)
            else {"value": values[own][0], "unit": "1", "ci": values[own][1:], "samples": None}
            for metric, values in given.get("metrics", {}).items()
        },
        "certificate": {"losses": [2.0, 1.9], "weights_sha256": "ab"},
        "evidence": None,
    }


def _comparison(case: dict, base: dict, time: tuple) -> dict:
    ratio, *bounds = time
    return {
        "technique": case["technique"],
        "variant": case["variant"],
        "task": case["task"],
        "batch_size": case["batch_size"],
        "mode": case["mode"],
        "kind": "baseline",
        "numerator": case["id"],
        "denominator": base["id"],
        "ratio": ratio,
        "ci": bounds or None,
        "sd": 0.01 if bounds else None,
        "n": 5 if bounds else 1,
        "verdict": "faster" if bounds else None,
        "reason": None,
    }
