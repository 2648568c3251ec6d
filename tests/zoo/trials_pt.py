"""Trials of the batch-size finder: a function for each PyTorch model of the zoo, by its name."""

from collections.abc import Callable

from tests.zoo.cells_pt import plain_step, sgd
from tests.zoo.pt import ZOO, loss_of


def __getattr__(name: str) -> Callable:
    if name not in ZOO:
        raise AttributeError(name)
    foreign = ZOO[name]

    def trial(batch_size: int) -> Callable:
        model = foreign.build().train()
        # A normalisation needs more than one value to train on.
        x, y = foreign.inputs(batch_size + 1), foreign.labels(batch_size + 1)
        optimizer = sgd(model)
        return lambda: plain_step(model, optimizer, loss_of(foreign), None, x, y)

    return trial
