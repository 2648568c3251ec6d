"""One framework's share of the tests of gradient health; `worker.py` runs it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from bench.recipes import bench_gradient_health
from tests import workers
from tests.recipes import initialization_scenarios as drawn
from tests.recipes.initialization_scenarios import (
    FRAMEWORK,
    ORTHOGONAL,
    codes,
    cross_entropy,
    everything,
    labels,
    language,
    random_state,
    tensor,
)

impl = workers.implementation(FRAMEWORK, "recipes.gradient_health", "kit.examples")
initialization, health_of = drawn.initialization, impl.recipes.gradient_health

if FRAMEWORK == "pt":
    import torch
    from torch import nn

    def plain_norms(model, x, y):
        """By a plain backward pass, layer by layer."""
        state = random_state()
        output = model(x)
        output.retain_grad()
        cross_entropy(output, y).backward()
        torch.set_rng_state(torch.tensor(state))
        found = {}
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                layer = name.rpartition(".")[0]
                found[layer] = found.get(layer, 0.0) + float(parameter.grad.square().sum())
        found["output"] = float(output.grad.square().sum())
        model.zero_grad()
        return {name: square**0.5 for name, square in found.items()}

    def write_kernels(model, kernels):
        with torch.no_grad():
            for layer, kernel in zip([*model.layers, model.head], kernels, strict=True):
                layer.weight.copy_(torch.tensor(kernel.T))
                layer.bias.zero_()

else:
    import tensorflow as tf

    keras = tf.keras

    def plain_norms(model, x, y):
        """By a plain tape, layer by layer."""
        kept = everything(model)
        with tf.GradientTape() as tape:
            output = model(x, training=True)
            loss = cross_entropy(output, y)
        variables = model.trainable_variables
        found = {}
        for variable, gradient in zip(
            [*variables, None], tape.gradient(loss, [*variables, output]), strict=True
        ):
            layer = "output"
            if variable is not None:
                layer = drawn.variable_name(variable).rpartition("/")[0]
            square = float(tf.reduce_sum(tf.convert_to_tensor(gradient) ** 2))
            found[layer] = found.get(layer, 0.0) + square
        for variable, value in zip(model.variables, kept, strict=True):
            variable.assign(value)
        return {name: square**0.5 for name, square in found.items()}

    def write_kernels(model, kernels):
        dense = [layer for layer in model.layers if layer.weights]
        for layer, kernel in zip(dense, kernels, strict=True):
            layer.set_weights([kernel, np.zeros(kernel.shape[1])])


def norms():
    """Those of a plain backward pass; and what else changed."""
    model = language()
    wanted = plain_norms(model, codes(), labels())
    before = everything(model), random_state()
    found = health_of.gradient_norms(model, cross_entropy, codes(), labels())
    with suppress(ZeroDivisionError):
        health_of.gradient_norms(model, lambda output, y: 1 / 0, codes(), labels())
    same = all(map(np.array_equal, before[0], everything(model)))
    gradients = FRAMEWORK == "pt" and any(p.grad is not None for p in model.parameters())
    return {
        "wanted": wanted,
        "found": found,
        "as before": same and np.array_equal(before[1], random_state()) and not gradients,
    }


def normalized_kernel():
    """Whether norms leave a kernel as it was that its layer writes to, in training."""
    if FRAMEWORK == "pt":
        return None  # there a buffer is written to
    layers = keras.layers
    spectral = layers.SpectralNormalization(layers.Dense(10, kernel_initializer="ones"))
    model = keras.Sequential([keras.Input((3,)), spectral])
    before = everything(model)
    x = tensor(np.ones((4, 3), np.float32))
    health_of.gradient_norms(model, cross_entropy, x, labels()[:4])
    return all(map(np.array_equal, before, everything(model)))


def named_output():
    """Norms of a model whose last layer is called "last", and of one where it is "output"."""
    found = []
    for last in ("last", "output"):
        if FRAMEWORK == "pt":
            parts = {"first": nn.Linear(3, 3), last: nn.Linear(3, 4)}
            model = nn.Sequential()
            for name, layer in parts.items():
                model.add_module(name, layer)
        else:
            parts = [keras.layers.Dense(n, name=name) for n, name in ((3, "first"), (4, last))]
            model = keras.Sequential([keras.Input((3,)), *parts])
        initialization.apply_initialization(model)
        x = np.ones((4, 3), np.float32)
        found.append(health_of.gradient_norms(model, cross_entropy, tensor(x), labels()[:4]))
    return found


@dataclass
class Held:
    """An output that frameworks do not know as a container."""

    logits: object


def held():
    """The norm at an output in a dataclass, and at the same one plain; only PyTorch takes it."""
    if FRAMEWORK != "pt":
        return None
    model, y = nn.Linear(3, 2), torch.tensor([0, 1])
    outer = nn.Sequential(model)
    outer.forward = lambda x: Held({"all": Held(model(x))})
    norms = [
        health_of.gradient_norms(model, cross_entropy, torch.ones(2, 3), y),
        health_of.gradient_norms(
            outer, lambda out, y: cross_entropy(out.logits["all"].logits, y), torch.ones(2, 3), y
        ),
    ]
    return [each["output"] for each in norms]


def twins():
    """Norms of the same drawn kernels on the same batch."""
    random = np.random.default_rng(4)
    sizes = [(16, 16)] * 4 + [(16, 10)]
    kernels = [(random.normal(size=s) / 3).astype(np.float32) for s in sizes]
    x, y = random.normal(size=(8, 16)).astype(np.float32), random.integers(0, 10, 8)
    found = {}
    for residual in (False, True):
        model = impl.kit.examples.deep_network(layers=4, width=16, residual=residual)
        write_kernels(model, kernels)
        norms = health_of.gradient_norms(model, cross_entropy, tensor(x), tensor(y))
        found[str(residual)] = list(norms.values())
    return found


def health():
    """Unhealthy layers of 30, plain and with residuals, by scheme."""
    random = np.random.default_rng(5)
    x = tensor(random.normal(size=(64, 64)).astype(np.float32))
    y = tensor(random.integers(0, 10, 64))
    models = {each: impl.kit.examples.deep_network(residual=each) for each in (False, True)}
    found = {}
    for case, settings in {
        "default": {"scheme": "default"},
        "glorot": {"scheme": "glorot_normal"},
        "he": {"scheme": "he_normal"},
        "orthogonal": {"scheme": ORTHOGONAL, "gain": 2**0.5},
        "he, doubled": {"scheme": "he_normal", "gain": 2.0},
        "he, small": {"scheme": "he_normal", "gain": 30**-0.5},
    }.items():
        for residual, model in models.items():
            initialization.apply_initialization(model, **settings)
            norms = health_of.gradient_norms(model, cross_entropy, x, y)
            said = health_of.find_unhealthy(norms)
            found[f"{case}{', residual' if residual else ''}"] = {
                "said": sorted({reason.partition(":")[0] for reason in said.values()}),
                "count": len(said),
                "first": next(iter(norms.values())) / norms["output"],
            }
    return found


def rules():
    """What is said of norms that are given."""
    given = {"a": 1e-9, "b": 1.0, "c": 1e6, "d": 0.0, "e": float("nan"), "output": 1.0}
    saturated = {"a": 1e-3, "output": 0.0}  # a penalty's gradient alone
    return {
        "given": health_of.find_unhealthy(given),
        "saturated": health_of.find_unhealthy(saturated),
    }


def faults():
    """What the benchmark plants and says of it, by fault."""
    return bench_gradient_health._faults(impl)


SCENARIOS = (norms, normalized_kernel, named_output, held, twins, health, rules, faults)
