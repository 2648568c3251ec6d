"""Where a step's time goes: one breakdown from the spans that a framework's profiler recorded.

A profiler's spans become parts of the time that passed, not sums over threads: at each moment of a
step a computing operator counts before communication, that before a copy to the device, that before
waiting for data; where none of them runs, the framework is between operators, or idle. Operators
that run at the same time share the moment. So the parts add up to the step.

What the profiler itself costs is measured, as steps with and without it take turns, and is taken
away from the parts in proportion to the events that it recorded in each.

What a product or a convolution computes follows from its shapes, a multiplication and an addition
counted as two; its share of the machine's peak is that over its seconds, against a large product in
the same framework, process and dtype. What computes anything else has no such share.
"""

from __future__ import annotations

import json
import math
import time
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from statistics import fmean, median
from typing import Any

WAITING, STEP = "waiting for data", "train step"  # the marks of each step in a trace
COMPUTING = ("forward", "backward", "optimizer")
# The parts, in the order in which they count where several go on at once.
PARTS = (*COMPUTING, "communication", "transfer", "waiting", "overhead", "idle")
BLOCKED = 1e-3  # seconds: the framework's own gaps between operators are shorter
EVENT = 2e-6  # seconds that recording one event costs at most
SETTLING = 5.0  # seconds at most: a compilation may last longer than a loader has batches for


@dataclass(frozen=True)
class Span:
    """What a profiler recorded: something on a thread of the host or a queue of the device.

    Times are in seconds. part: of `PARTS`; None is that of the span around it. operator: whether it
    computes or moves values, and is not only the framework's way to what does. flops: floating
    point operations in `dtype`, of a product or a convolution whose shapes are known; else None.
    """

    name: str
    start: float
    end: float
    thread: str
    part: str | None = None
    operator: bool = False
    device: bool = False
    flops: float | None = None
    dtype: str = ""


@dataclass(frozen=True)
class Taken:
    """One step: seconds of waiting for its batch, of itself, and of its thread's CPU time."""

    waiting: float
    step: float
    cpu: float


@dataclass(frozen=True)
class Operator:
    """An operator: calls a step, seconds a step without those that it called, share of all.

    flops: floating point operations a step. of_peak: those a second over the machine's peak. None
    where it is no product or convolution, or not all of its calls are known.
    """

    name: str
    calls: float
    seconds: float
    share: float
    flops: float | None = None
    of_peak: float | None = None


@dataclass(frozen=True)
class Breakdown:
    """Seconds a step by part, of a step that took `step` seconds without the profiler.

    `profiled`: what it took with the profiler, beside the same waiting; `traced`: all of it by the
    trace's own clock.
    `operators`: the most expensive first. `gaps`: the longest times without an operator inside a
    step: seconds, and the operators before and after. `memory`: seconds since the first step and
    bytes allocated then; empty where the profiler has none. `peaks`: floating point operations a
    second by dtype, of those in which products ran.
    """

    step: float
    profiled: float
    traced: float
    waiting: float
    transfer: float
    forward: float
    backward: float
    optimizer: float
    communication: float
    overhead: float
    idle: float
    operators: tuple[Operator, ...]
    gaps: tuple[tuple[float, str, str], ...]
    memory: tuple[tuple[float, int], ...]
    peaks: dict[str, float] = field(default_factory=dict)

    @property
    def profiler_cost(self) -> float:
        """What the profiler adds to a step, as a share of it."""
        return self.profiled / self.step - 1

    def share(self, *parts: str) -> float:
        """The share of these parts in the step."""
        return sum(getattr(self, part) for part in parts) / self.step

    def __str__(self) -> str:
        """The parts, then the operators, as two tables."""
        rows = [f"{'part':24}{'ms':>10}{'share':>8}"]
        for part in ("waiting", "transfer", *PARTS[:4], "overhead", "idle"):
            rows.append(f"{part:24}{getattr(self, part) * 1e3:10.3f}{self.share(part):8.1%}")
        rows.append(f"{'step':24}{self.step * 1e3:10.3f}   (profiled {self.profiler_cost:+.1%})")
        rows.append(f"\n{'operator':44}{'calls':>8}{'ms':>10}{'share':>8}{'of peak':>9}")
        for one in self.operators[:10]:
            row = f"{one.name[:43]:44}{one.calls:8.1f}{one.seconds * 1e3:10.3f}{one.share:8.1%}"
            rows.append(row if one.of_peak is None else f"{row}{one.of_peak:9.0%}")
        peaks = [f"{dtype} {peak / 1e9:.4g} GFLOP/s" for dtype, peak in self.peaks.items() if peak]
        rows += [f"peak, of a large product: {', '.join(peaks)}"] if peaks else []
        return "\n".join(rows)


