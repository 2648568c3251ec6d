"""tables.csv: the tidy table, a line for each figure of each row, at full precision."""

from __future__ import annotations

import csv
import io
from typing import Any

from bench.analysis.table import COLUMNS, table
from bench.record import Record
from bench.report.text import plain

LARGEST_WHOLE = 2**53
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # with which a spreadsheet begins to calculate


def csv_text(record: Record) -> str:
    """The table as CSV with a header; a cell is empty where nothing was measured."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows({n: _cell(value) for n, value in line.items()} for line in table(record))
    return out.getvalue()


def _cell(value: Any) -> Any:
    """Numbers as they are, text such that no spreadsheet takes it for a formula."""
    if value is None:
        return ""
    if isinstance(value, float) and value.is_integer() and abs(value) < LARGEST_WHOLE:
        return int(value)  # of bytes and counts
    if isinstance(value, int | float):
        return value
    text = plain(value)
    return f"'{text}" if text.startswith(FORMULA) else text
