"""Which answers hold on all machines: those of one record, checked against the records of others.

A statement is what the first machine's answer names in a framework, or which framework it shows to
be ahead. Another machine confirms it, contradicts it by its whole interval, or can't tell. A
machine that did not measure it is left out. A figure without an interval confirms nothing; if it
shows no gain, the statement is open on that machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from bench.analysis.machine_class import same_class
from bench.analysis.questions import Answer, answers
from bench.analysis.ranking import Ranking
from bench.analysis.reading import load
from bench.analysis.table import GAINED, MORE_IS_BETTER, Figure, Row, is_better
from bench.analysis.verdicts import DELTA
from bench.record import FRAMEWORKS, Record

HOLDS, TURNS, UNTOLD, NOTHING, ONCE = "holds", "turns", "can't be told", "nothing", "one machine"


@dataclass(frozen=True)
class Machine:
    """A record, its folder's name, and its answers."""

    name: str
    record: Record

    @cached_property
    def answers(self) -> dict[tuple, Answer]:
        """Its answers, by question, goal and piece of work."""
        return {key(each): each for each in answers(self.record)}


def key(answer: Answer) -> tuple:
    """The question, the goal and the piece of work, by which answers of two records are matched."""
    work = answer.work
    place = (work.kind, work.task, work.batch_size, work.apart)
    return (answer.question.aim, answer.goal.name, *place)


def machines_in(folder: Path) -> list[Machine]:
    """The records of the folders in a folder, in the order of their names."""
    places = sorted(path.parent for path in folder.glob("*/results.json"))
    return [Machine(place.name, load(place)) for place in places]


def others(first: Record, machines: list[Machine]) -> list[Machine]:
    """The machines of another class than the first."""
    environment = first.environment
    return [one for one in machines if not same_class(environment, one.record.environment)]


@dataclass(frozen=True)
class Seen:
    """What a machine says about a statement.

    `holds`: None if its interval can't tell. `told`: whether it has an interval. `gain`: of the row
    over its baseline, or of the framework that the statement names over the other. `row`: the row
    that this machine names, if the statement is that nothing gains.
    """

    machine: Machine
    holds: bool | None = None
    told: bool = False
    gain: Figure | None = None
    row: Row | None = None
    answer: Answer | None = None


@dataclass(frozen=True)
class Statement:
    """What the first machine's answer says about a framework; without one, which one is ahead.

    `row`: the row it names; None if nothing gains. `ahead`: the framework; None if no difference
    was shown. `seen`: what each machine says, the first machine's first.
    """

    answer: Answer
    framework: str | None
    row: Row | None
    ahead: str | None
    seen: list[Seen]

    @property
    def says_something(self) -> bool:
        """Whether a gain or a lead was shown."""
        return self.row is not None or self.ahead is not None

    @property
    def told(self) -> list[Seen]:
        """What the machines with an interval say."""
        return [one for one in self.seen if one.told]

    @property
    def verdict(self) -> str:
        """Whether it holds on all machines that can tell."""
        if any(one.holds is False for one in self.told):
            return TURNS
        if len(self.told) < 2 or not self.seen[0].told:
            return ONCE
        if self._doubted or any(one.holds is None for one in self.told):
            return UNTOLD
        return HOLDS if self.says_something else NOTHING

    @property
    def _doubted(self) -> bool:
        """Whether a machine has a figure without an interval that shows no such gain."""
        name = self.answer.goal.figure
        gains = [one.gain for one in self.seen if one.gain and not one.told]
        without = (without_gain(name, replace(gain, kind="exact")) for gain in gains)
        return self.says_something and any(without)

    @property
    def differs(self) -> bool:
        """Whether it holds but by different amounts: two intervals do not overlap."""
        bounds = [one.gain.bounds for one in self.told if one.gain and one.gain.bounds]
        apart = bounds and max(low for low, _ in bounds) > min(high for _, high in bounds)
        return self.verdict == HOLDS and bool(apart)


