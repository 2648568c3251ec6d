"""A record as one HTML page that needs no network: the answer first, then all tables and charts.

Its styles and its script stand in the page and are named by their hashes in its content security
policy, so that nothing else in it can run, whatever a record holds.
"""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass, replace

from markupsafe import Markup

from bench.analysis.families import FAMILIES, family_of
from bench.analysis.ranking import Work, rank
from bench.analysis.reading import View, task_of, techniques, view
from bench.record import Record, TaskFacts
from bench.report import advised, answer, bars, charts, svg
from bench.report.content import Facts, Report, TaskPart, TechniquePart, build
from bench.report.curves import curves
from bench.report.lifetimes import lifetimes
from bench.report.names import FAMILY_TITLES, plainly
from bench.report.svg_shapes import Chart
from bench.report.tables import GRAPHS, SAME_WORK
from bench.report.technique_tables import Table, phases
from bench.report.tradeoffs import tradeoffs


@dataclass(frozen=True)
class Piece:
    """A table and the charts that stand beside it."""

    table: Table
    charts: list[Chart]


@dataclass(frozen=True)
class Section:
    """A technique: its anchor, what is said of it, and each of its tasks with its pieces."""

    anchor: str
    family: str
    part: TechniquePart
    tasks: list[tuple[TaskPart, list[Piece]]]


@dataclass(frozen=True)
class Decision:
    """A piece of work: the answers for all goals, and the table over all of its rows.

    `small`: its model is, and what decides is the framework's overhead.
    """

    title: str
    small: bool
    count: int
    answers: list[tuple[str, Facts]]
    table: Table


FIRST = 6  # aims on the first screen; what follows is folded


def html(record: Record, user_answer: str = "", report: Report | None = None) -> str:
    """The whole page. own: the answer of a run on a user's model, as text.

    report: of `record`, if it is made.
    """
    report = report or build(record)
    style, script = (_asset(name) for name in ("report.css.j2", "report.js.j2"))
    sections = _sections(record, report)
    anchors = {n: one.anchor for n, one in zip(techniques(record), sections, strict=True)}
    shown, more = advised.first(report.answers, FIRST)
    return (
        svg.environment()
        .get_template("report.html.j2")
        .render(
            report=report,
            own=user_answer,
            gains=bars.chart(report.answers, anchors),
            summaries=[advised.table(part, record.why) for part in (shown, more) if part],
            legend=advised.LEGEND,
            decisions=list(map(_decision, report.works)),
            families={
                name: [s for s in sections if s.family == name]
                for name in FAMILIES
                if any(s.family == name for s in sections)
            },
            family_titles=FAMILY_TITLES,
            sections=sections,
            noise=charts.controls_forest(record.noise_floor.controls),
            same_work=SAME_WORK,
            graphs=GRAPHS,
            verdicts=VERDICTS,
            style=Markup(style),
            script=Markup(script),
            hashes={"style": _hash(style), "script": _hash(script)},
            numbers=iter(range(1, 1_000_000)),
        )
    )


def _decision(work: Work) -> Decision:
    rankings = [ranking for goal in work.goals if (ranking := rank(work, goal))]
    answers = [(answer.measure(ranking), answer.lines(ranking)) for ranking in rankings]
    table = answer.decision_table(work)
    table = replace(table, title=plainly(table.title))
    return Decision(work.title, work.large is False, len(work.rows), answers, table)


# verdict or status -> the style of its word
VERDICTS = {
    "faster": "good",
    "slower": "bad",
    "slightly faster": "good",
    "slightly slower": "bad",
    "better": "good",
    "worse": "bad",
    "equivalent": "even",
    "faster, less accurate": "mixed",
    "slower, more accurate": "mixed",
    "FAILED": "bad",
    "UNSUPPORTED": "even",
    "NOT_APPLIED": "mixed",
    "inconclusive": "even",
    "not comparable": "mixed",
}


def _asset(name: str) -> str:
    return svg.environment().get_template(name).render()


def _hash(text: str) -> str:
    """A source of the content security policy: the text's SHA-256."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


# Techniques --------------------------------------------------------------------------------------


def _sections(record: Record, report: Report) -> list[Section]:
    sections: list[Section] = []
    for name, part in zip(techniques(record), report.techniques, strict=True):
        tasks = []
        for task in part.tasks:
            about = record.tasks.get(task_of(task.title)) or TaskFacts()
            made = blocks(view(record, name, task.title), task.tables, about)
            tasks.append((task, made))
        anchor = "technique-" + (re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "x")
        while anchor in [section.anchor for section in sections]:
            anchor += f"-{len(sections)}"
        sections.append(Section(anchor, family_of(name), part, tasks))
    return sections


def blocks(of_task: View, tables: list[Table], task: TaskFacts) -> list[Piece]:
    """The tables in their order, each with its charts; some charts bring a table of their own."""
    made = []
    for table in tables:
        drawn = [charts.forest(of_task)] if table.name == "ratios" else []
        drawn += lifetimes(of_task) if table.name == "lifetimes" else []
        drawn += curves(of_task) if table.name == "accuracy" else []
        made.append(Piece(table, [chart for chart in drawn if chart]))
        if table.name == "memory" and (memory := charts.memory_bars(of_task)):
            made.append(Piece(phases(of_task.rows), [memory]))
        if table.name == "accuracy":
            made += [Piece(*each) for each in tradeoffs(of_task, task)]
    return made
