"""tables.csv: one row a case with all of its figures, in base units and full precision."""

from __future__ import annotations

import csv
import io
from typing import Any

from bench.analysis.reading import DIFFERENT, block_count
from bench.analysis.values import at, is_number, is_pair
from bench.report.text import plain

WORDS = ("id", "technique", "framework", "flavour", "variant", "title", "program", "role", "task")
WORDS += ("batch_size", "mode", "status", "reason")
MEMORY = ("import", "build", "first_step_peak", "steady_peak")
MEMORY += ("parameters", "gradients", "optimizer", "rest")
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # with which a spreadsheet begins to calculate

Row = dict[str, Any]


def csv_text(results: dict[str, Any]) -> str:
    """The table as CSV with a header; a cell is empty where nothing was measured."""
    rows = [_row(case, results) for case in results["cases"]]
    metrics = dict.fromkeys(name for case in results["cases"] for name in case.get("metrics") or {})
    columns = [*_row({}, results), *(column for name in metrics for column in _metric(name, {}))]
    for row, case in zip(rows, results["cases"], strict=True):
        for name in metrics if case["status"] == "OK" else ():
            row |= _metric(name, at(case, "metrics", name))
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, restval="", lineterminator="\n")
    writer.writerow({name: _cell(name) for name in columns})
    writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
    return out.getvalue()


def _cell(value: Any) -> Any:
    """Numbers as they are, text such that no spreadsheet takes it for a formula."""
    if value is None or (isinstance(value, float) and not is_number(value)):
        return ""
    if is_number(value):
        return value
    text = plain(value)
    return f"'{text}" if text.startswith(FORMULA) else text


def _row(case: dict, results: dict[str, Any]) -> Row:
    """All but the metrics; without figures where the case is not OK."""
    found = {name: case.get(name) for name in WORDS}
    good = case if case.get("status") == "OK" else {}
    timing, memory, trained = (good.get(name) for name in ("timing", "memory", "accuracy"))
    found |= _figure("step_s", at(timing, "median_s"), at(timing, "ci_s"))
    shown = [c for c in results["cases"] if c["id"] == case.get("program")] or [case]
    found["blocks"] = block_count(shown[0]) or None
    for kind, name in (("baseline", "to_baseline"), ("framework", "pytorch_to_tensorflow")):
        found |= _comparison(name, _of(case, kind, results))
    found |= {
        f"{name}_first_call_s": at(timing, f"{name}_first_call_s") for name in ("cold", "warm")
    }
    found |= {f"memory_{part}_bytes": at(memory, f"{part}_bytes") for part in MEMORY}
    for name in ("allocated", "reserved"):
        found[f"memory_device_{name}_bytes"] = at(memory, "device_peak", name)
    found["accuracy_metric"] = at(trained, "metric")
    found |= _figure("accuracy", at(trained, "mean"), at(trained, "ci"))
    apart = at(trained, "difference")
    found |= _figure("accuracy_to_baseline", at(apart, "mean"), at(apart, "ci"))
    found["accuracy_to_baseline_verdict"] = at(apart, "verdict")
    found["artifact_bytes"] = good.get("artifact_bytes")
    return found


def _figure(name: str, value: Any, bounds: Any) -> Row:
    low, high = bounds if is_pair(bounds) else (None, None)
    return {name: value, f"{name}_low": low, f"{name}_high": high}


def _metric(name: str, metric: dict | None) -> Row:
    bounds = at(metric, "ci")
    low, high = bounds if isinstance(bounds, list) and len(bounds) == 2 else (None, None)
    found = {"": at(metric, "value"), "_low": low, "_high": high, "_unit": at(metric, "unit")}
    return {f"metric_{name}{end}": value for end, value in found.items()}


def _comparison(name: str, comparison: dict | None) -> Row:
    """A ratio with its interval and verdict; no ratio between unlike work."""
    verdict = at(comparison, "verdict")
    same = comparison if verdict != DIFFERENT else None
    found = _figure(f"ratio_{name}", at(same, "ratio"), at(same, "ci"))
    return found | {f"ratio_{name}_verdict": verdict}


def _of(case: dict, kind: str, results: dict[str, Any]) -> dict | None:
    """A case's ratio to its own baseline (a control's is to its equal), or to or from its twin."""
    kinds = (kind, "control") if kind == "baseline" else (kind,)
    sides = ("numerator",) if kind == "baseline" else ("numerator", "denominator")
    return next(
        (
            comparison
            for comparison in results["comparisons"]
            if comparison["kind"] in kinds
            and comparison["variant"] == case.get("variant")
            and case["id"] in [comparison[side] for side in sides]
        ),
        None,
    )
