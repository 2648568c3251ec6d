"""Which passes of a run count: those in which the machine was the same, by a rule set beforehand.

Before and after each pass a sentinel measures how fast the machine is. Two speeds are the same
where they differ by no more than `SAME_SPEED`, as those of machines of one class do.

1. A pass under which the machine changed, whose two speeds are not the same, is played again at
   once, one time. What it had before is dropped.
2. Of all passes those count that have the speed which most blocks have; of two speeds that equally
   many have, the faster one. The others are left out, and so is a pass under which the machine
   changed both times. Where it changed under every pass, all count, and the report says so.

The sentinel knows no sample and no ratio, so that nobody can choose passes by what they show.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.analysis.machine_class import SAME_SPEED, same_speed
from bench.record import Pass


def changed(played: Pass) -> bool:
    """Whether the machine changed under a pass."""
    return bool(played.before and played.after) and not same_speed(played.before, played.after)


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
    speeds = [speed for played in passes for speed in _speeds(played)] or [1.0]
    line = f"MACHINE CHANGED: in pass {first.number + 1}, which began at {first.began}; its speed "
    line += f"was between {min(speeds) / max(speeds):.0%} and 100% of the highest."
    if again:
        line += f" {_named(again)} played again."
    if out:
        return f"{line} {_named(out)} left out."
    still = any(played.matches for played in unsteady)
    return f"{line} It changed under every pass, and all count." if still else line


def _left_out(passes: Sequence[Pass]) -> list[Pass]:
    known = [played for played in passes if played.matches and _speeds(played)]
    steady = [played for played in known if not changed(played)]
    if not steady:
        return []
    usual = max((_level(top) for top in steady), key=lambda top: (_weight(steady, top), top))
    return [p for p in known if p not in steady or not _same(_level(p), usual)]


def _weight(passes: Sequence[Pass], top: float) -> int:
    """How many blocks were played at a speed."""
    return sum(len(played.matches) for played in passes if _same(_level(played), top))


def _level(played: Pass) -> float:
    speeds = _speeds(played)
    return sum(speeds) / len(speeds)


def _speeds(played: Pass) -> list[float]:
    return [speed for speed in (played.before, played.after) if speed]


def _same(speed: float, top: float) -> bool:
    """Whether a speed is the highest one, or lower by no more than the factor."""
    return top / SAME_SPEED <= speed <= top


def _named(passes: Sequence[Pass]) -> str:
    numbers = sorted({played.number + 1 for played in passes})
    several = len(numbers) > 1
    listed = ", ".join(map(str, numbers))
    return f"Pass{'es' * several} {listed} {'were' if several else 'was'}"
