"""Make the pages of docs/techniques again from the technique files."""

from __future__ import annotations

import argparse
import sys

from bench.docs import FOLDER, differing, write


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status (1: --check found a page out of date)."""
    parser = argparse.ArgumentParser(prog="twinbench docs", description=__doc__)
    parser.add_argument("--check", action="store_true", help="only exit 1 if a page is outdated")
    if parser.parse_args(arguments).check:
        old = differing(FOLDER)
        if old:
            print(
                f"docs/techniques: not what the code gives: {', '.join(old)}; "
                "make them again with: twinbench docs",
                file=sys.stderr,
            )
        return 1 if old else 0
    write(FOLDER)
    print(FOLDER)
    return 0
