"""What to use on several classes of machine, side by side: a line an answer, a column a class."""

from __future__ import annotations

from bench.analysis.across_machines import Machine
from bench.analysis.machine_class import differences, words
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
    names = letters(len(records))
    machines = [Machine(name, record) for name, record in zip(names, records, strict=True)]
    paragraphs: list[str | Table] = [NOT_POOLED.format(len(records))]
    for one in machines:
        environment = one.record.environment
        lines = [f"{one.name}: {words(environment)}; {run_line(one.record)}."]
        if one is not machines[0]:
            apart = differences(records[0].environment, environment)
            lines.append(f"Against {names[0]}: {'; '.join(apart)}.")
        paragraphs.append(" ".join(lines))
    return [*paragraphs, table(machines)]


def table(machines: list[Machine]) -> Table:
    """A line for each answer of any of them."""
    answers = {name: answer for one in machines for name, answer in one.answers.items()}
    rows = []
    for name, answer in answers.items():
        cells = [_cell(one.answers.get(name)) for one in machines]
        rows.append([_brief(answer)[0], *cells])
    return Table("What to use", of_words("to", *(one.name for one in machines)), rows)


def _brief(answer: Answer) -> list[str]:
    return advised.brief([answer]).rows[0]


def _cell(answer: Answer | None) -> str:
    if answer is None:
        return MISSING
    _, *sides, leads = _brief(answer)
    named = [f"{name.upper()}: {said}" for name, said in zip(FRAMEWORKS, sides, strict=True)]
    return "\n".join([*named, f"ahead: {leads}"])
