"""Runs of one class of machine as one record, whose intervals hold for other runs as well."""

from __future__ import annotations

from math import exp, log

import numpy as np
import pytest
from scipy import stats

from bench.analysis.analyse import analyse
from bench.analysis.pooling import by_class, pool
from bench.analysis.table import FIRST_CALL, MEMORY, RATE, TIME, Table
from bench.record import Accuracy, ColdStart, Metric, Pass
from bench.report import tables
from tests.records import (
    as_read,
    find_case,
    find_comparison,
    played_run,
    with_case,
    with_environment,
)

ROWS = {"made_up": ("plain", *(f"row{number}" for number in range(15)))}
NAMES = [(side, name) for side in ("pt", "tf") for name in ROWS["made_up"]]


def runs(between, count, seed=0, sd=0.01, rows=ROWS, **fields):
    """Runs whose rows take as long as their baselines, but for what runs differ by."""
    draw, made = np.random.default_rng(seed), []
    for number in range(count):
        times = {name: exp(draw.normal(0, between)) for name in NAMES}
        fields["started"] = f"2026-01-0{number + 1}"
        made.append(analyse(played_run(times, 5, rows, sd, 10 * seed + number, **fields)))
    return made


def covered(record):
    """The share of ratios of which the interval holds the truth, which is 1."""
    bounds = [c.ci for c in record.comparisons if c.kind != "control"]
    return np.mean([low <= 1 <= high for low, high in bounds])


# Times --------------------------------------------------------------------------------------------


def test_intervals_of_pooled_runs_hold_what_runs_scatter_by_and_those_of_one_do_not():
    """2% from run to run, and 1% from block to block of one."""
    pooled, alone = [], []
    for seed in range(3):
        some = runs(0.02, 5, seed)
        pooled.append(covered(pool(some)))
        alone += map(covered, some[:2])
    assert np.mean(pooled) > 0.93
    assert np.mean(alone) < 0.75


def test_a_ratio_is_the_mean_of_the_runs_and_its_interval_is_hartung_s_and_knapp_s():
    """Of a pair that lends nobody its variance: two frameworks alone at a piece of work."""
    rows = {"made_up": ("plain",)}
    some = runs(0.03, 4, rows=rows)
    plain = [[case for case in run.cases if case.variant == "plain"] for run in some]
    some = [analyse(run.but(cases=cases)) for run, cases in zip(some, plain, strict=True)]
    found = find_comparison(pool(some), "pt/plain", "tf/plain")
    logs = [log(find_comparison(run, "pt/plain", "tf/plain").ratio) for run in some]
    half = stats.t.ppf(0.975, 3) * np.std(logs, ddof=1) / 2
    assert log(found.ratio) == pytest.approx(np.mean(logs))
    assert np.log(found.ci) == pytest.approx([np.mean(logs) - half, np.mean(logs) + half])
    assert (found.n, found.sd) == (4, pytest.approx(np.std(logs, ddof=1)))


def test_more_runs_tell_more():
    widths = []
    for count in (2, 3, 6):
        bounds = [c.ci for c in pool(runs(0.02, count)).comparisons]
        widths.append(np.median([log(high / low) for low, high in bounds]))
    assert widths[0] > widths[1] > widths[2]


def test_what_only_one_run_has_stays_as_that_run_has_it():
    first, second = runs(0.0, 2)
    less = [case for case in first.cases if case.variant != "row3"]
    whole = pool([analyse(first.but(cases=less)), second])
    for pair in (("pt/row3", "pt/plain"), ("tf/row3", "tf/plain")):
        found, alone = find_comparison(whole, *pair), find_comparison(second, *pair)
        assert (found.ratio, found.ci, found.n) == (alone.ratio, alone.ci, 5)
    assert find_comparison(whole, "pt/row4", "pt/plain").n == 2


def test_a_pass_that_a_run_left_out_takes_no_run_out_of_the_pooled_record():
    first, second, third = runs(0.0, 3)
    steady = {"began": "2026-01-03", "matches": [0], "after": 1e9}
    passes = [Pass(number=n, before=speed, **steady) for n, speed in enumerate((1e9, 5e8, 1e9))]
    whole = pool([first, second, third.but(passes=passes)])
    assert find_comparison(whole, "pt/row4", "pt/plain").n == 3


def test_a_row_of_other_settings_is_another_program():
    first, second = runs(0.0, 2)
    whole = pool([with_case(first, "pt/row3", settings={"size": 2}), second])
    assert len(find_case(whole, "pt/row3").timing.step_s["0"]) == 1
    assert len(find_case(whole, "pt/row4").timing.step_s["0"]) == 2


