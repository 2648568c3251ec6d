"""What an exported file says of itself: who made it, of which task and weights, and its classes."""

from __future__ import annotations

import json
from importlib import metadata

import numpy as np

from shared.datasets import ALPHABET
from shared.photos import CLASSES
from shared.specs import DatasetSpec, Task
from shared.weights import checksum


def provenance(task: Task, weights: dict[str, np.ndarray]) -> dict[str, str]:
    """Strings by name, for a file's metadata.

    `made_by`, `version`: this project and its version ("unknown" where it is not installed);
    `task`; `weights_sha256`: the checksum of the canonical weights; `class_names`: a JSON list in
    the order of the logits.
    """
    return {
        "made_by": "twinbench",
        "version": version(),
        "task": task.name,
        "weights_sha256": checksum(weights),
        "class_names": json.dumps(class_names(task.dataset)),
    }


def version() -> str:
    """This project's version, "unknown" where it is not installed."""
    try:
        return metadata.version("twinbench")
    except metadata.PackageNotFoundError:
        return "unknown"


def class_names(dataset: DatasetSpec) -> list[str]:
    """The names of a data set's classes in the order of their codes.

    Digits are called by their number; of a text, every character, and "other" for all that have no
    code; of crops, the photo and the part of it. Raises ValueError for photos, whose classes are
    folders.
    """
    if dataset.kind in ("digits", "scenes"):
        return [str(number) for number in range(dataset.num_classes)]
    if dataset.kind == "text":
        return [*ALPHABET, "other"]
    if dataset.kind == "crops":
        return list(CLASSES)
    if dataset.kind == "file":  # its classes have no names that are known here
        return []
    raise ValueError(f"the classes of {dataset.name} are the names of its folders")