# Running -----------------------------------------------------------------------------------------


def endless(batches: Iterable) -> Iterator:
    """The batches, again and again. Raises ValueError where there are none (any more)."""
    while True:
        any_batch = False
        for batch in batches:
            any_batch = True
            yield batch
        if not any_batch:
            raise ValueError("there are no batches (or no more of an iterator: give a list)")


def in_order(batch: Any) -> Sequence:
    """What a step gets of a batch: a tuple's or a list's items; a dict or a tensor as it is."""
    return batch if isinstance(batch, tuple | list) else (batch,)


def run_steps(
    step: Callable,
    batches: Iterator,
    *,
    count: int,
    synchronize: Callable = lambda: None,
    mark: Callable = nullcontext,
) -> list[Taken]:
    """Take steps; tell how long each waited for its batch and took. mark(name): a profiler's."""
    taken = []
    for _ in range(count):
        start = time.perf_counter()
        with mark(WAITING):
            batch = next(batches)
        middle, cpu = time.perf_counter(), time.thread_time()
        with mark(STEP):
            step(*in_order(batch))
            synchronize()
        cpu = time.thread_time() - cpu
        taken.append(Taken(middle - start, time.perf_counter() - middle, cpu))
    return taken


def fastest(call: Callable, *, seconds: float) -> float:
    """Seconds of the fastest of as many calls as fit, and of one at least, after one untimed."""
    call()
    found, deadline = math.inf, time.perf_counter() + seconds
    while (start := time.perf_counter()) < deadline or found == math.inf:
        call()
        found = min(found, time.perf_counter() - start)
    return found


def product_flops(a: Sequence[int], b: Sequence[int], inner: int) -> float:
    """Operations of a batch of matrix products of these shapes, of which one may be broadcast.

    inner: the length that is summed over.
    """
    if not inner:
        return 0.0
    batches = zip_longest(reversed(a[:-2]), reversed(b[:-2]), fillvalue=1)
    rows, columns = math.prod(a[-2:]) / inner, math.prod(b[-2:]) / inner
    return 2.0 * inner * rows * columns * math.prod(map(max, batches))


def convolution_flops(weights: Sequence[int], positions: int) -> float:
    """Operations of a convolution, or of the gradient of its input or of its weights.

    Each weight is used once at each position: of the output, batch included; of the input where it
    is transposed. In groups, `weights` has the shape that is kept. Padding counts as input does.
    """
    return 2.0 * math.prod(weights) * positions


def settle(step: Callable, *, since: float, **take) -> None:
    """Take a step, and more for as long as nothing was taken, which is `since` that moment.

    What a loader made ahead meanwhile is then used up, and steps wait as they do in a training.
    """
    until = time.perf_counter() + min(SETTLING, time.perf_counter() - since)
    run_steps(step, count=1, **take)
    while time.perf_counter() < until:
        run_steps(step, count=1, **take)


# From spans to parts -----------------------------------------------------------------------------


@dataclass
class Node:
    """A span in the tree of its thread: its part, and the seconds of the spans in it."""

    span: Span
    parent: Node | None
    part: str | None
    inside: float = 0.0

    @property
    def top(self) -> bool:
        """Whether it is an operator that no operator called."""
        above = self.parent
        while above is not None and not above.span.operator:
            above = above.parent
        return self.span.operator and above is None


def nest(spans: Iterable[Span]) -> list[Node]:
    """Each span with the one around it on its thread; what only overlaps is not inside."""
    threads = defaultdict(list)
    for span in spans:
        threads[span.thread].append(span)
    nodes = []
    for of_thread in threads.values():
        open_: list[Node] = []
        for span in sorted(of_thread, key=lambda span: (span.start, -span.end)):
            open_ = [node for node in open_ if node.span.end > span.start]
            parent = next((n for n in reversed(open_) if n.span.end >= span.end), None)
            node = Node(span, parent, span.part or (parent.part if parent else None))
            if parent is not None:
                parent.inside += span.end - span.start
            nodes.append(node)
            open_.append(node)
    return nodes


