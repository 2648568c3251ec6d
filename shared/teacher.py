"""The trained teacher of the distillation benchmarks: one set of weights for both frameworks.

`twinbench teacher` trains it anew and writes `teacher.npz`: canonical names and layouts,
float16, which halves the file, and the accuracy of just those rounded weights.
"""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shared.specs import TASKS, parameter_shapes, state_shapes

TASK = TASKS["digits-resnet20"]
PATH = Path(__file__).with_name("teacher.npz")
AGAIN = "make it with: twinbench teacher"
DAMAGE = (
    *(ValueError, TypeError, KeyError, OSError, EOFError),
    *(zipfile.BadZipFile, zlib.error, NotImplementedError),  # a flipped bit names another method
)


@dataclass(frozen=True)
class Teacher:
    """Canonical float32 weights, and the accuracy in percent on the task's test split."""

    weights: dict[str, np.ndarray]
    accuracy: float


def rounded(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The float32 values that are left of `weights` in the file."""
    return {name: value.astype(np.float16).astype(np.float32) for name, value in weights.items()}


def save(teacher: Teacher, path: Path = PATH) -> None:
    """Write the file. Raises ValueError where the weights are not those of the task's model."""
    _check(teacher.weights, path)
    narrow = {name: value.astype(np.float16) for name, value in sorted(teacher.weights.items())}
    np.savez_compressed(path, accuracy=np.float64(teacher.accuracy), **narrow)


def load(path: Path = PATH) -> Teacher:
    """Read the file; never executes code (no pickle).

    Raises FileNotFoundError without it, and ValueError where it is damaged or holds other weights.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no teacher at {path}; {AGAIN}")
    try:
        with np.load(path, allow_pickle=False) as file:
            found = {name: file[name] for name in file.files}
        accuracy = float(found.pop("accuracy"))
        weights = {name: value.astype(np.float32) for name, value in found.items()}
    except DAMAGE as error:
        what = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} is damaged ({what}); {AGAIN}") from error
    _check(weights, path)
    return Teacher(weights, accuracy)


def _check(weights: dict[str, np.ndarray], path: Path) -> None:
    wanted = parameter_shapes(TASK.model) | state_shapes(TASK.model)
    if {name: value.shape for name, value in weights.items()} != wanted:
        raise ValueError(f"{path} does not hold the weights of {TASK.name}; {AGAIN}")
    if not all(np.isfinite(value.astype(np.float16)).all() for value in weights.values()):
        raise ValueError(f"{path} holds weights that are not finite in float16; {AGAIN}")
