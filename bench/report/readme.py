"""The headline tables between two markers of README.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.analysis.record import Row, View, above_import, tasks, techniques, view
from bench.analysis.values import at
from bench.report import write_atomically
from bench.report.blocks import Column, Table, difference_of, unit_of, versus
from bench.report.content import machine_line, run_line, warnings
from bench.report.figures import MISSING, number, plus_minus, scaled
from bench.report.tables import escape, markdown_table

BEGIN, END = "<!-- table:begin -->", "<!-- table:end -->"
YARDSTICK = "baseline"  # its rows are in the report: it is no technique


def read(path: Path) -> str:
    """The text of README.md, or ValueError where it cannot be read."""
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        raise ValueError(f"{path}: cannot be read") from None


def write(path: Path, text: str) -> None:
    """Replace README.md at once."""
    write_atomically({path: text})


def with_tables(text: str, results: dict[str, Any]) -> str:
    """`text` with the headline tables of `results` between its markers.

    ValueError where a marker is missing, or the record has no technique that ran.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"no text between {BEGIN} and {END} to replace")
    return f"{before}{BEGIN}\n{headline(results)}{END}{after}"


def headline(results: dict[str, Any]) -> str:
    """The headline tables as Markdown, with their source; ValueError where nothing ran."""
    found = headline_tables(results)
    if not found:
        raise ValueError("the record has no technique that ran")
    source = f"Measured on {machine_line(results['environment'])} ({run_line(results)})."
    paragraphs = [f"**{escape(warning)}**" for warning in warnings(results)]
    paragraphs += [escape(source), *map(markdown_table, found)]
    return "\n\n".join(part.strip("\n") for part in paragraphs) + "\n"


def headline_tables(results: dict[str, Any]) -> list[Table]:
    """Speed, then memory and accuracy of every technique at each task's largest batch."""
    views = [
        (name, work, view(results, name, work))
        for name in techniques(results)
        if name != YARDSTICK
        for work in tasks(results, name)
    ]
    lines = [(name, work, found, row) for name, work, found in views for row in _largest(found)]
    return [table for table in (_speed(lines), _other(lines)) if table.rows]


Line = tuple[str, str, View, Row]


def _largest(found: View) -> list[Row]:
    """The rows of the largest batch size in which something ran."""
    rows = found.rows[max(found.rows)] if found.rows else []
    return [row for row in rows if "OK" in (at(row.pt, "status"), at(row.tf, "status"))]


def _table(title: str, heads: list[str], rows: list[list[str]], words: int) -> Table:
    """A table whose first `words` columns hold words."""
    columns = [Column("", head, right=place >= words) for place, head in enumerate(heads)]
    return Table(title, columns, rows)


def _speed(lines: list[Line]) -> Table:
    heads = ["technique", "task, batch", "variant", "PyTorch step [ms]", "TensorFlow step [ms]"]
    heads += ["PyTorch ÷ own baseline", "TensorFlow ÷ own baseline", "PyTorch ÷ TensorFlow"]
    rows = []
    for technique, task, found, row in lines:
        steps = [number(scaled(at(case, "timing", "median_s"), 1e3)) for case in (row.pt, row.tf)]
        pairs = [found.own(row.pt), found.own(row.tf), found.twins(row)]
        place = f"{task}, {(row.pt or row.tf)['batch_size']}"
        cells = [*steps, *map(versus, pairs)]
        if set(cells) != {MISSING}:
            rows.append([technique, place, row.label, *cells])
    return _table("Speed", heads, rows, words=3)


def _other(lines: list[Line]) -> Table:
    heads = ["technique", "task, batch", "variant"]
    heads += ["PyTorch memory [MB]", "TensorFlow memory [MB]"]
    heads += ["metric", "PyTorch", "TensorFlow"]
    heads += ["PyTorch to baseline", "TensorFlow to baseline"]
    rows = []
    for technique, task, found, row in lines:
        sides = (row.pt, row.tf)
        memory = [number(scaled(above_import(at(case, "memory")), 1e-6)) for case in sides]
        trained = [_accuracy(case, found) for case in sides]
        means = [plus_minus(at(t, "mean"), at(t, "ci")) for t in trained]
        apart = [difference_of(t) for t in trained]
        metric = next((at(t, "metric") for t in trained if t), None)
        place = f"{task}, {(row.pt or row.tf)['batch_size']}"
        cells = [*memory, unit_of(metric).lower() if metric else MISSING, *means, *apart]
        if set(cells) != {MISSING}:
            rows.append([technique, place, row.label, *cells])
    return _table("Memory and accuracy", heads, rows, words=3)


def _accuracy(case: dict | None, found: View) -> dict | None:
    """What `case` was trained to; the training may stand at another batch size."""
    same = [
        other["accuracy"]
        for other in found.cases.values()
        if case
        and other.get("accuracy")
        and all(at(other, key) == at(case, key) for key in ("framework", "flavour", "variant"))
    ]
    return next(iter(same), None)
