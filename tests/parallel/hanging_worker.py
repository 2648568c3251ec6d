"""Two replicas of which one hangs after its first step, for `test_hanging.py`: SIDE FOLDER.

Prints what `launch` raised, after how long, what was left of its files, and which interfaces the
replicas had.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil

PATIENCE = 6.0  # seconds


def hanging(build, *, seen: str) -> tuple:
    """The plain replicas of a side; the second one sleeps in its second step."""
    technique = importlib.import_module(f"{os.environ['HANGING_SIDE']}_impl.parallel.data_parallel")
    model, optimizer, step = technique.processes(build)
    config = json.loads(os.environ.get("TF_CONFIG", "{}"))
    rank = int(os.environ.get("RANK", config.get("task", {}).get("index", 0)))
    Path(seen, f"interfaces-{rank}").write_text(json.dumps(sorted(psutil.net_if_addrs())))
    calls = []

    def hang(x, y, samples):
        calls.append(time.monotonic())
        if len(calls) == 2:
            Path(seen, f"begun-{rank}").write_text(str(time.monotonic()))
            if rank == 1:
                time.sleep(600)
        return step(x, y, samples)

    return model, optimizer, hang


def pt_small() -> tuple:
    """What trains does not matter here, and takes little time."""
    import torch

    model = torch.nn.Linear(4, 2)
    return model, torch.optim.SGD(model.parameters(), 0.1), torch.nn.functional.cross_entropy


def tf_small() -> tuple:
    """See `pt_small`."""
    import tensorflow as tf

    model = tf.keras.Sequential([tf.keras.Input((4,)), tf.keras.layers.Dense(2)])
    loss_fn = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return model, tf.keras.optimizers.SGD(0.1), lambda output, y: loss_fn(y, output)


def distribute(model, batches):
    """What the technique does."""
    technique = importlib.import_module(f"{os.environ['HANGING_SIDE']}_impl.parallel.data_parallel")
    return technique.distribute(model, batches)


def main(side: str, folder: str) -> None:
    """Train, and print what became of it."""
    from shared import parallel

    tempfile.tempdir = None  # TMPDIR is of this run, and a fork may know another
    os.environ["HANGING_SIDE"] = side
    random = np.random.default_rng(0)
    dataset = random.normal(size=(32, 4)).astype(np.float32), random.integers(0, 2, 32)
    run = parallel.Run(replicas=2, global_batch=16, steps=8, threads=2, timeout_s=PATIENCE)
    launch = importlib.import_module(f"{side}_impl.kit.replicas").launch
    here = "tests.parallel.hanging_worker"
    try:
        launch(f"{here}:hanging", f"{here}:{side}_small", dataset, run, {"seen": folder})
        raised = ["nothing", ""]
    except Exception as error:
        raised = [type(error).__name__, str(error)]
    found = {path.name: json.loads(path.read_text()) for path in Path(folder).iterdir()}
    print(json.dumps({"raised": raised, "ended": time.monotonic(), **found}))


if __name__ == "__main__":
    main(*sys.argv[1:])
