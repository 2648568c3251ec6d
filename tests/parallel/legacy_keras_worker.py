"""Replicas under tf_keras, against one process: `python -m ... tf_keras FOLDER DIGITS`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from shared import parallel
from tests.parallel.data_parallel_worker import forked

MAKE, BUILD = "tf_impl.parallel.data_parallel:processes", "tf_impl.kit.examples:digits_cnn"


def main(folder: Path, digits: Path) -> None:
    def train(count: int) -> parallel.Result:
        run = parallel.Run(replicas=count, global_batch=32, steps=4)
        return forked("tf", folder, MAKE, BUILD, digits, run, {"synchronised_norm": True})

    # Synchronised, too: the fused kernel, which that leaves, keeps another variance, n / (n - 1).
    print(json.dumps({"apart": parallel.distance(train(1), train(2))}))


if __name__ == "__main__":
    main(*map(Path, sys.argv[2:]))
