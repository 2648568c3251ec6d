"""The rule: what hurts is left out, by intervals over pairs, and what the parts promise."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import log

import pytest

from bench.analysis.verdicts import t_interval
from bench.ladders import rule
from bench.ladders.record import Evidence, Run
from bench.record import Metric
from tests.ladders.planted import EFFECTS, LADDER, metrics

BLOCKS = 4


SAME = Evidence(losses=[2.0, 1.0], weights_sha256="same")


def run(stage, block, rungs, framework="pt", **changes):
    fields = {
        "stage": stage,
        "block": block,
        "framework": framework,
        "rungs": tuple(rungs),
        "status": "OK",
        "reason": None,
        "metrics": metrics(rungs, block),
        "evidence": SAME,
    }
    return Run(**fields | changes)


def broken(stage, block, rungs, framework="pt"):
    return run(stage, block, rungs, framework, status="FAILED", reason="it broke", metrics={})


def times(one, factor):
    """The run with another time of an iteration."""
    value = factor * one.value("iteration")
    return one.but(metrics=one.metrics | {"iteration": Metric(value=value)})


def climbed(framework="pt", blocks=BLOCKS, ladder=LADDER):
    """All runs that the rule asks for, and the steps at the end."""
    runs = []
    while (steps := rule.climb(ladder, runs, framework, blocks))[-1].state == "open":
        stage, programs = steps[-1].rung.name, (steps[-1].below, steps[-1].rungs)
        for block, rungs in product(range(blocks), programs):
            make = broken if "broken" in rungs else run
            runs.append(make(stage, block, rungs, framework))
    for block, rungs in product(range(blocks), rule.parts_of(steps)):
        runs.append(run(rule.PARTS, block, rungs, framework))
    return runs, {step.rung.name: step for step in steps}


def test_what_hurts_or_fails_is_shown_and_left_out_of_all_that_follows():
    runs, steps = climbed()
    states = {name: step.state for name, step in steps.items()}
    assert states == {
        "quick": "kept",
        "slow": "left out",
        "lean": "kept",  # slower, but judged by its memory
        "careless": "left out",  # faster, but less accurate
        "wise": "kept",
        "broken": "failed",
        "last": "kept",
    }
    assert steps["last"].rungs == ("quick", "lean", "wise", "last")
    assert "time of an iteration" in steps["slow"].reason
    assert "quality" in steps["careless"].reason
    assert steps["broken"].reason == "it broke"
    assert steps["slow"].figures["iteration"]  # shown
    later = [r.rungs for r in runs if r.stage in ("lean", "wise", "last", rule.PARTS)]
    assert not any({"slow", "careless", "broken"} & set(rungs) for rungs in later)


def test_what_changes_nothing_in_a_framework_is_not_asked_for_there():
    _, steps = climbed("tf")
    assert steps["careless"].state == "nothing"
    assert steps["careless"].reason == "it takes care"
    assert "careless" not in steps["last"].rungs
    assert not steps["careless"].figures


@pytest.mark.parametrize(("name", "judged"), [("quick", "iteration"), ("lean", "memory")])
def test_ratios_are_of_pairs_whatever_the_machine_does_between_them(name, judged):
    _, steps = climbed()
    found = steps[name].below_by[judged]
    planted = EFFECTS[name][0 if judged == "iteration" else 1]
    assert found.ratio == pytest.approx(planted, rel=0.03)
    assert found.ci[0] <= found.ratio <= found.ci[1]


def test_against_plain_a_rung_stands_at_the_product_of_those_that_were_kept():
    _, steps = climbed()
    kept = [steps[name].below_by["iteration"] for name in ("quick", "lean", "wise", "last")]
    found = steps["last"].plain_by["iteration"]
    assert log(found.ratio) == pytest.approx(sum(log(each.ratio) for each in kept))
    assert found.ci[0] < found.ratio < found.ci[1]
    # Wider than that of its last factor alone, since all of them scatter.
    assert found.sd > kept[-1].sd / BLOCKS**0.5


def test_the_scatter_of_the_rungs_before_counts_and_that_of_later_ones_does_not():
    """By hand: two degrees of freedom more, of the mean of their variances."""
    values, kin = [0.1, 0.2, 0.3], [[0.0, 0.2], [-0.1, 0.1, 0.3]]
    found, freedom = rule._interval(values, kin)
    prior = (0.02 + 0.08) / (1 + 2)
    assert freedom == 2 + 2
    assert found.sd == pytest.approx(((0.02 + 2 * prior) / 4) ** 0.5)
    assert found.high - found.mean == pytest.approx(2.776 * found.sd / 3**0.5, rel=1e-3)
    assert rule._interval(values, [[0.5]])[0] == t_interval(values)
    runs, steps = climbed()
    noisy = [
        times(each, (1.0 + place % 3) / each.value("iteration")) if each.stage == "lean" else each
        for place, each in enumerate(runs)
    ]
    after = {step.rung.name: step for step in rule.climb(LADDER, noisy, "pt", BLOCKS)}
    for name in ("quick", "slow"):
        assert after[name].below_by == steps[name].below_by
    widths = [
        log(s["last"].below_by["iteration"].ci[1] / s["last"].below_by["iteration"].ci[0])
        for s in (steps, after)
    ]
    assert widths[1] > 2 * widths[0]


def test_what_stays_helps_only_where_its_whole_interval_does():
    _, steps = climbed()
    assert {name for name, step in steps.items() if step.helps} == {"quick", "lean", "wise", "last"}
    assert not replace(steps["quick"], state="left out").helps
    reaching = replace(steps["quick"].below_by["iteration"], ci=(0.4, 1.01))
    assert not replace(steps["quick"], below_by={"iteration": reaching}).helps
    assert not replace(steps["wise"], quality=replace(steps["wise"].quality, low=-0.1)).helps
    _, alone = climbed(blocks=1)  # of one pair, nothing is known
    assert not any(step.helps for step in alone.values())


def test_frameworks_are_compared_block_by_block_plain_and_at_the_top():
    """Whatever the machine's speed was in a block."""
    runs, climbs = both()
    runs = [
        times(each, 2 if each.rungs else 4) if each.framework == "tf" and each.metrics else each
        for each in runs
    ]
    plain, top = rule.between(runs, climbs, "iteration")
    assert plain.ratio == pytest.approx(0.25, rel=0.02)
    assert top.ratio == pytest.approx(0.5, rel=0.02)
    assert plain.n == BLOCKS
    assert rule.between(runs, {"pt": climbs["pt"]}, "iteration") == [None, None]
    assert rule.between(runs[:4], {"pt": [], "tf": []}, "iteration") == [None, None]


