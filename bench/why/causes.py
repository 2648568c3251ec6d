"""The causes of a difference: the kinds of work that make most of it, with what is known of them.

A cause is measured if the seconds themselves show it, such as page faults. It is tested if an
experiment confirms it. Otherwise it is called a guess.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from bench.why import measured as m
from bench.why.difference import Difference, Line
from shared import step_events as kinds

SHARE = 0.15  # of the difference, from which on a kind of work is named
MOST = 3
DENORMAL, FLUSHED = 1e-3, 0.8  # share of the weights; of the time, with denormals flushed
FEW = 0.01  # of a step: what is less was compiled into other kernels
MOST_OF_PEAK = 1.1  # chosen: a share above it says that other programs disturbed the peak
REPLACED = kinds.KINDS[: kinds.KINDS.index(kinds.COMPILED)]  # what compilers make kernels of
MEASURED, TESTED, GUESS = "measured", "tested", "a guess"
SELF_EVIDENT = (
    kinds.DELAYED,
    kinds.FAULTS,
    kinds.RECOMPILATION,
    kinds.INPUT,
    kinds.READING,
    kinds.PYTHON,
    kinds.OPTIMIZER,
    kinds.COPIES,
    kinds.COMPILED,
    kinds.RUNTIME,
)
IN_WORDS = {
    kinds.PRODUCTS: "products",
    kinds.CONVOLUTIONS: "convolutions",
    kinds.ELEMENTWISE: "element-wise operators",
    kinds.DISPATCH: "dispatch between operators",
    kinds.READING: "results that the step reads, waiting for them",
    kinds.WAITING: "waiting, with no thread at work",
    kinds.DELAYED: "waiting for processors that others had",
    kinds.INPUT: "waiting for batches",
    kinds.OPTIMIZER: "the optimizer",
    kinds.RECOMPILATION: "compiling again",
    kinds.RUNTIME: "the runtime of its file, whose operators no profiler sees",
}


@dataclass(frozen=True)
class Cause:
    """A part of the difference. seconds: per step, positive if `a` spends more.

    kind: of `measured.KINDS`, or "threads" and "denormals", which slow all kinds. words: what is
    slower, and why, as far as known. status: see above. evidence: the result of an experiment.
    """

    kind: str
    seconds: float
    words: str
    status: str = GUESS
    evidence: str = ""
    layers: tuple[str, ...] = ()

    def judged(self, borne_out: bool, evidence: str) -> Cause:
        """The cause after an experiment."""
        return replace(self, status=TESTED if borne_out else GUESS, evidence=evidence)


def causes(difference: Difference) -> list[Cause]:
    """What makes most of the difference, the largest first; nothing if the difference is noise."""
    if difference.is_noise:
        return []
    whole = _of_all(difference)
    if whole:
        return whole
    # What others took of the processors says nothing of the programs: it is named beside the rest.
    others = difference.line(kinds.DELAYED).more
    least = SHARE * abs(difference.seconds - others)
    lines = [one for one in _with_compiled(difference) if abs(one.more) >= least]
    lines.sort(key=lambda one: (one.more * difference.seconds < 0, -abs(one.more)))
    return [_cause(difference, line) for line in lines[:MOST]]


def _of_all(difference: Difference) -> list[Cause]:
    """A cause that slows all kinds of work, where there is one."""
    slow, fast = difference.a, difference.b
    if difference.seconds < 0:
        slow, fast = fast, slow
    ours, theirs = slow.facts, fast.facts
    if ours.threads != theirs.threads:
        words = f"{slow.name} has {_threads(ours.threads)}, {fast.name} {theirs.threads}"
        words += f", of {ours.processors} processors"
        return [Cause("threads", difference.seconds, words)]
    if ours.denormal >= DENORMAL and ours.flushed is not None and ours.flushed < FLUSHED:
        words = f"denormal numbers, {ours.denormal:.0%} of the weights, which {slow.name} computes"
        words += " with as they are"
        evidence = f"flushed to zero, a step takes {ours.flushed:.2f} of its time"
        return [Cause("denormals", difference.seconds, words, TESTED, evidence)]
    return []


def _with_compiled(difference: Difference) -> list[Line]:
    """The lines by kind; where one side compiles, its kernels and what they replace are one."""
    replaced = _replaced(difference)
    lines = [difference.line(kind) for kind in (kinds.COMPILED, *replaced)]
    rest = [one for one in difference.kinds if one not in lines]
    return [*rest, Line(kinds.COMPILED, sum(x.a for x in lines), sum(x.b for x in lines))]


def _replaced(difference: Difference) -> list[str]:
    """The kinds of work that only the side computes which does not compile, the longest first."""
    line = difference.line(kinds.COMPILED)
    if bool(line.a) == bool(line.b):
        return []
    by_side = [
        (one.what, *((one.a, one.b) if line.a else (one.b, one.a))) for one in difference.kinds
    ]
    compiled = difference.a if line.a else difference.b
    few = [one for one in by_side if one[0] in REPLACED and one[1] < FEW * compiled.step]
    return [what for what, _, others in sorted(few, key=lambda one: -one[2]) if others]


def _threads(count: int) -> str:
    return f"{count} thread{'s' * (count > 1)}"


def _cause(difference: Difference, line: Line) -> Cause:
    layers = [one for one in difference.where(line.what) if one.more * line.more > 0]
    most = tuple(one.what for one in layers[:2] if one.what)
    status = MEASURED if line.what in SELF_EVIDENT else GUESS
    words = IN_WORDS.get(line.what, line.what)
    if line.what in (kinds.PRODUCTS, kinds.CONVOLUTIONS):
        words = _of_products(difference, line.what, words)
    elif line.what == kinds.ATTENTION:
        words = _of_attention(difference)
    elif line.what == kinds.COMPILED and (replaced := _replaced(difference)):
        name = (difference.a if difference.line(kinds.COMPILED).a else difference.b).name
        words = f"{' and '.join(replaced[:2])}, which {name} compiles into its kernels"
    elif line.what in (kinds.FAULTS, kinds.RECOMPILATION):
        words = _of_counts(difference, line.what)
    elif most and line.what not in (kinds.OPTIMIZER, kinds.WAITING, kinds.DELAYED, kinds.INPUT):
        words += f" ({', '.join(most)})"
    return Cause(line.what, line.more, words, status, layers=most)


def _of_products(difference: Difference, kind: str, words: str) -> str:
    """Their number, and which library runs them at which share of the peak."""
    told = [_speed(side, kind, difference) for side in (difference.a, difference.b)]
    calls = max(round(one[0]) for one in told)
    words = f"{calls} {words}" if calls > 1 else words
    names = [
        library or side.name + " without oneDNN" * (not side.facts.onednn)
        for (_, library, _), side in zip(told, _sides(difference), strict=True)
    ]
    shares = [share for *_, share in told]
    dtypes = [_dtype(side, kind) for side in _sides(difference)]
    if names[0] == names[1]:
        names = [f"{name} in {dtype}" for name, dtype in zip(names, dtypes, strict=True)]
    if names[0] == names[1]:
        names = [side.name for side in _sides(difference)]
    if None in shares:
        return f"{words} ({names[0]}, {names[1]})"
    return (
        f"{words} that {names[0]} runs at {shares[0]:.0%} of peak and {names[1]} at {shares[1]:.0%}"
    )


def _sides(difference: Difference) -> tuple[m.Side, m.Side]:
    return difference.a, difference.b


def _dtype(side: m.Side, kind: str) -> str:
    every = [one for one in side.products if one.kind == kind]
    return max(every, key=lambda one: one.seconds).dtype if every else "float32"


def _speed(side: m.Side, kind: str, difference: Difference) -> tuple[float, str, float | None]:
    """Calls a step, the library of most of their time, and their share of the machine's peak."""
    every = [one for one in side.products if one.kind == kind]
    if not every:
        return 0.0, "", None
    libraries: dict[str, float] = {}
    for one in every:
        libraries[one.ran_by] = libraries.get(one.ran_by, 0.0) + one.seconds
    # Of the whole kind: what an operator does beside its products is time that they cost.
    seconds = sum(one.seconds for one in side.parts() if one.kind == kind)
    dtype = _dtype(side, kind)
    peak = max(one.facts.peaks.get(dtype, 0.0) for one in _sides(difference))
    flops = sum(one.flops for one in every)
    share = flops / seconds / peak if seconds and peak and flops else None
    share = share if share and share <= MOST_OF_PEAK else None
    return sum(one.calls for one in every), max(libraries, key=libraries.__getitem__), share


