"""tables.csv: one row a case with all of its figures, in base units and full precision."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from typing import Any

from bench.record import (
    DIFFERENT,
    Accuracy,
    AccuracyDifference,
    Case,
    Comparison,
    Memory,
    Metric,
    Record,
    Timing,
)
from bench.report.text import plain

WORDS = ("id", "technique", "framework", "flavour", "variant", "title", "program", "role", "task")
WORDS += ("batch_size", "mode", "status", "reason")
MEMORY = ("import", "build", "first_step_peak", "steady_peak")
MEMORY += ("parameters", "gradients", "optimizer", "rest")
LARGEST_WHOLE = 2**53
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # with which a spreadsheet begins to calculate

Row = dict[str, Any]


def csv_text(record: Record) -> str:
    """The table as CSV with a header; a cell is empty where nothing was measured."""
    by_id = {case.id: case for case in record.cases}
    names = dict.fromkeys(name for case in record.cases for name in case.metrics)
    rows = [_row(case, by_id, names, record.comparisons) for case in record.cases]
    columns = dict.fromkeys(name for row in rows for name in row)
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, restval="", lineterminator="\n")
    writer.writerow({name: _cell(name) for name in columns})
    writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
    return out.getvalue()


def _cell(value: Any) -> Any:
    """Numbers as they are, text such that no spreadsheet takes it for a formula."""
    if value is None:
        return ""
    if isinstance(value, float) and value.is_integer() and abs(value) < LARGEST_WHOLE:
        return int(value)  # of bytes and counts
    if isinstance(value, int | float):
        return value
    text = plain(value)
    return f"'{text}" if text.startswith(FORMULA) else text


def _row(
    case: Case, by_id: dict[str, Case], metrics: Iterable[str], comparisons: list[Comparison]
) -> Row:
    """A case's figures; none where it is not OK, but the same columns."""
    program = by_id.get(case.program_id, case)
    words = {name: getattr(case, name) for name in WORDS}
    if case.status != "OK":
        case = case.but(
            timing=Timing(), memory=None, accuracy=None, metrics={}, artifact_bytes=None
        )
    timing, memory = case.timing, case.memory or Memory()
    trained = case.accuracy or Accuracy()
    difference = trained.difference or AccuracyDifference()
    return {
        **words,
        **_figure("step_s", timing.median_s, timing.ci_s),
        "blocks": program.timing.block_count or None,
        **_comparison("to_baseline", _to_baseline(case, comparisons)),
        **_comparison("pytorch_to_tensorflow", _to_twin(case, comparisons)),
        "cold_first_call_s": timing.cold_first_call_s,
        "warm_first_call_s": timing.warm_first_call_s,
        **{f"memory_{part}_bytes": getattr(memory, f"{part}_bytes") for part in MEMORY},
        **{
            f"memory_device_{name}_bytes": (memory.device_peak or {}).get(name)
            for name in ("allocated", "reserved")
        },
        "accuracy_metric": trained.metric,
        **_figure("accuracy", trained.mean, trained.ci),
        **_figure("accuracy_to_baseline", difference.mean, difference.ci),
        "accuracy_to_baseline_verdict": difference.verdict,
        "artifact_bytes": case.artifact_bytes,
        **{
            column: value
            for name in metrics
            for column, value in _metric(name, case.metrics.get(name) or Metric()).items()
        },
    }


def _figure(name: str, value: float | None, bounds: tuple | None) -> Row:
    low, high = bounds or (None, None)
    return {name: value, f"{name}_low": low, f"{name}_high": high}


def _metric(name: str, metric: Metric) -> Row:
    return _figure(f"metric_{name}", metric.value, metric.ci) | {f"metric_{name}_unit": metric.unit}


def _comparison(name: str, comparison: Comparison | None) -> Row:
    """A ratio with its interval and verdict; no ratio between unlike work."""
    verdict = comparison and comparison.verdict
    same = None if verdict == DIFFERENT else comparison
    ratio, ci = (same.ratio, same.ci) if same else (None, None)
    return _figure(f"ratio_{name}", ratio, ci) | {f"ratio_{name}_verdict": verdict}


def _to_baseline(case: Case, comparisons: list[Comparison]) -> Comparison | None:
    """A case's ratio to its baseline; a control's is to its equal."""
    for comparison in comparisons:
        if comparison.kind in ("baseline", "control") and comparison.numerator == case.id:
            return comparison
    return None


def _to_twin(case: Case, comparisons: list[Comparison]) -> Comparison | None:
    """The ratio of a case and its twin, whichever of both it is."""
    for comparison in comparisons:
        ids = (comparison.numerator, comparison.denominator)
        is_twin = comparison.kind == "framework" and comparison.variant == case.variant
        if is_twin and case.id in ids:
            return comparison
    return None
