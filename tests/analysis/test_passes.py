"""Which passes count: those in which the machine was the same."""

from __future__ import annotations

import pytest

from bench.analysis.passes import changed, left_out, said
from bench.record import Pass

FAST, SLOW, MATCHES = 1e11, 5e10, [0, 1]


def run(*speeds, **others):
    """A run whose passes have these speeds before and after them."""
    return [
        Pass(number=n, began=f"12:0{n}", matches=MATCHES, before=b, after=a, **others)
        for n, (b, a) in enumerate(speeds)
    ]


def numbers(passes):
    """The passes that are left out whole."""
    out = left_out(passes)
    assert all((match, number) in out for _, number in out for match in MATCHES)
    return {number for _, number in out}


def test_a_steady_machine_is_not_mentioned():
    passes = run((FAST, 0.9 * FAST), (0.85 * FAST, FAST), (FAST, FAST))
    assert numbers(passes) == set()
    assert said(passes) is None
    assert said([]) is None
    assert said(run((None, None))) is None


def test_a_pass_counts_as_changed_by_a_factor_either_way():
    slower, faster, same = run((FAST, SLOW), (SLOW, FAST), (FAST, FAST / 1.29))
    assert changed(slower)
    assert changed(faster)
    assert not changed(same)
    assert not changed(run((FAST, None))[0])


@pytest.mark.parametrize(
    ("speeds", "out"),
    [
        ([(FAST, FAST), (SLOW, SLOW), (FAST, FAST)], {1}),
        ([(SLOW, SLOW), (FAST, FAST), (FAST, FAST)], {0}),  # the neighbour was there first
        ([(FAST, FAST), (SLOW, SLOW), (SLOW, SLOW)], {0}),
        ([(FAST, FAST), (SLOW, SLOW)], {1}),  # as many: the faster one
        ([(FAST, FAST), (FAST, SLOW), (FAST, FAST)], {1}),  # it changed both times
        ([(FAST, SLOW)], set()),  # there is nothing else
        ([(FAST, SLOW), (SLOW, FAST)], set()),
        ([(FAST, FAST), (SLOW, None)], {1}),  # it was interrupted
    ],
)
def test_the_speed_of_most_blocks_counts(speeds, out):
    assert numbers(run(*speeds)) == out


def test_a_pass_that_was_played_again_is_judged_by_that():
    dropped = Pass(number=1, began="12:01", matches=[], before=FAST, after=SLOW)
    again = Pass(number=1, began="12:02", matches=MATCHES, before=FAST, after=FAST, again=True)
    passes = [*run((FAST, FAST)), dropped, again]
    assert numbers(passes) == set()
    assert said(passes) == (
        "MACHINE CHANGED: in pass 2, which began at 12:01; its speed was between 50% and 100% of "
        "the highest. Pass 2 was played again."
    )


def test_a_device_that_changes_counts_as_the_machine_does():
    """The machine is steady: only its GPU has another clock."""
    speeds = [(FAST, FAST), (FAST, SLOW), (SLOW, SLOW), (FAST, FAST)]
    passes = [
        played.but(device_before=before, device_after=after)
        for played, (before, after) in zip(run(*[(FAST, FAST)] * 4), speeds, strict=True)
    ]
    assert [changed(played) for played in passes] == [False, True, False, False]
    assert numbers(passes) == {1, 2}
    assert "its device's speed was between 50% and 100% of the highest" in said(passes)


def test_matches_that_came_later_are_judged_by_their_own_time():
    later = Pass(number=0, began="12:09", matches=[7], before=SLOW, after=SLOW)
    assert left_out([*run((FAST, FAST), (FAST, FAST)), later]) == {(7, 0)}


def test_a_line_says_what_is_left_out():
    line = said(run((FAST, FAST), (SLOW, SLOW), (FAST, FAST), (SLOW, SLOW), (FAST, FAST)))
    assert line.startswith("MACHINE CHANGED: in pass 2, which began at 12:01;")
    assert line.endswith("Passes 2, 4 were left out.")
    assert said(run((FAST, SLOW))).endswith("It changed under every pass, and all count.")
