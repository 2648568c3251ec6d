"""What float64 tells of a train step: `python -m tests.zoo.exactness_worker tf`."""

from __future__ import annotations

from functools import partial

from tests import workers
from tests.zoo.cells import Cell
from tests.zoo.cells_tf import Applied, plain_step, sgd
from tests.zoo.tf import ZOO

MODEL = "two_inputs"
FASTER = 1.0001  # times the learning rate: updates that are 1e-4 off


def tried() -> dict:
    """The plain step, and one with another learning rate, each in float64."""
    exact, cell = Applied(ZOO[MODEL]).in_float64(), Cell()

    def steps(learning_rate: float):
        model = exact.model()
        optimizer = sgd()
        optimizer.learning_rate = learning_rate
        step = partial(plain_step, model, optimizer, exact.loss_fn)
        exact.trains(cell, step, model, exact.plain())

    for name, factor in {"plain": 1.0, "faster": FASTER}.items():
        cell.attempt(name, partial(steps, 0.01 * factor), exact.unchanged)
    return cell.variants


if __name__ == "__main__":
    workers.report([tried])
