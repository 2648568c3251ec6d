"""What to use for each aim, in words: for the terminal, the page and README.md."""

from __future__ import annotations

from collections.abc import Sequence

from bench.analysis.questions import Answer
from bench.analysis.ranking import NAMES, RECIPE, Goal, Ranking
from bench.analysis.table import (
    GAINED,
    MEMORY,
    RATE,
    TIME,
    Figure,
    Row,
)
from bench.analysis.verdicts import DELTA
from bench.record import FRAMEWORKS, Case, Why
from bench.report.answer import accuracy_of, at_memory, bounded, gain_of, minus
from bench.report.formatting import interval, number
from bench.report.names import called, name_of, sizes, title
from bench.report.technique_tables import Table, of_words
from bench.report.text import hanging, plain, wrap

NO_DIFFERENCE = "no difference shown"
UNLIKE = "unlike programs"
SHOWN = (
    f"A gain counts where its whole 95% interval, in brackets, is beyond {DELTA:.0%} of time, "
    "memory or size. Accuracy counts as kept if the row computes the same, or its score is "
    "within the task's margin, or a short training has the same loss, or a trained model the same "
    "predictions. “But” says why a row is not advised."
)
BEST_OF_EACH = (
    "“Ahead” compares the best row of each framework, which may be two techniques. A framework "
    "without a named row has its baseline there. “Unlike programs” are two techniques, or "
    "one in two runtimes. Rows with “but” are left out of “ahead”; README's table, which compares "
    "one technique in both, has them."
)
LEGEND = f"{SHOWN} {BEST_OF_EACH}"
BRIEF_LEGEND = (
    "Gains are over plain code of the same framework, or over what is named; x means times as "
    "fast. Brackets hold 95% intervals."
)


# Figures ------------------------------------------------------------------------------------------


def gained(ratio: Figure, goal: Goal, *, short: bool = False) -> str:
    """As `gain_of`, and +3.6 points (+1.3 to +6.0)."""
    if goal.figure != GAINED:
        return gain_of(ratio, goal.figure, short=short)
    value, *bounds = (minus(f"{part:+.1f}") for part in (ratio.value, ratio.low, ratio.high))
    unit = goal.unit if short else goal.title.partition(" gained")[0]
    return f"{value} {unit}" + bounded(ratio, " to ".join(bounds))


# Words --------------------------------------------------------------------------------------------


def place_of(answer: Answer) -> str:
    """GPT on text, batch 2; of accuracy, what is trained."""
    work, words = answer.work, called(answer.work.task)
    if answer.goal.figure != GAINED:
        words += f", batch {work.batch_size}"
    elif work.kind != RECIPE:
        words += f", {NAMES[work.kind]}"
    return words if work.apart in ("", *FRAMEWORKS.values()) else f"{words} ({work.apart})"


def named(side: Ranking) -> Row | None:
    """The row that is named; None where it is the plain code, or has no gain over it."""
    best = side.best
    return None if best.is_baseline or side.aim.gain(best) is None else best


def tempting(side: Ranking) -> Row | None:
    """The row that would gain most, and was not shown to keep accuracy."""
    return next(iter(side.tempting), None)


def _nothing(answer: Answer, side: Ranking) -> str:
    """No gain shown (11 tried); also where no interval could show one."""
    figures = [row.ratios.get(answer.goal.figure) for row in side.tried]
    once = "" if any(figure and figure.bounds for figure in figures) else ", measured once"
    kept = " with accuracy kept" if side.tempting else ""
    return f"no gain shown{kept} ({len(side.tried)} tried{_once(answer) or once})"


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


def _reason(side: Ranking, *, wide: bool = True) -> str:
    """Why the row that would gain more is not named; wide: and where it keeps accuracy."""
    row = tempting(side)
    kept = side.work.table.kept_on(row) if wide else []
    return accuracy_of(row.accuracy) + (
        f" (kept for {', '.join(map(called, kept))})" if kept else ""
    )


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
        parts = [f"{gain} against “{_base(more)}”{_once(answer)}, but {_reason(side)}"]
        parts += [f"plain {measured}" if measured else "", _nothing(answer, side)]
        return [name_of(more.case), "; ".join(filter(None, parts))]
    if not row:
        return [_nothing(answer, side), f"plain {measured}" if measured else ""]
    gain = f"{gained(row.ratios[name], answer.goal)} against “{_base(row)}”{_once(answer)}"
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


def ahead(answer: Answer, *, short: bool = False) -> list[str]:
    """The framework that is ahead of the best of each, by how much, and whose plain code that is.

    short: the gain in few words.
    """
    if answer.between is None or not answer.between.bounds:
        return ["not compared"]
    if not answer.ahead:
        return [NO_DIFFERENCE, *_compared(answer)]
    gain = gained(answer.seen_from(answer.ahead), answer.goal, short=short)
    return [FRAMEWORKS[answer.ahead], gain, *_compared(answer)]


def _compared(answer: Answer) -> list[str]:
    """Whose plain code is compared, and that programs are unlike where none is plain code."""
    best = [side.best.case for side in answer.sides.values()]
    plain_ones = [case for case in best if case.role == "baseline" and not is_file(case)]
    names = {name_of(case, short=True) for case in best}
    unlike = [UNLIKE] if not plain_ones and len(names) > 1 else []
    return [*_plain_code(answer), *unlike]


