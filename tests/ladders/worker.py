"""One framework's share of the ladders' tests, in one process.

`python -m tests.ladders.worker pt|tf` runs each scenario of `*_scenarios.py`, as that of recipes.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests import workers
from tests.recipes import worker


def split_cpu() -> None:
    """Make two devices of TensorFlow's CPU before it runs."""
    impl = workers.implementation("tf", "ladders.language_model")
    impl.ladders.language_model._split_cpu(2)


if __name__ == "__main__":
    if sys.argv[1:] == ["tf"]:
        split_cpu()
    worker.main(Path(__file__).parent)
