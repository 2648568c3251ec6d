"""Models and weights that the tests of equal work share."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from shared.specs import TASKS, BottleneckSpec, CNNSpec, DetectorSpec, GPTSpec, ResNetSpec
from shared.weights import init_weights

SEED, STEPS, BATCH_SIZE = 5, 10, 8


def _task(name: str, model):
    """A task's recipe and bar with a model of its kind."""
    return replace(TASKS[name], model=model)


# Of each kind of model, two of each part one after the other. Wider and deeper ones are the same
# code, and every timed row certifies its ten first losses.
_CNN = CNNSpec((12, 12, 2), ((6, 1), (8, 2)), num_classes=5)
_GPT = GPTSpec(vocabulary=11, sequence_length=6, width=8, heads=2, layers=2)
PROVEN = {
    "cnn": _task("digits-cnn", _CNN),
    "without batchnorm": _task("digits-cnn", replace(_CNN, batch_norm=False)),
    "resnet": _task("digits-resnet20", ResNetSpec((12, 12, 2), 2, (6,), num_classes=5)),
    "large stem": _task(
        "photos-resnet18", ResNetSpec((48, 48, 3), 1, (4, 6), num_classes=5, large_stem=True)
    ),
    "bottleneck": _task(
        "photos-resnet50", BottleneckSpec((48, 48, 3), (1, 2), (4, 6), num_classes=5)
    ),
    "detector": _task(
        "digits-detection",
        DetectorSpec((24, 24, 3), ((4, 2), (6, 2), (6, 1), (6, 2)), (2, 3), (8.0,), num_classes=3),
    ),
    "gpt": _task("text-gpt", _GPT),
    "bert": _task("text-bert", replace(_GPT, layers=1, causal=False)),
}


def trained_looking(spec) -> dict[str, np.ndarray]:
    """Weights where no scale is 1 and no shift is 0, so that none can be mistaken for another."""
    random = np.random.default_rng(SEED)
    weights = init_weights(spec, SEED)
    for name, value in weights.items():
        kind = name.rpartition(".")[2]
        if name.endswith("conv2.bn.gamma" if spec.family == "bottleneck" else "conv1.bn.gamma"):
            # Trained residual branches add little; large ones amplify rounding from block to block.
            weights[name] = random.uniform(0.1, 0.3, value.shape).astype(np.float32)
        elif kind in ("gamma", "variance"):
            weights[name] = random.uniform(0.5, 1.5, value.shape).astype(np.float32)
        elif kind in ("beta", "bias", "mean"):
            weights[name] = random.normal(0.0, 0.3, value.shape).astype(np.float32)
    return weights
