"""Which rows address a bottleneck: those that gained over their own baseline and keep accuracy."""

from __future__ import annotations

import pytest

from bench.analysis.remedies import remedies
from tests.analysis.planted import planted

WORK = "digits-cnn, batch 64, train step"
GAINED = (0.6, 0.58, 0.62)


def row(technique="compilation", variant="changed", **effects):
    return {"technique": technique, "variant": variant} | effects


def left(record, bottleneck="overhead", framework="pt"):
    return [(one.technique, one.left) for one in remedies(record, framework, bottleneck)]


def test_the_best_row_of_each_technique_the_best_gain_first():
    record = planted(
        row(time=(0.9, 0.88, 0.92)),
        row(variant="better", time=GAINED),
        row(variant="worse", time=(0.7, 0.68, 0.72)),
        row("optimizer_implementations", time=(0.5, 0.48, 0.52)),
        row("memory_format", time=(0.1, 0.09, 0.11)),  # no remedy for this bottleneck
    )
    assert left(record) == [("optimizer_implementations", 0.5), ("compilation", 0.6)]
    first, _ = remedies(record, "pt", "overhead")
    assert (first.work, first.figure, first.ci) == (WORK, "time", (0.48, 0.52))
    assert "0.500 (0.480–0.520)" in str(first)


@pytest.mark.parametrize(
    ("time", "gained"),
    [
        ((0.9, 0.8, 0.97), True),
        ((0.9, 0.8, 0.98), False),
        ((1.2, 1.1, 1.3), False),
        ((0.9,), False),  # one block
        ((1.0,), False),
        ((1.2,), False),
    ],
)
def test_a_gain_is_a_whole_interval_beyond_what_counts_as_no_difference(time, gained):
    found = remedies(planted(row(time=time)), "pt", "overhead")
    assert bool(found) == gained
    assert [one.ci for one in found] == ([tuple(time[1:])] if gained else [])


def test_each_framework_has_its_own_and_what_loses_accuracy_is_none():
    rows = row(time=GAINED), row(time=(0.7, 0.68, 0.72), framework="tf")
    assert left(planted(*rows)) == [("compilation", 0.6)]
    assert left(planted(*rows), framework="tf") == [("compilation", 0.7)]
    quicker = row(time=(0.5, 0.48, 0.52), framework="tf")
    assert left(planted(rows[0], quicker)) == [("compilation", 0.6)]
    assert left(planted(row(time=GAINED, accuracy=(-5.0, -6.0, -4.0)))) == []


def test_a_program_that_several_techniques_have_is_a_remedy_of_each():
    record = planted(row(time=GAINED), row("stacking", time=GAINED))
    ours, theirs = (case for case in record["cases"] if case["role"] == "variant")
    theirs["program"] = ours["id"]
    assert sorted(left(record)) == [("compilation", 0.6), ("stacking", 0.6)]


def test_devices_are_compared_by_their_rates():
    rates = {"samples_per_s": (200.0, 100.0)}
    (one,) = remedies(planted(row("data_parallel", metrics=rates)), "pt", "communication")
    assert (one.left, one.ci, one.figure) == (0.5, None, "time a sample")


# Memory -------------------------------------------------------------------------------------------


def weighing(record, technique, framework, share):
    """The record with another peak of a baseline, as a share of 100 MB."""
    for case in record["cases"]:
        if (case["technique"], case["framework"], case["role"]) == (
            *(technique, framework, "baseline"),
        ):
            case["memory"]["steady_peak_bytes"] = 1e8 + share * 1e8
            case["memory"]["samples"] = {}
    return record


def test_a_smaller_peak_is_a_remedy_whatever_its_time():
    record = planted(row("gradient_accumulation", peaks=[0.5, 0.5], time=(1.2, 1.1, 1.3)))
    assert left(record, "memory size") == [("gradient_accumulation", 0.5)]
    once, larger = {"memory": 0.5}, {"peaks": [1.5, 1.5]}
    for given in (once, larger):
        assert left(planted(row("gradient_accumulation", **given)), "memory size") == []


@pytest.mark.parametrize(("most", "gained"), [(0.901, True), (1.0, False), (1.2, False)])
def test_it_is_less_by_more_than_processes_scatter(most, gained):
    record = planted(row("stacking", peaks=[0.9, most]))
    assert left(record, "memory size") == ([("stacking", pytest.approx(0.9))] if gained else [])


def test_the_smallest_baseline_of_its_own_framework_is_what_counts():
    rows = [
        row(technique, peaks=[0.5, 0.5], framework=framework)
        for technique in ("stacking", "mixed_precision")
        for framework in ("pt", "tf")
    ]
    record = weighing(planted(*rows), "mixed_precision", "pt", 0.8)
    record = weighing(record, "stacking", "tf", 0.4)
    assert left(record, "memory size") == [("stacking", 0.625), ("mixed_precision", 0.625)]
    assert left(record, "memory size", "tf") == []


def test_rows_whose_memory_was_not_measured_are_none():
    record = planted(row("stacking", time=GAINED))
    for case in record["cases"]:
        case["memory"] = None
    assert left(record, "memory size") == []
