"""From results.json to the reports: terminal, Markdown, one HTML page, and CSV."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from bench.analysis.record import load, results_file

# format -> the file beside the record
FORMATS = {"markdown": "report.md", "html": "report.html", "csv": "tables.csv"}


def write_reports(path: str | Path, formats: Iterable[str] = FORMATS) -> list[Path]:
    """Make the reports beside the results.json at `path` again and return where they are.

    Each replaces the old one whole, and none does unless all could be made. Raises ValueError as
    `load` does, and where the folder cannot be written.
    """
    from bench.report import page, tables, tidy  # they import this package

    makers = {"markdown": tables.markdown, "html": page.html, "csv": tidy.csv_text}
    results, file = load(path), results_file(path)
    texts = {file.with_name(FORMATS[name]): makers[name](results) for name in formats}
    write_atomically(texts)
    return list(texts)


def write_atomically(texts: dict[Path, str]) -> None:
    """Replace each file at once, so that no reader sees half of it. ValueError if it cannot be."""
    partials = {target: target.with_name(f".{target.name}.partial") for target in texts}
    try:
        for target, text in texts.items():
            partials[target].write_text(text, "utf-8", newline="\n")
        for target, partial in partials.items():
            partial.replace(target)
    except OSError as error:
        for partial in partials.values():
            partial.unlink(missing_ok=True)
        raise ValueError(f"{target}: cannot be written ({error.strerror})") from None
