"""Memory over rounds: steady, a cache that fills and is kept, or a leak that goes on.

A leak grows as long as the program runs: the resident memory of the second half of the rounds rises
in a line, and still does in the last third. A cache grows and then stays, and is not given back.
What grows in chunks is judged by its line, too, but not what grows once: no leak is a single step.

A cache by shape grows as long as there are new shapes. So where memory grows and shapes vary, old
batches are played again: a leak grows with them as before, such a cache does not.
"""

from __future__ import annotations

import ctypes
import gc
import platform
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from statistics import linear_regression, median

import psutil

from shared.profiles import endless, in_order

STEADY, CACHE, LEAK = "steady", "cache", "leak"
FEWEST = 12  # rounds in which a line can be told from noise
BY_SHAPE = "a cache by shape, such as oneDNN's, which ONEDNN_PRIMITIVE_CACHE_CAPACITY bounds"


@dataclass(frozen=True)
class Growth:
    """What became of the memory: bytes after each round (resident, or of the device), and why.

    `per_round`: bytes a round over the second half. `released`: bytes that the allocators gave
    back when asked to at the end. `growing`: types of Python objects that there were more of with
    every round, and how many a round; what is kept outside of Python is not among them. `again`:
    bytes a round with batches that were played before; None where it was not looked at.
    """

    sizes: tuple[int, ...]
    verdict: str
    per_round: float
    released: int
    growing: tuple[tuple[str, float], ...]
    again: float | None = None

    def __str__(self) -> str:
        """One line."""
        grown = (self.sizes[-1] - self.sizes[0]) / 1e6
        said = f"{self.verdict}: {grown:+.1f} MB in {len(self.sizes)} rounds"
        if self.verdict == LEAK:
            said += f", {self.per_round / 1e6:.2f} MB with every round"
        if self.again is not None:
            said += f", {self.again / 1e6:.2f} MB a round where old batches come again"
            said += f" ({BY_SHAPE})" if self.verdict == CACHE else ""
        if self.verdict != STEADY and self.growing:
            kinds = ", ".join(f"{number:.1f} {name}" for name, number in self.growing[:3])
            said += f"; objects more a round: {kinds}"
        return said + f"; {self.released / 1e6:.1f} MB were given back when asked for"


def watch(
    step: Callable,
    batches: Iterable,
    *,
    rounds: int,
    steps: int,
    warmup: int,
    least: float,
    synchronize: Callable = lambda: None,
    device: Callable | None = None,
    release: Callable = lambda: None,
) -> Growth:
    """Take `rounds` rounds of `steps` steps and judge the memory after each.

    least: megabytes a round that are a leak. device: tells the bytes that are allocated on a
    device, which then count in place of those of the process. release: gives back what the
    framework keeps. Raises ValueError for fewer than 12 rounds, for no batches, and other settings
    out of range.
    """
    if steps < 1:
        raise ValueError(f"growth needs 1 step a round, not {steps}")
    if rounds < FEWEST or warmup < 1 or least <= 0:
        raise ValueError(
            f"growth needs {FEWEST} rounds, a round of warm-up, and least above 0, "
            f"not {rounds}, {warmup}, {least}"
        )
    stream, size, shapes = endless(batches), device or _resident, set()

    def draw() -> list:
        return [next(stream) for _ in range(steps)]

    def play(drawn: list) -> int:
        for batch in drawn:
            step(*in_order(batch))
        synchronize()
        gc.collect()
        return size()

    for _ in range(warmup):
        play(draw())
    sizes, objects = [], []
    gc.collect()
    release()
    _trim()  # or growth goes into pages that are free, and is not seen
    gc.freeze()  # what there is already is neither looked through nor counted in each round
    try:
        for number in range(rounds):
            drawn = draw()
            shapes.update(map(_shapes, drawn))
            sizes.append(play(drawn))
            if number in (rounds // 2, rounds - 1):
                objects.append(Counter(map(_name, gc.get_objects())))
        verdict, slope = judge(sizes, least=least)
        again = None
        grows = verdict != STEADY or slope >= least * 0.5e6
        if grows and len(shapes) > 1:
            again = _again(draw, play)
        if again is not None and again < slope / 2:
            verdict = CACHE
    finally:
        gc.unfreeze()
    full = _resident()
    gc.collect()
    release()
    _trim()
    released = max(0, full - _resident())
    growing = _growing(*objects, rounds - 1 - rounds // 2)
    return Growth(tuple(sizes), verdict, slope, released, growing, again)


def _again(draw: Callable, play: Callable) -> float | None:
    """Bytes a round with old batches: some are played once, then twice more, and these count.

    None where there are no more batches.
    """
    try:
        old = [draw() for _ in range(FEWEST)]
    except ValueError:  # an iterator that ended
        return None
    for drawn in old:
        play(drawn)
    return max(0.0, _slope([play(drawn) for drawn in [*old, *old]]))


def _shapes(batch) -> tuple:
    """The lengths of all arrays of a batch."""
    if isinstance(batch, Mapping):
        batch = tuple(batch.values())
    if isinstance(batch, tuple | list):
        return tuple(map(_shapes, batch))
    return tuple(getattr(batch, "shape", ()))


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
    return linear_regression(range(len(values)), values).slope


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
