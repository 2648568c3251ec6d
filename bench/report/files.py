"""The files of a report, made beside their record."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, partial
from pathlib import Path

from bench.analysis.reading import load, results_file
from bench.report import csv_export, page, tables
from bench.report.content import build
from bench.report.replace import write_atomically

# format -> the file beside the record
FORMATS = {"markdown": "report.md", "html": "report.html", "csv": "tables.csv"}
OWN = "answer.txt"  # beside the record of a user's model, which the page begins with


def write_reports(path: str | Path, formats: Iterable[str] = FORMATS) -> list[Path]:
    """Make the reports beside the results.json at `path` again and return where they are.

    Each replaces the old one whole, and none does unless all could be made. Raises ValueError as
    `load` does, and where the folder cannot be written.
    """
    record, file = load(path), results_file(path)
    answer = file.with_name(OWN)
    answered = answer.read_text("utf-8").rstrip() if answer.exists() else ""
    report = cache(partial(build, record))  # of both pages
    makers = {
        "markdown": lambda: tables.markdown(record, report()),
        "html": lambda: page.html(record, answered, report()),
        "csv": lambda: csv_export.csv_text(record),
    }
    texts = {file.with_name(FORMATS[name]): makers[name]() for name in formats}
    write_atomically(texts)
    return list(texts)
