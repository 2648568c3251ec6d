"""What `bench.analysis.advice` says, in words: for the terminal, the page and README.md."""

from __future__ import annotations

from itertools import zip_longest
from typing import NamedTuple

from bench.analysis.advice import Advice, Side
from bench.analysis.decisions import title
from bench.analysis.effects import Effect
from bench.analysis.pairing import baseline
from bench.analysis.priorities import ACCURACY, BATCH, MEMORY, RATE, SIZE, TIME, Row
from bench.analysis.reading import FRAMEWORKS, peak
from bench.analysis.values import at
from bench.analysis.verdicts import DELTA
from bench.report.answer import accuracy_of, parameters, rounded
from bench.report.blocks import Table, of_words
from bench.report.figures import interval, number
from bench.report.text import hanging, pad, plain, wrap


class Words(NamedTuple):
    """How a figure's effects are told: a gain, the same in short, what it takes more, a verdict."""

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
    ACCURACY: Words("{} points of accuracy", "{} points", "", "to be more accurate"),
}  # fmt: skip
NO_DIFFERENCE = "no difference shown"
LEGEND = (
    f"Named is what was shown to gain over its own baseline (“against”), at least {DELTA:.0%} of "
    "time, memory or size by the whole interval, and keeps accuracy: the same work, or no worse "
    "than the task's margin by the bound of its interval. Ahead: the framework whose named row, or "
    "plain code where none is named, was shown to be better. Brackets hold 95% intervals."
)

BRIEF_LEGEND = (
    "Gains over plain code of the same framework (x: times as fast), or over what is named; never "
    "over the other framework: that is what “ahead” compares. Shown means that the whole 95% "
    f"interval, in brackets, lies beyond {DELTA:.0%} of time, memory or size; that of memory is by "
    "the scatter of the rows that had several processes. Gains keep accuracy; “but” says why a row "
    "is not advised, and “ahead” then compares what it is held against: docs/report.md names that."
)


# Figures -----------------------------------------------------------------------------------------


def gained(effect: Effect, figure: str, *, short: bool = False) -> str:
    """1.30 times as fast (1.23–1.36); 58% less memory (56–60); +3.6 points (+1.3 to +6.0).

    Brackets hold an interval, and nothing else does.
    """
    if figure == ACCURACY:
        value, *bounds = (f"{part:+.1f}" for part in (effect.value, effect.low, effect.high))
        around = " to ".join(bounds)
    elif figure in (MEMORY, SIZE):
        parts = (effect.value, effect.high, effect.low)
        value, *bounds = (f"{100 * (1 - part):.0f}" for part in parts)
        around = "–".join(bounds)
    else:
        turned = effect.turned()
        value = number(turned.value)
        around = interval([turned.low, turned.high], like=turned.value)
    words = WORDS[figure].short if short else WORDS[figure].gain
    return words.format(value) + _around(effect, around)


def _around(effect: Effect, bounds: str) -> str:
    """What stands after a figure: its interval, the range of what was measured, or nothing."""
    return {"interval": f" ({bounds})", "range": f", measured {bounds}"}.get(effect.kind, "")


def _measured(case: dict, figure: str) -> str:
    """The row's own figure."""
    value, size, unit = {
        TIME: (at(case, "timing", "median_s"), 1e-3, "ms"),
        RATE: (at(case, "metrics", "samples_per_s", "value"), 1.0, "samples/s"),
        MEMORY: (peak(case.get("memory")), 1e6, "MB"),
        BATCH: (at(case, "metrics", BATCH, "value"), 1.0, "samples"),
        SIZE: (case.get("artifact_bytes"), 1e6, "MB"),
    }.get(figure, (None, 1.0, ""))
    return f"{number(value / size)} {unit}" if value else ""


# Words -------------------------------------------------------------------------------------------


def name_of(case: dict) -> str:
    """channels_last + compile (stacking); tuned folder."""
    words, technique = title(case), case["technique"].replace("_", " ")
    if words in technique or technique in words:
        return short_name_of(case)
    return f"{words} ({technique})"


def short_name_of(case: dict) -> str:
    """channels_last + compile; tuned folder."""
    words, technique = title(case), case["technique"].replace("_", " ")
    return technique if words in technique else words


def place_of(found: Advice) -> str:
    """text-gpt-10m, batch 2."""
    return found.task if found.batch_size is None else f"{found.task}, batch {found.batch_size}"


