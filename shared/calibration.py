"""Real samples from which the ranges of a quantized model's activations come."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np


def batches(inputs: Iterable[np.ndarray], *, size: int) -> Iterator[tuple[np.ndarray, ...]]:
    """The arrays of a model's inputs, samples along the first axis, in batches of `size`.

    The last one holds what is left. Raises ValueError where there are no samples, where the inputs
    have different numbers of them, or where a value is not finite.
    """
    arrays = [np.asarray(part) for part in inputs]
    counts = {array.shape[0] if array.ndim else 0 for array in arrays}
    if len(counts) != 1 or counts == {0}:
        raise ValueError(f"calibration needs samples, as many in each input, not {sorted(counts)}")
    if not all(np.isfinite(array).all() for array in arrays):
        raise ValueError("calibration samples hold values that are not finite")
    places = range(0, counts.pop(), size)
    return (tuple(array[place : place + size] for array in arrays) for place in places)
