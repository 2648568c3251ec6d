"""One time for each case, from which all ratios follow: within a block, over matches and blocks."""

import json
from itertools import combinations
from math import exp, log
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from bench.analysis.fit import (
    FASTEST,
    Fit,
    _join,
    _least_squares,
    _pooled,
    block_times,
    fit,
    fit_of,
    undisturbed,
)

ROOT = Path(__file__).resolve().parents[2]
RECORDS = [ROOT / "docs" / "results.json", *sorted(ROOT.glob("docs/*/results.json"))]


def ratio(found, top, bottom):
    return exp(found[top] - found[bottom])


def drifting(rounds=30, sd=0.0, seed=0, **factors):
    """Samples of contenders on a machine whose speed drifts twofold."""
    random = np.random.default_rng(seed)
    drift = np.geomspace(1, 2, rounds)
    return {
        name: list(factor * drift * np.exp(random.normal(0, sd, rounds)))
        for name, factor in factors.items()
    }


# Within a block ---------------------------------------------------------------------------------


def test_a_drift_of_the_machine_hits_all_alike():
    found = block_times(drifting(a=1.1, b=1.0, c=3.0))
    assert ratio(found, "a", "b") == pytest.approx(1.1)
    assert ratio(found, "c", "a") == pytest.approx(3 / 1.1)
    assert exp(found["b"]) == pytest.approx(np.mean(np.geomspace(1, 2, 30)[:10]))


def test_rounds_that_were_interrupted_do_not_matter():
    random = np.random.default_rng(0)
    played = {name: list(f * np.exp(random.normal(0, 0.01, 30))) for name, f in FACTORS.items()}
    clean = block_times(played)
    for own in played.values():  # of each other rounds: half of them, by up to 50 times
        for number in random.choice(30, 15, replace=False):
            own[number] *= random.uniform(1.2, 50)
    found = block_times(played)
    for top, bottom in combinations(FACTORS, 2):
        assert ratio(found, top, bottom) == pytest.approx(ratio(clean, top, bottom), rel=0.01)
        assert ratio(found, top, bottom) == pytest.approx(FACTORS[top] / FACTORS[bottom], rel=0.01)


def test_slow_first_rounds_do_not_count():
    played = drifting(sd=0.01, a=1.2, b=1.0)
    slow = {name: [9.0, 9.0, *own] for name, own in played.items()}
    assert block_times(slow) == pytest.approx(block_times(played), abs=0.02)


@pytest.mark.parametrize(
    ("samples", "expected"),
    [([2.0], 2.0), ([3.0, 1.0], 2.0), ([3.0, 1.0, 2.0], 1.5), ([*range(1, 31)], 5.5)],
)
def test_the_fastest_third_counts_and_two_at_least(samples, expected):
    assert FASTEST == 3
    assert undisturbed(samples) == pytest.approx(expected)
    assert undisturbed(samples[::-1]) == pytest.approx(expected)


def published_blocks():
    """Samples of the published contenders that were measured side by side, match by match."""
    for path in RECORDS:
        record = json.loads(path.read_text("utf-8"))
        samples = {case["id"]: case["timing"]["step_s"] for case in record["cases"]}
        if "matches" not in record:
            yield from side_by_side(samples, record["comparisons"])
            continue
        for match, names in enumerate(record["matches"]):
            own = {n: samples[n][str(match)] for n in names if str(match) in samples[n]}
            blocks = set.intersection(*map(set, own.values())) if own else ()
            yield [{name: each[block] for name, each in own.items()} for block in blocks]


def side_by_side(samples, comparisons):
    """Those of the first match of each case; a pair's ratio tells whether it was the same one."""
    company = {}
    for c in comparisons:
        ours, theirs = samples[c["numerator"]], samples[c["denominator"]]
        if [len(block) for block in ours] != [len(block) for block in theirs]:
            continue
        each = [np.median(np.log(a) - np.log(b)) for a, b in zip(ours, theirs, strict=True)]
        if exp(fmean(each)) == pytest.approx(c["ratio"], rel=1e-9):
            both = company.get(c["numerator"], {c["numerator"]})
            both |= company.get(c["denominator"], {c["denominator"]})
            company |= dict.fromkeys(both, both)
    for names in {id(each): each for each in company.values()}.values():
        blocks = range(len(samples[min(names)]))
        yield [{name: samples[name][block] for name in sorted(names)} for block in blocks]


