"""Print a run's tables, make its reports again, or pool several runs.

    twinbench report PATH --format terminal
    twinbench report A B C --write FOLDER
    twinbench report docs --readme README.md

Runs on machines of one class are pooled: their intervals then include the
scatter between runs. The pooled answer is printed. --write keeps it in a
folder that the other commands read like a run. Runs on several classes are not
pooled; they get one column per class.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

from bench.analysis import pooling
from bench.analysis.analyse import analyse, raw
from bench.analysis.reading import load, results_file
from bench.record import encode
from bench.report import parsers, readme, side_by_side
from bench.report.files import FORMATS, write_reports
from bench.report.replace import write_atomically
from bench.report.tables import markdown, parts_as_markdown, parts_as_text, terminal


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status (1: a check failed, 2: an error)."""
    parser = parsers.described("twinbench report", __doc__)
    parser.add_argument(
        "paths",
        type=Path,
        nargs="+",
        metavar="path",
        help="a results.json, or its folder; several are pooled",
    )
    parser.add_argument(
        "--format",
        choices=("all", *FORMATS, "terminal"),
        default="all",
        help=f"terminal: print; default: write {', '.join(FORMATS.values())} beside the record",
    )
    parser.add_argument(
        "--derive",
        action="store_true",
        help="first analyse the record's measurements again, after a change of the analysis",
    )
    parser.add_argument(
        "--write", type=Path, metavar="FOLDER", help="write the pooled record and reports there"
    )
    parser.add_argument("--readme", type=Path, help="put chart, conclusions and tables into README")
    parser.add_argument(
        "--check", action="store_true", help="with --readme: only exit 1 if README is outdated"
    )
    chosen = parser.parse_args(arguments)
    if chosen.check and not chosen.readme:
        parser.error("--check needs --readme")
    if chosen.write and (len(chosen.paths) < 2 or chosen.readme):
        parser.error("--write pools runs: give two or more, without --readme")
    try:
        return _make(chosen)
    except ValueError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2


def _make(chosen: argparse.Namespace) -> int:
    if chosen.derive:
        for path in map(results_file, chosen.paths):
            record = load(path)
            if record.pooled:
                raise ValueError(f"{path} is pooled: derive its runs, and pool them again")
            write_atomically({path: encode(analyse(raw(record))).decode()})
    if chosen.readme:
        return _readme(chosen)
    if len(chosen.paths) > 1:
        return _several(chosen)
    if chosen.format == "terminal":
        print(terminal(load(chosen.paths[0])), end="")
    else:
        print(*write_reports(chosen.paths[0], _formats(chosen)), sep="\n")
    return 0


def _formats(chosen: argparse.Namespace) -> Iterable[str]:
    return FORMATS if chosen.format == "all" else [chosen.format]


def _several(chosen: argparse.Namespace) -> int:
    """Pool runs on one class of machine; of several classes show the answers side by side."""
    classes = pooling.by_class([load(path) for path in chosen.paths])
    if len(classes) > 1 and not chosen.write:
        parts = side_by_side.parts(list(map(pooling.pool, classes)))
        shown = parts_as_markdown if chosen.format == "markdown" else parts_as_text
        print(shown(parts), end="")
        return 0
    pooled = pooling.pool([record for alike in classes for record in alike])
    if not chosen.write:
        print(markdown(pooled) if chosen.format == "markdown" else terminal(pooled), end="")
        return 0
    file = chosen.write / "results.json"
    if file.exists() and not load(file).pooled:
        raise ValueError(f"{chosen.write} holds a run: give another folder")
    chosen.write.mkdir(parents=True, exist_ok=True)
    write_atomically({file: encode(pooled).decode()})
    made = [] if chosen.format == "terminal" else write_reports(chosen.write, _formats(chosen))
    print(file, *made, sep="\n")
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