def _nothing(found: Advice, side: Side, *, nearest: bool = True) -> str:
    """None of 3 tried was shown to be faster; the nearest, and what that takes."""
    tried = f"none of {side.tried} tried was" if side.tried > 1 else "the one tried was not"
    kept = ", accuracy kept" if side.tempting else ""
    said = f"{tried} shown {WORDS[found.figure].shown}{kept}"
    if not (nearest and side.nearest):
        return said
    which = "nearest " if side.tried > 1 else ""
    effect = side.nearest.effects[found.figure]
    once = "" if effect.bounded else ", measured once"
    once = ", one block, no interval" if found.provisional else once
    taken = _taken(effect, found.figure)
    tempts = found.figure != ACCURACY and effect.value < 1
    loses = tempts and not side.nearest.accuracy.kept
    but = f", {accuracy_of(side.nearest.accuracy)}" if loses else ""
    return f"{said}; {which}{short_name_of(side.nearest.case)}: {taken}{once}{but}"


def _taken(effect: Effect, figure: str) -> str:
    """17.2 times the time (15.1–19.4); what takes less, as a gain."""
    if figure == ACCURACY or effect.value < 1:
        return gained(effect, figure, short=True)
    bounds = interval([effect.low, effect.high], like=effect.value)
    return f"{number(effect.value)} times the {WORDS[figure].taken}{_around(effect, bounds)}"


def _takes(row: Row, figure: str) -> str:
    """What it takes to get a row, and what the row was shown to take more of than its baseline."""
    first = at(row.case, "timing", "cold_first_call_s")
    called = f" (first call {number(first)} s)" if first and "compiling" in row.takes else ""
    parts = [f"{row.takes}{called}"] if row.takes else []
    for name, words in ((TIME, "times the time"), (MEMORY, "times the memory")):
        effect = row.effects.get(name)
        if name != figure and effect and effect.kind == "interval" and effect.low > 1 + DELTA:
            bounds = interval([effect.low, effect.high], like=effect.value)
            parts.append(f"{number(effect.value)} {words} ({bounds})")
    return f"takes {', '.join(parts)}" if parts else ""


def _but(found: Advice, side: Side) -> str:
    """The row that would gain more, and why it is not named."""
    row = side.tempting
    if not row:
        return ""
    gain = gained(row.effects[found.figure], found.figure, short=True)
    return f"{name_of(row.case)} would give {gain}, but {_reason(side)}"


def _reason(side: Side) -> str:
    """Why the row that would gain more is not named, and where it was shown to keep accuracy."""
    kept = f" (kept on {', '.join(side.kept_on)})" if side.kept_on else ""
    return accuracy_of(side.tempting.accuracy) + kept


def sentence(found: Advice, side: Side, cases: list[dict]) -> list[str]:
    """What to use in a framework, and as a second line what that gains and takes."""
    row, figure = side.best, found.figure
    measured = _measured(side.case, figure)
    if not row:
        parts = [f"plain {measured}" if measured else "", _but(found, side)]
        return [_nothing(found, side), "; ".join(filter(None, parts))]
    gain = gained(row.effects[figure], figure)
    if base := baseline(row.case, cases):
        gain += f" against “{title(base)}”"
    gain += ", one block, no interval" if found.provisional else ""
    parts = [gain, measured]
    parts += ["" if figure == ACCURACY else accuracy_of(row.accuracy), _takes(row, figure)]
    if side.cheaper:
        less = gained(side.cheaper.effects[figure], figure, short=True)
        parts.append(f"easier to get: {name_of(side.cheaper.case)}, {less}")
    if side.equal:
        names = " or ".join(name_of(other.case) for other in side.equal)
        parts.append(f"not told apart from {names}")
    parts.append(_but(found, side))
    return [name_of(row.case), "; ".join(filter(None, parts))]


def ahead(found: Advice) -> list[str]:
    """The framework that is ahead, of what is named in both, and by how much."""
    if found.between is None or not found.between.bounded:
        return ["not compared"]
    if not found.ahead:
        return [NO_DIFFERENCE]
    gain = gained(found.seen_from(found.ahead), found.figure)
    return [FRAMEWORKS[found.ahead], gain, _plain_code(found)]


def _plain_code(found: Advice) -> str:
    """Whose plain code is compared, though a row that would gain more stands beside it."""
    plain_ones = [side for side in found.sides if side.tempting and not side.best]
    if not plain_ones:
        return ""
    one = plain_ones[0]
    of_one = "" if len(plain_ones) == len(found.sides) else f" of {FRAMEWORKS[one.framework]}"
    files = all(_is_file(side.plain) for side in plain_ones)
    return (title(one.plain) if files else "plain code") + of_one


def _is_file(case: dict) -> bool:
    """Whether its predictions are those of a file that a compiler or runtime has made."""
    return case.get("artifact_bytes") is not None


def _over(row: Row, figure: str) -> str:
    """Its baseline, where that is not the framework's plain code."""
    named = row.base and (figure == RATE or (figure == TIME and _is_file(row.base)))
    return f" over “{title(row.base)}”" if named else ""


