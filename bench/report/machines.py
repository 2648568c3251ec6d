"""What holds on all machines, as the page docs/machines.md and as marks and a line for README."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from bench.analysis.across_machines import (
    HOLDS,
    NOTHING,
    ONCE,
    TURNS,
    UNTOLD,
    Machine,
    Seen,
    Statement,
    same_row,
    statements,
)
from bench.analysis.machine_class import differences, product, words
from bench.analysis.ranking import Ranking
from bench.analysis.table import GAINED, MORE_IS_BETTER, SIZE, Figure, Row
from bench.record import FRAMEWORKS
from bench.report import advised
from bench.report.answer import WORDS
from bench.report.content import run_line
from bench.report.formatting import number
from bench.report.names import name_of
from bench.report.tables import escape

PAGE = "docs/machines.md"
AMOUNT = "holds, by another amount"
MARKS = {HOLDS: "✓", AMOUNT: "±", TURNS: "≠", UNTOLD: "?", ONCE: "", NOTHING: ""}
LEGEND = (
    "Other machines: ✓ all that measured it show the same, ± the same by another amount; ≠ one "
    "shows otherwise, ? one can't tell."
)
COUNTED = {
    HOLDS: "{} hold",
    AMOUNT: "{} hold by another amount",
    TURNS: "{} are reversed or gone",
    UNTOLD: "{} are undecided",
    ONCE: "{} were measured on one only",
    NOTHING: "{} show no difference",
}
WORST = (TURNS, UNTOLD, AMOUNT, HOLDS, ONCE, NOTHING)  # an answer has the first of its statements'


def verdict_of(statement: Statement) -> str:
    """The verdict, with "by another amount" as one of its own."""
    return AMOUNT if statement.differs else statement.verdict


def by_answer(stated: list[Statement]) -> dict[str, list[list[Statement]]]:
    """The statements of each answer together, by the answer's verdict."""
    grouped: dict[int, list[Statement]] = {}
    for one in stated:
        grouped.setdefault(id(one.answer), []).append(one)
    made: dict[str, list[list[Statement]]] = {verdict: [] for verdict in WORST}
    for some in grouped.values():
        made[min(map(verdict_of, some), key=WORST.index)].append(some)
    return made


def counts(stated: list[Statement]) -> str:
    """How many answers hold, turn, or can't be told."""
    grouped = by_answer(stated)
    parts = [
        text.format(len(grouped[verdict])) for verdict, text in COUNTED.items() if grouped[verdict]
    ]
    return f"Of {sum(map(len, grouped.values()))} answers {', '.join(parts)}."


# In README ----------------------------------------------------------------------------------------


def marks(stated: list[Statement]) -> dict[tuple[int, str | None], str]:
    """A mark, or none, by the id of the answer and the framework; None for who is ahead."""
    return {(id(one.answer), one.framework): MARKS[verdict_of(one)] for one in stated}


def line(machines: list[Machine], stated: list[Statement]) -> str:
    """The sentence of README's first screen: on how many other machines, and how much holds there.

    Those that tell something with an interval count.
    """
    telling = {id(seen.machine) for one in stated for seen in one.told}
    count = sum(id(one) in telling for one in machines) or len(machines)
    others = "one other" if count == 1 else f"{count} others"
    return f"**Other machines** ([{PAGE}]({PAGE})): on {others}, {escape(counts(stated).lower())}"


def _part(machine: Machine) -> str:
    """That a record is a part of a run, where it is."""
    ran = {case.framework for case in machine.record.cases if case.status == "OK"}
    parts = [f"{name} only" for side, name in FRAMEWORKS.items() if ran == {side}]
    whole = machine.record.finished and machine.record.effort != "quick"
    parts += [] if whole else ["a part of a run"]
    return f" ({', '.join(parts)})" if parts else ""


# The page -----------------------------------------------------------------------------------------

