"""Effects and their bounds: of intervals, of what was repeated elsewhere, of what is exact."""

from __future__ import annotations

from math import exp, inf, log, sqrt

import numpy as np
import pytest
from scipy import stats

from bench.analysis.effects import NOT_MEASURED, Effect, Effects
from tests.analysis.planted import planted


def row(technique="mixed_precision", variant="changed", **effects):
    return {"technique": technique, "variant": variant} | effects


def find(record, technique="mixed_precision", role="variant"):
    (one,) = (c for c in record["cases"] if (c["technique"], c["role"]) == (technique, role))
    return one


def effect(record, figure, technique="mixed_precision"):
    return Effects(record).of(find(record, technique), figure)[0]


# What was measured in one process -----------------------------------------------------------------


def scatter(*groups):
    """The deviation of logarithms about the means of their groups, and its freedom."""
    apart = [log(v) - np.mean(np.log(own)) for own in groups for v in own]
    freedom = len(apart) - len(groups)
    return sqrt(sum(each**2 for each in apart) / freedom), freedom


def bounds(value, sd, freedom, ours, theirs):
    wide = exp(stats.t.ppf(0.975, freedom) * sd * sqrt(1 / ours + 1 / theirs))
    return pytest.approx((value, value / wide, value * wide))


@pytest.mark.parametrize(("ours", "theirs"), [(1, 1), (1, 3), (2, 1), (2, 4)])
def test_a_peak_has_the_scatter_of_those_that_the_run_repeated(ours, theirs):
    repeated = [1.0, 1.2, 0.9]
    record = planted(row(memory=0.5), row("compilation", peaks=repeated))
    for role, count in (("variant", ours), ("baseline", theirs)):
        case = find(record, role=role)
        peak = case["memory"]["above_import_bytes"]
        case["memory"]["samples"]["above_import_bytes"] = [peak] * count
    sd, freedom = scatter(repeated, repeated, *([1.0] * n for n in (ours, theirs) if n > 1))
    found = effect(record, "memory")
    assert (found.value, found.low, found.high) == bounds(0.5, sd, freedom, ours, theirs)
    assert found.kind == "interval"


def test_peaks_of_nothing_do_not_count_and_a_program_counts_once():
    repeated = [1.0, 1.2, 0.9]
    record = planted(row(memory=0.5), row("compilation", peaks=repeated))
    whole = effect(record, "memory")
    for role in ("variant", "baseline"):
        find(record, "compilation", role)["memory"]["samples"]["above_import_bytes"] += [
            *(0, -5.0, None)
        ]
    assert effect(record, "memory") == whole
    again = find(record, "compilation") | {"id": "again", "variant": "again"}
    record["cases"].append(again)
    assert effect(record, "memory") == whole


def test_first_calls_of_less_than_a_second_scatter_too():
    record = planted(row(), row("compilation"))
    find(record)["timing"]["cold_first_call_s"] = 0.8
    assert effect(record, "first_call").kind == "once"
    calls = [0.4, 0.5, 0.7]
    find(record, "compilation")["metrics"]["cold_first_calls_s"] = {"value": 0.5, "samples": calls}
    found = effect(record, "first_call")
    assert (found.value, found.low, found.high) == bounds(0.8 / 0.5, *scatter(calls), 1, 1)


# Other figures ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ([6.0, 5.0, 7.0], [3.0, 2.0, 4.0], Effect(2.0, 5 / 4, 7 / 2, "interval")),
        ([6.0, -1.0, 7.0], [3.0, 2.0, 4.0], Effect(2.0, 0.0, 7 / 2, "interval")),
        ([6.0, 5.0, 7.0], [3.0, -1.0, 4.0], Effect(2.0, 5 / 4, inf, "interval")),
        (6.0, [3.0, 2.0, 4.0], Effect(2.0, 2.0, 2.0, "once")),
        ([6.0, 5.0, 7.0], 3.0, Effect(2.0, 2.0, 2.0, "once")),
        (0.0, 3.0, None),
    ],
)
def test_a_ratio_of_metrics_spans_the_bounds_of_both(ours, theirs, expected):
    record = planted(row(metrics={"load": (ours, theirs)}))
    assert effect(record, "load") == expected


@pytest.mark.parametrize(
    ("metric", "value", "samples", "expected"),
    [
        ("load", 2.0, [1.5, 2.0, 3.0], Effect(2.0, 1.5, 3.0, "range")),
        ("load", 2.0, [2.0, 3.0], Effect(2.0, 2.0, 3.0, "range")),
        ("load", 2.0, [1.0, 2.0], Effect(2.0, 1.0, 2.0, "range")),
        ("load", 2.0, [1.5, 1.8], Effect(2.0, 2.0, 2.0, "once")),
        ("load", 2.0, [2.5, 2.8], Effect(2.0, 2.0, 2.0, "once")),
        ("load", 2.0, [2.0], Effect(2.0, 2.0, 2.0, "once")),
        ("load", 2.0, None, Effect(2.0, 2.0, 2.0, "once")),
        ("load", 0.5, None, Effect(0.5, 0.5, 0.5, "once")),
        ("load", -2.0, None, None),
        ("checkpoint", 100, None, Effect(100, 100, 100, "exact")),
        ("largest_batch", 100, None, Effect(100, 100, 105, "range")),
        ("macs", 100, None, Effect(100, 100, 100, "exact")),
        ("macs", 0, None, Effect(0, 0, 0, "exact")),
        ("load", None, None, None),
    ],
)
def test_a_row_s_own_figure(metric, value, samples, expected):
    record = planted(row())
    case = find(record)
    case["metrics"][metric] = {"value": value, "unit": "1", "ci": None, "samples": samples}
    found = (expected, None) if expected else (None, NOT_MEASURED)
    assert Effects(record).value(case, metric) == found


def test_what_a_device_s_allocator_counts_is_exact():
    record = planted(row(memory=0.5), row("compilation", peaks=[1.0, 1.2, 0.9]))
    for role, peak in (("variant", 3.0), ("baseline", 4.0)):
        find(record, role=role)["memory"]["device_peak"] = {"allocated": peak}
    assert effect(record, "memory") == Effect(0.75, 0.75, 0.75, "exact")


@pytest.mark.parametrize("low", [0.5, 0.0])
def test_the_other_way_round_the_bounds_change_places(low):
    turned = Effect(2.0, low, 4.0, "interval").turned()
    assert turned == Effect(0.5, 0.25, 1 / low if low else inf, "interval")
