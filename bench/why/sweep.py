"""From a profiler's events to the pieces of a step.

Operators nest: a moment belongs to the innermost. Threads that compute at the same time share it.
So the pieces add up to the step as the profiler saw it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from bench.why import measured as m
from shared import step_events as kinds
from shared.profiles import BLOCKED, EVENT, STEP, Taken
from shared.step_events import Event

Segment = tuple[float, float, Event]


@dataclass
class Swept:
    """Seconds and calls per step of everything seen."""

    pieces: list[m.Piece]
    products: list[m.Product]


def sweep(events: list[Event], steps: list[tuple[Event, Event]], taken: list[Taken]) -> Swept:
    """The pieces of the marked steps. steps: the marks of (waiting, step).

    taken: the same steps by the process's clocks.
    """
    seconds, gaps = Counter(), Counter()
    segments = sorted(_innermost(events), key=lambda one: one[0])
    main, count = steps[0][0].thread, len(steps)
    for waiting, step in steps:
        seconds["", "", kinds.INPUT] += waiting.end - waiting.start
        inside = [_cut(one, step) for one in segments if one[0] < step.end and one[1] > step.start]
        for length, running in _moments(inside, step):
            working = [one for one in running if one.kind != kinds.DISPATCH]
            for one in working:
                seconds[one.layer, one.phase, one.kind] += length / len(working)
            if not working:
                layer = running[0].layer if running else ""
                gaps[layer] += length
    asleep = _asleep(segments, steps, taken, main)
    idle = sum(gaps.values())
    for layer, length in gaps.items():
        share = asleep / idle if idle else 0.0
        seconds[layer, "", kinds.DISPATCH] += length * (1 - share)
        seconds[layer, "", kinds.WAITING] += length * share
    return Swept(_pieces(events, steps, seconds), _products(segments, events, steps, count))


def without_profiler(pieces: list[m.Piece], plain: float, profiled: float) -> list[m.Piece]:
    """The pieces without the cost of recording: that of their events, at most half of a piece."""
    added, events = max(0.0, profiled - plain), sum(piece.calls for piece in pieces)
    each = min(EVENT, added / events) if events else 0.0
    lost = ((one, min(one.seconds / 2, each * one.calls)) for one in pieces)
    return [m.scaled(one, 1 - loss / one.seconds) for one, loss in lost if one.seconds > 0]


def _innermost(events: Iterable[Event]) -> list[Segment]:
    """What each thread did at each moment, by the innermost event."""
    threads = defaultdict(list)
    for event in events:
        threads[event.thread].append(event)
    segments: list[Segment] = []
    for of_thread in threads.values():
        stack: list[Event] = []
        at = 0.0
        for event in [*sorted(of_thread, key=lambda one: (one.start, -one.end)), None]:
            until = event.start if event else float("inf")
            while stack and stack[-1].end <= until:
                top = stack.pop()
                if top.end > at:
                    segments.append((at, top.end, top))
                    at = top.end
            if event:
                if stack and until > at:
                    segments.append((at, until, stack[-1]))
                at = max(at, until)
                stack.append(event)
    return segments


def _cut(segment: Segment, step: Event) -> Segment:
    return max(segment[0], step.start), min(segment[1], step.end), segment[2]


def _moments(segments: list[Segment], step: Event) -> Iterable[tuple[float, list[Event]]]:
    """Each length of time in a step in which the same events ran, and these."""
    edges = [(start, 1, event) for start, _, event in segments]
    edges += [(end, 0, event) for _, end, event in segments]
    edges.sort(key=lambda edge: edge[:2])
    running: list[Event] = []
    last = step.start
    for at, begins, event in [*edges, (step.end, 0, None)]:
        if at > last:
            yield at - last, running
            last = at
        if begins:
            running.append(event)
        elif event in running:
            running.remove(event)


def _asleep(segments: list[Segment], steps: list, taken: list[Taken], main: str) -> float:
    """Seconds in long gaps between operators in which the step's thread used no CPU."""
    work = [(s, e) for s, e, event in segments if event.kind != kinds.DISPATCH]
    covered = sum(
        e - s for s, e, one in segments if one.thread == main and one.kind != kinds.DISPATCH
    )
    long = short = 0.0
    for _, step in steps:
        at = step.start
        for start, end in [*work, (step.end, step.end)]:
            if end <= step.start or start > step.end:
                continue
            gap = max(0.0, start - at)
            long, short = (long + gap, short) if gap >= BLOCKED else (long, short + gap)
            at = max(at, end)
    busy = max(0.0, sum(one.cpu for one in taken) - covered - short)
    return max(0.0, long - busy)


def _pieces(events: list[Event], steps: list, seconds: Counter) -> list[m.Piece]:
    calls, names, count = Counter(), defaultdict(Counter), len(steps)
    for event in events:
        if event.name != STEP and any(s.start <= event.start < s.end for _, s in steps):
            phase = "" if event.kind == kinds.DISPATCH else event.phase
            key = event.layer, phase, event.kind
            calls[key] += 1
            names[key][event.name] += event.end - event.start
    return [
        m.Piece(
            layer=key[0],
            phase=key[1],
            kind=key[2],
            seconds=length / count,
            calls=calls[key] / count,
            names=tuple(name for name, _ in names[key].most_common(3)),
        )
        for key, length in seconds.most_common()
        if length > 0
    ]


def _products(segments: list, events: list[Event], steps: list, count: int) -> list[m.Product]:
    """Products and convolutions by layer, shape and dtype."""
    begin, end = steps[0][1].start, steps[-1][1].end
    sums: dict[tuple, list[float]] = {}
    for event in events:
        if event.product and begin <= event.start < end:
            shape, flops, dtype = event.product
            key = event.kind, event.layer, shape, dtype
            so_far = sums.setdefault(key, [0.0, 0.0, 0.0])
            for place, value in enumerate((1.0, event.end - event.start, flops)):
                so_far[place] += value / count
    return [
        m.Product(
            **dict(zip(("kind", "layer", "shape", "dtype"), key, strict=True)),
            calls=calls,
            seconds=seconds,
            flops=flops,
        )
        for key, (calls, seconds, flops) in sums.items()
    ]
