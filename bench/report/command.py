"""Make reports again from a record: `twinbench report PATH`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench.analysis.analyse import analyse, raw
from bench.analysis.reading import load, results_file
from bench.record import encode
from bench.report import readme
from bench.report.files import FORMATS, write_reports
from bench.report.replace import write_atomically
from bench.report.tables import terminal


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status (1: a check failed, 2: an error)."""
    parser = argparse.ArgumentParser(prog="twinbench report", description=__doc__)
    parser.add_argument(
        "paths",
        type=Path,
        nargs="+",
        metavar="path",
        help="a results.json, or the folder that holds one; several with --readme",
    )
    parser.add_argument(
        "--format",
        choices=("all", *FORMATS, "terminal"),
        default="all",
        help=f"all (the default) writes {', '.join(FORMATS.values())} beside the record, "
        "terminal prints",
    )
    parser.add_argument(
        "--derive",
        action="store_true",
        help="first make every figure of the record again from what was measured: after a change "
        "of the analysis",
    )
    parser.add_argument("--readme", type=Path, help="put chart, conclusions and tables there")
    parser.add_argument(
        "--check", action="store_true", help="with --readme: change nothing, exit 1 if it differs"
    )
    chosen = parser.parse_args(arguments)
    if chosen.check and not chosen.readme:
        parser.error("--check needs --readme")
    if len(chosen.paths) > 1 and not chosen.readme:
        parser.error("several runs need --readme")
    try:
        return _make(chosen)
    except ValueError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2


def _make(chosen: argparse.Namespace) -> int:
    if chosen.derive:
        for path in map(results_file, chosen.paths):
            write_atomically({path: encode(analyse(raw(load(path)))).decode()})
    if chosen.readme:
        return _readme(chosen)
    if chosen.format == "terminal":
        print(terminal(load(chosen.paths[0])), end="")
    else:
        formats = FORMATS if chosen.format == "all" else [chosen.format]
        print(*write_reports(chosen.paths[0], formats), sep="\n")
    return 0


def _readme(chosen: argparse.Namespace) -> int:
    runs = [load(path) for path in chosen.paths]
    made = readme.files(chosen.readme, runs)
    if chosen.check:
        old = [str(path) for path, text in made.items() if _text(path) != text]
        if old:
            given = " ".join(map(str, chosen.paths))
            print(f"{', '.join(old)}: not what {given} gives", file=sys.stderr)
        return 1 if old else 0
    for path in made:
        path.parent.mkdir(exist_ok=True)
    write_atomically(made)
    print(*made, sep="\n")
    return 0


def _text(path: Path) -> str | None:
    return readme.read(path) if path.exists() else None
