"""What to use for each aim, in words: for the terminal, the page and README.md."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

from bench.analysis.questions import Answer
from bench.analysis.ranking import NAMES, RECIPE, Goal, Ranking
from bench.analysis.table import (
    BATCH,
    GAINED,
    MEMORY,
    MORE_IS_BETTER,
    RATE,
    SIZE,
    STEPS,
    TIME,
    Figure,
    Row,
)
from bench.analysis.verdicts import DELTA
from bench.record import FRAMEWORKS, Case, Why
from bench.report.answer import accuracy_of
from bench.report.formatting import interval, number
from bench.report.names import name_of, sizes, title
from bench.report.technique_tables import Table, of_words
from bench.report.text import hanging, pad, plain, wrap


class Words(NamedTuple):
    """How a figure's gains are told: a gain, the same in short, what it takes more, a verdict."""

    gain: str
    short: str
    taken: str
    shown: str


WORDS = {
    TIME: Words("{} times as fast", "{}x", "time", "to be faster"),
    RATE: Words("{} times the samples/s", "{}x", "time of a sample", "to be faster"),
    MEMORY: Words("{}% less memory", "{}% less", "memory", "to take less"),
    BATCH: Words("{} times the largest batch", "{}x the largest batch", "memory of a sample",
                 "to fit a larger batch"),
    SIZE: Words("{}% smaller", "{}% smaller", "size", "to be smaller"),
    GAINED: Words("", "", "", "to be more accurate"),
    STEPS: Words("{} times as few steps", "{}x as few steps", "steps", "to take fewer steps"),
}  # fmt: skip
NO_DIFFERENCE = "no difference shown"
LEGEND = (
    f"Named is what was shown to gain over its own baseline (“against”), at least {DELTA:.0%} of "
    "time, memory or size by the whole interval, and keeps accuracy: the same work, or no worse "
    "than the task's margin by the bound of its interval; or it says that the loss of a short "
    "training is kept, or a trained model's predictions. Ahead: the framework whose named row, or "
    "plain code where none is named, was shown to be better. Brackets hold 95% intervals."
)
BRIEF_LEGEND = (
    "Gains over plain code of the same framework (x: times as fast), or over what is named; never "
    "over the other framework: that is what “ahead” compares. Shown means that the whole 95% "
    f"interval, in brackets, lies beyond {DELTA:.0%} of time, memory or size; that of memory is by "
    "the scatter of the rows that had several processes and that from run to run. Gains keep "
    "accuracy, or what their words say; “but” says why a row is not advised, and “ahead” then "
    "compares what it is held against: docs/report.md names that."
)


# Figures ------------------------------------------------------------------------------------------


def gained(ratio: Figure, goal: Goal, *, short: bool = False) -> str:
    """1.30 times as fast (1.23–1.36); 58% less memory (56–60); +3.6 points (+1.3 to +6.0).

    Brackets hold an interval, and nothing else does.
    """
    name = goal.figure
    if name == GAINED:
        value, *bounds = (f"{part:+.1f}" for part in (ratio.value, ratio.low, ratio.high))
        unit = goal.unit if short else goal.title.partition(" gained")[0]
        return f"{value} {unit}" + _around(ratio, " to ".join(bounds))
    if name in (MEMORY, SIZE):
        parts = (ratio.value, ratio.high, ratio.low)
        value, *bounds = (f"{100 * (1 - part):.0f}" for part in parts)
        around = "–".join(bounds)
    else:
        times = ratio if name in MORE_IS_BETTER else ratio.turned()
        value = number(times.value)
        around = interval((times.low, times.high), like=times.value)
    words = WORDS[name].short if short else WORDS[name].gain
    return words.format(value) + _around(ratio, around)


def _around(ratio: Figure, bounds: str) -> str:
    """What stands after a figure: its interval, the range of what was measured, or nothing."""
    return {"interval": f" ({bounds})", "range": f", measured {bounds}"}.get(ratio.kind, "")


def _taken(ratio: Figure, goal: Goal) -> str:
    """17.2 times the time (15.1–19.4); what takes less, as a gain."""
    name = goal.figure
    less = ratio.turned() if name in (RATE, BATCH) else ratio
    if name == GAINED or less.value < 1:
        return gained(ratio, goal, short=True)
    bounds = interval((less.low, less.high), like=less.value)
    return f"{number(less.value)} times the {WORDS[name].taken}{_around(less, bounds)}"


