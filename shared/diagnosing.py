"""The program that diagnoses a task's train step, or that of a file, with either framework."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from functools import partial

from shared import user_model


def run(find_bottleneck: Callable, train_step: Callable, about: str) -> None:
    """Read the command line, diagnose, and print what was found, or JSON for programs.

    train_step: (a task's name, batch size or None) -> the step and its batches. A file has a
    function `make()` that returns them.
    """
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("what", nargs="?", default="digits-cnn", help="a task, or a file.py")
    parser.add_argument("--batch-size", type=int, help="of a task; default: its compute batch")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--folder", default="", help="where the profiler's files go")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    find = partial(find_bottleneck, steps=given.steps, folder=given.folder)
    if given.what.endswith(".py"):
        sys.path.insert(0, ".")  # of its imports
        try:
            found = user_model.with_made(os.path.abspath(given.what), find)
        except user_model.BadFile as error:
            sys.exit(str(error))
    else:
        found = find(*train_step(given.what, given.batch_size))
    print(json.dumps(found.as_json()) if given.json else f"{found}\n\n{found.breakdown}")
