"""Reversal is exact, its strength follows the formula, gradients are those of plain code."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import numpy as np
import pytest

from shared.specs import BottleneckSpec, GPTSpec, ResNetSpec
from shared.weights import init_weights
from tests import workers
from tests.adaptation.samples import RECIPE, SPEC, STEPS, batches, model_of, step_of, weights_of
from tests.frameworks import apart

FRAMEWORKS = ("pt", *workers.keras())
DESCENT = replace(RECIPE, learning_rate=1.0, momentum=0.0)
PT, TF = pytest.mark.only("pt"), pytest.mark.only("tf", "tf_keras")


@pytest.fixture
def adversary(kit, technique):
    """`adversary(**settings)`: a new model, its domain head and the adversarial model of both."""

    def make(steps=STEPS, strength=1.0):
        model, parts = model_of(kit)
        head = technique.make_domain_head(width=6, hidden=5, seed=2)
        both = technique.AdversarialModel(*parts, head, steps=steps, strength=strength)
        return model, head, both

    return make


@pytest.fixture
def loss_fn(kit, technique):
    return technique.adversarial_loss(kit.training.cross_entropy)


def strength(progress):
    return 2 / (1 + np.exp(-10 * np.asarray(progress))) - 1


@pytest.mark.parametrize("factor", [0.0, 0.375, 2.0])  # sums of powers of two: no rounding
def test_the_gradient_is_reversed_exactly_and_the_value_stays(technique, models, factor):
    x, seen = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32), []
    given = factor if factor == 2.0 else models.scalar(factor)  # a number is as good as a tensor

    def reversed_(value):
        seen.append(technique.reverse_gradient(value, given))
        return models.total(3 * seen[0] * seen[0])

    _, (plain,) = models.gradients_at(lambda value: models.total(3 * value * value), x)
    _, (gradient,) = models.gradients_at(reversed_, x)
    assert np.array_equal(models.numpy(seen[0]), x)
    assert np.array_equal(gradient, np.float32(-factor) * plain)


def test_the_gradient_of_bfloat16_is_reversed(technique, models):
    x = models.cast(np.ones((4, 3), np.float32), "bfloat16")
    _, (gradient,) = models.gradients_at(
        lambda value: models.total(technique.reverse_gradient(value, models.scalar(0.5))), x
    )
    assert np.array_equal(gradient, np.full((4, 3), -0.5))


def test_the_strength_follows_the_paper_and_counts_training_passes_alone(
    kit, technique, models, adversary, loss_fn, tmp_path
):
    """In each of six passes over which it rises in four, and in another that takes up its state."""
    progress = np.linspace(0, 1, 11).astype(np.float32)
    found = [float(technique.reversal_strength(models.scalar(part))) for part in progress]
    assert np.allclose(found, strength(progress), rtol=1e-5, atol=1e-7)
    _, _, both = adversary(steps=4, strength=0.5)
    step, predict = step_of(kit, both, loss_fn), kit.training.make_predict(both)
    for x, y in batches(kit, 6):
        found.append(float(both.current_strength()))
        step(x, y)
        predict(x)
    assert np.allclose(found[11:], 0.5 * strength([0, 0.25, 0.5, 0.75, 1, 1]), rtol=1e-5)
    other = adversary(steps=4, strength=0.5)[2]
    models.restore(other, both, tmp_path)
    assert float(other.current_strength()) == pytest.approx(0.5 * strength(1), rel=1e-5)


def test_what_puts_a_model_back_puts_its_count_of_passes_back(
    kit, models, adversary, loss_fn, tmp_path
):
    _, _, both = adversary(steps=4)
    optimizer = kit.training.make_optimizer(both, RECIPE)
    step = kit.training.make_train_step(both, optimizer, loss_fn)
    stream = batches(kit, 3)
    step(*stream[0])
    before = 1.0, float(both.current_strength())
    assert before[1] > 0
    models.gradient_health.gradient_norms(both, loss_fn, *stream[1])
    assert (float(both.passes), float(both.current_strength())) == before
    models.nonfinite.find_nonfinite(both, loss_fn, *stream[1])
    assert (float(both.passes), float(both.current_strength())) == before
    find = models.learning_rate_finder.find_learning_rate
    with contextlib.suppress(ValueError):  # a loss that never falls: all is put back then, too
        find(both, optimizer, step, stream, steps=20, window=3)
    assert (float(both.passes), float(both.current_strength())) == before
    models.checkpoints.save_checkpoint(tmp_path / "saved", both, None, {})
    other = adversary(steps=4)[2]
    models.checkpoints.load_checkpoint(tmp_path / "saved", other)
    assert (float(other.passes), float(other.current_strength())) == before


def test_gradients_are_those_of_two_losses_of_which_the_features_get_one_reversed(
    kit, models, adversary, loss_fn
):
    """What plain descent at rate 1 moves in the second pass; beside plain framework code."""
    (x, y), moved = batches(kit, 1)[0], []
    model, head, _ = adversary()
    loss, labels, domains, of_head = models.plain_gradients(model, head, x, y)
    assert not {"head.kernel", "head.bias"} & domains.keys()
    for most in (0.0, 1.0):
        model, head, both = adversary(strength=most)
        kit.training.make_predict(both)(x)  # counts nothing
        models.count_one_pass(both)
        factor = float(both.current_strength())
        assert factor == pytest.approx(most * strength(0.1), rel=1e-5)
        before = weights_of(kit, model), models.weights(head)
        assert float(step_of(kit, both, loss_fn, DESCENT)(x, y)) == pytest.approx(loss, rel=1e-5)
        after = weights_of(kit, model), models.weights(head)
        moved.append({name: before[0][name] - after[0][name] for name in before[0]})
        for name, gradient in labels.items():  # a weight less its update loses digits
            assert apart(moved[-1][name], gradient - factor * domains.get(name, 0.0)) < 1e-4
        for one, other, gradient in zip(before[1], after[1], of_head, strict=True):
            assert apart(one - other, gradient) < 1e-4
    # Without the reversal the first convolution would go elsewhere.
    assert apart(moved[0]["conv0.kernel"], moved[1]["conv0.kernel"]) > 1e-2


def test_ten_steps_of_twins_agree(kit, models, adversary, loss_fn, agrees):
    model, head, both = adversary()
    step = step_of(kit, both, loss_fn)
    losses = [float(step(x, y)) for x, y in batches(kit, STEPS)]
    domain = {f"domain {number}": value for number, value in enumerate(models.weights(head))}
    agrees("ten steps", {"losses": losses, **weights_of(kit, model), **domain}, 1e-5)


def test_features_of_two_inputs_and_in_a_graph(technique, models):
    """In each structure that the framework's models take."""
    both, pairs, wanted = models.of_two_inputs(technique)
    for inputs in pairs:
        logits, source, target = models.call(both, inputs)
        assert np.allclose(models.numpy(logits), wanted, rtol=1e-5, atol=1e-6)
        assert len(source) == len(target) == 5
    eager, graph = models.eager_and_graph(technique, both, pairs[0])
    assert np.allclose(eager, graph, rtol=1e-5, atol=1e-8)
    assert np.abs(eager).sum() > 0


