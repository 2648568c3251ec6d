"""Check published claims against a run: which hold, and which do not.

    twinbench claims results/latest

bench/claims.json has the claims, their sources, and the rule by which rows
answer each. Nothing is judged by hand. With several records, each adds only
the rows that those before it lack. A row names its class of machine if that is
not the first record's.
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
from shared.choices import unknown

PAGE = Path(__file__).parents[1] / "docs" / "claims.md"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status (1: --check found an old page, 2: an error)."""
    parser = parsers.described("twinbench claims", __doc__)
    parser.add_argument(
        "paths", type=Path, nargs="+", metavar="path", help="a results.json, or its folder"
    )
    parser.add_argument("--technique", help="only the claims about this technique")
    parser.add_argument(
        "--ledger", type=Path, default=LEDGER, help="claims to check (default: bench/claims.json)"
    )
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--json", action="store_true", help="print JSON, with every row")
    kinds.add_argument("--write", action="store_true", help="make docs/claims.md again")
    kinds.add_argument("--check", action="store_true", help="exit 1 if docs/claims.md is outdated")
    given = parser.parse_args(arguments)
    if given.technique and (given.write or given.check):
        parser.error("docs/claims.md has all techniques: leave out --technique")
    try:
        return _run(given)
    except ValueError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2


def _run(given: argparse.Namespace) -> int:
    if given.technique and given.technique not in families():
        raise ValueError(f"--technique: {unknown(given.technique, families())}")
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
