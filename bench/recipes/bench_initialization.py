"""Initialization: what training reaches from each scheme, and gradients through 30 layers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from bench.harness.helpers import kit_module, once, plain
from bench.harness.plan import TRAINED, Prepared, Technique, Work, Workload, row
from bench.harness.stages import Stages
from shared.specs import Recipe

_row = partial(row, measured=TRAINED, changes="weights")
LAYERS, WIDTH = 30, 64  # of the deep network, which sees digits of 8 x 8
RECIPE = Recipe("sgd", learning_rate=0.02, epochs=10, accuracy_batch_size=64)
TRAIN_SIZE = 1_200

TECHNIQUE = Technique(
    family="recipes",
    name="initialization",
    effort="ordinary",
    title="Initialization",
    variants=(
        _row("default", "the framework's default", role="baseline", scheme="default", gain=1.0),
        _row("he_normal", "He, normal", scheme="he_normal", gain=1.0),
        _row("glorot_uniform", "Glorot, uniform", "ordinary", scheme="glorot_uniform", gain=1.0),
        _row(
            "orthogonal",
            "orthogonal, gain of rectifiers",
            "ordinary",
            scheme="orthogonal",
            gain=2**0.5,
        ),
        _row("he_uniform", "He, uniform", "ordinary", scheme="he_uniform", gain=1.0),
        _row("glorot_normal", "Glorot, normal", "ordinary", scheme="glorot_normal", gain=1.0),
        # For the deep network: digits-cnn has no residuals.
        _row(
            "he_residual",
            "He, gain for 30 residuals",
            measured=replace(TRAINED, accuracy=False),
            scheme="he_normal",
            gain=LAYERS**-0.5,
        ),
    ),
    # Of the few layers of digits-cnn, which has BatchNorm, a default run does not ask it.
    workloads=(
        Workload("digits-cnn", "compute", accuracy=True, trained_from="ordinary", timed=False),
    ),
    differs_by_design=(
        "The defaults differ: PyTorch draws weights and biases from a uniform distribution of "
        "variance 1/(3 fan-in); Keras has Glorot's for weights and zeros for biases. The "
        "frameworks start from different numbers.",
    ),
    notes=(
        f"In addition to digits-cnn, which has BatchNorm: {LAYERS} dense layers of width {WIDTH} "
        "with ReLU, plain and with a shortcut around each, on scikit-learn's digits of 8 x 8. "
        "Shown are the first layer's gradient over that of the output, the number of layers "
        "below a thousandth or above a thousand times of that, and test accuracy after "
        f"{RECIPE.epochs} epochs. Only that network uses the gain for residuals.",
    ),
    probes=True,
    composed_of=("kit.examples", "recipes.gradient_health"),
)


def prepare(impl, work: Work) -> Prepared:
    """The plain step on weights that are drawn anew."""
    row, technique = plain(impl, work), impl.recipes.initialization

    def train(stages: Stages) -> None:
        technique.apply_initialization(row.model, **work.settings, seed=stages.seed)
        stages.watch(row.step, row.predict)

    return replace(row, train=train)


def took_effect(impl, work: Work, prepared: Prepared, batch) -> tuple[dict, str | None]:
    """The weights are others."""
    impl.recipes.initialization.apply_initialization(prepared.model, **work.settings)
    weights = impl.kit.models.export_weights(prepared.model)
    apart = max(float(np.abs(weights[name] - v).max()) for name, v in work.weights.items())
    return {"largest_difference": apart}, None if apart else "the weights are as they were"


def probe(impl, work: Work, batches) -> dict[str, dict]:
    """What the gradient is in a deep network, plain and residual, and what it learns."""
    metrics = {}
    for name, residual in (("plain", False), ("residual", True)):
        ratio, unhealthy, accuracy = _deep(impl, work, residual)
        metrics[f"{name}_gradient"] = once("", ratio)
        metrics[f"{name}_unhealthy"] = once("layers", unhealthy)
        metrics[f"{name}_accuracy"] = once("%", accuracy)
    return metrics


def _deep(impl, work: Work, residual: bool) -> tuple[float, int, float]:
    """First layer's gradient over the output's, unhealthy layers, accuracy after training."""
    health, training = impl.recipes.gradient_health, impl.kit.training
    network = kit_module(impl, "examples").deep_network(
        layers=LAYERS, width=WIDTH, residual=residual
    )
    impl.recipes.initialization.apply_initialization(network, **work.settings)
    x, y = impl.kit.data.to_device(*_digits())
    size = RECIPE.accuracy_batch_size
    norms = health.gradient_norms(network, training.cross_entropy, x[:size], y[:size])
    ratio = next(iter(norms.values())) / norms["output"]
    optimizer = training.make_optimizer(network, RECIPE)
    step = training.make_train_step(network, optimizer, training.cross_entropy)
    train = {"batch_size": size, "epochs": RECIPE.epochs, "seed": 0}
    training.fit(step, x[:TRAIN_SIZE], y[:TRAIN_SIZE], **train)
    accuracy = training.evaluate(
        training.make_predict(network),
        x[TRAIN_SIZE:],
        y[TRAIN_SIZE:],
        metric="accuracy",
        batch_size=len(x) - TRAIN_SIZE,
    )
    return ratio, len(health.find_unhealthy(norms)), accuracy


def _digits() -> tuple[np.ndarray, np.ndarray]:
    """1,797 digits of 64 pixels, standardised, in an order of their own."""
    from sklearn.datasets import load_digits  # imports for half a second, which most runs save

    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    x = (x - x.mean()) / x.std()
    return x[order].astype(np.float32), y[order].astype(np.int64)
