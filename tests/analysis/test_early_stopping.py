"""A run that ends early where it is decided: bounds, intervals, verdicts, and who leaves."""

from math import exp, sqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from bench.analysis import sequential
from bench.analysis.analyse import analyse, raw
from bench.analysis.bounds import LOOKS, bound, confidence, crossing, taken
from bench.analysis.comparisons import side_by_side
from bench.analysis.early_stopping import _finished, accuracy_decided, leaving
from bench.analysis.fit import fit_of
from bench.analysis.ranking import GOALS, Aim, Limits, works
from bench.analysis.sequential import DECIDED, Pair, judge
from bench.analysis.verdicts import DELTA, Interval, Ratio
from bench.record import Timing, encode
from bench.validation.simulate import BASE, Outcome, simulate, summary
from tests import records, workers
from tests.records import played_run

# Bounds -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("looks", "error", "published"),
    [
        # Jennison and Turnbull, Group Sequential Methods (2000), table 2.1.
        (1, 0.05, 1.960),
        (2, 0.05, 2.178),
        (3, 0.05, 2.289),
        (5, 0.05, 2.413),
        (10, 0.05, 2.555),
        (3, 0.10, 1.992),
        (3, 0.01, 2.873),
    ],
)
def test_the_bound_is_pocock_s(looks, error, published):
    assert bound(tuple(range(1, looks + 1)), error) == pytest.approx(published, abs=6e-4)


@pytest.mark.parametrize("looks", [LOOKS, (4, 6, 8), (2, 9), (3, 4, 5, 20)])
def test_sums_of_noise_cross_the_bound_as_often_as_it_says(looks):
    drawn = np.random.default_rng(0).normal(size=(100_000, looks[-1])).cumsum(axis=1)
    at = np.array(looks)
    crossed = (np.abs(drawn[:, at - 1] / np.sqrt(at)) > bound(looks)).any(axis=1)
    assert crossed.mean() == pytest.approx(0.05, abs=0.003)
    assert crossing(bound(looks), looks) == pytest.approx(0.05, abs=1e-8)


def test_plain_intervals_at_each_look_would_be_wrong_in_one_of_ten():
    assert crossing(1.96, LOOKS) > 0.10


@settings(max_examples=25 if workers.campaign() else 8)  # each takes a fifth of a second
@given(st.lists(st.integers(2, 40), min_size=1, max_size=5, unique=True).map(sorted))
def test_more_looks_need_a_wider_bound(looks):
    more = (*looks, looks[-1] + 3)
    assert 1.959 < bound(tuple(looks)) < bound(more)
    assert confidence(more, 0.90) < confidence(more, 0.95)


def test_an_end_takes_the_place_of_the_next_look():
    assert [taken(LOOKS, blocks) for blocks in (2, 3, 4, 5, 6, 8)] == [
        *([2], [3], [3, 4], [3, 5], [3, 5, 6], [3, 5, 8])
    ]


# Intervals over looks ----------------------------------------------------------------------------


def test_errors_and_coverage_are_what_they_should_be_where_contenders_leave():
    noise = np.random.default_rng(0).normal(0, 0.028, 400)  # of a log ratio, as on two cores
    found = simulate(noise, seed=1, works=300, looks=LOOKS)
    count = sum(len(each.verdicts) for each in found.values())
    assert 0.93 <= sum(each.covered for each in found.values()) / count <= 0.985
    assert found[1.0].share("faster", "slower") <= 0.01
    assert found[1.0].share("slightly faster", "slightly slower") <= 0.05
    margin = found[1 + DELTA]
    assert margin.share("faster", "slower") <= 0.05
    assert margin.share("equivalent") <= 0.05 + 3 * (0.05 * 0.95 / 300) ** 0.5
    assert found[1.05].share("slower", "slightly slower") >= 0.8
    assert found[1.10].share("slower") >= 0.98
    assert found[1 / 1.10].share("faster") >= 0.95
    assert found[1.5].share("slower") == 1
    assert found[1.5].blocks / 300 < 3.5
    assert sum(each.blocks for each in found.values()) / count < 6.5
    assert "intervals cover the truth in" in summary(noise, found)


log_times = st.lists(
    st.fixed_dictionaries({n: st.floats(-0.2, 0.2) for n in (BASE, "x", "y", "z")}),
    min_size=8,
    max_size=8,
)
ASKED = [Pair(name, BASE) for name in "xyz"]


@given(log_times)
@settings(max_examples=60)
def test_no_later_look_undoes_a_verdict_or_widens_an_interval(blocks):
    before = {}
    for count in LOOKS:
        for pair, one in zip(ASKED, judge(fit_of(blocks[:count]), ASKED, LOOKS), strict=True):
            if pair in before and before[pair].verdict in DECIDED:
                assert (one.verdict, one.look) == (before[pair].verdict, before[pair].look)
            assert one.ci[0] <= one.ratio <= one.ci[1]
            before[pair] = one


