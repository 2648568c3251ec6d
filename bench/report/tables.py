"""A record as text for the terminal and as Markdown."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from rich import box
from rich.measure import measure_renderables
from rich.table import Table as RichTable
from rich.text import Text

from bench.analysis.machine_class import words
from bench.record import Record
from bench.report import advised, answer
from bench.report.content import Facts, Report, TechniquePart, build
from bench.report.names import plainly
from bench.report.technique_tables import Column, Table
from bench.report.text import CONSOLE, GAP, hanging, plain, wrap

SMALLEST_WIDTH = 60
MOST_LINES = 21  # of the answer: with a blank, pytest's last line and the prompt 24
LONGEST_LABEL = 32  # cells; a longer one stands on a line of its own
LONGEST_WORD = 24  # cells; a longer one is broken rather than that a column takes more
LONGEST_REASON = 400  # characters in the terminal; report.md has it whole
GRAPHS = "How the graphs of twins differ"
SAME_WORK = "Same work (certificates of twins: initial weights, first losses)"


# Terminal --------------------------------------------------------------------------------------


def answered(record: Record, width: int = 80) -> str:
    """The answer alone: `MOST_LINES` lines at most, no line wider than `width` (60 at least)."""
    report, width = build(record), max(width, SMALLEST_WIDTH)
    lines = _heading(f"What to use on {words(record.environment)}", "=", width)
    lines += [line for warning in report.warnings for line in _loud(warning, width)]
    lines += advised.lines(report.answers, width, MOST_LINES - len(lines))
    return "\n".join(lines) + "\n"


def terminal(record: Record, width: int = 80) -> str:
    """The answer, then all tables, as plain text, no line wider than `width` cells."""
    return f"{answered(record, width)}\n\n{detail(record, width)}"


def detail(record: Record, width: int = 80) -> str:
    """The run, its machine and all tables."""
    report, width = build(record), max(width, SMALLEST_WIDTH)
    lines = [*_heading("twinbench", "=", width), *wrap(plain(report.run), width)]
    lines += hanging("$", plain(report.command), width, 2)
    lines += [line for warning in report.warnings for line in ["", *_loud(warning, width)]]
    lines += ["", *_facts(report.environment, width), "", *_facts(report.noise, width)]
    if report.controls:
        lines += ["", *grid(report.controls, width)]
    for part in report.techniques:
        lines += ["", "", *_technique(part, width)]
    lines += ["", "", *_heading("How to read this", "=", width), *_facts(report.legend, width)]
    lines += [line for warning in report.warnings for line in ["", *_loud(warning, width)]]
    return "\n".join(lines) + "\n"


def _heading(text: str, rule: str, width: int) -> list[str]:
    lines = wrap(plain(text), width)
    return [*lines, rule * width]


def _loud(warning: str, width: int) -> list[str]:
    return [f"!! {line}" for line in wrap(plain(warning), width - 3)]


def _facts(facts: Facts, width: int) -> list[str]:
    """Labels in a column, and what they say beside them."""
    labels = [plain(label) for label, _ in facts]
    indent = min(max(map(len, labels), default=0), LONGEST_LABEL) + GAP
    texts = [plain(text) for _, text in facts]
    return [
        line
        for label, text in zip(labels, texts, strict=True)
        for line in hanging(label, text, width, indent)
    ]


def _technique(part: TechniquePart, width: int) -> list[str]:
    lines = _heading(part.title, "=", width)
    lines += ["", *_facts(part.variants, width)] if part.variants else []
    for task in part.tasks:
        for table in task.tables:
            if not table.detail:
                lines += ["", *grid(table, width, prefix=task.title)]
        lines += _remarks("Not comparable", task.incomparable, width)
        lines += _bullets(GRAPHS, task.graphs, width)
    lines += _bullets("Differs by design", part.differs, width)
    lines += _bullets("Notes", part.notes, width)
    lines += _remarks("Failed, unsupported, not applied", part.problems, width)
    for title, facts in ((SAME_WORK, part.same_work), ("Took effect", part.took_effect)):
        lines += ["", *wrap(title, width), *_facts(facts, width)] if facts else []
    return lines


def _bullets(title: str, texts: list[str], width: int) -> list[str]:
    bullets = [line for text in texts for line in hanging("-", plain(text), width, 2)]
    return ["", *wrap(title, width), *bullets] if bullets else []


def _remarks(title: str, facts: Facts, width: int) -> list[str]:
    """Labels with long texts below them."""
    return _bullets(title, [f"{label}: {_short(text)}" for label, text in facts], width)


def _short(text: str) -> str:
    return text if len(text) <= LONGEST_REASON else f"{text[:LONGEST_REASON]} … (more in report.md)"


def parts_as_text(parts: Iterable[str | Table], width: int = 80) -> str:
    """Paragraphs and tables, one below the other."""
    blocks = [wrap(p, width) if isinstance(p, str) else grid(p, width) for p in parts]
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def grid(table: Table, width: int, prefix: str = "") -> list[str]:
    """A table: title, frameworks over their columns, heads, a rule, rows.

    Where its columns do not fit side by side, it goes on below with those that are left.
    """
    title = plain(f"{prefix} · {table.title}" if prefix else table.title)
    lines = []
    for number, part in enumerate(_parts(table, width)):
        lines += ["", *wrap(f"{title} (continued)", width)] if number else wrap(title, width)
        lines += _drawn(part, width)
    return lines


@dataclass(frozen=True)
class _TextColumn:
    """A column as text, and how many cells it takes at least and at most."""

    column: Column
    head: Text
    cells: list[Text]
    least: int
    most: int


def _text(cell: str) -> Text:
    """A cell whose lines are each of printable characters."""
    return Text("\n".join(map(plain, cell.split("\n"))))


def _as_text(table: Table, place: int, before: list[_TextColumn]) -> _TextColumn:
    """A column beside those `before`: the first one of a framework has room for its name."""
    column = table.columns[place]
    head, cells = _text(column.head), [_text(row[place]) for row in table.rows]
    # A subheading stands over its rows and may be wrapped.
    shown = [head, *(cell for cell, row in zip(cells, table.rows, strict=True) if any(row[1:]))]
    if not before or before[-1].column.group != column.group:
        shown.append(Text(column.group))
    wide = measure_renderables(CONSOLE, CONSOLE.options, shown)
    return _TextColumn(column, head, cells, min(LONGEST_WORD, wide.minimum), wide.maximum)


def _parts(table: Table, width: int) -> list[list[_TextColumn]]:
    """The columns in parts that fit without breaking words, each with the columns of names."""
    names: list[_TextColumn] = []
    parts = [names]
    for place, column in enumerate(table.columns):
        if not column.right and len(names) == place:
            names.append(_as_text(table, place, names))
            continue
        added = _as_text(table, place, parts[-1])
        least = sum(each.least + GAP for each in parts[-1]) + added.least
        if parts[-1] is not names and least > width:
            parts.append(names)
            added = _as_text(table, place, names)
        parts[-1] = [*parts[-1], added]
    return parts


def _widths(columns: list[_TextColumn], width: int) -> list[int]:
    """Cells of each column: the widest, or less where they wrap; words before figures."""
    widths, room = [column.most for column in columns], width - GAP * (len(columns) - 1)
    while sum(widths) > room:
        places = range(len(columns))
        loose = [n for n in places if widths[n] > columns[n].least] or places
        widths[max(loose, key=lambda n: (not columns[n].column.right, widths[n]))] -= 1
    return widths


def _drawn(columns: list[_TextColumn], width: int) -> list[str]:
    """Heads, a rule and rows of columns that fit into `width`; a blank line before subheadings."""
    widths = _widths(columns, width)
    drawn = RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for column, cells in zip(columns, widths, strict=True):
        justify = "right" if column.column.right else "left"
        drawn.add_column(column.head, width=cells, justify=justify, overflow="fold")
    for place, row in enumerate(zip(*(column.cells for column in columns), strict=True)):
        if place and not any(row[1:]):
            drawn.add_row()
        drawn.add_row(*row)
    lines = CONSOLE.render_lines(drawn, CONSOLE.options.update_width(width), pad=False)
    text = ["".join(segment.text for segment in line).rstrip() for line in lines]
    return [*_groups(columns, widths), *text]


def _groups(columns: list[_TextColumn], widths: list[int]) -> list[str]:
    """The line that names the framework over its columns, or none."""
    spans = []
    pairs = zip(columns, widths, strict=True)
    for group, members in groupby(pairs, key=lambda pair: pair[0].column.group):
        cells = [each for _, each in members]
        span = sum(cells) + GAP * (len(cells) - 1)
        spans.append(f"{group} ".ljust(span, "─")[:span] if group else " " * span)
    return [(" " * GAP).join(spans).rstrip()] if any(each.column.group for each in columns) else []


# Markdown --------------------------------------------------------------------------------------


def markdown(record: Record, report: Report | None = None) -> str:
    """The report as GitHub-flavoured Markdown, without tables of detail. report: of `record`."""
    report = report or build(record)
    return render(
        "report.md.j2",
        report=report,
        graphs=GRAPHS,
        answer=Markup(advised_table(advised.table(report.answers, record.why))),
        legend=advised.LEGEND,
    )


def render(template: str, **values: Any) -> str:
    """A page of a template, in which every expression is escaped but for what is marked safe."""
    return _environment().get_template(template).render(**values)


def parts_as_markdown(parts: Iterable[str | Table]) -> str:
    """Paragraphs and tables for a page: a table's title stands above it."""
    blocks = [
        escape(p) if isinstance(p, str) else f"**{escape(p.title)}**\n\n{markdown_table(p).strip()}"
        for p in parts
    ]
    return "\n\n".join(blocks) + "\n"


