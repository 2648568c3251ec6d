"""Experiments that decide whether a cause is one.

Those of `tested` need no new process: products by themselves, and a step on one thread. Those of
`thorough` start both sides again with one condition changed: as many threads, the allocator as
installed, fewer instructions. A cause is borne out where the difference that it should make is
made: half of it at least.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from msgspec.structs import replace

from bench.why.causes import Cause
from bench.why.difference import Difference
from bench.why.side import Request, Running
from shared import step_events as kinds

HALF = 0.5
MOST_SHAPES = 4
ROUNDS = 3
LIMITED = {"ONEDNN_MAX_CPU_ISA": "SSE41", "ATEN_CPU_CAPABILITY": "default"}
LIMITED |= {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}


def tested(named: list[Cause], difference: Difference, a: Running, b: Running) -> list[Cause]:
    """The causes after the experiments of the running processes."""
    return [_tested(one, difference, a, b) for one in named]


def _tested(cause: Cause, difference: Difference, a: Running, b: Running) -> Cause:
    if cause.kind == kinds.PRODUCTS:
        return products_alone(cause, difference, a.product, b.product)
    if cause.kind == kinds.WAITING:
        return on_one_thread(cause, difference, a.single, b.single)
    return cause


def products_alone(
    cause: Cause,
    difference: Difference,
    a: Callable[[tuple, str], float],
    b: Callable[[tuple, str], float],
) -> Cause:
    """Whether the shapes by themselves differ as they do in the step.

    a, b: seconds of a product of a shape and dtype, in the process of either side.
    """
    sums = []
    for side, alone in ((difference.a, a), (difference.b, b)):
        every = [one for one in side.products if one.kind == kinds.PRODUCTS and len(one.shape) == 3]
        every.sort(key=lambda one: -one.seconds)
        most = every[:MOST_SHAPES]
        whole = sum(one.flops for one in every) or 1.0
        share = sum(one.flops for one in most) / whole
        seconds = sum(one.calls * alone(one.shape, one.dtype) for one in most)
        sums.append(seconds / share if share else 0.0)
    if not all(sums):
        return cause
    gap = sums[0] - sums[1]
    borne = gap * cause.seconds > 0 and abs(gap) >= HALF * abs(cause.seconds)
    told = f"alone, these products take {sums[0] * 1e3:.3g} and {sums[1] * 1e3:.3g} ms"
    return cause.judged(borne, told)


def on_one_thread(
    cause: Cause, difference: Difference, a: Callable[[], float], b: Callable[[], float]
) -> Cause:
    """Whether waiting goes where there is one thread, and so nothing to wait for."""
    gap = a() - b()
    borne = abs(gap) <= HALF * abs(difference.seconds) or gap * difference.seconds < 0
    told = f"on one thread, the difference is {gap * 1e3:.3g} ms"
    return cause.judged(borne, told)


def thorough(named: list[Cause], difference: Difference, a: Request, b: Request) -> list[Cause]:
    """The causes after experiments in new processes."""
    return [_changed(one, difference, a, b) for one in named]


def _changed(cause: Cause, difference: Difference, a: Request, b: Request) -> Cause:
    if cause.kind == "threads":
        most = max(a.threads, b.threads)
        gap = gap_of(replace(a, threads=most), replace(b, threads=most))
        return _goes(cause, difference, gap, f"with {most} threads on both sides")
    if cause.kind == kinds.FAULTS:
        pair = (replace(one, allocator="tuned") for one in (a, b))
        words = "with an allocator that keeps what is freed, on both sides"
        return _goes(cause, difference, gap_of(*pair), words)
    if cause.kind in (kinds.PRODUCTS, kinds.CONVOLUTIONS) and cause.status != "tested":
        gap = gap_of(*(replace(one, variables=one.variables | LIMITED) for one in (a, b)))
        return _goes(cause, difference, gap, "with the instructions of SSE4 alone")
    return cause


def _goes(cause: Cause, difference: Difference, gap: float, words: str) -> Cause:
    """Whether the cause's part of the difference goes with the condition."""
    went = (difference.seconds - gap) / cause.seconds
    return cause.judged(went >= HALF, f"{words} the difference is {gap * 1e3:.3g} ms")


def gap_of(a: Request, b: Request) -> float:
    """Seconds that a step of `a` takes more than one of `b`, in new processes."""
    with Running(a) as one, Running(b) as other:
        gaps = [one.round() - other.round() for _ in range(ROUNDS)]
    return median(gaps)
