"""Losses of the kit's step, the hand-written one and `fit`: `python -m ... pt|tf`."""

from __future__ import annotations

import json
import sys

import numpy as np

from shared.specs import TASKS
from shared.weights import init_weights
from tests import workers

impl = workers.implementation(sys.argv[1], "train_step.baseline")
kit, baseline = impl.kit, impl.train_step.baseline
TASK = TASKS["digits-cnn"]


def main(framework: str) -> None:
    kit.runtime.configure(threads=2, seed=0)
    weights, random = init_weights(TASK.model, seed=3), np.random.default_rng(0)
    images = [
        (random.normal(size=(8, 32, 32, 1)).astype(np.float32), random.integers(0, 10, 8))
        for _ in range(6)
    ]
    batches = kit.data.resident_batches(images)

    def built() -> tuple:
        model = kit.models.build(TASK.model, weights)
        return model, kit.training.make_optimizer(model, TASK.recipe)

    steps = {
        "kit": kit.training.make_train_step(*built(), kit.training.cross_entropy),
        "hand_written": baseline.make_hand_written_step(*built()),
    }
    found = {
        name: [kit.runtime.to_float(step(*b)) for b in batches] for name, step in steps.items()
    }
    if framework == "tf":
        found["fit_seconds"], found["fit"] = baseline.make_fit_loop(*built())(batches)
        model, optimizer = built()
        scaling = kit.training.tf.keras.mixed_precision.LossScaleOptimizer(optimizer)
        try:
            baseline.make_hand_written_step(model, scaling)
        except NotImplementedError as error:
            found["a scaled loss"] = str(error)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
