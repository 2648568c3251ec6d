"""Checks of data: what a pass costs, and what they find of planted faults."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bench.harness.helpers import checking
from bench.harness.plan import Technique, Work, Workload, warm
from shared import datasets

TECHNIQUE = Technique(
    family="recipes",
    name="data_checks",
    effort="ordinary",
    title="Checks of data",
    variants=(
        warm("plain", "without", role="baseline"),
        warm("checked", "the data checked", checked=True),
    ),
    workloads=(Workload("digits-cnn", "compute", timed=False),),
    notes=(
        "Pass: seconds to go over the training split once, with or without the checks. Found: of "
        "five planted faults (NaN, a value out of range, a label out of range, a rare class, a "
        "sample in both splits).",
    ),
    probes=True,
)


def probe(impl, work: Work, batches) -> dict[str, dict]:
    """Seconds of a pass over the data, and what is found of planted faults."""
    x, y = datasets.load(Path(work.data), "train")
    size = work.task.recipe.accuracy_batch_size
    order = list(datasets.batch_order(len(x), size, seed=0, epoch=0))
    split = [impl.kit.data.to_device(x[rows], y[rows]) for rows in order]

    def call():
        if work.settings:
            impl.recipes.data_checks.check_data(split, num_classes=10)
        else:
            sum(float(y[0]) for _, y in split)

    return checking(work, call, lambda: _faults(impl, x[:600], y[:600]))


def _faults(impl, x: np.ndarray, y: np.ndarray) -> dict[str, str]:
    """What is said of each planted fault; "" where it was not found."""
    checks = impl.recipes.data_checks
    low, high = float(x.min()), float(x.max())

    def said(x: np.ndarray, y: np.ndarray) -> str:
        batch = impl.kit.data.to_device(x, y)
        report = checks.check_data([batch], num_classes=10, low=low, high=high)
        return "; ".join(map(str, report.findings))

    def with_value(value: float) -> np.ndarray:
        planted = x.copy()
        planted[7, 3, 3, 0] = value
        return planted

    out_of_range, few = y.copy(), (y != 3) | (np.cumsum(y == 3) <= 1)
    out_of_range[5] = 10
    twice = [impl.kit.data.to_device(part, y[:300]) for part in (x[:300], x[299:599])]
    return {
        "nan": said(with_value(float("nan")), y),
        "value out of range": said(with_value(high + 1), y),
        "label out of range": said(x, out_of_range),
        "rare class": said(x[few], y[few]),
        "in both splits": "; ".join(map(str, checks.check_splits([twice[0]], [twice[1]]).findings)),
    }