HOW = (
    "Each folder in [docs/machines](machines) holds the record of a run on one machine. For each "
    "answer of README's machine, the others are asked about the same rows of the same work.",
    "**✓ holds**: every machine that measured it with an interval shows it, beyond 3% of time, "
    "memory or size. **± by another amount**: they do, and two of the intervals do not meet. "
    "**≠ turns**: one machine shows no such gain or lead, by its whole interval, or the other "
    "framework leads. **? can't be told**: one interval leaves both open, or a figure without one "
    "shows no gain. An answer has the worst verdict of its lines. Brackets hold 95% intervals. A "
    "figure without one confirms nothing.",
    "Why compares plain code and the row on two machines. Accuracies have the same seeds on all "
    "machines, and file sizes the same weights: equal figures there say nothing of chance.",
)
ADD = (
    "Make a default run, then publish it with one command. It removes host names, user names and "
    "folders, checks the record, and makes this page and README again."
)
COMMANDS = (
    ".venv/bin/pytest bench/ --benchmark-only",
    ".venv/bin/twinbench machines add results/latest",
)
HEADINGS = {
    TURNS: "What turns",
    UNTOLD: "What can't be told",
    AMOUNT: "What holds by another amount",
    HOLDS: "What holds",
    ONCE: "What one machine has measured",
    NOTHING: "What shows nothing on any",
}
FOLDED = (AMOUNT, HOLDS, ONCE, NOTHING)


def page(first: Machine, machines: list[Machine]) -> str:
    """The page as Markdown: what README's machine says, and what the others say of that."""
    stated = statements(first, machines)
    labels = _labels([first, *machines])
    grouped = by_answer(stated)
    parts = [
        "<!-- Made by `twinbench machines page`: make it again. -->",
        "# What holds on all machines",
        *_summary(first, stated, labels),
        "## The machines",
        *(_machine(one, first, stated, labels) for one in (first, *machines)),
    ]
    for verdict, heading in HEADINGS.items():
        if grouped[verdict]:
            parts += [f"## {heading}", *_answers(grouped[verdict], labels, verdict in FOLDED)]
    parts += ["## How it is judged", *HOW, "## Add a machine", ADD]
    parts.append("\n".join(["```sh", *COMMANDS, "```"]))
    parts.append("Many machines at once: [many_machines.md](many_machines.md).")
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _labels(machines: list[Machine]) -> dict[str, str]:
    """A short name of each machine: its speed, or its GPU; where two have the same, all words."""
    short = {}
    for one in machines:
        environment = one.record.environment
        text = words(environment)
        speed = text.rpartition(", ")[2] if product(environment, "float32") else text
        short[one.name] = str(environment.gpu.get("name")) if environment.gpu else speed
    return {
        one.name: short[one.name]
        if list(short.values()).count(short[one.name]) == 1
        else words(one.record.environment)
        for one in machines
    }


FIRST = 3  # answers of the summary; the sections below it have all


def _summary(first: Machine, stated: list[Statement], labels: dict[str, str]) -> Iterator[str]:
    """What a reader gets in ten seconds."""
    about = f"README's answers are of one machine, {words(first.record.environment)}."
    yield f"{escape(about)} **{escape(counts(stated))}**"
    lines = [
        f"- **{verdict[0].upper()}{verdict[1:]}**: {_place(one)}. {_in_short(one, labels)}"
        for verdict in (TURNS, UNTOLD)
        for one in stated
        if one.verdict == verdict
    ][:FIRST]
    apart = [one for one in stated if one.differs]
    if apart:
        most = max(apart, key=_spread)
        about = f"{_place(most)}. {_in_short(most, labels)}"
        lines.append(f"- **By another amount**, most of all: {about}")
    yield "\n".join(lines)