def statements(first: Machine, machines: list[Machine]) -> list[Statement]:
    """The statements of `first` with what `machines` say, in the order of the answers."""
    return [said for each in first.answers.values() for said in _of_answer(each, first, machines)]


def _of_answer(answer: Answer, first: Machine, machines: list[Machine]) -> Iterator[Statement]:
    for framework in FRAMEWORKS:
        if framework not in answer.sides:
            continue
        row = subject(answer.sides[framework])
        looks = [
            _of_row(one, one.answers.get(key(answer)), answer, framework, row)
            for one in (first, *machines)
        ]
        yield Statement(answer, framework, row, None, looks)
    if answer.between is not None and answer.between.bounds:
        looks = [_of_lead(one, one.answers.get(key(answer)), answer) for one in (first, *machines)]
        yield Statement(answer, None, None, answer.ahead, looks)


def subject(side: Ranking) -> Row | None:
    """The row that an answer names in a framework: the best, or one that gains but loses accuracy.

    None if no row was shown to gain.
    """
    if not side.best.is_baseline and side.aim.gain(side.best) is not None:
        return side.best
    return next(iter(side.tempting), None)


def same_row(side: Ranking, row: Row) -> Row | None:
    """The same row in another record, by technique and variant, else by a unique variant name."""
    case = row.case
    rows = [one for one in side.tried if one.case.side == case.side]
    alike = [one for one in rows if one.case.variant == case.variant]
    exact = [one for one in alike if one.case.technique == case.technique]
    return exact[0] if exact else alike[0] if len(alike) == 1 else None


def _of_row(
    machine: Machine, there: Answer | None, answer: Answer, framework: str, row: Row | None
) -> Seen:
    """What a machine says of a row of a framework, or of that nothing gains in it."""
    side = there and there.sides.get(framework)
    if not side:
        return Seen(machine)
    name = answer.goal.figure
    if row is None:
        return _of_nothing(machine, there, answer.sides[framework], side)
    other = same_row(side, row)
    gain = other and side.aim.gain(other)
    if gain is None:
        return Seen(machine, answer=there)
    holds = True if is_better(name, gain) else False if without_gain(name, gain) else None
    if row.accuracy.kept and not other.accuracy.kept:
        holds = False if other.accuracy.lost else None
    return Seen(machine, holds, bool(gain.bounds), gain, other, there)


def _of_nothing(machine: Machine, there: Answer, here: Ranking, side: Ranking) -> Seen:
    """Of that nothing gains: whether a machine names something that was shown not to gain here."""
    named = subject(side)
    if named is None:
        told = any(side.aim.gain(row).bounds for row in side.tried)
        return Seen(machine, True, told, answer=there)
    ours = same_row(here, named)
    gain_here = ours and here.aim.gain(ours)
    contrary = gain_here is not None and without_gain(here.goal.figure, gain_here)
    gain = side.aim.gain(named)
    return Seen(machine, False if contrary else None, bool(gain.bounds), gain, named, there)


def _of_lead(machine: Machine, there: Answer | None, answer: Answer) -> Seen:
    """What a machine says of who is ahead; where nobody is, the gain of who is there."""
    if there is None or there.between is None:
        return Seen(machine, answer=there)
    name, told = answer.goal.figure, bool(there.between.bounds)
    if answer.ahead is None:
        if there.ahead is None:
            return Seen(machine, True, told, answer=there)
        contrary = without_gain(name, answer.seen_from(there.ahead))
        lead = there.seen_from(there.ahead)
        return Seen(machine, False if contrary else None, told, lead, answer=there)
    lead = there.seen_from(answer.ahead)
    contrary = without_gain(name, lead)
    holds = True if there.ahead == answer.ahead else False if contrary else None
    return Seen(machine, holds, told, lead, answer=there)


def without_gain(name: str, ratio: Figure) -> bool:
    """Whether the whole interval shows no gain."""
    if ratio.bounds is None:
        return False
    if name == GAINED:
        return ratio.high <= 0
    return ratio.high <= 1 + DELTA if name in MORE_IS_BETTER else ratio.low >= 1 / (1 + DELTA)
