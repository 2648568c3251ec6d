"""Sleep of known length and small data, for the steps of either framework."""

from __future__ import annotations

import gc
import time

import numpy as np

FORWARD, BACKWARD = 0.012, 0.02  # the seconds that the layer of `sleeping_step` sleeps
SLEPT: dict[str, list[float]] = {}


def nap(seconds: float, part: str) -> None:
    """Sleep, and note how long it really was: a busy machine wakes late."""
    start = time.perf_counter()
    time.sleep(seconds)
    SLEPT.setdefault(part, []).append(time.perf_counter() - start)


def arrays(inputs: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """A batch with two classes."""
    random = np.random.default_rng(0)
    x = random.normal(size=(size, inputs)).astype(np.float32)
    return x, random.integers(0, 2, size)


def late_batches(batch, seconds: float):
    """A loader that takes so long for each batch."""
    while True:
        time.sleep(seconds)
        yield batch


def forget() -> None:
    """Leave what there is out of all that TensorFlow's profiler goes through for a step's graph."""
    gc.collect()
    gc.freeze()