def test_rows_that_the_runs_certificates_tell_apart_are_not_compared():
    first, second = runs(0.0, 2)
    blocks = [block.but(losses=[9.0] * 10) for block in find_case(second, "pt/row3").blocks]
    whole = pool([first, with_case(second, "pt/row3", blocks=blocks)])
    assert find_comparison(whole, "pt/row3", "pt/plain").verdict == "not comparable"
    assert find_comparison(whole, "pt/row4", "pt/plain").verdict != "not comparable"


# Other figures ------------------------------------------------------------------------------------


def starts(*sizes):
    """New processes with these peaks, and first calls as many seconds long."""
    memory = [{"import_bytes": 0, "steady_peak_bytes": size} for size in sizes]
    return [
        ColdStart(first_call_s=size / 1e8, memory=each)
        for size, each in zip(sizes, memory, strict=True)
    ]


def test_peaks_and_first_calls_scatter_as_they_do_over_runs():
    some = []
    for run, factor in zip(runs(0.0, 3), (0.9, 1.0, 1.1), strict=True):
        run = with_case(run, "pt/row1", cold_starts=starts(5e7 * factor))
        some.append(analyse(with_case(run, "pt/plain", cold_starts=starts(1e8, 1e8, 3e8))))
    whole = Table(pool(some))
    row, base = (find_case(whole.record, name) for name in ("pt/row1", "pt/plain"))
    logs = np.log([0.9, 1.0, 1.1])
    sd = (np.sum((logs - logs.mean()) ** 2) / 4) ** 0.5  # beside three that are alike
    half = stats.t.ppf(0.975, 4) * sd * (2 / 3) ** 0.5
    for name in (MEMORY, FIRST_CALL):
        found, _ = whole.between(row, base, name)
        assert found.value == pytest.approx(0.5)
        assert np.log([found.low, found.high]) == pytest.approx([log(0.5) - half, log(0.5) + half])


def test_what_a_probe_reports_is_the_median_with_the_runs_as_samples():
    some = [
        with_case(run, "pt/row1", probed={RATE: Metric(value=value, samples=[1.0, value])})
        for run, value in zip(runs(0.0, 3), (90.0, 120.0, 100.0), strict=True)
    ]
    found = find_case(pool(some), "pt/row1").metrics[RATE]
    assert (found.value, found.samples, found.ci) == (100.0, [90.0, 120.0, 100.0], None)
    assert find_case(pool([some[0], *runs(0.0, 2)[1:]]), "pt/row1").metrics[RATE].value == 90.0


def test_runs_train_with_the_same_seeds_and_count_as_those():
    seeds = ([90.0, 92.0], [91.0, 92.0, 94.0, 95.0])
    some = [
        with_case(run, "pt/row1", accuracy=Accuracy(metric="accuracy", per_seed=each))
        for run, each in zip(runs(0.0, 2), seeds, strict=True)
    ]
    assert find_case(pool(some), "pt/row1").accuracy.per_seed == [90.5, 92.0, 94.0, 95.0]


# The record ---------------------------------------------------------------------------------------


def test_all_views_read_it():
    some = runs(0.3, 3)
    whole = as_read(pool(some))
    assert whole.pooled == ["2026-01-01", "2026-01-02", "2026-01-03"]
    assert whole.started == "2026-01-03"
    assert "What to use" in tables.terminal(whole)
    assert "What to use" in tables.markdown(whole)
    row, base = (find_case(whole, name) for name in ("pt/row1", "pt/row2"))  # which no run compared
    logs = []
    for run in some:
        pair = (find_case(run, case.id) for case in (row, base))
        logs.append(log(Table(run).between(*pair, TIME)[0].value))
    found, _ = Table(whole).between(row, base, TIME)
    assert log(found.value) == pytest.approx(np.mean(logs))
    assert found.high / found.low > 1.2


def test_classes_of_machines_are_told_apart():
    one, two, three = runs(0.0, 3)
    quick = with_environment(two, peak_flops={"float32": 1e15})
    assert by_class([one, quick, three]) == [[one, three], [quick]]
    assert pool([quick]) is quick
    unknown = two.but(environment=two.environment.but(peak_flops=None))  # which is like both
    assert by_class([unknown, one, quick]) == [[unknown, one], [quick]]


def of_another_class(record):
    return with_environment(record, cpu="another one")


def of_a_file(record):
    return with_environment(record, model={"name": "a.py", "sha256": "1"})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            of_another_class,
            "different classes of machine can't be pooled: the processor is another",
        ),
        (of_a_file, "runs of different files"),
        (lambda record: record.but(pooled=["2026-01-01"]), "pooled already"),
        (lambda record: record.but(started="2026-01-01"), "a run is given twice"),
    ],
)
def test_what_is_not_pooled_is_said_in_one_line(change, reason):
    first, second = runs(0.0, 2)
    with pytest.raises(ValueError, match=reason) as said:
        pool([first, change(second)])
    assert "\n" not in str(said.value)
