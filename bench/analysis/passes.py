"""Which passes of a run count: those in which the machine was the same, by a rule set beforehand.

Before and after each pass a sentinel measures how fast the machine is, and its device where that is
no CPU. Two speeds are the same where they differ by no more than `SAME_SPEED`, as those of machines
of one class do. The rule holds for the machine and for the device:

1. A pass under which the machine changed, whose two speeds are not the same, is played again at
   once, one time. What it had before is dropped.
2. Of all passes those count that have the speed which most blocks have; of two speeds that equally
   many have, the faster one. The others are left out, and so is a pass under which the machine
   changed both times. Where it changed under every pass, all count, and the report says so.

The sentinel knows no sample and no ratio, so that nobody can choose passes by what they show.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from bench.analysis.machine_class import SAME_SPEED, same_speed
from bench.record import Pass

MACHINE, DEVICE = ("before", "after"), ("device_before", "device_after")  # entries of a pass


def changed(played: Pass) -> bool:
    """Whether the machine or its device changed under a pass."""
    both = [_speeds(played, what) for what in (MACHINE, DEVICE)]
    return any(len(speeds) == 2 and not same_speed(*speeds) for speeds in both)


def left_out(passes: Sequence[Pass]) -> set[tuple[int, int]]:
    """The blocks that do not count: (match, block)."""
    return {(match, p.number) for p in _left_out(passes) for match in p.matches}


def said(passes: Sequence[Pass]) -> str | None:
    """When the machine changed, how, and what became of it, in a line; None where it did not."""
    out, again = _left_out(passes), [played for played in passes if played.again]
    unsteady = [played for played in passes if changed(played)]
    if not (out or again or unsteady):
        return None
    first = next(played for played in passes if played in [*out, *unsteady, *again])
    ranges = {
        whose: [speed for played in passes for speed in _speeds(played, what)]
        for whose, what in (("its speed", MACHINE), ("its device's speed", DEVICE))
    }
    line = f"MACHINE CHANGED: in pass {first.number + 1}, which began at {first.began}; "
    line += " and ".join(
        f"{whose} was between {min(speeds) / max(speeds):.0%} and 100% of the highest"
        for whose, speeds in ranges.items()
        if speeds
    )
    line += "."
    if again:
        line += f" {_named(again)} played again."
    if out:
        return f"{line} {_named(out)} left out."
    still = any(played.matches for played in unsteady)
    return f"{line} It changed under every pass, and all count." if still else line


def _left_out(passes: Sequence[Pass]) -> list[Pass]:
    known = [played for played in passes if played.matches and _speeds(played, MACHINE)]
    steady = [played for played in known if not changed(played)]
    out = [played for played in known if steady and played not in steady]
    for what in (MACHINE, DEVICE):
        levels = [(_level(played, what), played) for played in steady if _speeds(played, what)]
        tops = (level for level, _ in levels)
        usual = max(tops, key=lambda top: (_weight(levels, top), top), default=0.0)
        out += [played for level, played in levels if not _same(level, usual)]
    return [played for played in known if played in out]


def _weight(levels: Sequence[tuple[float, Pass]], top: float) -> int:
    """How many blocks were played at a speed."""
    return sum(len(played.matches) for level, played in levels if _same(level, top))


def _level(played: Pass, what: tuple[str, str]) -> float:
    return fmean(_speeds(played, what))


def _speeds(played: Pass, what: tuple[str, str]) -> list[float]:
    return [speed for name in what if (speed := getattr(played, name))]


def _same(speed: float, top: float) -> bool:
    """Whether a speed is the highest one, or lower by no more than the factor."""
    return top / SAME_SPEED <= speed <= top


def _named(passes: Sequence[Pass]) -> str:
    numbers = sorted({played.number + 1 for played in passes})
    several = len(numbers) > 1
    listed = ", ".join(map(str, numbers))
    return f"Pass{'es' * several} {listed} {'were' if several else 'was'}"
