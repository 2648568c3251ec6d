"""Checks of data, without a framework: faults are counted, classes and hashes are compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

from shared.findings import Report, is_one, many


def check_batch(named: list, num_classes: int) -> int:
    """Return how many samples a batch has.

    named: (name, leaf) of x, y and what else there is; a number by itself is the whole batch's.

    Raises ValueError where `num_classes` is given for a batch without labels, where neither x nor
    y has a tensor, and where they have different lengths.
    """
    if num_classes and not any(name.startswith("y") for name, _ in named):
        raise ValueError(
            "num_classes is given, but a batch has no labels: each must be (x, y), or more"
        )
    lengths = {name: len(leaf) for name, leaf in named if not is_one(leaf)}
    if not lengths:
        raise ValueError("a batch is empty: neither x nor y has a tensor")
    if len(set(lengths.values())) > 1:
        raise ValueError(f"parts of a batch have different lengths: {lengths}")
    return next(iter(lengths.values()))


def check_seen(samples: int) -> None:
    """Raise ValueError where the data had no sample."""
    if not samples:
        raise ValueError("there is no batch to check")


class Tally:
    """Faults by check and place: how many values, in how many samples, and the first.

    place: name and number of the batch that is looked at.
    """

    def __init__(self) -> None:
        self.found: dict[tuple[str, str], list] = {}
        self.place = ("", 0)

    def add(self, check: str, bad: np.ndarray, what: str = "") -> None:
        """Count a fault. bad: a mask of the batch's shape; what: of the first batch with it."""
        if not bad.any():
            return
        name, number = self.place
        rows = bad.reshape(len(bad), -1).any(1)
        first = f"first in batch {number}, sample {int(rows.argmax())}{what}"
        entry = self.found.setdefault((check, name), [0, 0, first])
        entry[0] += int(bad.sum())
        entry[1] += int(rows.sum())

    def write(self, report: Report) -> None:
        """Add the faults to a report."""
        for (check, name), (values, samples, first) in self.found.items():
            report.add(
                check, name, f"{many(values, 'value')} in {many(samples, 'sample')}, {first}"
            )


def look_at_balance(
    report: Report, name: str, counts: Counter, num_classes: int, imbalance: float
) -> None:
    """Report classes without samples, and the most frequent one beside the rarest."""
    if not counts:
        return
    absent = [str(label) for label in range(num_classes) if label not in counts]
    if absent:
        some = f"{', '.join(absent[:5])}{', ...' if absent[5:] else ''}"
        report.add("balance", name, f"no sample of class {some}")
    rare, frequent = min(counts, key=counts.get), max(counts, key=counts.get)
    if counts[frequent] > imbalance * counts[rare]:
        most = many(counts[frequent], "sample")
        report.add("balance", name, f"class {frequent} has {most}, class {rare} {counts[rare]}")


def compare_splits(first: Iterable[bytes], second: Iterable[bytes]) -> Report:
    """Look for samples that are in both, by their hashes."""
    places: dict[bytes, int] = {}
    for number, digest in enumerate(first):
        places.setdefault(digest, number)
    twice, total = [], 0
    for digest in second:
        if digest in places:
            twice.append((total, places[digest]))
        total += 1
    report = Report(f"{total} samples beside {len(places)} different ones")
    if twice:
        some = ", ".join(f"{one} is its {other}" for one, other in twice[:3])
        text = f"{many(len(twice), 'sample')} of the second also in the first: {some}"
        report.add("duplicate", "x", text + (", ..." if twice[3:] else ""))
    return report
