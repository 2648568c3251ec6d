"""Canonical weights: one NumPy dictionary that both frameworks import.

Layouts are those of `shared.specs.parameter_shapes`: convolutions (height, width, in, out), dense
kernels (in, out). Each kit transposes where its framework stores them otherwise.
"""

from __future__ import annotations

import hashlib
from math import log, prod, sqrt

import numpy as np

from shared.specs import DetectorSpec, ModelSpec, parameter_shapes, state_shapes

RARE = 0.01  # share of places at which a detector expects an object of a class, before training
# The last scale of a residual block, by the model's family.
_LAST = {"resnet": ".conv1.bn.gamma", "bottleneck": ".conv2.bn.gamma"}


def init_weights(
    spec: ModelSpec, seed: int, *, zero_init_residual: bool = True
) -> dict[str, np.ndarray]:
    """Draw float32 initial weights for `spec`: every parameter and BatchNorm's running statistics.

    Convolutions and dense kernels: He normal over the fan-in (He et al., 2015); transformer
    matrices and embeddings: normal with standard deviation 0.02 (Radford et al., 2019); scales 1,
    but the last of each residual block 0, so that a block begins as its shortcut (Goyal et al.,
    2017, section 5.1: without it rounding grows tenfold a step); everything else 0. A detector's
    head: normal with standard deviation 0.01, and biases by which each class is expected at one
    place in a hundred (Lin et al., 2017, section 4.1). Each tensor has its own stream, so that
    adding one changes no other.

    zero_init_residual: without it a residual block's last scale is 1 as well. A model that only
        predicts, as nobody's does in half of whose convolutions every weight is multiplied by 0:
        its file would be smaller, and rounded otherwise.
    """
    weights = {}
    for name, shape in parameter_shapes(spec).items():
        stream = np.random.default_rng([seed, *hashlib.sha256(name.encode()).digest()])
        if name.endswith("gamma"):
            last = _LAST.get(spec.family) if zero_init_residual else None
            value = np.zeros(shape) if last and name.endswith(last) else np.ones(shape)
        elif name.endswith((".beta", ".bias")):
            value = np.zeros(shape)
            if isinstance(spec, DetectorSpec) and name == "head.bias":
                value[: spec.num_classes] = log(RARE / (1 - RARE))
        elif isinstance(spec, DetectorSpec) and name == "head.kernel":
            value = stream.normal(0.0, 0.01, shape)
        elif spec.family == "gpt":
            value = stream.normal(0.0, 0.02, shape)
        else:
            value = stream.normal(0.0, sqrt(2.0 / prod(shape[:-1])), shape)
        weights[name] = value.astype(np.float32)
    for name, shape in state_shapes(spec).items():
        fill = 1.0 if name.endswith("variance") else 0.0
        weights[name] = np.full(shape, fill, np.float32)
    return weights


def checksum(weights: dict[str, np.ndarray]) -> str:
    """SHA-256 over names, shapes and float32 bytes by name: equal only for equal weights."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        array = np.ascontiguousarray(weights[name], dtype=np.float32)
        digest.update(f"{name}{array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
