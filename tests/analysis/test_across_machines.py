"""Which answers hold on all machines, of records whose answers are known."""

from __future__ import annotations

import pytest

from bench.analysis import across_machines
from bench.analysis.across_machines import HOLDS, NOTHING, ONCE, TURNS, UNTOLD, Machine, statements
from tests.analysis.test_ranking import GAIN, KEPT, LOST, fast, row
from tests.analysis.test_ranking import NOTHING as NONE
from tests.records import ENVIRONMENT, with_case

LESS = (0.8, 0.78, 0.82)
WIDE, WIDE_GAIN = (0.95, 0.85, 1.05), (0.9, 0.8, 1.02)


def stated(*runs, framework="pt"):
    """What the first of these runs states of train steps, and the others see."""
    first, *more = (Machine(str(number), run) for number, run in enumerate(runs))
    (said,) = [
        one
        for one in statements(first, more)
        if one.framework == framework and one.answer.goal.name == "train-speed"
    ]
    return said


def changed(*time, **more):
    return fast(row(time=time, **more))


@pytest.mark.parametrize(
    ("here", "there", "verdict", "differs"),
    [
        (GAIN, GAIN, HOLDS, False),
        (GAIN, LESS, HOLDS, True),
        (GAIN, NONE, TURNS, False),
        (GAIN, (1.2, 1.1, 1.3), TURNS, False),
        (GAIN, WIDE_GAIN, UNTOLD, False),
        (GAIN, (0.6,), ONCE, False),
        (NONE, NONE, NOTHING, False),
        (NONE, GAIN, TURNS, False),
        (WIDE, GAIN, UNTOLD, False),
    ],
)
def test_a_gain_holds_where_every_machine_with_an_interval_shows_it(here, there, verdict, differs):
    said = stated(changed(*here), changed(*there))
    assert (said.verdict, said.differs) == (verdict, differs)


def test_a_figure_without_an_interval_confirms_nothing_and_can_raise_a_doubt():
    for once, verdict in ((0.6, HOLDS), (1.1, UNTOLD)):
        runs = changed(*GAIN), changed(*GAIN), changed(once)
        assert stated(*runs).verdict == verdict
        assert not stated(*runs).seen[2].told


def test_what_holds_on_two_turns_by_a_third():
    runs = changed(*GAIN), changed(*LESS), changed(*NONE)
    assert stated(*runs[:2]).verdict == HOLDS
    assert [one.holds for one in stated(*runs).seen] == [True, True, False]
    assert stated(*runs).verdict == TURNS


def test_a_machine_that_did_not_measure_a_row_says_nothing_of_it():
    other = fast(row("memory_format", "channels_last", time=GAIN))
    said = stated(changed(*GAIN), other)
    assert (said.verdict, said.seen[1].told, said.seen[1].gain) == (ONCE, False, None)
    assert stated(changed(*GAIN), other, changed(*GAIN)).verdict == HOLDS


def test_another_winner_there_leaves_what_is_named_here_to_hold():
    both = fast(row(time=LESS), row("memory_format", "channels_last", time=GAIN))
    said = stated(changed(*LESS), both)
    assert said.verdict == HOLDS
    side = said.seen[1].answer.sides["pt"]
    assert side.best.case.technique == "memory_format"
    assert said.seen[1].row.case.technique == "compilation"


def test_a_row_that_moved_to_another_technique_is_the_same_row():
    moved = fast(row("stacking", time=GAIN))
    assert stated(changed(*GAIN), moved).verdict == HOLDS
    two = fast(row("stacking", time=GAIN), row("memory_format", time=GAIN))
    assert stated(changed(*GAIN), two).verdict == ONCE  # which of them is not known


def test_a_gain_that_costs_accuracy_there_does_not_hold():
    kept, lost = (changed(*GAIN, changes_math=True, accuracy=acc) for acc in (KEPT, LOST))
    assert stated(kept, kept).verdict == HOLDS
    assert stated(kept, lost).verdict == TURNS


def pair(pt, tf):
    """A record whose frameworks take so many seconds a step, within 1%; nothing gains."""
    run = fast(row(time=NONE), row(time=NONE, framework="tf"))
    for side, seconds in (("pt", pt), ("tf", tf)):
        for variant in ("base", "changed"):
            times = {"median_s": seconds, "ci_s": (0.99 * seconds, 1.01 * seconds)}
            run = with_case(run, f"{side}/{variant}", timing=times)
    return run


@pytest.mark.parametrize(
    ("here", "there", "ahead", "verdict", "differs"),
    [
        ((1.0, 2.0), (1.0, 2.0), "pt", HOLDS, False),
        ((1.0, 2.0), (1.0, 1.5), "pt", HOLDS, True),
        ((1.0, 2.0), (2.0, 1.0), "pt", TURNS, False),
        ((1.0, 2.0), (1.0, 1.0), "pt", TURNS, False),
        ((1.0, 2.0), (1.0, 1.04), "pt", UNTOLD, False),
        ((1.0, 1.0), (1.0, 1.0), None, NOTHING, False),
        ((1.0, 1.0), (2.0, 1.0), None, TURNS, False),
        ((1.04, 1.0), (2.0, 1.0), None, UNTOLD, False),
    ],
)
def test_who_is_ahead_holds_where_every_machine_shows_it(here, there, ahead, verdict, differs):
    said = stated(pair(*here), pair(*there), framework=None)
    assert (said.ahead, said.verdict, said.differs) == (ahead, verdict, differs)


def test_a_record_of_the_first_machine_s_class_is_no_other_machine():
    alike, faster = (
        Machine(name, changed(*GAIN).but(environment=ENVIRONMENT.but(peak_flops={"float32": peak})))
        for name, peak in (("alike", 2.1e11), ("faster", 4e11))
    )
    first = changed(*GAIN).but(environment=ENVIRONMENT.but(peak_flops={"float32": 2e11}))
    assert across_machines.others(first, [alike, faster]) == [faster]
