"""The command line of each command of `twinbench`."""

from __future__ import annotations

import argparse


def described(program: str, docstring: str | None) -> argparse.ArgumentParser:
    """One without options yet, whose help shows a module's docstring as it stands."""
    as_it_stands = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(program, description=docstring, formatter_class=as_it_stands)