def _plain_code(answer: Answer) -> list[str]:
    """Whose plain code is compared, as no row is named there."""
    plain_ones = [side for side in answer.sides.values() if not named(side)]
    if not plain_ones:
        return []
    if all(is_file(side.best.case) for side in plain_ones):
        return [" and ".join(dict.fromkeys(title(side.best.case) for side in plain_ones))]
    every = len(plain_ones) == len(answer.sides)
    return ["plain code" + ("" if every else f" of {FRAMEWORKS[plain_ones[0].framework]}")]


def is_file(case: Case) -> bool:
    """Whether its predictions are those of a file that a compiler or runtime has made."""
    return case.artifact_bytes is not None


# Tables -------------------------------------------------------------------------------------------


def table(answers: list[Answer], known: Sequence[Why] = ()) -> Table:
    """A line for each aim at a piece of work: what to use in both frameworks, and who is ahead.

    known: where differences come from, whose sentence stands beside the ratio.
    """
    rows, why = [], {(one.numerator, one.denominator): f"Why: {one.sentence}." for one in known}
    for answer in answers:
        sides = {name: sentence(answer, side) for name, side in answer.sides.items()}
        best = [side.best for side in answer.sides.values()]
        leads = ahead(answer)
        if answer.goal.figure == TIME:
            for name, side in answer.sides.items():
                if row := named(side):
                    sides[name].append(why.get((row.case.id, row.base.id), ""))
            leads.append(why.get(tuple(row.case.id for row in best), ""))
        task = answer.work.task
        parts = (place_of(answer), sizes([task]), task if called(task) != task else "")
        row = [[answer.question.aim, ", ".join(filter(None, parts))]]
        row += [sides.get(name, ["not measured"]) for name in FRAMEWORKS]
        rows.append(["\n".join(map(plain, filter(None, said))) for said in (*row, leads)])
    return _table(rows)


def brief(answers: list[Answer]) -> Table:
    """The same in few words: a row and its gain in each framework."""
    rows = []
    for answer in answers:
        sides = {name: _short(answer, side, wide=True) for name, side in answer.sides.items()}
        work = ", ".join(filter(None, (place_of(answer), sizes([answer.work.task]))))
        leads = ", ".join(ahead(answer, short=True))
        cells = [*(sides.get(name, "not measured") for name in FRAMEWORKS), leads]
        rows.append([f"{plain(answer.question.aim)}\n{plain(work)}", *map(plain, cells)])
    return _table(rows)


def _table(rows: list[list[str]]) -> Table:
    columns = of_words("to", *FRAMEWORKS.values(), "ahead, best of each")
    return Table("What to use", columns, rows, name="summary")


# The terminal -------------------------------------------------------------------------------------

MARKS = {True: "*", False: ":"}
KEY = (
    "x: times as fast as plain code of that framework, or as what is named. *: ahead, best of "
    "each, which may be unlike programs; a row with “but” does not count."
)
NOTHING = "Nothing was shown to gain over plain code. report.html has every row."
AHEAD = " *: its plain code is ahead."
NO_AIM = (
    "Nothing could be shown to gain: no row beside the baselines has a figure that an aim asks "
    "for; report.html has every figure."
)


def lines(answers: list[Answer], width: int, room: int) -> list[str]:
    """What to use for the main aims, in `room` lines; what does not fit is counted."""
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
    """The aim and the work, below them a line or two for each framework."""
    made = wrap(plain(f"{answer.question.aim}: {place_of(answer)}"), width)
    for framework, side in answer.sides.items():
        mark = f"  {framework.upper()}{MARKS[answer.ahead == framework]}"
        made += hanging(mark, plain(_short(answer, side)), width, 6)
    return made


def _short(answer: Answer, side: Ranking, *, wide: bool = False) -> str:
    """A row and its gain; `wide`: where there is room, where that was proven, and what tempts."""
    name, best = answer.goal.figure, named(side)
    row = best or tempting(side)
    if not row:
        return _nothing(answer, side)
    gain = gained(row.ratios[name], answer.goal, short=True)
    gain += over(row, name) + _once(answer)
    proven = accuracy_of(row.accuracy) if wide and row.accuracy.proven_on else ""
    beside = [proven, row.price] if best else [f"but {_reason(side, wide=wide)}"]
    parts = [f"{name_of(row.case, short=True)}: {gain}", at_memory(row, name), *beside]
    said = ", ".join(filter(None, parts))
    if wide and best and side.tempting:
        other = tempting(side)
        more = gained(other.ratios[name], answer.goal, short=True)
        said += f"; {name_of(other.case, short=True)}: {more}, but {_reason(side)}"
    return said


def over(row: Row, name: str) -> str:
    """Its baseline, where that is not the framework's plain code."""
    if name != RATE and not (name == TIME and is_file(row.base)):
        return ""
    return f" over “{_base(row)}”"


def _base(row: Row) -> str:
    """What a row is compared with, without the runtime that the row's name has already."""
    base, comma, runtime = title(row.base).rpartition(", ")
    return base if comma and title(row.case).endswith(f", {runtime}") else title(row.base)