# Words --------------------------------------------------------------------------------------------


def place_of(answer: Answer) -> str:
    """text-gpt-10m, batch 2; of accuracy, what is trained."""
    work = answer.work
    if answer.goal.figure != GAINED:
        words = f"{work.task}, batch {work.batch_size}"
    else:
        words = work.task if work.kind == RECIPE else f"{work.task}, {NAMES[work.kind]}"
    return words if work.apart in ("", *FRAMEWORKS.values()) else f"{words} ({work.apart})"


def named(side: Ranking) -> Row | None:
    """The row that is named; None where it is the plain code, or has no gain over it."""
    best = side.best
    return None if best.is_baseline or side.aim.gain(best) is None else best


def tempting(side: Ranking) -> Row | None:
    """The row that would gain most, and was not shown to keep accuracy."""
    return next(iter(side.tempting), None)


def _nothing(answer: Answer, side: Ranking, *, nearest: bool = True) -> str:
    """None of 3 tried was shown to be faster; the nearest, and what that takes."""
    name, row = answer.goal.figure, side.nearest
    several = len(side.tried) > 1
    tried = f"none of {len(side.tried)} tried was" if several else "the one tried was not"
    kept = ", accuracy kept" if side.tempting else ""
    counts = f"{tried} shown {WORDS[name].shown}{kept}"
    if side.tempting or not nearest:
        return counts
    ratio = row.ratios[name]
    once = "" if ratio.bounds else ", measured once"
    once = _once(answer) or once
    less = name != GAINED and (ratio.value > 1 if name in MORE_IS_BETTER else ratio.value < 1)
    but = f", {accuracy_of(row.accuracy)}" if less and not row.accuracy.kept else ""
    which = "nearest " if several else ""
    return (
        f"{counts}; {which}{name_of(row.case, short=True)}: {_taken(ratio, answer.goal)}{once}{but}"
    )


def _takes(row: Row, name: str) -> str:
    """What it takes to get a row, and what the row was shown to take more of than its baseline."""
    first = row.case.timing.cold_first_call_s
    called = f" (first call {number(first)} s)" if first and "compiling" in row.price else ""
    parts = [f"{row.price}{called}"] if row.price else []
    for other, words in ((TIME, "times the time"), (MEMORY, "times the memory")):
        ratio = row.ratios.get(other)
        if other != name and ratio and ratio.kind == "interval" and ratio.low > 1 + DELTA:
            bounds = interval((ratio.low, ratio.high), like=ratio.value)
            parts.append(f"{number(ratio.value)} {words} ({bounds})")
    return f"takes {', '.join(parts)}" if parts else ""


def _but(answer: Answer, side: Ranking) -> str:
    """The row that would gain more, and why it is not named."""
    row = tempting(side)
    if not row:
        return ""
    gain = gained(row.ratios[answer.goal.figure], answer.goal, short=True)
    return f"{name_of(row.case)} would give {gain}{_once(answer)}, but {_reason(side)}"


def _once(answer: Answer) -> str:
    if not answer.provisional:
        return ""
    others = answer.work.others
    beside = f", beside other programs on {others:.0%} of the cores" if others else ""
    return f", one block, no interval{beside}"


def _reason(side: Ranking) -> str:
    """Why the row that would gain more is not named, and where it was shown to keep accuracy."""
    row = tempting(side)
    kept = side.work.table.kept_on(row)
    return accuracy_of(row.accuracy) + (f" (kept on {', '.join(kept)})" if kept else "")


def _measured(answer: Answer, side: Ranking) -> str:
    """The row's own figure."""
    goal, figure = answer.goal, side.aim.figure(side.best)
    if goal.figure == GAINED or figure is None:
        return ""
    return f"{number(figure.value / goal.size)} {goal.unit}"


