"""Which passes of a run count: those with the machine at the same speed, by a rule set in advance.

Before and after each pass, a fixed computation measures the speed of the machine, and of the GPU if
there is one. Two speeds are the same if they differ by no more than the factor `SAME_SPEED`, which
also defines a class of machines. The rule holds for the machine and for the GPU:

1. If the speeds before and after a pass are not the same, the pass is repeated at once, one time.
   The first try is dropped.
2. The passes at the speed of most blocks count; of two equally frequent speeds, the faster one. The
   others are left out, as is a pass whose speed changed both times. If the speed changed in every
   pass, all count, and the report says so.

The rule sees no sample and no ratio, so no pass is chosen by its result.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from bench.analysis.machine_class import SAME_SPEED, same_speed
from bench.record import Pass

MACHINE, DEVICE = ("before", "after"), ("device_before", "device_after")  # entries of a pass


def changed(played: Pass) -> bool:
    """Whether the speed of the machine or the GPU changed during a pass."""
    both = [_speeds(played, what) for what in (MACHINE, DEVICE)]
    return any(len(speeds) == 2 and not same_speed(*speeds) for speeds in both)


def left_out(passes: Sequence[Pass]) -> set[tuple[int, int]]:
    """The blocks that do not count: (match, block)."""
    return {(match, p.number) for p in _left_out(passes) for match in p.matches}


def said(passes: Sequence[Pass]) -> str | None:
    """One line about when and how the machine changed and what followed; None if it did not."""
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