def _steps(spans: Iterable[Span]) -> list[tuple[Span, Span]]:
    """(waiting, step) of each step that is marked, in order."""
    marks = sorted((s for s in spans if s.name in (WAITING, STEP)), key=lambda span: span.start)
    pairs = list(zip(marks[::2], marks[1::2], strict=False))
    if not pairs or any((a.name, b.name) != (WAITING, STEP) for a, b in pairs):
        raise ValueError("the profiler's trace lacks the marks of the steps")
    return pairs


def _within(steps: list[tuple[Span, Span]], spans: list[Span]) -> list[Span]:
    """The spans that begin in a step: what the profiler saw between them is not of the steps.

    What begins while a step waits for its batch is the loader's, but for the waiting itself, and
    for what other processes send.
    """
    begins = [waiting.start for waiting, _ in steps]
    within = []
    for span in spans:
        at = bisect_right(begins, span.start) - 1
        if at >= 0 and span.start < steps[at][1].end:
            loads = span.start < steps[at][1].start and span.part != "communication"
            if not loads or span.name == WAITING:
                within.append(span)
    return within


def break_down(
    spans: list[Span],
    plain: list[Taken],
    profiled: list[Taken],
    memory: list[tuple[float, int]],
    peaks: dict[str, float],
) -> Breakdown:
    """The breakdown of the marked steps, by the times of steps that were taken without.

    peaks: the machine's floating point operations a second by dtype.
    """
    steps = _steps(spans)
    nodes = nest(_within(steps, spans))
    main = steps[0][0].thread
    on_device = any(node.span.device and node.span.operator for node in nodes)
    tops = [n for n in nodes if n.top and (n.span.device or not on_device or _crosses(n))]
    parts, gaps = _sweep(steps, [n for n in tops if n.span.end > n.span.start])
    parts["idle"] = _idle(gaps, profiled, _covered(nodes, main))
    parts["overhead"] -= parts["idle"]
    parts = {part: parts[part] / len(steps) for part in PARTS}
    corrected = _corrected(parts, _events(nodes), plain, profiled)
    begin = steps[0][0].start
    return Breakdown(
        step=fmean(one.waiting + one.step for one in plain),
        profiled=fmean(one.waiting for one in plain) + fmean(one.step for one in profiled),
        traced=math.fsum(parts.values()),
        **corrected,
        operators=_operators(nodes, len(steps), on_device, peaks),
        gaps=tuple(sorted(gaps, reverse=True)[:3]),
        memory=tuple((at - begin, size) for at, size in sorted(memory) if at >= begin),
        peaks=peaks,
    )


def _crosses(node: Node) -> bool:
    return node.part == "communication"


def _sweep(steps: list[tuple[Span, Span]], tops: list[Node]) -> tuple[Counter, list]:
    """Seconds by part over all steps ("overhead": no operator), and the gaps inside of steps."""
    edges = [(n.span.start, 1, n) for n in tops] + [(n.span.end, 0, n) for n in tops]
    for waiting, step in steps:
        edges += [(waiting.start, 2, waiting), (step.start, 2, step), (step.end, 2, None)]
    edges.sort(key=lambda edge: edge[:2])
    parts, gaps, running = Counter(), [], {}
    mark, last, before = None, edges[0][0], ""
    for at, kind, what in edges:
        if mark is not None and at > last:
            now = Counter(node.part or "forward" for node in running.values())
            _credit(parts, now, at - last, mark)
            if not running and mark.name == STEP:
                gaps.append((at - last, before, what.span.name if kind == 1 else "end of the step"))
        if kind == 2:
            mark, before = what, "begin of the step"
        elif kind == 1:
            running[id(what)] = what
        else:
            running.pop(id(what), None)
            before = what.span.name
        last = at
    return parts, gaps


def _credit(parts: Counter, now: Counter, seconds: float, mark: Span) -> None:
    """Add a moment to what goes on in it."""
    if mark.name == WAITING:
        parts["waiting"] += seconds
        return
    computing = [part for part in COMPUTING if now[part]]
    for part in computing or [next((p for p in PARTS[3:5] if now[p]), "overhead")]:
        parts[part] += seconds / max(1, len(computing))