def markdown_table(table: Table) -> str:
    """One table as GitHub-flavoured Markdown."""
    return str(_environment().get_template("table.md.j2").module.grid(table))


def advised_table(table: Table) -> str:
    """What to use as Markdown: each cell on one line, what comes first in it in bold."""
    return markdown_table(replace(table, rows=[list(map(_bold, row)) for row in table.rows]))


def _bold(cell: str) -> Markup:
    name, _, more = (escape(part) for part in cell.partition("\n"))
    return Markup(f"**{name}**: {more}" if more else name)


@cache
def _environment() -> Environment:
    """Every expression of a template is escaped, but for what is marked as safe."""
    made = Environment(
        loader=ChoiceLoader([PackageLoader(f"bench.{name}", ".") for name in ("report", "docs")]),
        autoescape=False,  # this escapes for HTML; `finalize` escapes for Markdown
        finalize=escape,
        keep_trailing_newline=True,
        lstrip_blocks=True,
        trim_blocks=True,
        undefined=StrictUndefined,
    )
    made.filters["table"] = lambda table: Markup(markdown_table(table))
    made.filters["decided"] = answer.decision_table
    made.filters["plainly"] = plainly
    made.filters["summary"] = lambda text: Markup(html.escape(plain(text), quote=False))
    made.filters["one_batch"] = _of_one_batch
    made.filters["head"] = lambda text: Markup(re.sub(_UNIT, r"[\1]", escape(text)))
    return made


def _of_one_batch(table: Table) -> Table:
    """A table of a single batch size, which its title then says and no row."""
    first, *rows = table.rows
    if not first[0].startswith("batch ") or any(first[1:]):
        return table
    if not all(any(row[1:]) for row in rows):
        return table
    return replace(table, title=f"{table.title}, {first[0]}", rows=rows)


_UNIT = r"\\\[([\w%/]+)\\\](?!\()"  # brackets around a word that is no link stay readable


def escape(value: Any) -> str:
    """`value` as literal text in Markdown, on one line: no markup, HTML, table bar or link."""
    if isinstance(value, Markup):
        return value
    text = plain(value)
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = re.sub(r"([\\`*\[\]|~#$])", r"\\\1", text)
    text = re.sub(r"(?<![0-9A-Za-z])_|_(?![0-9A-Za-z])", r"\\_", text)
    return re.sub(r"^([-+=]|\d+[.)])(?=[-+=\s]|$)", _not_a_list, text)


def _not_a_list(found: re.Match) -> str:
    return f"{found[0][:-1]}\\{found[0][-1]}"
