"""Sizes of files and of models."""

from __future__ import annotations

import zlib
from math import prod
from pathlib import Path

import numpy as np

from bench.record import Artifact
from shared.specs import (
    FileSpec,
    ModelSpec,
    layers,
    parameter_shapes,
)


def artifact_bytes(artifact: Path | None) -> Artifact | None:
    """Bytes of a file, or of all files in a folder, as they are and compressed (zlib, level 6)."""
    if artifact is None:
        return None
    files = [artifact] if artifact.is_file() else sorted(artifact.rglob("*"))
    contents = [path.read_bytes() for path in files if path.is_file()]
    return Artifact(
        bytes=sum(map(len, contents)),
        compressed_bytes=sum(len(zlib.compress(content, 6)) for content in contents),
    )


def model_size(spec: ModelSpec, weights: dict[str, np.ndarray]) -> dict[str, dict]:
    """Parameters, nonzero parameters of kernels, and multiply-accumulates per sample.

    weights: canonical ones of a model like that of `spec`, perhaps with fewer channels. MACs are
    those of dense kernels, zeros included; there are none for a user's model.
    """
    if isinstance(spec, FileSpec):
        return {"parameters": {"value": sum(v.size for v in weights.values()), "unit": None}}
    shapes = parameter_shapes(spec)
    kernels = {name: weights[name] for name in shapes if name.endswith(".kernel")}
    parameters = sum(weights[name].size for name in shapes)
    zeros = sum(int((kernel == 0).sum()) for kernel in kernels.values())
    macs = 0
    for layer in layers(spec):
        name = f"{layer.name}.kernel"
        left = kernels[name].size / prod(shapes[name]) if name in kernels else 1
        macs += round(layer.macs * left)
    return {
        "parameters": {"value": parameters, "unit": None},
        "parameters_not_zero": {"value": parameters - zeros, "unit": None},
        "macs": {"value": macs / 1e6, "unit": "M"},
    }