def test_what_takes_several_times_as_long_is_left_out_after_its_first_pair():
    below = run("quick", 0, ())
    rung = below.but(rungs=("quick",))
    assert rule.climb(LADDER, [below, times(rung, 2.9)], "pt", BLOCKS)[0].state == "open"
    quick, slow = rule.climb(LADDER, [below, times(rung, 7.1)], "pt", BLOCKS)
    assert quick.state == "left out"
    assert quick.reason == "time of an iteration: 7.1 times that of the program below"
    assert slow.below == ()


def test_a_single_pair_leaves_nothing_out():
    _, steps = climbed(blocks=1)
    assert steps["slow"].state == "kept"
    assert steps["slow"].below_by["iteration"].ci is None


def test_an_interval_that_reaches_no_difference_leaves_nothing_out():
    below = run("quick", 0, ())
    runs = []
    for block, factor in enumerate((0.8, 1.4, 1.2)):  # slower in the mean
        runs += [
            times(below.but(block=block, rungs=("quick",)), factor),
            below.but(block=block),
        ]
    (step,) = rule.climb(replace(LADDER, rungs=LADDER.rungs[:1]), runs, "pt", 3)
    assert step.below_by["iteration"].ratio > 1
    assert step.state == "kept"


def test_a_rung_is_open_until_it_has_all_of_its_pairs():
    runs = [run("quick", 0, ()), run("quick", 0, ("quick",)), run("quick", 1, ())]
    assert [s.state for s in rule.climb(LADDER, runs, "pt", 2)] == ["open"]
    runs.append(run("quick", 1, ("quick",)))
    assert [s.state for s in rule.climb(LADDER, runs, "pt", 2)] == ["kept", "open"]