@given(log_times, st.sets(st.sampled_from("xyz")))
@settings(max_examples=60)
def test_a_verdict_is_of_the_blocks_that_a_contender_played(blocks, gone):
    """Who left after three blocks is judged by three, whatever is found of others later."""
    at_three = judge(fit_of(blocks[:3]), ASKED, LOOKS)
    rest = [{n: v for n, v in times.items() if n not in gone} for times in blocks[3:]]
    for pair, early, late in zip(
        ASKED, at_three, judge(fit_of(blocks[:3] + rest), ASKED, LOOKS), strict=True
    ):
        if pair.top in gone:
            assert (late.verdict, late.look, late.n) == (early.verdict, early.look, 3)
            assert late.sd == pytest.approx(early.sd)
            assert late.ci[0] <= early.ci[0] + 1e-9 or late.ci[0] == pytest.approx(early.ci[0])


def test_one_block_has_no_interval_and_two_have():
    blocks = [{BASE: 0.0, "x": 0.5}, {BASE: 0.1, "x": 0.61}]
    (one,) = judge(fit_of(blocks[:1]), [Pair("x", BASE)], LOOKS)
    assert (one.ci, one.verdict, one.look, one.n) == (None, None, None, 1)
    assert one.ratio == pytest.approx(exp(0.5))
    (two,) = judge(fit_of(blocks), [Pair("x", BASE)], LOOKS)
    assert two.ci[0] < two.ratio < two.ci[1]
    assert judge(fit_of(blocks), [Pair("z", BASE)], LOOKS) == [None]


@pytest.mark.parametrize(("ci", "covered"), [((1.0, 2.0), 1), ((0.5, 1.0), 1), ((1.1, 2.0), 0)])
def test_bounds_of_an_interval_are_covered(ci, covered):
    outcome = Outcome()
    outcome.add(1.0, Ratio(1.0, ci, 0.1, 5, "slower"))
    assert (outcome.covered, outcome.blocks, outcome.verdicts) == (covered, 5, ["slower"])


def test_a_simulation_is_summed_up_in_shares_of_its_contenders():
    said = ["equivalent", "faster", "equivalent", "inconclusive"]
    found = {
        1.0: Outcome(covered=3, blocks=12, verdicts=said),
        1 + DELTA: Outcome(covered=4, blocks=20, verdicts=["slower", *["equivalent"] * 3]),
    }
    text = summary([0.1, -0.1], found)
    assert "noise sd 0.105 of 2 blocks" in text
    assert "87.5%; 4.0 blocks on average" in text
    assert 'at 1 "faster" or "slower" 25.0%; at the margin "slower" 25.0%' in text
    assert '"equivalent" 75.0%' in text
    assert "1.000: equivalent 50.0%, faster 25.0%, inconclusive 25.0%; covered 75.0%; 3.0" in text


def test_simulated_noise_is_about_the_truth_and_who_is_decided_leaves_at_once():
    noise = np.random.default_rng(0).normal(0, 0.001, 50)
    given = {"seed": 1, "works": 2, "looks": LOOKS}
    found, shifted = (simulate(noise + shift, **given) for shift in (0.0, 0.5))
    assert found[1.5].blocks == LOOKS[0] * 2
    assert {truth: each.verdicts for truth, each in found.items()} == {
        truth: each.verdicts for truth, each in shifted.items()
    }


def student(values, level):
    low, high = scipy_stats.ttest_1samp(values, 0).confidence_interval(level)
    return pytest.approx((exp(low), exp(high)))


def test_a_look_s_interval_is_student_s_at_the_level_of_all_looks_and_later_ones_cut_it():
    values = list(np.random.default_rng(6).normal(0.2, 0.05, 5))
    (first,) = judge(fit_of([{BASE: 0.0, "x": v} for v in values[:3]]), [Pair("x", BASE)], LOOKS)
    assert first.ci == student(values[:3], confidence(LOOKS))
    (second,) = judge(fit_of([{BASE: 0.0, "x": v} for v in values]), [Pair("x", BASE)], LOOKS)
    low, high = scipy_stats.ttest_1samp(values, 0).confidence_interval(confidence(LOOKS))
    cut = max(exp(low), first.ci[0]), min(exp(high), first.ci[1])
    assert second.ci == pytest.approx(cut)


