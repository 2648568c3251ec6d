"""Experiments that test whether a cause is real.

Those of `tested` need no new process: matrix products, convolutions and attention computed
separately, and a step on one thread. The others start both sides again with one condition changed:
oneDNN switched on where TensorFlow leaves it off, and in `thorough` equal threads, the installed
allocator, or fewer instructions. A cause is confirmed if the experiment makes at least half of the
difference that it should.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from statistics import median

from msgspec.structs import replace

from bench.why import measured as m
from bench.why.causes import TESTED, Cause, milliseconds
from bench.why.difference import Difference
from bench.why.side import Alone, Request, Running
from shared import step_events as kinds
from shared.onednn import VARIABLE

HALF = 0.5
COMPUTED = (kinds.PRODUCTS, kinds.CONVOLUTIONS, kinds.ATTENTION)
LENGTHS = {kinds.PRODUCTS: 3, kinds.CONVOLUTIONS: 13, kinds.ATTENTION: 4}  # of a shape
MOST_SHAPES = 4
ROUNDS = 3
LIMITED = {"ONEDNN_MAX_CPU_ISA": "SSE41", "ATEN_CPU_CAPABILITY": "default"}
LIMITED |= {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}


def tested(named: list[Cause], difference: Difference, a: Running, b: Running) -> list[Cause]:
    """The causes after the experiments of the running processes."""
    return [_tested(one, difference, a, b) for one in named]


def _tested(cause: Cause, difference: Difference, a: Running, b: Running) -> Cause:
    if cause.kind in COMPUTED:
        return alone(cause, difference, a.compute, b.compute)
    if cause.kind == kinds.WAITING:
        return on_one_thread(cause, difference, a.single, b.single)
    return cause


Compute = Callable[..., float]  # (what, single=...) -> seconds


def alone(cause: Cause, difference: Difference, a: Compute, b: Compute) -> Cause:
    """Whether the shapes computed separately differ as they do in the step.

    a, b: seconds of each shape in either side's process, on one thread or on all.
    """
    sums = [
        [_by_themselves(side, cause.kind, compute, single) for single in (False, True)]
        for side, compute in ((difference.a, a), (difference.b, b))
    ]
    (ours, ours_single), (theirs, theirs_single) = sums
    if not ours or not theirs:
        return cause
    gap = ours - theirs
    borne = gap * cause.seconds > 0 and abs(gap) >= HALF * abs(cause.seconds)
    told = f"alone, these {cause.kind} take {milliseconds(ours)} and {milliseconds(theirs)} ms, on "
    told += f"one thread {milliseconds(ours_single)} and {milliseconds(theirs_single)}"
    return cause.judged(borne, told)


def _by_themselves(side: m.Side, kind: str, compute: Compute, single: bool) -> float:
    """Seconds a step of the shapes of a kind, by those that compute most; 0 of none."""
    every = _shapes(side, kind)
    most = sorted(every, key=lambda one: -one[1])[:MOST_SHAPES]
    share = sum(flops for _, flops, _ in most) / (sum(flops for _, flops, _ in every) or 1.0)
    return sum(calls * compute(one, single=single) for calls, _, one in most) / (share or 1.0)


def _shapes(side: m.Side, kind: str) -> list[tuple[float, float, Alone]]:
    """(calls a step, operations, what is computed) of the shapes that are known.

    A convolution and attention are computed with their gradients where the step has these.
    """
    shapes: dict[Alone, list[float]] = {}
    for one in side.products:
        if one.kind != kind:
            continue
        calls, shape = one.calls, one.shape
        if kind == kinds.ATTENTION and len(shape) == 3:
            calls, shape = _of_attention(one, side)
        if len(shape) == LENGTHS[kind] or (kind == kinds.ATTENTION and len(shape) > 2):
            train = side.trains and kind != kinds.PRODUCTS
            what = Alone(kind=kind, shape=tuple(shape), dtype=one.dtype, train=train)
            so_far = shapes.setdefault(what, [0.0, 0.0])
            so_far[0] += calls
            so_far[1] += one.flops
    return [(calls, flops, what) for what, (calls, flops) in shapes.items()]


def _of_attention(one: m.Product, side: m.Side) -> tuple[float, tuple[int, ...]]:
    """Calls and (batch, length, width) of attention of which a batched product is a part.

    Self-attention has two products, and two more for the gradient of each; in all of them the
    length stands twice.
    """
    twice = [n for n, times in Counter(one.shape).items() if times > 1]
    if not twice or not one.calls:
        return 0.0, ()
    (length,) = twice
    width = (Counter(one.shape) - Counter([length, length])).popitem()[0]
    batch = round(one.flops / one.calls / (2 * math.prod(one.shape)))
    return one.calls / (6 if side.trains else 2), (batch, length, width)


def on_one_thread(
    cause: Cause, difference: Difference, a: Callable[[], float], b: Callable[[], float]
) -> Cause:
    """Whether waiting disappears on one thread, where there is nothing to wait for."""
    gap = a() - b()
    borne = abs(gap) <= HALF * abs(difference.seconds) or gap * difference.seconds < 0
    told = f"on one thread, the difference is {milliseconds(gap)} ms"
    return cause.judged(borne, told)


def with_onednn(named: list[Cause], difference: Difference, a: Request, b: Request) -> list[Cause]:
    """The causes after steps with oneDNN, for a slower side that computes without it."""
    slower = difference.a if difference.seconds > 0 else difference.b
    parts = [one for one in named if one.kind in COMPUTED and one.seconds * difference.seconds > 0]
    if slower.facts.onednn or slower.framework != "tf" or not parts:
        return named
    gap = gap_of(*(replace(one, variables=one.variables | {VARIABLE: "1"}) for one in (a, b)))
    words = f"with {VARIABLE}=1 the difference is {milliseconds(gap)} ms"
    largest = max(parts, key=lambda one: abs(one.seconds))
    borne = (difference.seconds - gap) / largest.seconds >= HALF
    evidence = "; ".join(filter(None, (largest.evidence, words)))
    judged = largest.judged(borne or largest.status == TESTED, evidence)
    return [judged if one is largest else one for one in named]


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
    if cause.kind in COMPUTED and cause.status != TESTED:
        gap = gap_of(*(replace(one, variables=one.variables | LIMITED) for one in (a, b)))
        return _goes(cause, difference, gap, "with the instructions of SSE4 only")
    return cause


def _goes(cause: Cause, difference: Difference, gap: float, words: str) -> Cause:
    """Whether the cause's part of the difference goes with the condition."""
    went = (difference.seconds - gap) / cause.seconds
    return cause.judged(went >= HALF, f"{words} the difference is {milliseconds(gap)} ms")


def gap_of(a: Request, b: Request) -> float:
    """By how many seconds a step of `a` is longer than one of `b`, in new processes."""
    with Running(a) as one, Running(b) as other:
        gaps = [one.round() - other.round() for _ in range(ROUNDS)]
    return median(gaps)
