"""Norms are those of a backward pass, and gradients are told healthy or not."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import pytest

from bench.recipes import bench_gradient_health
from tests import workers
from tests.recipes.samples import same

FRAMEWORKS = ("pt", *workers.keras())
MODELS = "recipes"
CODES, LABELS = np.arange(12), np.arange(12) % 7


def test_norms_are_those_of_a_plain_backward_pass(kit, technique, models):
    model, loss_fn = models.language(dropout=0.0), kit.training.cross_entropy
    x, y = models.tensor(CODES), models.tensor(LABELS)
    found = technique.gradient_norms(model, loss_fn, x, y)
    made = models.output(model, CODES, training=True)
    _, at_output = models.gradient_at(lambda z: loss_fn(z, y), made)
    squares = {"output": np.square(at_output).sum()}
    _, gradients = models.gradients(model, lambda: loss_fn(models.trained_output(model, x), y))
    for name, gradient in gradients.items():
        layer = name.replace("/", ".").rpartition(".")[0] or name
        squares[layer] = squares.get(layer, 0.0) + np.square(gradient).sum()
    assert len(squares) >= 6
    norms = {name.replace("/", "."): norm for name, norm in found.items()}
    assert norms == pytest.approx({n: square**0.5 for n, square in squares.items()}, rel=1e-4)


def test_nothing_changes(kit, technique, models):
    """Not even what a layer writes to its own kernel in training."""
    for model, x in (
        (models.language(), CODES),
        (models.with_spectral_norm(10), np.ones((12, 8), np.float32)),
    ):
        before, given = models.state(model), (models.tensor(x), models.tensor(LABELS))
        technique.gradient_norms(model, kit.training.cross_entropy, *given)
        with suppress(ZeroDivisionError):
            technique.gradient_norms(model, lambda output, y: 1 / 0, *given)
        assert same(before, models.state(model))


def test_a_layer_called_output_is_not_the_model_s_output(kit, technique, models):
    x, y = models.tensor(np.ones((4, 3), np.float32)), models.tensor(LABELS[:4] % 4)
    found = []
    for last in ("last", "output"):
        model = models.ending_in(last)
        models.initialization.apply_initialization(model)
        found.append(technique.gradient_norms(model, kit.training.cross_entropy, x, y))
    assert list(found[1].values()) == pytest.approx(list(found[0].values()))
    assert list(found[1])[-1] == "output"


@dataclass
class Held:
    """An output that frameworks do not know as a container."""

    logits: object


@pytest.mark.only("pt")
def test_the_output_s_norm_is_known_within_a_dataclass(kit, technique, models):
    model, loss_fn = models.linear(np.eye(3, 2, dtype=np.float32)), kit.training.cross_entropy
    given = models.tensor(np.ones((2, 3), np.float32)), models.tensor([0, 1])
    outer = models.behind(model, lambda out: Held({"all": Held(out)}))
    plain = technique.gradient_norms(model, loss_fn, *given)
    held = technique.gradient_norms(
        outer, lambda out, y: loss_fn(out.logits["all"].logits, y), *given
    )
    assert plain["output"] == held["output"] > 0


def test_twins_have_the_same_norms(kit, technique, models, agrees):
    random = np.random.default_rng(4)
    kernels = [random.normal(size=size) / 3 for size in [(16, 16)] * 4 + [(16, 10)]]
    x, y = random.normal(size=(8, 16)).astype(np.float32), random.integers(0, 10, 8)
    for residual in (False, True):
        model = models.deep_network(layers=4, width=16, residual=residual)
        models.write_kernels(model, [kernel.astype(np.float32) for kernel in kernels])
        given = kit.training.cross_entropy, models.tensor(x), models.tensor(y)
        norms = technique.gradient_norms(model, *given)
        agrees(f"residual {residual}", {"norms": list(norms.values())}, 1e-4)


@pytest.fixture(scope="module")
def thirty_layers(models):
    return {each: models.deep_network(residual=each) for each in (False, True)}


@pytest.mark.parametrize(
    ("residual", "scheme", "gain", "said"),
    [
        (False, "default", 1.0, {"vanishing"}),
        (False, "glorot_normal", 1.0, {"vanishing"}),
        (False, "he_normal", 1.0, set()),
        (False, "orthogonal", 2**0.5, set()),
        (False, "he_normal", 2.0, {"exploding"}),
        (False, "he_normal", 30**-0.5, {"vanishing"}),
        # A sum of 30 branches grows, whatever keeps one of them: only small ones are passed by.
        (True, "default", 1.0, {"exploding"}),
        (True, "glorot_normal", 1.0, {"exploding"}),
        (True, "he_normal", 1.0, {"exploding"}),
        (True, "he_normal", 30**-0.5, set()),
    ],
)
def test_thirty_layers_are_told_healthy_or_not(
    kit, technique, models, thirty_layers, residual, scheme, gain, said
):
    random, model = np.random.default_rng(5), thirty_layers[residual]
    x = models.tensor(random.normal(size=(64, 64)).astype(np.float32))
    y = models.tensor(random.integers(0, 10, 64))
    models.initialization.apply_initialization(model, scheme=scheme, gain=gain)
    norms = technique.gradient_norms(model, kit.training.cross_entropy, x, y)
    unhealthy = technique.find_unhealthy(norms)
    assert {reason.partition(":")[0] for reason in unhealthy.values()} == said


def test_each_rule_has_its_word(technique):
    given = {"a": 1e-9, "b": 1.0, "c": 1e6, "d": 0.0, "e": float("nan"), "output": 1.0}
    found = technique.find_unhealthy(given)
    words = {"a": "vanishing", "c": "exploding", "d": "no gradient", "e": "no finite gradient"}
    assert found.keys() == words.keys()
    assert all(found[name].startswith(word) for name, word in words.items())
    saturated = technique.find_unhealthy({"a": 1e-3, "output": 0.0})  # a penalty's alone
    assert saturated["output"].startswith("no gradient")
    assert saturated["a"].startswith("exploding")


def test_every_fault_that_the_benchmark_plants_is_found(impl):
    found = bench_gradient_health._faults(impl)
    assert all(found[fault].startswith(fault) for fault in ("vanishing", "exploding"))
