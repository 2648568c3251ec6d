"""Ratios, intervals and verdicts, at their edges and over simulated runs."""

from math import exp, log, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from bench.analysis import verdicts

PROCESS_SD = 0.024  # log ratio between two identical processes, as measured on two cores
BLOCKS = 8
BOUND = log(1 + verdicts.DELTA)

log_ratios = st.lists(st.floats(-2, 2), min_size=2, max_size=20)


def with_mean_and_sd(mean, sd, n=BLOCKS):
    """`n` values with exactly this mean and standard deviation."""
    values = np.tile([1.0, -1.0], n // 2)
    return list(mean + sd * values / np.std(values, ddof=1))


def half_width(sd, confidence, n=BLOCKS):
    return scipy_stats.t.ppf(0.5 + confidence / 2, n - 1) * sd / sqrt(n)


def simulate(true_log_ratio, runs, seed):
    """Comparisons of `runs` runs with the process noise of a default run."""
    random = np.random.default_rng(seed)
    drawn = random.normal(true_log_ratio, PROCESS_SD, (runs, BLOCKS))
    return [verdicts.compare(list(row)) for row in drawn]


# Intervals --------------------------------------------------------------------------------------


@pytest.mark.parametrize("confidence", [0.90, 0.95])
@pytest.mark.parametrize("n", [2, 3, 8, 20])
def test_t_interval_is_that_of_scipy(n, confidence):
    values = list(np.random.default_rng(n).normal(3, 2, n))
    found = verdicts.t_interval(values, confidence)
    expected = scipy_stats.ttest_1samp(values, 0).confidence_interval(confidence)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), rel=1e-12)
    assert found.mean == pytest.approx(np.mean(values))
    assert found.sd == pytest.approx(np.std(values, ddof=1))
    assert found.n == n


def test_one_value_has_no_interval():
    assert verdicts.t_interval([3.0]) == verdicts.Interval(3.0, None, None, None, 1)


# Verdicts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mean", "verdict"),
    [
        # The whole 95% interval must lie beyond 3%.
        (-(BOUND + half_width(0.02, 0.95)) - 1e-6, "faster"),
        (-(BOUND + half_width(0.02, 0.95)) + 1e-6, "slightly faster"),
        (BOUND + half_width(0.02, 0.95) - 1e-6, "slightly slower"),
        (BOUND + half_width(0.02, 0.95) + 1e-6, "slower"),
        # The whole 90% interval must lie inside 3%.
        (BOUND - half_width(0.02, 0.90) - 1e-6, "equivalent"),
        (BOUND - half_width(0.02, 0.90) + 1e-6, "inconclusive"),
        (-(BOUND - half_width(0.02, 0.90)) + 1e-6, "equivalent"),
        (-(BOUND - half_width(0.02, 0.90)) - 1e-6, "inconclusive"),
        (0.0, "equivalent"),
    ],
)
def test_verdict_at_the_edges_of_three_percent(mean, verdict):
    found = verdicts.compare(with_mean_and_sd(mean, 0.02))
    assert found.verdict == verdict
    assert found.ratio == pytest.approx(exp(mean))
    half = half_width(0.02, 0.95)
    assert found.ci == pytest.approx((exp(mean - half), exp(mean + half)))
    assert found.sd == pytest.approx(0.02)
    assert found.n == BLOCKS


@pytest.mark.parametrize(
    ("mean", "sd", "verdict"),
    [
        (half_width(0.05, 0.95) + 1e-6, 0.05, "slightly slower"),  # the 95% interval excludes 1
        (half_width(0.05, 0.95) - 1e-6, 0.05, "inconclusive"),
        (-half_width(0.05, 0.95) - 1e-6, 0.05, "slightly faster"),
        (log(0.970), 0.006, "slightly faster"),  # 0.965–0.975: not nothing, nor all beyond 3%
        (0.02, 0.005, "equivalent"),  # excludes 1, and lies inside 3%
    ],
)
def test_what_excludes_one_but_not_the_margin_is_slight(mean, sd, verdict):
    assert verdicts.compare(with_mean_and_sd(mean, sd)).verdict == verdict


@pytest.mark.parametrize("sd", [0.05, 0.1, 0.3])
def test_scatter_is_no_veto(sd):
    """The interval carries it: 0.834 (0.801–0.868) is faster, whatever its scatter."""
    beyond = BOUND + half_width(sd, 0.95) + 1e-6
    assert verdicts.compare(with_mean_and_sd(beyond, sd)).verdict == "slower"
    assert verdicts.compare(with_mean_and_sd(-beyond, sd)).verdict == "faster"


def test_one_block_gives_a_ratio_and_no_verdict():
    found = verdicts.compare([log(2.0)])
    assert found.ratio == pytest.approx(2.0)
    assert (found.ci, found.sd, found.n, found.verdict) == (None, None, 1, None)


@given(log_ratios)
def test_swapping_the_arms_inverts_the_comparison(values):
    forth, back = verdicts.compare(values), verdicts.compare([-value for value in values])
    swapped = {"faster": "slower", "slower": "faster"}
    swapped |= {f"slightly {one}": f"slightly {other}" for one, other in swapped.items()}
    assert back.ratio == pytest.approx(1 / forth.ratio)
    assert back.ci == pytest.approx((1 / forth.ci[1], 1 / forth.ci[0]))
    assert back.verdict == swapped.get(forth.verdict, forth.verdict)


