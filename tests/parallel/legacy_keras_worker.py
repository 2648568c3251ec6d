"""Replicas under tf_keras, against one process: `python -m ... tf_keras DIGITS`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from shared import parallel
from tf_impl.kit import replicas

MAKE, BUILD = "tf_impl.parallel.data_parallel:processes", "tf_impl.kit.examples:digits_cnn"


def main() -> None:
    def train(count: int, synchronised: bool) -> parallel.Result:
        run = parallel.Run(replicas=count, global_batch=32, steps=4)
        settings = {"synchronised_norm": synchronised}
        return replicas.launch(MAKE, BUILD, Path(sys.argv[2]), run, settings)

    # Synchronised, too: the fused kernel, which that leaves, keeps another variance, n / (n - 1).
    whole = train(1, synchronised=True)
    found = {
        name: parallel.distance(whole, train(2, synchronised))
        for name, synchronised in (("global", True), ("own", False))
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