@pytest.mark.parametrize(
    "spec",
    [
        SPEC,
        ResNetSpec((8, 8, 2), 1, (4, 6), num_classes=3, large_stem=True),
        BottleneckSpec((16, 16, 2), (1, 1), (4, 6), num_classes=3),
        GPTSpec(vocabulary=9, sequence_length=4, width=8, heads=2, layers=1),
    ],
    ids=lambda spec: spec.family,
)
def test_a_model_of_the_kit_is_its_features_and_its_head(kit, models, spec):
    model, random = kit.models.build(spec, init_weights(spec, seed=1)), np.random.default_rng(0)
    if spec.family == "gpt":
        x = random.integers(0, 9, (3, 4))
    else:
        x = random.normal(size=(3, *spec.input_shape)).astype(np.float32)
    x, _ = kit.data.to_device(x, np.zeros(3))
    features, head = kit.models.split_head(model)
    kit.models.import_weights(model, init_weights(spec, seed=2))
    ours = models.numpy(head(models.tensor(kit.training.make_predict(features)(x))))
    theirs = models.numpy(kit.training.make_predict(model)(x))
    assert np.allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    assert np.abs(theirs).sum() > 0


# Bad input ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [{"steps": 0}, {"strength": -0.1}, {"gamma": 0.0}, {"strength": float("nan")}],
)
def test_bad_settings_are_refused(kit, technique, settings):
    _, parts = model_of(kit)
    head = technique.make_domain_head(width=6)
    (name,) = settings
    with pytest.raises(ValueError, match=name):
        technique.AdversarialModel(*parts, head, **{"steps": 1} | settings)


@PT
def test_pt_domains_that_do_not_go_together_are_refused(technique, models):
    head, domain = models.nn.Linear(3, 2), technique.make_domain_head(width=3)
    models.check_forms(lambda f: technique.AdversarialModel(f, head, domain, steps=1))


def test_features_need_a_row_a_sample(technique, models):
    features, head = models.without_rows()
    both = technique.AdversarialModel(features, head, technique.make_domain_head(width=3), steps=1)
    with pytest.raises(ValueError, match="features need a row a sample"):
        models.run_in_a_graph(both, np.zeros((2, 4, 2, 3), np.float32))