def sentence(answer: Answer, side: Ranking) -> list[str]:
    """What to use in a framework, and as a second line what that gains and takes."""
    row, name = named(side), answer.goal.figure
    measured = _measured(answer, side)
    if not row and (more := tempting(side)):
        gain = gained(more.ratios[name], answer.goal)
        parts = [f"{gain} against “{title(more.base)}”{_once(answer)}, but {_reason(side)}"]
        parts += [f"plain {measured}" if measured else "", _nothing(answer, side)]
        return [name_of(more.case), "; ".join(filter(None, parts))]
    if not row:
        return [_nothing(answer, side), f"plain {measured}" if measured else ""]
    gain = f"{gained(row.ratios[name], answer.goal)} against “{title(row.base)}”{_once(answer)}"
    kept = "" if name == GAINED else accuracy_of(row.accuracy)
    parts = [gain, measured, kept, _takes(row, name)]
    if side.cheapest and not side.cheapest.is_baseline:
        less = gained(side.cheapest.ratios[name], answer.goal, short=True)
        parts.append(f"easier to get: {name_of(side.cheapest.case)}, {less}")
    if side.alike:
        names = " or ".join(name_of(other.case) for other in side.alike)
        parts.append(f"not told apart from {names}")
    parts.append(_but(answer, side))
    return [name_of(row.case), "; ".join(filter(None, parts))]


def ahead(answer: Answer) -> list[str]:
    """The framework that is ahead, of what is named in both, and by how much."""
    if answer.between is None or not answer.between.bounds:
        return ["not compared"]
    if not answer.ahead:
        return [NO_DIFFERENCE]
    gain = gained(answer.seen_from(answer.ahead), answer.goal)
    return [FRAMEWORKS[answer.ahead], gain, _plain_code(answer)]


def _plain_code(answer: Answer) -> str:
    """Whose plain code is compared, though a row that would gain more stands beside it."""
    plain_ones = [side for side in answer.sides.values() if side.tempting and not named(side)]
    if not plain_ones:
        return ""
    one = plain_ones[0]
    of_one = "" if len(plain_ones) == len(answer.sides) else f" of {FRAMEWORKS[one.framework]}"
    files = all(is_file(side.best.case) for side in plain_ones)
    return (title(one.best.case) if files else "plain code") + of_one


def is_file(case: Case) -> bool:
    """Whether its predictions are those of a file that a compiler or runtime has made."""
    return case.artifact_bytes is not None


# Tables -------------------------------------------------------------------------------------------


def table(answers: list[Answer], known: Sequence[Why] = ()) -> Table:
    """A line for each aim at a piece of work: what to use in both frameworks, and who is ahead.

    known: where differences come from, whose sentence stands beside the ratio.
    """
    rows, why = [], {(one.numerator, one.denominator): f"{one.sentence}." for one in known}
    for answer in answers:
        sides = {name: sentence(answer, side) for name, side in answer.sides.items()}
        best = [side.best for side in answer.sides.values()]
        leads = ahead(answer)
        if answer.goal.figure == TIME:
            for name, side in answer.sides.items():
                if row := named(side):
                    sides[name].append(why.get((row.case.id, row.base.id), ""))
            leads.append(why.get(tuple(row.case.id for row in best), ""))
        work = ", ".join(filter(None, (place_of(answer), sizes([answer.work.task]))))
        row = [[answer.question.aim, work]]
        row += [sides.get(name, ["not measured"]) for name in FRAMEWORKS]
        rows.append(["\n".join(map(plain, filter(None, said))) for said in (*row, leads)])
    return _table(rows)


def brief(answers: list[Answer]) -> Table:
    """The same in few words: a row and its gain in each framework."""
    rows = []
    for answer in answers:
        sides = {name: _short(answer, side, wide=True) for name, side in answer.sides.items()}
        work = ", ".join(filter(None, (place_of(answer), sizes([answer.work.task]))))
        leads = ahead(answer)[0]
        if answer.ahead:
            gain = gained(answer.seen_from(answer.ahead), answer.goal, short=True)
            leads = ", ".join(filter(None, (leads, gain, _plain_code(answer))))
        cells = [*(sides.get(name, "not measured") for name in FRAMEWORKS), leads]
        rows.append([f"{plain(answer.question.aim)}\n{plain(work)}", *map(plain, cells)])
    return _table(rows)


