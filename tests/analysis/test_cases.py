"""The figures of one case, worked out by hand."""

from __future__ import annotations

from math import inf, nan

import pytest
from scipy import stats

from bench.analysis import cases
from bench.analysis.bounds import confidence
from bench.analysis.cases import Context
from bench.analysis.values import finite
from bench.record import Accuracy, Artifact, Block, Environment, Metric, TaskFacts, Timing
from tests.records import case

TASKS = {"digits-cnn": TaskFacts(metric="accuracy", margin=1.0)}
PLAYED = Timing(step_s={"0": {"0": [0.3]}})


def trained(*values, **fields):
    return case(accuracy=Accuracy(metric="accuracy", per_seed=list(values)), **fields)


def seen(name, *values):
    return case(trained_metrics=[{name: Metric(value=value, unit="1")} for value in values])


def half(values, level):
    """Half of Student's interval of a mean."""
    low, high = stats.ttest_1samp(values, 0).confidence_interval(level)
    return (high - low) / 2


@pytest.mark.parametrize(("looks", "level"), [((), 0.95), ((4, 6, 8), confidence((4, 6, 8)))])
def test_a_metric_over_seeds_has_the_interval_that_its_looks_ask_for(looks, level):
    seeds = [90.0, 91.5, 93.0]
    made = cases.accuracy(trained(*seeds), None, TASKS, looks)
    assert made.mean == 91.5
    assert made.ci == pytest.approx((91.5 - half(seeds, level), 91.5 + half(seeds, level)))
    assert made.difference is None
    epochs = cases._seen_in_training(seen("epochs", *seeds), looks)["epochs"]
    assert (epochs.value, epochs.samples) == (91.5, seeds)
    assert epochs.ci == pytest.approx(made.ci)


@pytest.mark.parametrize("value", [nan, inf, None])
def test_a_seed_without_a_finite_metric_leaves_no_figure(value):
    diverged, base = finite(trained(90.0, value, 93.0)), trained(90.0)
    made = cases.accuracy(diverged, base, TASKS)
    assert (made.mean, made.ci, made.difference) == (None, None, None)
    assert cases.not_finite(diverged) == "accuracy not measured: the metric is not finite at seed 1"
    assert cases.not_finite(base) is cases.not_finite(case()) is None
    assert cases.accuracy(base, diverged, TASKS).difference is None


@pytest.mark.parametrize("missed", [None, nan])
def test_a_seed_that_missed_its_target_leaves_no_mean(missed):
    steps = cases._seen_in_training(finite(seen("steps", 4, missed)), ())["steps"]
    assert (steps.value, steps.ci, steps.unit) == (None, None, "1")
    assert cases._seen_in_training(case(), ()) == {}


def test_the_main_dtype_is_the_one_of_most_products_over_all_kinds():
    counts = {"matmul": {"float32": 3, "bfloat16": 2}, "convolution": {"bfloat16": 2}}
    assert cases._main_dtype({"operator_dtypes": counts}) == "bfloat16"
    assert cases._main_dtype({}) is None
    assert cases._main_dtype(None) is None


class Timed:
    """A fit that knows one time."""

    def time(self, _):
        return 0.3, (0.25, 0.4)


def test_rates_are_those_of_a_batch_by_the_step_s_time():
    row = case(
        batch_size=4,
        timing=PLAYED,
        evidence={"operator_dtypes": {"matmul": {"float32": 1}}},
        flops=6e9,
    )
    machine, context = Environment(peak_flops={"float32": 1e11}), Context(fit=Timed())
    rates = cases._rates(row, machine, context)
    assert rates["samples_per_s"].value == 4 / 0.3
    assert rates["samples_per_s"].ci == (4 / 0.4, 4 / 0.25)
    assert rates["share_of_peak"].value == pytest.approx(6e9 / 0.3 / 1e11)
    assert rates["share_of_peak"].ci == pytest.approx((6e9 / 0.4 / 1e11, 6e9 / 0.25 / 1e11))
    other = Environment(peak_flops={"bfloat16": 1e11})
    assert "share_of_peak" not in cases._rates(row, other, context)
    for nothing in (row.but(status="FAILED"), row.but(timing=Timing())):
        assert cases._rates(nothing, machine, context) == {}
    assert cases._rates(row, machine, Context()) == {}


def test_energy_is_the_mean_of_each_block_and_only_of_what_ran_in_all():
    joules = [[3.0, 2.0, 1.0], [4.0, 3.0, 2.0]]
    blocks = [Block(match=0, block=n, energy_j=each) for n, each in enumerate(joules)]
    row = case(batch_size=4, timing=PLAYED, blocks=blocks)
    metrics = cases._energy(row, ())
    step, sample = metrics["energy_per_step"], metrics["energy_per_sample"]
    width = half([2.0, 3.0], 0.95)
    assert (step.value, step.ci) == (2.5, pytest.approx((2.5 - width, 2.5 + width)))
    assert sample.value == 2.5 / 4
    assert [4 * edge for edge in sample.ci] == pytest.approx(step.ci)
    uncounted = [blocks[0], Block(match=0, block=1)]
    for nothing in (row.but(status="FAILED"), row.but(blocks=[]), row.but(blocks=uncounted)):
        assert cases._energy(nothing, ()) == {}


@pytest.mark.parametrize(("sizes", "samples"), [([30], None), ([30, 10, 20], [30, 10, 20])])
def test_the_size_of_trained_files_is_their_median(sizes, samples):
    files = [Artifact(bytes=size, compressed_bytes=size - 5) for size in sizes]
    metrics = cases.artifact(case(trained_artifacts=files))
    middle = sorted(sizes)[len(sizes) // 2]
    size = metrics["artifact"]
    assert (size.value, size.unit, size.samples) == (middle, "bytes", samples)
    assert metrics["compressed_artifact"].value == middle - 5
