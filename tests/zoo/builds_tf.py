"""What parallel techniques build in each process: a function for each model, by its name."""

from collections.abc import Callable

from tests.zoo.cells_tf import sgd, without_dropout
from tests.zoo.tf import ZOO, loss_of


def __getattr__(name: str) -> Callable:
    if name not in ZOO:
        raise AttributeError(name)

    def build() -> tuple:
        model = without_dropout(ZOO[name].build())
        return model, sgd(), loss_of(ZOO[name])

    return build
