"""Which published claims hold in a run, which do not, and which it can't test.

    twinbench claims results/latest [...] [--json] [--technique T] [--write]

Claims stand in bench/claims.json, with their sources and the rule by which rows of a record answer
them; nothing is judged by hand. Of several records each adds the rows that those before it do not
have; their class of machine is named where it is not the first one's. --write makes docs/claims.md
from them.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path

from bench.analysis.claims import LEDGER, judge, load_ledger
from bench.analysis.families import families
from bench.analysis.reading import load
from bench.report import parsers
from bench.report.claims import data, page, text
from bench.report.replace import put

PAGE = Path(__file__).parents[1] / "docs" / "claims.md"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status (1: --check found an old page, 2: an error)."""
    parser = parsers.described("twinbench claims", __doc__)
    parser.add_argument(
        "paths", type=Path, nargs="+", help="one or more: a results.json, or the folder of one"
    )
    parser.add_argument("--technique", help="only the claims of this technique")
    parser.add_argument("--ledger", type=Path, default=LEDGER, help="other claims than our own")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--json", action="store_true", help="for other programs: every row as well")
    kinds.add_argument("--write", action="store_true", help="make docs/claims.md")
    kinds.add_argument("--check", action="store_true", help="exit 1 if docs/claims.md is another")
    given = parser.parse_args(arguments)
    if given.technique and (given.write or given.check):
        parser.error("the page has every technique: leave out --technique")
    try:
        return _run(given)
    except ValueError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2


def _run(given: argparse.Namespace) -> int:
    if given.technique and given.technique not in families():
        known = ", ".join(families())
        raise ValueError(f"--technique: {given.technique!r} is none of {known}")
    claims = load_ledger(given.ledger)
    chosen = [c for c in claims if given.technique in (None, c.technique)]
    records = [load(path) for path in given.paths]
    judged = judge(records, chosen)
    if given.json:
        print(json.dumps(data(records, judged), indent=1, ensure_ascii=False))
    elif given.write or given.check:
        paths = shlex.join(path.as_posix() for path in given.paths)
        return put(PAGE, page(records, judged, paths), paths, check=given.check)
    else:
        print("\n".join(text(records, judged)))
    return 0
