"""What to use on several classes of machine, side by side: a line an answer, a column a class."""

from __future__ import annotations

from bench.analysis.across_machines import Machine
from bench.analysis.machine_class import differences, same_class, words
from bench.analysis.questions import Answer
from bench.record import FRAMEWORKS, Record
from bench.report import advised
from bench.report.content import run_line
from bench.report.formatting import MISSING
from bench.report.svg_shapes import letters
from bench.report.technique_tables import Table, of_words

NOT_POOLED = (
    "Not pooled: the runs are of {} classes of machine, on which other answers may hold. Each "
    "column is of one class."
)


def parts(records: list[Record]) -> list[str | Table]:
    """Sentences and the table; `records`: one of each class."""
    named = dict(zip(letters(len(records)), records, strict=True))
    about = [f"{name}: {words(r.environment)}; {run_line(r)}." for name, r in named.items()]
    compared = table([Machine(name, record) for name, record in named.items()])
    return [NOT_POOLED.format(len(records)), *machine_lines(named), *about, compared]


def machine_lines(named: dict[str, Record]) -> list[str]:
    """How the machines of runs differ from the first, "old" or another, what matters most first."""
    (first, base), *others = named.items()
    environments = {name: run.environment for name, run in others}
    apart = {n: differences(base.environment, e) for n, e in environments.items()}
    alike = {n: same_class(base.environment, e) for n, e in environments.items()}
    lines = [f"Machines of one class: {words(base.environment)}."] if all(alike.values()) else []
    for name in sorted(filter(apart.get, apart), key=alike.get):
        said = "; ".join(apart[name])
        against = f"{name} against {first}: {said}" if first != "old" else said
        lines.append(f"{against[0].upper()}{against[1:]}.")
    return lines


def table(columns: list[Machine]) -> Table:
    """A line for each answer of any of them."""
    answers = {name: answer for one in columns for name, answer in one.answers.items()}
    rows = []
    for name, answer in answers.items():
        cells = [_cell(one.answers.get(name)) for one in columns]
        rows.append([_brief(answer)[0], *cells])
    return Table("What to use", of_words("to", *(one.name for one in columns)), rows)


def _brief(answer: Answer) -> list[str]:
    return advised.brief([answer]).rows[0]


def _cell(answer: Answer | None) -> str:
    if answer is None:
        return MISSING
    _, *sides, leads = _brief(answer)
    named = [f"{name.upper()}: {said}" for name, said in zip(FRAMEWORKS, sides, strict=True)]
    return "\n".join([*named, f"ahead: {leads}"])