def test_kin_share_their_variance_and_strangers_do_not():
    random = np.random.default_rng(3)
    blocks = [
        {BASE: 0.0, "x": 0.1 + 0.001 * random.normal(), "y": 0.3 * random.normal()}
        for _ in range(3)
    ]
    alone = judge(fit_of(blocks), [Pair("x", BASE, 1), Pair("y", BASE, 2)], LOOKS)[0]
    among = judge(fit_of(blocks), [Pair("x", BASE, 1), Pair("y", BASE, 1)], LOOKS)[0]
    own = np.std([times["x"] - times[BASE] for times in blocks], ddof=1)
    other = np.std([times["y"] - times[BASE] for times in blocks], ddof=1)
    assert (alone.sd, alone.freedom) == (pytest.approx(own), 2)
    pooled = sqrt((2 * own**2 + other**2) / 3)  # one other counts for one degree of freedom,
    assert (among.sd, among.freedom) == (pytest.approx(pooled), 3)
    many = [times | {f"y{n}": times["y"] for n in range(9)} for times in blocks]  # ten for four
    pairs = [Pair(name, BASE, 1) for name in ("x", "y", *(f"y{n}" for n in range(9)))]
    among = judge(fit_of(many), pairs, LOOKS)[0]
    pooled = sqrt((2 * own**2 + 4 * other**2) / 6)
    assert (among.sd, among.freedom) == (pytest.approx(pooled), 6)


def test_a_fixed_number_of_blocks_has_the_interval_of_one_look_and_nobody_leaves():
    blocks = [{BASE: 0.0, "x": 0.01 * number, "y": -0.02 * number} for number in range(3)]
    pairs = [Pair("x", BASE, 1), Pair("y", BASE, 1)]
    fixed, looked = (judge(fit_of(blocks), pairs, looks) for looks in ((), (3,)))
    assert [ratio.freedom for ratio in fixed] == [3] * 2
    assert [ratio.look for ratio in fixed] == [None] * 2
    for one, other in zip(fixed, looked, strict=True):
        assert one.ci == pytest.approx(other.ci)
        assert one.verdict == other.verdict


# Who leaves --------------------------------------------------------------------------------------

QUICK = "made_up/digits-cnn-4/pt/quick"


def to_baselines(record):
    """The comparisons with baselines, by the ids of the cases."""
    return {c.numerator: c for c in record.comparisons if c.kind == "baseline"}


def named(ids):
    return {"/".join(each.split("/")[2:]) for each in ids}


def test_who_is_decided_leaves_baselines_and_controls_stay():
    found = leaving(played_run({("pt", "quick"): 0.5, ("tf", "quick"): 0.6}))
    assert named(found) == {"pt/quick", "tf/quick", "pt/same", "tf/same"}


def test_nobody_leaves_without_looks_nor_after_one_block():
    times = {("pt", "quick"): 0.5, ("tf", "quick"): 0.6}
    assert leaving(played_run(times, looks=None)) == set()
    assert leaving(played_run(times, blocks=1)) == set()


def test_an_undecided_twin_keeps_both():
    """0.5 against 0.485: the ratio to each baseline is clear, that of the twins at the margin."""
    times = {("pt", "quick"): 0.5, ("tf", "quick"): 0.4855}
    assert named(leaving(played_run(times))) == {"pt/same", "tf/same"}


def test_who_is_told_apart_but_hardly_measured_plays_on():
    """0.5 within a tenth is faster, and no figure to print."""
    times = {("pt", "quick"): 0.5, ("tf", "quick"): 0.2}
    assert named(leaving(played_run(times))) >= {"pt/quick", "tf/quick"}
    given = played_run(times, sd=0.03)
    assert to_baselines(analyse(given))[QUICK].verdict == "faster"
    assert leaving(given) == set()


@pytest.mark.parametrize(
    ("half", "look", "verdict", "finished"),
    [
        (1.06, 3, "faster", True),
        (1.061, 3, "faster", False),
        (1.01, None, "faster", False),
        (1.5, None, "not comparable", True),
    ],
)
def test_a_ratio_is_finished_where_it_is_decided_and_as_narrow_as_six_percent(
    half, look, verdict, finished
):
    fields = {"verdict": verdict, "look": look}
    comparison = records.comparison(
        records.case(), records.case("base"), 1.0, 1.0, half**2, **fields
    )
    assert _finished(comparison) is finished


def test_who_has_nothing_to_be_compared_with_stays():
    times = {(framework, name): None for framework in ("pt", "tf") for name in ("plain", "control")}
    times |= {("tf", "quick"): None, ("tf", "same"): None}
    assert leaving(played_run(times)) == set()


