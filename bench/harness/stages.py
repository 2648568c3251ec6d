"""Rows that start from a trained model: the dense one to its plateau, then each in its own way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from bench.harness.plan import Prepared, Work


def train_on(
    impl, work: Work, prepare: Callable[..., Prepared], *, epochs: int
) -> Callable[[Callable], Callable]:
    """Return a `Prepared.train` of two stages, the same for a technique's baseline and its rows.

    The baseline, which `prepare(impl, work)` makes where there are no settings, trains for the
    recipe's epochs. From its weights `prepare` makes the row, with an optimizer that starts anew,
    and that trains for `epochs` more: every row takes as many steps at the same learning rate.
    """

    def train(fit: Callable) -> Callable:
        plain = prepare(impl, replace(work, settings={}))
        fit(plain.step)
        trained = impl.kit.models.export_weights(plain.model)
        row = prepare(impl, replace(work, weights=trained))
        fit(row.step, epochs)
        return row.predict

    return train
