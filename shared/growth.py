"""Memory over rounds: steady, a cache that fills and is kept, or a leak that goes on.

A leak grows as long as the program runs: the resident memory of the second half of the rounds rises
in a line, and still does in the last third. A cache grows and then stays, and is not given back.
What grows in chunks is judged by its line, too, but not what grows once: no leak is a single step.
"""

from __future__ import annotations

import ctypes
import gc
import platform
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import psutil

STEADY, CACHE, LEAK = "steady", "cache", "leak"


@dataclass(frozen=True)
class Growth:
    """What became of the memory: bytes after each round (resident, or of the device), and why.

    `per_round`: bytes a round over the second half. `released`: bytes that the allocators gave
    back when asked to at the end. `growing`: types of Python objects that there were more of with
    every round, and how many a round; what is kept outside of Python is not among them.
    """

    sizes: tuple[int, ...]
    verdict: str
    per_round: float
    released: int
    growing: tuple[tuple[str, float], ...]

    def __str__(self) -> str:
        """One line."""
        grown = (self.sizes[-1] - self.sizes[0]) / 1e6
        said = f"{self.verdict}: {grown:+.1f} MB in {len(self.sizes)} rounds"
        if self.verdict == LEAK:
            said += f", {self.per_round / 1e6:.2f} MB with every round"
        if self.verdict != STEADY and self.growing:
            kinds = ", ".join(f"{number:.1f} {name}" for name, number in self.growing[:3])
            said += f"; objects more a round: {kinds}"
        return said + f"; {self.released / 1e6:.1f} MB were given back when asked for"


def watch(
    work: Callable,
    *,
    rounds: int,
    warmup: int,
    least: float,
    device: Callable | None = None,
    release: Callable = lambda: None,
) -> Growth:
    """Do `work()` round by round and judge the memory. least: megabytes a round that are a leak.

    device: tells the bytes that are allocated on a device, which then count in place of those of
    the process. release: gives back what the framework keeps.
    Raises ValueError for fewer than 12 rounds, in which no line can be told from noise.
    """
    if rounds < 12 or warmup < 1 or least <= 0:
        raise ValueError(
            "growth needs 12 rounds, a round of warm-up, and least above 0, "
            f"not {rounds}, {warmup}, {least}"
        )
    size = device or _resident
    for _ in range(warmup):
        work()
    sizes, objects = [], []
    gc.collect()
    release()
    _trim()  # or growth goes into pages that are free, and is not seen
    gc.freeze()  # what there is already is neither looked through nor counted in each round
    try:
        for number in range(rounds):
            work()
            gc.collect()
            sizes.append(size())
            if number in (rounds // 2, rounds - 1):
                objects.append(Counter(map(_name, gc.get_objects())))
    finally:
        gc.unfreeze()
    full = _resident()
    gc.collect()
    release()
    _trim()
    released = max(0, full - _resident())
    found, slope = judge(sizes, least=least)
    return Growth(
        tuple(sizes), found, slope, released, _growing(*objects, rounds - 1 - rounds // 2)
    )


def _resident() -> int:
    return psutil.Process().memory_info().rss


def judge(sizes: list[int], *, least: float) -> tuple[str, float]:
    """The verdict on bytes after each round, and bytes a round over the second half."""
    half, third = sizes[len(sizes) // 2 :], sizes[-(len(sizes) // 3) :]
    slope, steps = _slope(half), [after - before for before, after in pairwise(half)]
    again = (sum(steps) - max(steps)) / len(steps)  # what grew beside the largest step
    if slope >= least * 1e6 and min(_slope(third), again) >= least * 0.5e6:
        return LEAK, slope
    grown = median(third) - sizes[0]
    return (CACHE if grown >= least * 1e6 * len(sizes) else STEADY), slope


def _slope(values: list[int]) -> float:
    """The slope of the straight line through these, by least squares."""
    middle, mean = (len(values) - 1) / 2, sum(values) / len(values)
    spread = sum((at - middle) ** 2 for at in range(len(values)))
    return sum((at - middle) * (value - mean) for at, value in enumerate(values)) / spread


def _name(thing) -> str:
    kind = type(thing)
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")


def _growing(middle: Counter, end: Counter, rounds: int) -> tuple[tuple[str, float], ...]:
    """Types with more objects at the end than half-way, a round, the most first."""
    more = {name: (number - middle[name]) / rounds for name, number in end.items()}
    found = [(name, number) for name, number in more.items() if number >= 0.5]
    return tuple(sorted(found, key=lambda pair: -pair[1])[:5])


def _trim() -> None:
    """Ask glibc to give free pages back; other allocators are not asked."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
