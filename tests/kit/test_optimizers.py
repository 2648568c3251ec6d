"""Optimizer rules are the same on both sides, on identical given gradients, to 1e-6.

Apart from the models, because rules like Adam's amplify rounding noise. What Keras cannot set as
PyTorch does (where epsilon is added) is bounded here by what `tf_impl.kit.training` says of it.
"""

import numpy as np
import pytest

from tests.kit.parity import check, part
from tests.kit.parity_worker import (
    OPTIMIZER_SPEC,
    OPTIMIZER_STEPS,
    OPTIMIZERS,
    TINY,
    given_gradients,
    optimizer_recipe,
    trained_looking,
)

BAR = 1e-6
KERAS = ("keras3", "tf_keras")
CASES = [(name, scale) for name, scales in OPTIMIZERS.items() for scale in scales]


@pytest.mark.parametrize(("name", "scale"), CASES)
@pytest.mark.parametrize("side", KERAS)
def test_same_rule(side, name, scale):
    key = f"optimizers/{name}-{scale}"
    check(part(side, key), part("pt", key), BAR)


@pytest.mark.parametrize(("name", "scale"), CASES)
def test_the_rule_is_the_published_one(name, scale):
    """PyTorch's weights against the rule written out in float64."""
    expected = {key: rule(name, scale, key)[0] for key in part("pt", f"optimizers/{name}-{scale}")}
    check(part("pt", f"optimizers/{name}-{scale}"), expected, BAR)


@pytest.mark.parametrize("name", ["adamw", "rmsprop"])
@pytest.mark.parametrize("side", KERAS)
def test_epsilon_differs_no_more_than_stated(side, name):
    """Where gradients are so small that epsilon decides: an update by a relative eps / sqrt(v)."""
    ours, theirs = (part(s, f"optimizers/{name}-tiny") for s in (side, "pt"))
    for key, value in theirs.items():
        _, bound = rule(name, TINY, key)
        rounding = 1e-6 * np.abs(value)
        assert np.all(np.abs(ours[key].astype(np.float64) - value) <= bound + rounding), key
    with pytest.raises(AssertionError):
        check(ours, theirs, BAR)  # it does show here


@pytest.mark.parametrize(
    "other",
    ["sgd-momentum", "adamw-eps", "adamw-beta2", "adamw-decay", "rmsprop-eps", "rmsprop-rho"],
)
@pytest.mark.parametrize("side", KERAS)
def test_another_hyperparameter_is_noticed(side, other):
    name = other.partition("-")[0]
    ours = part(side, f"optimizers/other/{other}")
    with pytest.raises(AssertionError, match="differ by more than"):
        check(ours, part("pt", f"optimizers/{name}-{OPTIMIZERS[name][-1]}"), BAR)


def rule(name: str, scale: float, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Weights of tensor `key` after all steps, and how far Keras's epsilon may lead from them."""
    recipe = optimizer_recipe(name)
    w = trained_looking(OPTIMIZER_SPEC)[key].astype(np.float64)
    first, second, bound = np.zeros_like(w), np.zeros_like(w), np.zeros_like(w)
    gradients = given_gradients(name, scale)
    assert len(gradients) == OPTIMIZER_STEPS
    for step, gradient in enumerate(gradients, 1):
        g = gradient[key].astype(np.float64)
        if name == "sgd":
            first = recipe.momentum * first + g
            w = w - recipe.learning_rate * first
            continue
        if name == "adamw":
            w = w * (1 - recipe.learning_rate * recipe.weight_decay)
            first = recipe.beta1 * first + (1 - recipe.beta1) * g
            second = recipe.beta2 * second + (1 - recipe.beta2) * g**2
            direction = first / (1 - recipe.beta1**step)
            root = np.sqrt(second / (1 - recipe.beta2**step))
        else:
            second = recipe.rho * second + (1 - recipe.rho) * g**2
            direction, root = g, np.sqrt(second)
        update = recipe.learning_rate * direction / (root + recipe.eps)
        w, bound = w - update, bound + np.abs(update) * recipe.eps / root
    return w, bound