@given(log_ratios, st.floats(-2, 2))
def test_a_common_factor_moves_ratio_and_interval_alone(values, shift):
    plain, moved = verdicts.compare(values), verdicts.compare([value + shift for value in values])
    assert moved.ratio == pytest.approx(plain.ratio * exp(shift), rel=1e-9)
    assert moved.ci == pytest.approx([edge * exp(shift) for edge in plain.ci], rel=1e-6)
    assert moved.sd == pytest.approx(plain.sd, abs=1e-9)


@given(log_ratios)
def test_order_of_blocks_does_not_matter(values):
    forth, back = verdicts.compare(values), verdicts.compare(values[::-1])
    assert back.ratio == pytest.approx(forth.ratio)
    assert back.ci == pytest.approx(forth.ci)


# Many simulated runs ----------------------------------------------------------------------------


def test_interval_covers_the_truth_in_95_percent_of_runs():
    truth = log(1.07)
    found = simulate(truth, runs=4_000, seed=1)
    covered = np.mean([c.ci[0] <= exp(truth) <= c.ci[1] for c in found])
    assert 0.93 <= covered <= 0.97


@pytest.mark.parametrize(("true_ratio", "verdict"), [(1.1, "slower"), (1 / 1.1, "faster")])
def test_planted_ten_percent_is_found(true_ratio, verdict):
    for seed in range(5):
        found = simulate(log(true_ratio), runs=20, seed=seed)
        assert sum(c.verdict == verdict for c in found) >= 18


def test_tables_of_forty_equal_rows_hold_no_false_verdict():
    tables = 200
    verdicts = [c.verdict for c in simulate(0.0, runs=40 * tables, seed=2)]
    wrong = np.array([v in ("faster", "slower") for v in verdicts]).reshape(tables, 40)
    assert np.mean(wrong.any(axis=1)) <= 0.05
    assert np.mean([v in ("slightly faster", "slightly slower") for v in verdicts]) <= 0.05
    assert np.mean([v == "equivalent" for v in verdicts]) > 0.5  # and it can tell


def test_errors_at_the_bound_itself_are_those_of_the_tests():
    """A true 3% is the worst case: 5% for "equivalent", 2.5% for "slower", never "faster"."""
    verdicts = [c.verdict for c in simulate(BOUND, runs=4_000, seed=3)]
    shares = {v: verdicts.count(v) / len(verdicts) for v in ("equivalent", "slower", "faster")}
    assert shares["equivalent"] == pytest.approx(0.05, abs=0.012)
    assert shares["slower"] == pytest.approx(0.025, abs=0.008)
    assert shares["faster"] == 0


# Accuracy ---------------------------------------------------------------------------------------

# Seeds differ by far more than variants do.
SEEDS = list(90 + np.random.default_rng(5).normal(0, 3, 8))


def judged(difference, sd, *, margin=1.0, more_is_better=True):
    values = [base + d for base, d in zip(SEEDS, with_mean_and_sd(difference, sd), strict=True)]
    return verdicts.compare_accuracy(values, SEEDS, margin=margin, more_is_better=more_is_better)


@pytest.mark.parametrize(
    ("difference", "sd", "verdict"),
    [
        (0.0, 0.5, "equivalent"),
        (1.0 - half_width(0.5, 0.90) - 1e-6, 0.5, "equivalent"),
        (1.0 - half_width(0.5, 0.90) + 1e-6, 0.5, "better"),
        (-(1.0 - half_width(0.5, 0.90)) - 1e-6, 0.5, "worse"),
        (3.0, 0.5, "better"),
        (-3.0, 0.5, "worse"),
        (0.5, 2.0, "inconclusive"),
        (-0.5, 2.0, "inconclusive"),
        (half_width(2.0, 0.95) - 1e-6, 2.0, "inconclusive"),
        (half_width(2.0, 0.95) + 1e-6, 2.0, "better"),
    ],
)
def test_accuracy_is_judged_by_paired_differences(difference, sd, verdict):
    found = judged(difference, sd)
    assert found.verdict == verdict
    assert found.mean == pytest.approx(difference, abs=1e-9)
    half = half_width(sd, 0.95)
    assert found.ci == pytest.approx([difference - half, difference + half])


def test_fewer_bits_per_character_are_better():
    less_is_better = {"margin": 0.05, "more_is_better": False}
    assert judged(-0.2, 0.01, **less_is_better).verdict == "better"
    assert judged(0.2, 0.01, **less_is_better).verdict == "worse"
    assert judged(0.01, 0.01, **less_is_better).verdict == "equivalent"


@pytest.mark.parametrize("seeds", range(1, verdicts.FEWEST_SEEDS))
def test_few_seeds_give_a_difference_and_no_verdict(seeds):
    """Two that agree to the sample would make an interval of no width."""
    found = verdicts.compare_accuracy(
        [66.0, 67.0][:seeds], [91.0, 92.0][:seeds], margin=1.0, more_is_better=True
    )
    assert (found.mean, found.ci, found.verdict) == (-25.0, None, None)


def test_seeds_must_be_paired():
    with pytest.raises(ValueError, match=r"longer|shorter"):
        verdicts.compare_accuracy([1.0], [1.0, 2.0], margin=1.0, more_is_better=True)


@pytest.mark.parametrize("more", [True, False])
def test_no_difference_at_all_is_neither_better_nor_worse_without_a_margin(more):
    values = [3.0, 4.0, 5.0]
    found = verdicts.compare_accuracy(values, values, margin=0.0, more_is_better=more)
    assert (found.mean, found.ci, found.verdict) == (0.0, (0.0, 0.0), "inconclusive")