def _idle(gaps: list, profiled: list[Taken], covered: float) -> float:
    """Seconds of long gaps in which the step's thread used no CPU: it slept, or waited its turn."""
    long = sum(gap for gap, *_ in gaps if gap >= BLOCKED)
    short = sum(gap for gap, *_ in gaps if gap < BLOCKED)
    busy = max(0.0, sum(one.cpu for one in profiled) - covered - short)
    return max(0.0, long - busy)


def _covered(nodes: list[Node], main: str) -> float:
    """Seconds of the step's own thread in operators."""
    return sum(n.span.end - n.span.start for n in nodes if n.top and n.span.thread == main)


def _events(nodes: list[Node]) -> Counter:
    """Recorded events by part: those of an operator in its part, all others between operators."""
    counts = Counter()
    for node in nodes:
        if not node.span.device:
            above, inside = node, node.span.operator
            while not inside and above.parent is not None:
                above, inside = above.parent, above.parent.span.operator
            counts[(node.part or "forward") if inside else "overhead"] += 1
    return counts


def _corrected(
    parts: dict, events: Counter, plain: list[Taken], profiled: list[Taken]
) -> dict[str, float]:
    """The parts without what the profiler added to the step.

    Waiting is what it was without the profiler. Of the rest each part loses what its events cost:
    what steps with the profiler take more, over all events, at most `EVENT` each (more is noise of
    the machine), and at most half of the part. What then is left over scales all of them.
    """
    waiting = fmean(one.waiting for one in plain)
    step = fmean(one.step for one in plain)
    added = max(0.0, median(one.step for one in profiled) - median(one.step for one in plain))
    rest = {part: seconds for part, seconds in parts.items() if part != "waiting"}
    events = Counter({part: events[part] / len(profiled) for part in rest})
    each = min(EVENT, added / max(1, events.total()))
    rest = {p: max(seconds / 2, seconds - each * events[p]) for p, seconds in rest.items()}
    scale = step / (math.fsum(rest.values()) or 1.0)
    return {"waiting": waiting} | {part: seconds * scale for part, seconds in rest.items()}


def _operators(
    nodes: list[Node], steps: int, on_device: bool, peaks: dict[str, float]
) -> tuple[Operator, ...]:
    """Operators by name with what they take themselves, the most expensive first."""
    calls, seconds, flops, ideal = Counter(), Counter(), Counter(), Counter()
    for node in nodes:
        span = node.span
        if span.operator and span.device == on_device:
            calls[span.name] += 1
            seconds[span.name] += max(0.0, span.end - span.start - node.inside)
            # Of a call that is not known nothing is, and that is all of the name's.
            flops[span.name] += math.nan if span.flops is None else span.flops
            ideal[span.name] += (span.flops or 0.0) / (peaks.get(span.dtype) or math.nan)
    every = sum(seconds.values()) or 1.0
    operators = []
    for name, itself in seconds.most_common():
        count, of_peak = (
            _known(flops[name] / steps),
            _known(ideal[name] / itself if itself else math.nan),
        )
        operators.append(
            Operator(name, calls[name] / steps, itself / steps, itself / every, count, of_peak)
        )
    return tuple(operators)


def _known(value: float) -> float | None:
    return value if value > 0 else None


# Files -------------------------------------------------------------------------------------------


def write_stacks(spans: Iterable[Span], path: Path) -> None:
    """Write collapsed stacks, "a;b;c microseconds" a line: what flame graphs are drawn from."""
    stacks = Counter()
    for node in nest(spans):
        names, above = [], node
        while above is not None:
            names.append(above.span.name.replace(";", ","))
            above = above.parent
        own = node.span.end - node.span.start - node.inside
        stacks[";".join(reversed(names))] += max(0, round(own * 1e6))
    lines = [f"{stack} {own}\n" for stack, own in sorted(stacks.items()) if own]
    path.write_text("".join(lines), "utf-8")


def write_chrome_trace(spans: Iterable[Span], path: Path) -> None:
    """Write a trace of the Trace Event Format, which Chrome, Perfetto and speedscope open."""
    threads = {name: number for number, name in enumerate({span.thread: None for span in spans})}
    events: list[dict] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": number, "args": {"name": name}}
        for name, number in threads.items()
    ]
    for span in spans:
        seconds = {"ts": span.start * 1e6, "dur": (span.end - span.start) * 1e6}
        about = {"cat": span.part or "other", "pid": 0, "tid": threads[span.thread]}
        events.append({"ph": "X", "name": span.name, **about, **seconds})
    path.write_text(json.dumps({"traceEvents": events}), "utf-8")
