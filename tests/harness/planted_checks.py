"""A technique that keeps what its baseline has, and variants of it that lose something."""

from dataclasses import replace
from itertools import count

import numpy as np

from bench.harness.helpers import plain


def prepare(impl, work):
    """The plain step and predictions, or what a variant makes of them."""
    row = plain(impl, work)
    if work.variant == "every_fourth_update":
        calls, losses = count(), []

        def step(x, y):
            if next(calls) % 4 == 0:
                losses.append(row.step(x, y))
            return losses[-1]

        return replace(row, step=step)
    if work.variant in ("coarse", "not_finite"):
        scale = np.nan if work.variant == "not_finite" else 1.0

        def predict(x):
            return np.round(np.asarray(row.predict(x)) / 4) * 4 * scale

        return replace(row, predict=predict)
    return row