def _table(rows: list[list[str]]) -> Table:
    columns = of_words("to", *FRAMEWORKS.values(), "ahead")
    return Table("What to use", columns, rows, name="summary")


# The terminal -------------------------------------------------------------------------------------

LABEL = 26  # cells: an aim, and its work below
MARKS = {True: "*", False: ":"}
KEY = (
    "Gains that keep accuracy; x: times as fast as the own baseline; *: is ahead, with plain code "
    "where none gains or “but” stands."
)
NOTHING = "Nothing was shown to gain over its own baseline; report.html has every row."
AHEAD = " *: plain code is ahead."
NO_AIM = (
    "Nothing could be shown to gain: no row beside the baselines has a figure that an aim asks "
    "for; report.html has every figure."
)


def lines(answers: list[Answer], width: int, room: int) -> list[str]:
    """What to use for the main aims, in `room` lines; what does not fit is counted.

    Where nothing gains, what comes nearest.
    """
    told, rest = split(answers)
    parts = [(each, _lines(each, width)) for each in told or filter(lambda one: one.main, rest)]
    nothing = NOTHING + AHEAD * any(each.ahead for each, _ in parts)
    head = wrap(KEY if told else nothing if answers else NO_AIM, width)
    aims = [each.question for each, _ in parts]
    nth = [aims[:place].count(aim) for place, aim in enumerate(aims)]
    kept, left = [], room - len(head) - 1
    for place in sorted(range(len(parts)), key=nth.__getitem__):  # each aim once, before any twice
        left -= len(parts[place][1])
        if left < 0:
            break
        kept.append(place)
    shown = [line for place in sorted(kept) for line in parts[place][1]]
    rest = len(parts) - len(kept)
    more = [f"… and {rest} more: see report.html, or twinbench choose"] if rest else []
    return [*head, *shown, *more]


def split(answers: list[Answer]) -> tuple[list[Answer], list[Answer]]:
    """The main ones that tell something, and all others."""
    told = [each for each in answers if each.main and each.tells]
    return told, [each for each in answers if each not in told]


def first(answers: list[Answer], most: int) -> tuple[list[Answer], list[Answer]]:
    """Of `most` aims the first place that tells something, and all others."""
    aims = {each.question: each for each in reversed(split(answers)[0])}
    told = [each for each in answers if each in aims.values()][:most]
    return told, [each for each in answers if each not in told]


def _lines(answer: Answer, width: int) -> list[str]:
    """A line or two for each framework, beside them the aim and the work."""
    texts = [
        line
        for framework, side in answer.sides.items()
        for line in hanging(
            f"{framework.upper()}{MARKS[answer.ahead == framework]}",
            plain(_short(answer, side)),
            width - LABEL,
            4,
        )
    ]
    labels = [answer.question.aim, *wrap(plain(place_of(answer)), LABEL - 1)]
    return [f"{pad(a, LABEL)}{b}".rstrip() for a, b in zip_longest(labels, texts, fillvalue="")]


def _short(answer: Answer, side: Ranking, *, wide: bool = False) -> str:
    """A row and its gain; `wide`: where there is room, over what, and where that was proven."""
    name, best = answer.goal.figure, named(side)
    row = best or tempting(side)
    if not row:
        # What comes nearest is left out where there is little room and the other side gains.
        return _nothing(answer, side, nearest=wide or not answer.tells)
    gain = gained(row.ratios[name], answer.goal, short=True)
    gain += (over(row, name) if wide else "") + _once(answer)
    proven = accuracy_of(row.accuracy) if wide and row.accuracy.proven_on else ""
    beside = [proven, row.price] if best else [f"but {_reason(side)}"]
    said = ", ".join(filter(None, [f"{name_of(row.case, short=True)}: {gain}", *beside]))
    if wide and best and side.tempting:
        other = tempting(side)
        more = gained(other.ratios[name], answer.goal, short=True)
        said += f"; {name_of(other.case, short=True)}: {more}, but {_reason(side)}"
    return said


def over(row: Row, name: str) -> str:
    """Its baseline, where that is not the framework's plain code."""
    named_too = name == RATE or (name == TIME and is_file(row.base))
    return f" over “{title(row.base)}”" if named_too else ""