def test_less_is_better_where_the_metric_says_so():
    ladder = replace(LADDER, task="text-gpt")  # bits per character
    _, steps = climbed(ladder=ladder)
    assert steps["careless"].state == "kept"  # eight less
    assert steps["wise"].state == "left out"  # three more


def test_the_first_step_is_that_of_the_first_run():
    """A compiler finds its work on the disk in later ones."""
    _, steps = climbed()
    assert steps["quick"].figures["first_step"] == 1.0


def test_what_the_parts_promise_stands_beside_what_their_stack_gave():
    runs, steps = climbed()
    found = rule.promises(runs, "pt", list(steps.values()))
    time, memory = found["iteration"], found["memory"]
    assert list(time.alone) == ["quick", "lean", "last"]  # wise is judged by its quality
    assert time.promised.ratio == pytest.approx(0.5 * 1.2 * 0.9, rel=0.05)
    assert time.gave.ratio == pytest.approx(0.5 * 1.2 * 0.9, rel=0.05)
    assert memory.promised.ratio == pytest.approx(0.6)
    assert time.top.ratio == pytest.approx(0.54, rel=0.05)
    # A stack that gives less than its parts promise is not hidden.
    runs = [
        times(each, 1.5)
        if (each.stage, each.rungs) == (rule.PARTS, ("quick", "lean", "last"))
        else each
        for each in runs
    ]
    found = rule.promises(runs, "pt", list(steps.values()))["iteration"]
    assert found.gave.ratio / found.promised.ratio == pytest.approx(1.5, rel=0.05)


def test_the_quality_at_the_top_is_compared_with_that_of_the_bottom():
    runs, steps = climbed()
    found = rule.top_quality(LADDER, runs, "pt", list(steps.values()))
    assert found.mean == pytest.approx(3.0, abs=0.3)
    assert found.low < 3.0 < found.high or found.sd < 0.3


def both(changed="pt", **evidence):
    """Two climbs, one of which has other evidence in its first rung."""
    runs, climbs = [], {}
    for side in ("pt", "tf"):
        of_side, steps = climbed(side)
        runs += [
            each.but(evidence=SAME.but(**evidence))
            if side == changed and each.stage == "quick"
            else each
            for each in of_side
        ]
        climbs[side] = list(steps.values())
    return runs, climbs


def test_twins_that_lose_alike_agree():
    runs, climbs = both()
    assert rule.twin_difference(LADDER, runs, "quick", climbs) is None
    assert (
        rule.twin_difference(LADDER, runs, "careless", climbs) == "not measured"
    )  # nothing in one of them


@pytest.mark.parametrize(
    ("evidence", "said"),
    [({"losses": [2.0, 1.1]}, "loss of step 2"), ({"weights_sha256": "other"}, "weights")],
)
def test_twins_that_do_other_work_are_told(evidence, said):
    runs, climbs = both(**evidence)
    assert said in rule.twin_difference(LADDER, runs, "quick", climbs)


def test_a_tolerance_holds_from_its_rung_on():
    runs, climbs = both(losses=[2.0, 1.001])
    assert rule.twin_difference(LADDER, runs, "quick", climbs)
    loose = [replace(LADDER.rungs[0], loss_tolerance=0.05), *LADDER.rungs[1:]]
    loose = replace(LADDER, rungs=tuple(loose))
    assert rule.twin_difference(loose, runs, "quick", climbs) is None


def test_twins_of_which_one_left_out_what_changes_the_losses_are_no_twins():
    runs, climbs = both()
    kept = [
        replace(s, rungs=tuple(n for n in s.rungs if n != "lean")) if s.rung.name == "last" else s
        for s in climbs["tf"]
    ]
    assert (
        rule.twin_difference(LADDER, runs, "last", climbs | {"tf": kept}) == "another computation"
    )
