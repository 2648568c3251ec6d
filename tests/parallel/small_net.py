"""What both frameworks' models of model and tensor parallelism share."""

from __future__ import annotations

import numpy as np

RATE, MOMENTUM = 0.05, 0.9


def weights(norm: bool) -> dict[str, np.ndarray]:
    """Canonical weights of the small convolutional net."""
    random = np.random.default_rng(1)
    shapes = {"conv0.kernel": (3, 3, 3, 8), "conv1.kernel": (3, 3, 8, 8)}
    shapes |= {"up.kernel": (8, 16), "up.bias": (16,), "down.kernel": (16, 10), "down.bias": (10,)}
    found = {name: random.normal(0, 0.3, shape) for name, shape in shapes.items()}
    if norm:
        found |= {"bn.gamma": np.ones(8), "bn.beta": np.zeros(8)}
        found |= {"bn.mean": np.zeros(8), "bn.variance": np.ones(8)}
    return {name: value.astype(np.float32) for name, value in found.items()}