def table(listed: list[Advice], cases: list[dict]) -> Table:
    """A line for each aim at a piece of work: what to use in both frameworks, and who is ahead."""
    columns = of_words("to", *FRAMEWORKS.values(), "ahead")
    rows = []
    for each in listed:
        sides = {side.framework: sentence(each, side, cases) for side in each.sides}
        size = [f"{rounded(count)} parameters" for count in parameters([each.task])]
        row = [[each.question.aim, ", ".join([place_of(each), *size])]]
        row += [sides.get(name, ["not measured"]) for name in FRAMEWORKS]
        rows.append(["\n".join(map(plain, filter(None, said))) for said in (*row, ahead(each))])
    return Table("What to use", columns, rows, name="summary")


def brief(listed: list[Advice]) -> Table:
    """The same in few words: a row and its gain in each framework."""
    columns = of_words("to", *FRAMEWORKS.values(), "ahead")
    rows = []
    for each in listed:
        sides = {side.framework: _short(each, side, wide=True) for side in each.sides}
        size = [f"{rounded(count)} parameters" for count in parameters([each.task])]
        work = ", ".join([place_of(each), *size])
        leads = ahead(each)[0]
        if each.ahead:
            gain = gained(each.seen_from(each.ahead), each.figure, short=True)
            leads = ", ".join(filter(None, (FRAMEWORKS[each.ahead], gain, _plain_code(each))))
        said = [f"{each.question.aim}\n{work}"]
        said += [sides.get(name, "not measured") for name in FRAMEWORKS]
        rows.append([plain(cell) if "\n" not in cell else cell for cell in (*said, leads)])
    return Table("What to use", columns, rows, name="summary")


# The terminal ------------------------------------------------------------------------------------

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


def lines(listed: list[Advice], width: int, room: int) -> list[str]:
    """What to use for the main aims, in `room` lines; what does not fit is counted.

    Where nothing gains, what comes nearest.
    """
    told, rest = split(listed)
    said = [(each, _lines(each, width)) for each in told or filter(lambda one: one.main, rest)]
    nothing = NOTHING + AHEAD * any(each.ahead for each, _ in said)
    head = wrap(KEY if told else nothing if listed else NO_AIM, width)
    aims = [each.question for each, _ in said]
    nth = [aims[:place].count(aim) for place, aim in enumerate(aims)]
    kept, left = [], room - len(head) - 1
    for place in sorted(range(len(said)), key=nth.__getitem__):  # each aim once, before any twice
        left -= len(said[place][1])
        if left < 0:
            break
        kept.append(place)
    shown = [line for place in sorted(kept) for line in said[place][1]]
    rest = len(said) - len(kept)
    more = [f"… and {rest} more: see report.html, or twinbench choose"] if rest else []
    return [*head, *shown, *more]


def split(listed: list[Advice]) -> tuple[list[Advice], list[Advice]]:
    """The main ones that tell something, and all others."""
    told = [each for each in listed if each.main and each.tells]
    return told, [each for each in listed if each not in told]


def first(listed: list[Advice], most: int) -> tuple[list[Advice], list[Advice]]:
    """Of `most` aims the first place that tells something, and all others."""
    aims = {each.question: each for each in reversed(split(listed)[0])}
    told = [each for each in listed if each in aims.values()][:most]
    return told, [each for each in listed if each not in told]


def _lines(found: Advice, width: int) -> list[str]:
    """A line or two for each framework, beside them the aim and the work."""
    said = [
        line
        for side in found.sides
        for line in hanging(
            f"{side.framework.upper()}{MARKS[found.ahead == side.framework]}",
            plain(_short(found, side)),
            width - LABEL,
            4,
        )
    ]
    labels = [found.question.aim, *wrap(plain(place_of(found)), LABEL - 1)]
    return [f"{pad(a, LABEL)}{b}".rstrip() for a, b in zip_longest(labels, said, fillvalue="")]


def _short(found: Advice, side: Side, *, wide: bool = False) -> str:
    """A row and its gain; `wide`: where there is room, over what, and where that was proven."""
    row = side.best or side.tempting
    if not row:
        # What comes nearest is left out where there is little room and the other side gains.
        gains = any(each.best or each.tempting for each in found.sides)
        return _nothing(found, side, nearest=wide or not gains)
    gain = gained(row.effects[found.figure], found.figure, short=True)
    gain += _over(row, found.figure) if wide else ""
    if found.provisional:
        gain += ", one block, no interval"
    proven = accuracy_of(row.accuracy) if wide and row.accuracy.proven_on else ""
    beside = [proven, row.takes] if side.best else [f"but {_reason(side)}"]
    said = ", ".join(filter(None, [f"{short_name_of(row.case)}: {gain}", *beside]))
    if wide and side.best and side.tempting:
        more = gained(side.tempting.effects[found.figure], found.figure, short=True)
        said += f"; {short_name_of(side.tempting.case)}: {more}, but {_reason(side)}"
    return said