def _in_short(statement: Statement, labels: dict[str, str]) -> str:
    """PyTorch's ONNX Runtime: 4.98x on 418 GFLOP/s, 3.15x on 189 GFLOP/s."""
    goal, told = statement.answer.goal, []
    for look in statement.told:
        leads, gain = look.answer.ahead, _gain(statement, look)
        bare = gain and advised.gained(
            replace(gain, low=gain.value, high=gain.value, kind="once"), goal, short=True
        )
        if statement.framework is None:
            bare = f"{FRAMEWORKS[leads]}, {bare}" if leads else advised.NO_DIFFERENCE
        told.append(f"{bare or 'none'} on {labels[look.machine.name]}")
    row = statement.row or next(filter(None, (look.row for look in statement.told)), None)
    name = (
        f"{FRAMEWORKS[statement.framework]}'s {name_of(row.case, short=True)}" if row else "Ahead"
    )
    return escape(f"{name}: {'; '.join(told)}")


def _gain(statement: Statement, look: Seen) -> Figure | None:
    """The gain to show; of who is ahead, that of the framework which is ahead there."""
    leads = look.answer.ahead if statement.framework is None else None
    return look.answer.seen_from(leads) if leads else look.gain


def _spread(statement: Statement) -> float:
    """The largest gain over the smallest."""
    values = [one.gain.value for one in statement.told if one.gain]
    return max(values) / min(values) if min(values) > 0 else 1.0


def _machine(one: Machine, first: Machine, stated: list[Statement], labels: dict[str, str]) -> str:
    """A machine in words, its run, and how it differs from README's."""
    label = labels[one.name]
    about = f"{words(one.record.environment).removeprefix(f'{label}, ')}{_part(one)}"
    line = f"- **{escape(label)}**: {escape(f'{about}; {run_line(one.record)}')}."
    if one is first:
        return f"{line} README's table is of it."
    if not any(look.told for each in stated for look in each.seen if look.machine is one):
        line += " It has no interval for anything below, so it confirms nothing."
    environments = first.record.environment, one.record.environment
    apart = differences(*environments, new="it", before="on README's")
    return f"{line} Against README's machine: {escape('; '.join(apart))}." if apart else line


def _answers(some: list[list[Statement]], labels: dict[str, str], folded: bool) -> Iterator[str]:
    """The statements of each answer, below it what each machine says; folded, a block an aim."""
    if not folded:
        yield from (_answer(stated, labels) for stated in some)
        return
    for aim in dict.fromkeys(stated[0].answer.question.aim for stated in some):
        of_aim = [stated for stated in some if stated[0].answer.question.aim == aim]
        yield f"<details><summary>{escape(aim)}: {len(of_aim)}</summary>"
        yield from (_answer(stated, labels) for stated in of_aim)
        yield "</details>"


def _answer(stated: list[Statement], labels: dict[str, str]) -> str:
    """A line for each statement that any machine shows, with what each of them says."""
    lines = [f"**{_place(stated[0])}**", ""]
    for one in (one for one in stated if one.verdict != NOTHING):
        looks = [(labels[look.machine.name], _look(one, look)) for look in one.seen]
        told = "; ".join(f"{text} on {label}" for label, text in looks if text)
        subject = _subject(one) if one.framework else "ahead"
        marked = " ".join(filter(None, ["-", MARKS[verdict_of(one)], subject]))
        lines.append(f"{marked}: {escape(told)}")
        lines += [f"    - {escape(text)}" for text in _why(one, labels) if one.verdict == TURNS]
    if nothing := [_subject(one) for one in stated if one.verdict == NOTHING]:
        lines.append(f"- {'; '.join(nothing)}, on any")
    return "\n".join(lines)


def _place(statement: Statement) -> str:
    answer = statement.answer
    return escape(f"{answer.question.aim}: {advised.place_of(answer)}")


def _subject(statement: Statement) -> str:
    if statement.framework is None:
        ahead = statement.ahead and FRAMEWORKS[statement.ahead]
        return escape(f"ahead: {ahead}" if ahead else f"ahead: {advised.NO_DIFFERENCE}")
    name = FRAMEWORKS[statement.framework]
    if statement.row is None:
        return escape(f"{name}: no gain shown")
    return escape(f"{name}: {name_of(statement.row.case, short=True)}")


