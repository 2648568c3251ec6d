"""Runs an example of the documentation: `python -m tests.example_worker pt FILE`."""

import os
import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    os.chdir(Path(sys.argv[2]).parent)
    runpy.run_path(sys.argv[2], run_name="__main__")
    print("\n{}")
