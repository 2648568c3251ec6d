"""One framework's share of all recipes' tests, in one process: imports take most of the time.

`python -m tests.recipes.worker pt|tf|tf_keras` runs each scenario of `*_scenarios.py` and prints
one line of JSON: "technique scenario" -> what was found, or {"error": traceback}. On standard error
stands how long each took.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path

import numpy as np


def main(folder: Path = Path(__file__).parent, which: str = "SCENARIOS") -> None:
    """Run a family's scenarios: `folder` is that of its tests, `which` the name of their list."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)  # a second one would wait, and spin, for a core that others use
    found = {}
    for path in sorted(folder.glob("*_scenarios.py")):
        technique = path.stem.removesuffix("_scenarios")
        module = importlib.import_module(f"tests.{folder.name}.{path.stem}")
        for scenario in getattr(module, which, ()):
            name = f"{technique} {scenario.__name__}"
            start, cpu = time.monotonic(), sum(os.times()[:4])
            try:
                found[name] = scenario()
            except Exception:
                found[name] = {"error": traceback.format_exc()}
            took = f"{time.monotonic() - start:.1f} s, CPU {sum(os.times()[:4]) - cpu:.1f} s"
            print(f"{name}: {took}", file=sys.stderr)
    print(json.dumps(found, default=lambda value: np.asarray(value).tolist()))


if __name__ == "__main__":
    main()
