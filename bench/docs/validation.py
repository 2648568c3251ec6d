"""What `twinbench validate measure` found, as a page: docs/validation.md.

    python -m bench.docs.validation results/latest/validation.json
    python -m bench.docs.validation --page

The first keeps the pairs of that run in docs/validation.json; both make the page from it.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np

from bench.analysis.reading import FRAMEWORKS
from bench.harness.folders import replace_file
from bench.harness.processes import ROOT
from bench.report.blocks import Column, Table
from bench.report.figures import number
from bench.report.tables import markdown_table
from bench.validate import COPIES, PLANTED, by_kind, moved

RECORD, PAGE = ROOT / "docs" / "validation.json", ROOT / "docs" / "validation.md"
KINDS = {"control": "equal work"} | {
    name: f"{share:.0%} longer, planted" for name, share in PLANTED.items() if name in COPIES
}
FOUND = ("slower", "slightly slower")
FALSE = (*FOUND, "faster", "slightly faster")  # of equal work

_HEAD = """# Equal work, and differences that were planted

`twinbench validate measure` plays the same train step against itself in processes of their own,
and against steps that work longer by a known share, as a run of the suite would, with the same
looks and the same company. Measured on {machine}.
"""

_STAYED = """\
Of equal work all stay: there is seen what leaving does. Of what was planted those stay who were not
decided at the first look, since they had looked small; that alone makes them look larger after it.
"""


def page(found: dict) -> str:
    """The page, from the record alone."""
    environment = found["environment"]
    machine = f"{environment['cpu']}, {environment['threads']} cores"
    lines = [_HEAD.format(machine=machine), markdown_table(_verdicts(found)).strip(), ""]
    lines += [f"- {line[0].upper()}{line[1:]}." for line in moved(found)]
    lines += ["", _STAYED] if lines[-1] else []
    return "\n".join(lines).rstrip() + "\n"


def _verdicts(found: dict) -> Table:
    rows = []
    for (framework, kind), own in by_kind(found).items():
        blocks = [n for each in own.values() for n in each]
        said = ", ".join(f"{len(each)} {verdict}" for verdict, each in own.items())
        wanted = FALSE if kind == "control" else FOUND
        count = sum(len(own.get(verdict, ())) for verdict in wanted)
        told = f"{count} told apart" if kind == "control" else f"{count} found"
        rows.append(
            [
                FRAMEWORKS[framework],
                KINDS[kind],
                f"{told} of {len(blocks)}",
                said,
                number(float(np.mean(blocks))),
            ]
        )
    titles = ["framework", "pairs", "wrong or found", "verdicts", "blocks on average"]
    return Table("", [Column("", title, right=False) for title in titles], rows)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.docs.validation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", nargs="?", type=Path, metavar="validation.json")
    parser.add_argument("--page", action="store_true", help="only make the page anew")
    given = parser.parse_args(arguments)
    if given.page == bool(given.file):
        parser.error("give a validation.json, or --page")
    if given.file:
        replace_file(RECORD, given.file.read_text("utf-8"))
    replace_file(PAGE, page(json.loads(RECORD.read_text("utf-8"))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
