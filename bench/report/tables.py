"""A record as text for the terminal and as Markdown."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from bench.report import advised, answer
from bench.report.blocks import Table
from bench.report.content import Facts, Report, TechniquePart, build
from bench.report.text import GAP, column_widths, hanging, least_widths, plain, row_lines, wrap

SMALLEST_WIDTH = 60
MOST_LINES = 31  # of the answer; the way on takes the rest of the first 40
LONGEST_LABEL = 32  # cells; a longer one stands on a line of its own
LONGEST_REASON = 400  # characters in the terminal; report.md has it whole
GRAPHS = "How the graphs of twins differ"
SAME_WORK = "Same work (certificates of twins: initial weights, first losses)"


# Terminal --------------------------------------------------------------------------------------


def answered(results: dict[str, Any], width: int = 80) -> str:
    """The answer alone: `MOST_LINES` lines at most, no line wider than `width` (60 at least)."""
    report, width = build(results), max(width, SMALLEST_WIDTH)
    lines = [*_heading("What to use", "=", width), *wrap(plain(report.measured), width)]
    lines += [line for warning in report.warnings for line in _loud(warning, width)]
    lines += ["", *advised.lines(report.advice, width, MOST_LINES - len(lines) - 1)]
    return "\n".join(lines) + "\n"


def terminal(results: dict[str, Any], width: int = 80) -> str:
    """The answer, then all tables, as plain text, no line wider than `width` cells."""
    return f"{answered(results, width)}\n\n{detail(results, width)}"


def detail(results: dict[str, Any], width: int = 80) -> str:
    """The run, its machine and all tables."""
    report, width = build(results), max(width, SMALLEST_WIDTH)
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


def parts_as_text(parts: Iterable[str | Table], width: int) -> str:
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
        more = ["", *wrap(f"{title} (continued)", width)] if number else wrap(title, width)
        lines += [*more, *_part(part, width)]
    return lines


def _parts(table: Table, width: int) -> list[Table]:
    """The table in pieces that fit without breaking words, each with the columns of names."""
    rows = [[column.head for column in table.columns], *(r for r in table.rows if any(r[1:]))]
    rows.append(_lone_groups(table))
    least = least_widths([[plain_lines(cell) for cell in row] for row in rows])
    rights = [column.right for column in table.columns]
    names = rights.index(True) if True in rights else len(rights)
    start = sum(least[:names]) + GAP * names
    parts: list[list[int]] = [[]]
    for place in range(names, len(least)):
        taken = start + sum(least[n] + GAP for n in parts[-1])
        if parts[-1] and taken + least[place] > width:
            parts.append([])
        parts[-1].append(place)
    return [_with_columns(table, [*range(names), *part]) for part in parts]


def _with_columns(table: Table, places: list[int]) -> Table:
    rows = [[row[place] for place in places] for row in table.rows]
    return replace(table, columns=[table.columns[place] for place in places], rows=rows)


def plain_lines(cell: str) -> str:
    """A cell whose lines are each of printable characters."""
    return "\n".join(map(plain, cell.split("\n")))


def _part(table: Table, width: int) -> list[str]:
    heads = [plain_lines(column.head) for column in table.columns]
    rows = [list(map(plain_lines, row)) for row in table.rows]
    whole = [_lone_groups(table), heads, *(row for row in rows if any(row[1:]))]
    widths = column_widths(whole, width)
    right = [column.right for column in table.columns]
    lines = _groups(table, widths)
    lines += [*row_lines(heads, widths, right), (" " * GAP).join("-" * each for each in widths)]
    for place, row in enumerate(rows):
        if any(row[1:]):
            lines += row_lines(row, widths, right)
        else:
            lines += [*([""] if place else []), *wrap(row[0], width)]
    return lines


def _lone_groups(table: Table) -> list[str]:
    """The frameworks that stand over one column, which has to have room for the name."""
    columns = Counter(column.group for column in table.columns)
    return [c.group if columns[c.group] == 1 else "" for c in table.columns]


def _groups(table: Table, widths: list[int]) -> list[str]:
    """The line that names the framework over its columns, or none."""
    spans: list[tuple[str, int]] = []
    for column, width in zip(table.columns, widths, strict=True):
        if spans and spans[-1][0] == column.group:
            spans[-1] = (column.group, spans[-1][1] + GAP + width)
        else:
            spans.append((column.group, width))
    if len(spans) == 1:
        return []
    names = [f"{group} ".ljust(width, "-") if group else " " * width for group, width in spans]
    return [(" " * GAP).join(name[:width] for name, (_, width) in zip(names, spans, strict=True))]


# Markdown --------------------------------------------------------------------------------------


def markdown(results: dict[str, Any], report: Report | None = None) -> str:
    """The whole report as GitHub-flavoured Markdown. report: of `results`, if it is made."""
    report = report or build(results)
    return (
        _environment()
        .get_template("report.md.j2")
        .render(
            report=report,
            same_work=SAME_WORK,
            graphs=GRAPHS,
            answer=Markup(advised_table(advised.table(report.advice, results["cases"]))),
            legend=advised.LEGEND,
        )
    )


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
        loader=PackageLoader("bench.report", "."),
        autoescape=False,  # this escapes for HTML; `finalize` escapes for Markdown
        finalize=escape,
        keep_trailing_newline=True,
        lstrip_blocks=True,
        trim_blocks=True,
        undefined=StrictUndefined,
    )
    made.filters["decided"] = answer.decision_table
    made.filters["head"] = lambda text: Markup(re.sub(_UNIT, r"[\1]", escape(text)))
    return made


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