def test_on_published_samples_it_scatters_less_than_medians_of_log_ratios():
    """The variance between blocks of each pair's log ratio, and what it is on average."""
    ours, theirs = [], []
    for blocks in published_blocks():
        found = [block_times(block) for block in blocks]
        for a, b in combinations(blocks[0], 2) if len(blocks) > 2 else ():
            ours.append(np.var([block[a] - block[b] for block in found], ddof=1))
            medians = [np.median(np.log(block[a][2:]) - np.log(block[b][2:])) for block in blocks]
            theirs.append(np.var(medians, ddof=1))
    assert len(ours) > 100
    assert fmean(ours) < 0.9 * fmean(theirs)


# Over blocks and matches ------------------------------------------------------------------------


def played(factors, matches, blocks=8, seed=0, process_sd=0.02, lost=()):
    """Samples by case, match and block: machine and processes differ from block to block."""
    random, found = np.random.default_rng(seed), {}
    for match, names in enumerate(matches):
        for block in range(blocks):
            if (match, block) in lost:
                continue
            speed = exp(random.normal(0, 0.3))
            for name in names:
                own = speed * factors[name] * exp(random.normal(0, process_sd))
                noise = np.exp(random.normal(0, 0.01, 30))
                found.setdefault(name, {}).setdefault(match, {})[block] = list(own * noise)
    return found


FACTORS = {"pt": 1.0, "tf": 1.3, "pt_a": 0.8, "tf_a": 1.1, "pt_b": 0.9, "tf_b": 1.5}
PARTS = [("pt", "tf", "pt_a", "tf_a"), ("pt", "tf", "pt_b", "tf_b")]


@pytest.mark.parametrize("lost", [(), ((1, 7),), ((1, 2), (1, 3), (0, 5))])
def test_a_time_divided_by_another_is_their_ratio(lost):
    found = fit(played(FACTORS, PARTS, lost=set(lost)))
    for top, bottom in combinations(FACTORS, 2):
        one = found.ratio(top, bottom)
        expected = found.time(top)[0] / found.time(bottom)[0]
        assert one.ratio == pytest.approx(expected, rel=1e-12)
        assert one.ratio == pytest.approx(FACTORS[top] / FACTORS[bottom], rel=0.06)
        assert one.ci[0] < one.ratio < one.ci[1]


def test_in_one_match_the_interval_is_student_s_over_blocks():
    samples = played(FACTORS, [PARTS[0]])
    found = fit(samples)
    each = [
        block_times({name: own[0][block] for name, own in samples.items()}) for block in range(8)
    ]
    values = [times["pt_a"] - times["pt"] for times in each]
    expected = scipy_stats.ttest_1samp(values, 0).confidence_interval(0.95)
    one = found.ratio("pt_a", "pt")
    assert one.ci == pytest.approx((exp(expected.low), exp(expected.high)), rel=1e-9)
    assert (one.n, one.sd) == (8, pytest.approx(np.std(values, ddof=1)))


def test_what_was_found_first_stands_when_others_play_later():
    first = fit(played(FACTORS, [PARTS[0]]))
    both = fit(played(FACTORS, PARTS))
    for top, bottom in combinations(PARTS[0], 2):
        ours, theirs = both.ratio(top, bottom), first.ratio(top, bottom)
        assert (ours.ratio, *ours.ci) == pytest.approx((theirs.ratio, *theirs.ci), rel=1e-12)


def test_a_match_that_was_disturbed_as_a_whole_moves_no_time():
    parts = [*PARTS, ("pt", "tf", "pt_c")]
    factors = FACTORS | {"pt_c": 1.2}
    samples = played(factors, parts, process_sd=0.0)
    for own in samples.values():  # the same speed in all, but twice as slow in one block of one
        for match, blocks in own.items():
            for block, each in blocks.items():
                slow = 2.0 if (match, block) == (0, 1) else 1.0
                blocks[block] = list(slow * np.exp(np.log(each) - np.mean(np.log(each))))
    for name, own in samples.items():
        for blocks in own.values():
            for block in blocks:
                blocks[block] = [factors[name] * each for each in blocks[block]]
    found = fit(samples)
    for name, factor in factors.items():
        seconds, (low, high) = found.time(name)
        assert seconds == pytest.approx(factor, rel=0.02)
        assert high / low < 1.05


def test_those_who_never_met_are_not_compared():
    found = fit(played(FACTORS, [("pt", "pt_a"), ("tf", "tf_a")]))
    assert found.ratio("pt_a", "tf_a") is None
    assert found.ratio("pt_a", "pt").ratio == pytest.approx(0.8, rel=0.05)