def _look(statement: Statement, look: Seen) -> str:
    """What a machine says of a statement; nothing where it did not measure it."""
    if look.answer is None:
        return ""
    if look.gain is None:
        if statement.framework is None:
            return advised.NO_DIFFERENCE if look.answer.between else ""
        return "none shown" if statement.row is None else ""
    leads = look.answer.ahead
    gain = advised.gained(_gain(statement, look), statement.answer.goal, short=True)
    once = "" if look.gain.bounds else ", no interval"
    if statement.framework is None:
        if leads is None:
            named = FRAMEWORKS[statement.ahead] if statement.ahead else ""
            return ", ".join(filter(None, (advised.NO_DIFFERENCE, f"{named} {gain}".strip())))
        return f"{FRAMEWORKS[leads]}, {gain}{once}"
    if statement.row is None:
        return f"{name_of(look.row.case, short=True)} {gain}{once}"
    side = look.answer.sides[statement.framework]
    better = advised.named(side)
    best = ""
    if better and better.case.variant != look.row.case.variant:
        more = advised.gained(side.aim.gain(better), statement.answer.goal, short=True)
        best = f", best there is {name_of(better.case, short=True)}, {more}"
    return f"{gain}{once}{best}"


# Why, as far as it was measured -------------------------------------------------------------------


def _why(statement: Statement, labels: dict[str, str]) -> Iterator[str]:
    """How much more time or memory the plain code takes on another machine, and the row."""
    here, name = statement.seen[0], statement.answer.goal.figure
    if name in (GAINED, SIZE):
        return
    for look in statement.told[1:]:
        pairs = _pairs(statement, here, look)
        factors = [(what, _factor(statement, *pair)) for what, *pair in pairs]
        known = [f"{what} {number(factor)}" for what, factor in factors if factor]
        if len(known) == len(pairs) > 1:
            there, first = labels[look.machine.name], labels[here.machine.name]
            taken = WORDS[name].taken
            yield f"why: {taken} on {there} over {taken} on {first}: {', '.join(known)}"


def _pairs(statement: Statement, here: Seen, there: Seen) -> list[tuple]:
    """(name, side here, row here, side there, row there) of what a statement compares."""
    if statement.framework is None:
        pairs = []
        for side, name in FRAMEWORKS.items():
            one, other = (look.answer.sides[side] for look in (here, there))
            pairs.append((_named(name, one.best, other.best), one, one.best, other, other.best))
        return pairs
    one, other = (look.answer.sides[statement.framework] for look in (here, there))
    row = statement.row or same_row(one, there.row) if there.row else statement.row
    rows = [row, there.row or statement.row]
    bases = [_base(side, row) for side, row in zip((one, other), rows, strict=True) if row]
    if None in (*rows, *bases):
        return []
    name = name_of(rows[0].case, short=True)
    return [("plain code", one, bases[0], other, bases[1]), (name, one, rows[0], other, rows[1])]


def _named(framework: str, here: Row, there: Row) -> str:
    """PyTorch's plain code; PyTorch's ONNX Runtime; PyTorch's best where that is another row."""
    plain_ones = [row.is_baseline and row.case.artifact_bytes is None for row in (here, there)]
    one, other = (name_of(row.case, short=True) for row in (here, there))
    what = "plain code" if all(plain_ones) else one if one == other else f"best ({one}; {other})"
    return f"{framework}'s {what}"


def _base(side: Ranking, row: Row) -> Row | None:
    """The row of a row's baseline."""
    return next((one for one in side.work.members if one.case is row.base), None)


def _factor(
    statement: Statement, one: Ranking, row: Row, other: Ranking, there: Row
) -> float | None:
    """What a row takes there over what it takes here."""
    figures = one.aim.figure(row), other.aim.figure(there)
    if None in figures:
        return None
    factor = figures[1].value / figures[0].value
    return 1 / factor if statement.answer.goal.figure in MORE_IS_BETTER else factor
