"""Make reports again from a record: `twinbench report PATH`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench.analysis.record import load
from bench.report import FORMATS, readme, write_reports
from bench.report.tables import terminal


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status (1: a check failed, 2: an error)."""
    parser = argparse.ArgumentParser(prog="twinbench report", description=__doc__)
    parser.add_argument("path", type=Path, help="a results.json, or the folder that holds one")
    parser.add_argument(
        "--format",
        choices=("all", *FORMATS, "terminal"),
        default="all",
        help=f"all (the default) writes {', '.join(FORMATS.values())} beside the record, "
        "terminal prints",
    )
    parser.add_argument("--readme", type=Path, help="put the headline tables into this file")
    parser.add_argument(
        "--check", action="store_true", help="with --readme: change nothing, exit 1 if it differs"
    )
    chosen = parser.parse_args(arguments)
    if chosen.check and not chosen.readme:
        parser.error("--check needs --readme")
    sys.stdout.reconfigure(errors="backslashreplace")  # a console without UTF-8 loses no table
    try:
        return _make(chosen)
    except ValueError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2


def _make(chosen: argparse.Namespace) -> int:
    if chosen.readme:
        return _readme(chosen)
    if chosen.format == "terminal":
        print(terminal(load(chosen.path)), end="")
    else:
        formats = FORMATS if chosen.format == "all" else [chosen.format]
        print(*write_reports(chosen.path, formats), sep="\n")
    return 0


def _readme(chosen: argparse.Namespace) -> int:
    old = readme.read(chosen.readme)
    new = readme.with_tables(old, load(chosen.path))
    if chosen.check and old != new:
        print(f"{chosen.readme}: its tables are not those of {chosen.path}", file=sys.stderr)
        return 1
    if not chosen.check:
        readme.write(chosen.readme, new)
        print(chosen.readme)
    return 0
