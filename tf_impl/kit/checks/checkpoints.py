"""What checkpoints refuse: files of another model or optimizer, and weights beyond float16."""

import hashlib

import numpy as np
import tensorflow as tf


def check_checkpoint(model: tf.keras.Model) -> None:
    """Raise ValueError for a model without variables."""
    if not model.built:
        raise ValueError("the model has no variables yet: call it once on an example input")


def check_resumable(path, head: dict) -> None:
    """Raise ValueError for a file that holds no optimizer's state."""
    if not head["resumable"]:
        raise ValueError(f"{path} holds only weights: it can't be resumed from")


def tables(model: tf.keras.Model) -> np.ndarray:
    """Digests of layers' vocabularies and bins, which are no variables: uint8 (layers, 32)."""
    digests = [hashlib.sha256(repr(table).encode()).digest() for _, table in _tables(model)]
    return np.frombuffer(b"".join(digests), np.uint8).reshape(len(digests), 32)


def check_tables(path, model: tf.keras.Model, arrays: dict[str, np.ndarray]) -> None:
    """Raise ValueError where a vocabulary or bins are others than when the file was written."""
    ours = tables(model)
    theirs = arrays.get("tables", ours)  # earlier versions did not write them
    if len(ours) != len(theirs):
        raise ValueError(f"{path} is of another model: its vocabularies or bins are others")
    for (name, _), one, other in zip(_tables(model), ours, theirs, strict=True):
        if not np.array_equal(one, other):
            raise ValueError(f"{path} is of another model: {name} has other words or bins there")


def _tables(model: tf.keras.Model) -> list[tuple[str, list]]:
    """What lookup layers look up, and where bins end: layer's name -> a list of plain values."""
    found = []
    for layer in model._flatten_layers():
        if hasattr(layer, "get_vocabulary"):
            weights = getattr(layer, "idf_weights", None)
            weights = [] if weights is None else np.asarray(weights).tolist()
            found.append((layer.name, [*map(str, layer.get_vocabulary()), *weights]))
        elif hasattr(layer, "bin_boundaries"):
            found.append((layer.name, [float(end) for end in layer.bin_boundaries or ()]))
    return found


def halved(name: str, value: np.ndarray) -> np.ndarray:
    """Return floating weights in float16; ValueError where a value does not fit."""
    if value.dtype not in (np.float32, np.float64):
        return value
    with np.errstate(over="ignore"):
        half = value.astype(np.float16)
    if np.isfinite(half).all() != np.isfinite(value).all():
        raise ValueError(f"{name} has values beyond float16's 65504: leave half_precision out")
    return half


def pairs(path, kind: str, variables: list, arrays: dict[str, np.ndarray]) -> list[tuple]:
    """Return each variable with its value, or raise ValueError where they are of other things."""
    saved = [name for name in arrays if name.startswith(f"{kind} ")]
    other = "model" if kind == "weight" else "optimizer"
    if len(saved) != len(variables):
        raise ValueError(
            f"{path} is of another {other}: {len(saved)} variables there, {len(variables)} here"
        )
    found = [(variable, arrays[f"{kind} {n}"]) for n, variable in enumerate(variables)]
    # NumPy writes the bytes of a dtype that it does not know, such as bfloat16.
    found = [(v, a.view(_numpy_dtype(v)) if a.dtype.kind == "V" else a) for v, a in found]
    for variable, value in found:
        if tuple(variable.shape) != value.shape:
            raise ValueError(
                f"{path} is of another {other}: {variable.name} is {value.shape} there, "
                f"{tuple(variable.shape)} here"
            )
    return found


def _numpy_dtype(variable) -> np.dtype:
    return np.dtype(tf.as_dtype(variable.dtype).as_numpy_dtype)