def _of_attention(difference: Difference) -> str:
    fused = [_is_fused(side) for side in _sides(difference)]
    if fused[0] == fused[1]:
        return "attention"
    without, within = (0, 1) if fused[1] else (1, 0)
    sides = _sides(difference)
    return (
        f"attention, which {sides[without].name} computes in separate products and a softmax, "
        f"{sides[within].name} in one kernel"
    )


def _is_fused(side: m.Side) -> bool:
    names = {name for one in side.pieces if one.kind == kinds.ATTENTION for name in one.names}
    return any("flash" in name or "fused" in name.lower() for name in names)


def _of_counts(difference: Difference, kind: str) -> str:
    a, b = difference.a.facts, difference.b.facts
    if kind == kinds.FAULTS:
        return f"page faults, {a.faults:.0f} per step against {b.faults:.0f}"
    return f"compiling again, {a.graphs:.2g} times per step against {b.graphs:.2g}"


# Words -------------------------------------------------------------------------------------------


def sentence(difference: Difference, named: list[Cause] | None = None) -> str:
    """One sentence: how much more or less, and what makes most of it."""
    named = causes(difference) if named is None else named
    a, b = difference.a.name, difference.b.name
    if difference.is_noise:
        return f"{a} and {b} take the same time, within what equal programs differ by"
    seconds = difference.seconds
    more = "more" if seconds > 0 else "less"
    told = [_part(one, seconds) for one in named]
    head = f"{a} takes {milliseconds(abs(seconds))} ms {more} than {b}"
    return f"{head}: {', '.join(told)}" if told else f"{head}, in many small parts"


def _part(cause: Cause, seconds: float) -> str:
    guess = ", a guess" if cause.status == GUESS and cause.evidence else ""
    if cause.kind in ("threads", "denormals"):
        return cause.words + guess
    turned = "" if cause.seconds * seconds > 0 else " more" if cause.seconds > 0 else " less"
    return f"{milliseconds(abs(cause.seconds))}{turned} in {cause.words}{guess}"


def milliseconds(seconds: float) -> str:
    """With two or three significant digits."""
    value = seconds * 1e3
    return f"{value:.0f}" if abs(value) >= 10 else f"{value:.2g}"
