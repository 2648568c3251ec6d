"""The figures of one case, worked out by hand."""

from __future__ import annotations

from math import inf, nan

import pytest
from scipy import stats

from bench.analysis import cases
from bench.analysis.bounds import confidence

TASKS = {"more": {"metric": "accuracy", "margin": 1.0}}


def half(values, level):
    """Half of Student's interval of a mean."""
    low, high = stats.ttest_1samp(values, 0).confidence_interval(level)
    return (high - low) / 2


@pytest.mark.parametrize(("looks", "level"), [(None, 0.95), ([4, 6, 8], confidence((4, 6, 8)))])
def test_a_metric_over_seeds_has_the_interval_that_its_looks_ask_for(looks, level):
    seeds = [90.0, 91.5, 93.0]
    case = {"task": "more", "accuracy": {"metric": "accuracy", "per_seed": seeds}}
    found = cases.accuracy(case, None, TASKS, looks)
    assert found["mean"] == 91.5
    assert found["ci"] == pytest.approx([91.5 - half(seeds, level), 91.5 + half(seeds, level)])
    assert found["difference"] is None
    trained = [{"epochs": {"value": value, "unit": "1"}} for value in seeds]
    seen = cases._seen_in_training({"trained_metrics": trained}, looks)["epochs"]
    assert (seen["value"], seen["samples"]) == (91.5, seeds)
    assert seen["ci"] == pytest.approx(found["ci"])


@pytest.mark.parametrize("value", [nan, inf, None])
def test_a_seed_without_a_finite_metric_leaves_no_figure(value):
    case = {"task": "more", "accuracy": {"metric": "accuracy", "per_seed": [90.0, value, 93.0]}}
    base = {"task": "more", "accuracy": {"metric": "accuracy", "per_seed": [90.0]}}
    found = cases.accuracy(case, base, TASKS, None)
    assert [found[name] for name in ("mean", "ci", "difference")] == [None] * 3
    assert cases.not_finite(case) == "accuracy not measured: the metric is not finite at seed 1"
    assert cases.not_finite(base) is cases.not_finite({"accuracy": None}) is None
    assert cases.accuracy(base, case, TASKS, None)["difference"] is None


@pytest.mark.parametrize("missed", [None, nan])
def test_a_seed_that_missed_its_target_leaves_no_mean(missed):
    trained = [{"steps": {"value": value, "unit": "1"}} for value in (4, missed)]
    found = cases._seen_in_training({"trained_metrics": trained}, None)
    assert found == {"steps": cases.figure(None, "1")}
    assert cases._seen_in_training({"trained_metrics": []}, None) == {}


def test_the_main_dtype_is_the_one_of_most_products_over_all_kinds():
    counts = {"matmul": {"float32": 3, "bfloat16": 2}, "convolution": {"bfloat16": 2}}
    assert cases._main_dtype({"operator_dtypes": counts}) == "bfloat16"
    assert cases._main_dtype({}) is None
    assert cases._main_dtype(None) is None


class Timed:
    """A fit that knows one time."""

    def time(self, _):
        return 0.3, [0.25, 0.4]


def test_rates_are_those_of_a_batch_by_the_step_s_time():
    case = {
        "id": "a",
        "status": "OK",
        "batch_size": 4,
        "timing": {"step_s": {"0": {"0": [0.3]}}},
        "evidence": {"operator_dtypes": {"matmul": {"float32": 1}}},
        "flops": 6e9,
    }
    about = {"fit": Timed(), "looks": None}
    found = cases._rates(case, {"peak_flops": {"float32": 1e11}}, about)
    assert found["samples_per_s"] == cases.figure(4 / 0.3, "samples/s", [4 / 0.4, 4 / 0.25])
    share = found["share_of_peak"]
    assert share["value"] == pytest.approx(6e9 / 0.3 / 1e11)
    assert share["ci"] == pytest.approx([6e9 / 0.4 / 1e11, 6e9 / 0.25 / 1e11])
    assert "share_of_peak" not in cases._rates(case, {"peak_flops": {"bfloat16": 1e11}}, about)
    for nothing in ({"status": "FAILED"}, {"timing": {"step_s": {}}}):
        assert cases._rates(case | nothing, {}, about) == {}
    assert cases._rates(case, {}, about | {"fit": None}) == {}


def test_energy_is_the_mean_of_each_block_and_only_of_what_ran_in_all():
    case = {
        "status": "OK",
        "batch_size": 4,
        "timing": {"step_s": {"0": {"0": [0.3]}}},
        "blocks": [
            {"energy_j": [3.0, 2.0, 1.0]},
            {"energy_j": [4.0, 3.0, 2.0]},
        ],
    }
    found = cases._energy(case, None)
    bounds = pytest.approx([2.5 - half([2.0, 3.0], 0.95), 2.5 + half([2.0, 3.0], 0.95)])
    assert (found["energy_per_step"]["value"], found["energy_per_step"]["ci"]) == (2.5, bounds)
    assert found["energy_per_sample"]["value"] == 2.5 / 4
    assert [4 * edge for edge in found["energy_per_sample"]["ci"]] == bounds
    for nothing in ({"status": "FAILED"}, {"blocks": []}, {"blocks": [case["blocks"][0], {}]}):
        assert cases._energy(case | nothing, None) == {}


@pytest.mark.parametrize(("sizes", "samples"), [([30], None), ([30, 10, 20], [30, 10, 20])])
def test_the_size_of_trained_files_is_their_median(sizes, samples):
    trained = [{"bytes": size, "compressed_bytes": size - 5} for size in sizes]
    found = cases.artifact({"probed": {}, "trained_artifacts": trained, "cold_starts": []})
    middle = sorted(sizes)[len(sizes) // 2]
    assert found["artifact"] == cases.figure(middle, "bytes", samples=samples)
    assert found["compressed_artifact"]["value"] == middle - 5
