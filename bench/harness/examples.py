"""Samples of a task's training split, for tracing, calibration and checks.

For a user's file they come from its batches, in the file's structure of x and y.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from bench.harness.plan import Work
from shared import datasets, user_model


def examples(work: Work, count: int, split: str = "train") -> tuple[Any, Any]:
    """x and y of the first `count` samples of a split, or of all if there are fewer."""
    folder = Path(work.data)
    if work.task.dataset.kind == "file":
        return user_model.samples(folder, count)
    return tuple(np.asarray(part[:count]) for part in datasets.load(folder, split))


def zeros(work: Work, count: int) -> tuple[np.ndarray, np.ndarray]:
    """x and y of zeros, with the task's shapes and dtypes, for tracing."""
    spec = work.task.model
    if spec.family == "gpt":
        return (np.zeros((count, spec.sequence_length), np.int64),) * 2
    return np.zeros((count, *spec.input_shape), np.float32), np.zeros(count, np.int64)
