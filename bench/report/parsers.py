"""The command line of each command of `twinbench`."""

from __future__ import annotations

import argparse
from pathlib import Path


def described(program: str, docstring: str | None) -> argparse.ArgumentParser:
    """A parser without options whose help shows the docstring, with its line breaks."""
    unchanged = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(program, description=docstring, formatter_class=unchanged)


def add_record(parser: argparse.ArgumentParser) -> None:
    """The option of the commands that show what a record says a remedy gains."""
    parser.add_argument(
        "--record",
        type=Path,
        action="append",
        metavar="PATH",
        help="take gains from this results.json or folder; may be repeated",
    )
