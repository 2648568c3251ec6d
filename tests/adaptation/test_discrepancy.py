"""The discrepancy is that of NumPy, its gradient that of finite differences; it draws together."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from tests import workers
from tests.adaptation.samples import STEPS, batches, model_of, step_of, weights_of
from tests.frameworks import apart

FRAMEWORKS = ("pt", *workers.keras())
MODELS = "adversarial"
WIDTHS = {"several": (0.25, 0.5, 1.0, 2.0, 4.0), "one": (0.5,)}
RANDOM = np.random.default_rng(1)
# Features of two domains, far from 0, so that rounding would show.
SOURCE = (RANDOM.normal(size=(6, 4)) + 30).astype(np.float32)
TARGET = (1.5 * RANDOM.normal(size=(9, 4)) + 31).astype(np.float32)


def squared(a, b):
    return np.square(a - b).sum()


def mean_squared(source, target):
    return np.mean([squared(a, b) for a, b in permutations([*source, *target], 2)])


def mmd(source, target, widths, scale):
    """Pair by pair, as the formula has it."""

    def kernel(a, b):
        return np.mean([np.exp(-squared(a, b) / (width * scale)) for width in widths])

    def within(rows):
        return np.mean([kernel(a, b) for a, b in permutations(rows, 2)])

    across = np.mean([kernel(a, b) for a in source for b in target])
    return within(source) + within(target) - 2 * across


@pytest.mark.parametrize("name", WIDTHS)
def test_the_value_is_that_of_numpy_and_the_gradient_that_of_finite_differences(
    technique, models, agrees, name
):
    """Of a scale that is constant. Twins agree in both."""
    settings = {} if name == "several" else {"bandwidths": WIDTHS[name]}
    value, gradients = models.gradients_at(
        lambda source, target: technique.mmd(source, target, **settings), SOURCE, TARGET
    )
    parts = SOURCE.astype(float), TARGET.astype(float)
    scale, step = mean_squared(*parts), 1e-4
    wanted = mmd(*parts, WIDTHS[name], scale)
    assert wanted > 0.05
    assert float(value) == pytest.approx(wanted, rel=1e-4)
    for place, gradient in enumerate(gradients):
        differences = np.zeros_like(parts[place])
        for index in np.ndindex(differences.shape):
            for sign in (1, -1):
                moved = [part.copy() for part in parts]
                moved[place][index] += sign * step
                differences[index] += sign * mmd(*moved, WIDTHS[name], scale) / (2 * step)
        assert apart(gradient, differences) < 1e-4
    source, target = gradients
    agrees(name, {"value": float(value), "source": source, "target": target}, 1e-5)


def test_features_that_are_all_the_same_have_none(technique, models):
    same = np.ones((4, 3), np.float32)
    value, gradients = models.gradients_at(technique.mmd, same, same)
    assert value == 0
    assert np.all(np.isfinite(gradients))


def test_features_may_be_maps(technique, models):
    maps, _ = models.gradients_at(technique.mmd, *(SOURCE + n for n in (0, 1)))
    shaped = [(SOURCE + n).reshape(6, 2, 2) for n in (0, 1)]
    assert models.gradients_at(technique.mmd, *shaped)[0] == pytest.approx(maps, rel=1e-6)


def test_it_is_zero_on_average_for_domains_that_are_alike(technique, models):
    random = np.random.default_rng(2)
    pairs = random.normal(size=(200, 2, 8, 3)).astype(np.float32)
    drawn = [float(technique.mmd(*map(models.tensor, pair))) for pair in pairs]
    assert abs(np.mean(drawn)) < 3 * np.std(drawn) / len(drawn) ** 0.5 < 0.03


def test_low_precision_is_computed_in_float32(technique, models):
    low = [models.cast(part, "bfloat16") for part in (SOURCE, TARGET)]
    found = technique.mmd(*low)
    wanted = technique.mmd(*(models.cast(part, "float32") for part in low))
    assert "float32" in str(found.dtype)
    assert float(found) == float(wanted)


@pytest.fixture
def train(kit, technique):
    """`train(weight, steps)`: the model, the aligned one of it, and the losses."""

    def run(weight, steps):
        model, parts = model_of(kit)
        aligned = technique.AlignedModel(*parts)
        loss_fn = technique.discrepancy_loss(kit.training.cross_entropy, weight=weight)
        step = step_of(kit, aligned, loss_fn)
        return model, aligned, [float(step(x, y)) for x, y in batches(kit, steps)]

    return run


def test_ten_steps_of_twins_agree_and_without_weight_it_is_not_there(kit, train, agrees):
    weights = []
    for weight in (1.0, 0.0):
        model, _, losses = train(weight, STEPS)
        weights.append(weights_of(kit, model))
        agrees(f"weight {weight}", {"losses": losses, **weights[-1]}, 1e-5)
    assert apart(*(found["conv0.kernel"] for found in weights)) > 1e-3


def test_features_come_together(kit, technique, train):
    x, _ = batches(kit, 1, size=200)[0]
    without, with_it = (kit.training.make_predict(train(w, 40)[1])(x)[1:] for w in (0.0, 1.0))
    assert float(technique.mmd(*with_it)) < float(technique.mmd(*without)) / 2


# Bad input ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t, x, y, loss: t.mmd(x, y, bandwidths=()), "bandwidths"),
        (lambda t, x, y, loss: t.mmd(x, y, bandwidths=(1.0, 0.0)), "bandwidths"),
        (lambda t, x, y, loss: t.mmd(x[:1], y), "needs two samples"),
        (lambda t, x, y, loss: t.discrepancy_loss(loss, weight=-1.0), "weight"),
        (lambda t, x, y, loss: t.discrepancy_loss(loss, bandwidths=(np.inf,)), "bandwidths"),
    ],
)
def test_a_refusal_says_why(kit, technique, models, call, message):
    x, y = models.tensor(SOURCE), models.tensor(TARGET)
    with pytest.raises(ValueError, match=message):
        call(technique, x, y, kit.training.cross_entropy)


@pytest.mark.only("tf", "tf_keras")
def test_tf_a_domain_of_one_sample_is_refused_in_a_graph_too(technique, models):
    """Which learns of it as it runs."""
    tf = models.tf
    program = tf.function(technique.mmd, input_signature=[tf.TensorSpec((None, 4))] * 2)
    assert np.isfinite(float(program(SOURCE, TARGET)))
    with pytest.raises(tf.errors.InvalidArgumentError, match="needs two samples"):
        program(SOURCE[:1], TARGET)


@pytest.mark.only("pt")
def test_pt_domains_that_do_not_go_together_are_refused(technique, models):
    models.check_forms(lambda f: technique.AlignedModel(f, models.nn.Linear(3, 2)))


def test_features_need_a_row_a_sample(technique, models):
    both = technique.AlignedModel(*models.without_rows())
    with pytest.raises(ValueError, match="features need a row a sample"):
        models.run_in_a_graph(both, np.zeros((2, 4, 2, 3), np.float32))
