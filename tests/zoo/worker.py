"""The process in which one framework's cells run: `python -m tests.zoo.worker pt` reads them.

One line of standard input is a cell, "technique model"; one line of what it prints is its result.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import warnings


def main() -> None:
    """Answer each line of the standard input."""
    framework = sys.argv[1]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the frameworks print is no answer
    warnings.simplefilter("ignore")
    cells = importlib.import_module(f"tests.zoo.cells_{framework}")
    if framework == "pt" and cells.DEVICE != "cpu":
        # float32 is float32 there in plain code, too, and GELU no approximation, as it is in the
        # one kernel that evaluates a whole layer of an encoder.
        importlib.import_module("pt_impl.kit.runtime").configure(threads=1, seed=0)
        importlib.import_module("torch").backends.mha.set_fastpath_enabled(False)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        start = time.monotonic()
        try:
            found = cells.run(*line.split())
        except Exception as error:  # of what the zoo does before it tries a technique
            found = {"status": "TRACEBACK", "reason": f"{type(error).__name__}: {error}"[:400]}
        found["seconds"] = round(time.monotonic() - start, 1)
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main()