def test_a_program_stays_as_long_as_a_case_that_shows_it():
    techniques = {"made_up": ("plain", "quick", "same"), "other": ("base", "x")}
    run = played_run({("pt", "quick"): 0.5, ("tf", "quick"): 0.6}, techniques=techniques)
    cases = [
        case.but(program=f"made_up/digits-cnn-4/{case.framework}/quick", timing=Timing(), blocks=[])
        if (case.technique, case.variant) == ("other", "x")
        else case
        for case in run.cases
    ]
    both = {QUICK, "other/digits-cnn-4/pt/x"}
    assert both <= leaving(run.but(cases=cases))
    at_the_margin = [
        case.but(timing=Timing(step_s=_slower(case.timing.step_s, 0.5 / (1 + DELTA))))
        if case.technique == "other" and case.variant in ("base", "control")
        else case
        for case in cases
    ]
    stay = leaving(run.but(cases=at_the_margin))
    assert not both & stay
    assert "made_up/digits-cnn-4/pt/same" in stay


def _slower(step_s, factor):
    return {
        match: {block: [factor * second for second in seconds] for block, seconds in blocks.items()}
        for match, blocks in step_s.items()
    }


def test_the_record_says_at_which_look_a_verdict_was_reached():
    run = played_run({("pt", "quick"): 0.5}, blocks=5)
    record = analyse(run)
    quick = to_baselines(record)[QUICK]
    assert (quick.verdict, quick.look, quick.n) == ("faster", 3, 5)
    assert quick.ci[0] < quick.ratio < quick.ci[1] < 1 / (1 + DELTA)
    assert to_baselines(analyse(run.but(looks=None)))[QUICK].look is None
    assert encode(analyse(raw(record))) == encode(record)


def test_two_alone_lend_each_other_no_variance():
    """A pair turned round is the same pair: it makes no interval narrower."""
    random = np.random.default_rng(3)
    own = fit_of([{"a": random.normal(0, 0.05), "b": random.normal(0.2, 0.05)} for _ in range(3)])
    found = side_by_side(own, {"a": "pt", "b": "pt"}, (3, 5))
    (alone,) = judge(own, [Pair("a", "b")], (3, 5))
    assert found[("a", "b")].ci == pytest.approx(alone.ci)
    assert found.keys() == {("a", "b")}


def test_a_row_stands_to_its_baseline_in_an_answer_as_in_the_record():
    record = analyse(played_run({("pt", "quick"): 0.9, ("pt", "same"): 0.97}, sd=0.03))
    (work,) = works(record)
    aim = Aim(work, GOALS["train-speed"], Limits())
    comparison = to_baselines(record)[QUICK]
    rows = {row.case.id: row for row in work.rows}
    quick, plain = rows[comparison.numerator], rows[comparison.denominator]
    assert aim.ratio(quick, plain).bounds == pytest.approx(comparison.ci)
    turned = [1 / end for end in comparison.ci[::-1]]
    assert aim.ratio(plain, quick).bounds == pytest.approx(turned)


# Accuracy ----------------------------------------------------------------------------------------


def test_seeds_end_where_the_verdict_on_accuracy_stands():
    base = [90.0, 91.0, 92.0, 93.0]
    rules = {"margin": 1.0, "more_is_better": True, "looks": (4, 6, 8)}
    assert accuracy_decided(
        [b + d for b, d in zip(base, [0.1, 0, -0.1, 0], strict=True)], base, **rules
    )
    assert accuracy_decided(
        [b - 5 + d for b, d in zip(base, [0.1, 0, -0.1, 0], strict=True)], base, **rules
    )
    assert not accuracy_decided([89.0, 93.0, 90.0, 93.5], base, **rules)
    assert not accuracy_decided([90.0], [90.0], **rules)


def test_seeds_are_judged_by_the_bound_of_their_looks():
    """What a plain interval of four seeds would call worse is not decided yet."""
    base = [90.0] * 4
    half = 3.182 * 1.0 / 2  # of the plain 95% interval, where the deviation is 1
    unit = np.array([1, 1, -1, -1]) / np.std([1, 1, -1, -1], ddof=1)
    values = list(90.0 - half - 0.1 + unit)
    rules = {"margin": 0.1, "more_is_better": True, "looks": (4, 6, 8)}
    assert not accuracy_decided(values, base, **rules)
    assert accuracy_decided(list(90.0 - 1.4 * half + unit), base, **rules)
    assert accuracy_decided(values, base, **rules | {"looks": (4,)})


@pytest.mark.parametrize(
    ("now", "kept"),
    [((-0.5, 0.5), (-0.1, 0.1)), ((0.0, 0.5), (0.0, 0.1)), ((0.3, 0.5), (0.1, 0.1))],
)
def test_a_later_look_takes_nothing_back_that_an_earlier_one_excluded(now, kept):
    before, later = (Interval(0.0, *edges, 0.1, 3) for edges in ((-0.1, 0.1), now))
    both = sequential._both(before, later)
    assert (both.low, both.high) == kept