@pytest.mark.parametrize(
    "pair", [("pt_a", "pt"), ("pt_b", "pt"), ("pt_b", "tf_b"), ("pt_a", "pt_b")]
)
def test_intervals_cover_the_truth_in_95_percent_of_runs(pair):
    """Within a match, and over two that the baselines join."""
    truth = log(FACTORS[pair[0]] / FACTORS[pair[1]])
    runs, covered = 250, 0
    random = np.random.default_rng(5)
    for _ in range(runs):
        blocks, groups = {}, {}
        for block in range(8):
            blocks[block], groups[block] = {}, {}
            for part in PARTS:
                speed = random.normal(0, 0.3)
                new = {n: speed + log(FACTORS[n]) + random.normal(0, 0.024) for n in part}
                _join(blocks[block], groups[block], new)
        one = Fit(blocks, groups, _pooled(blocks)).ratio(*pair)
        covered += log(one.ci[0]) <= truth <= log(one.ci[1])
    assert 0.91 <= covered / runs <= 0.985  # 95% but for chance: three standard deviations


speeds = st.lists(st.floats(-2, 2), min_size=2, max_size=6)


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=5), speeds, st.integers(0, 9))
def test_where_a_case_lacks_a_block_its_level_is_that_of_the_others(levels, drift, lost):
    """Of times that are a case's level and a block's: levels at the mean speed of all blocks."""
    names, mean = "abcde"[: len(levels)], fmean(drift)
    blocks = {
        number: {n: level + each for n, level in zip(names, levels, strict=True)}
        for number, each in enumerate(drift)
    }
    expected = {n: level + mean for n, level in zip(names, levels, strict=True)}
    assert _least_squares(blocks, list(names)) == pytest.approx(expected, abs=1e-9)
    del blocks[lost % len(drift)][names[0]]
    assert _pooled(blocks) == pytest.approx(expected, abs=1e-9)


# One time -----------------------------------------------------------------------------------------

LOGS = list(np.random.default_rng(3).normal(-4, 0.1, 5))
OWN = list(np.random.default_rng(4).normal(0, 0.02, 5))


def spanned(center, half):
    return pytest.approx((exp(center), exp(center - half), exp(center + half)))


def student(values, level):
    return scipy_stats.ttest_1samp(values, 0).confidence_interval(level)


def test_a_time_is_the_geometric_mean_with_student_s_interval():
    seconds, ci = fit_of([{"a": each, "b": 1.0} for each in LOGS]).time("a")
    low, high = student(LOGS, 0.95)
    assert (seconds, *ci) == pytest.approx((exp(fmean(LOGS)), exp(low), exp(high)))
    assert fit_of([{"a": LOGS[0]}]).time("a") == (pytest.approx(exp(LOGS[0])), None)


def test_at_looks_the_machine_s_noise_and_the_own_are_added():
    """Of two whose own noise is opposite, their mean is the machine's alone."""
    together = fit_of([{"a": m + e, "b": m - e} for m, e in zip(LOGS, OWN, strict=True)])
    seconds, ci = together.time_at_looks("a", 0.9)
    variances = [np.var(each, ddof=1) / 5 for each in (LOGS, OWN)]
    freedom = sum(variances) ** 2 / sum(each**2 / 4 for each in variances)
    half = scipy_stats.t.ppf(0.95, freedom) * sum(variances) ** 0.5
    assert (seconds, *ci) == spanned(fmean(LOGS) + fmean(OWN), half)


def test_who_left_early_has_the_speed_of_all_blocks_and_its_own_noise_of_those_it_played():
    """On a machine that changes by a known amount, after a contender has left."""
    blocks = [{"a": 1.0 + e, "b": 1.0 - e, "c": 1.0} for e in OWN[:3]]
    whole = fit_of([*blocks, *[{"b": 3.0, "c": 3.0}] * 2])
    seconds, (low, high) = whole.time_at_looks("a", 0.95)
    assert log(seconds) == pytest.approx((3 * 1.0 + 2 * 3.0) / 5 + fmean(OWN[:3]), abs=0.02)
    assert low < seconds < high


@pytest.mark.parametrize(("count", "known"), [(1, False), (2, True), (3, True)])
def test_two_blocks_have_an_interval_at_looks(count, known):
    whole = fit_of([{"a": m + e, "b": m} for m, e in zip(LOGS[:count], OWN, strict=False)])
    assert (whole.time_at_looks("a", 0.95)[1] is not None) is known
    late = fit_of([{"b": LOGS[0]}] * 2 + [{"a": m, "b": m} for m in LOGS[:count]])
    assert (late.time_at_looks("a", 0.95)[1] is not None) is known
