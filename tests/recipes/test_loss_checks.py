"""Losses that do not take what a model gives are named, and right ones are clean."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from bench.recipes import bench_loss_checks
from shared.specs import TASKS
from shared.weights import init_weights
from tests import workers
from tests.recipes.samples import CLASSES, arrays, same

FRAMEWORKS = ("pt", *workers.keras())
MODELS = "recipes"
PT, TF = pytest.mark.only("pt"), pytest.mark.only("tf", "tf_keras")
ODD = "takes probabilities and whose model gives probabilities: 1 found"
NOT_FORM = "form: loss: it takes {}, the model gives {}"


@pytest.fixture
def check(technique, models):
    """`check(model, loss)`: the report's text, on 32 samples of a clean dataset."""
    x, y = (part[:32] for part in arrays())

    def run(model, loss, kind="softmax", x=x, y=y, **settings):
        if kind == "sigmoid":
            y = (y % 2)[:, None].astype(np.float32)
        x = {"image": models.tensor(x)} if isinstance(model, models.Wrapped) else models.tensor(x)
        return str(technique.check_loss(model, loss, x, models.tensor(y), **settings))

    return run


@pytest.fixture
def pair(models, check):
    """The report of a model that gives this form and a loss that takes that one."""

    def run(kind, gives, takes):
        outputs = CLASSES if kind == "softmax" else 1
        model = models.classifier(outputs, gives, kind)
        return check(model, models.loss_over(kind, takes), kind)

    return run


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_pairs_of_logits_and_probabilities(pair, kind):
    head = "a batch of 32, whose loss takes logits and whose model gives logits"
    assert pair(kind, "logits", "logits") == f"{head}: nothing found"
    found = pair(kind, "probabilities", "logits")
    least = math.log(math.e + 3) - 1 if kind == "softmax" else math.log1p(math.exp(-1))
    assert NOT_FORM.format("logits", "probabilities") in found
    assert f"cannot fall below {least:.3g}" in found
    found = pair(kind, "logits", "probabilities")
    assert f"{NOT_FORM.format('probabilities', 'logits')}: use a loss over logits" in found


PRECISION = {  # the margin at which less than half is left, and how much is
    ("pt", "softmax"): (90, math.nan),
    # Legacy Keras adds 1e-7 within the logarithm, too: of 1.19e-7, and with smoothed labels.
    ("tf_keras", "sigmoid"): (16, 0.95 * 1.19 / 2.19 - 0.05),
}


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_a_loss_over_probabilities_is_shown_to_lose_its_gradient(flavour, pair, kind):
    margin, left = PRECISION.get((flavour, kind), (17, 0.0))
    found = pair(kind, "probabilities", "probabilities")
    pattern = (
        r"1 found\nprecision: loss: the gradient of a sample that is wrong by (\d+) in logits is "
        r"(not finite|\S+ of what is right): use a loss over logits"
    )
    at, share = re.search(pattern, found).groups()
    assert int(at) == margin
    share = math.nan if share == "not finite" else float(share.split()[0])
    assert share == pytest.approx(left, abs=0.01, nan_ok=True)


@PT
def test_pt_log_probabilities_go_with_both_losses_that_take_them(pair):
    for takes in ("log-probabilities", "logits"):
        assert pair("softmax", "log-probabilities", takes).endswith("nothing found")
    for gives in ("logits", "probabilities"):
        found = pair("softmax", gives, "log-probabilities")
        assert NOT_FORM.format("log-probabilities", gives) in found


@TF
@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_tf_keras_finds_the_logits_behind_its_own_activation(pair, kind):
    assert pair(kind, "probabilities by Keras", "probabilities").endswith("nothing found")
    assert "form: loss" in pair(kind, "probabilities by Keras", "logits")


@PT
@pytest.mark.parametrize("soft", [False, True])
def test_pt_classes_in_the_second_axis_are_found_by_their_labels(technique, models, soft):
    """As many of them as the last axis is wide."""
    images, y = models.torch.rand(2, 3, 4, 7), models.torch.randint(7, (2, 4, 7))
    if soft:
        y = models.nn.functional.one_hot(y, 7).movedim(-1, 1).float()
    model, loss = models.nn.Conv2d(3, 7, 1), models.nn.CrossEntropyLoss()
    head = "a batch of 2, whose loss takes logits and whose model gives"
    report = technique.check_loss(model, loss, images, y)
    assert str(report) == f"{head} logits: nothing found"
    twice = models.nn.Sequential(model, models.nn.Softmax(1))
    report = technique.check_loss(twice, loss, images, y)
    assert f"{head} probabilities: 1 found\nform: loss" in str(report)


def test_outputs_in_bfloat16_are_judged(models, check):
    head = "whose loss takes logits and whose model gives"
    right, twice = (
        check(models.in_bfloat16(models.classifier(CLASSES, form)), models.cross_entropy)
        for form in ("logits", "probabilities")
    )
    assert right.endswith(f"{head} logits: nothing found")
    assert NOT_FORM.format("logits", "probabilities") in twice


def test_a_loss_over_probabilities_is_judged_whatever_axes_it_squeezes_away(models, check):
    for model, loss, settings in models.squeezing(arrays()[1][:32]):
        assert ODD in check(model, loss, **settings)


def test_a_loss_that_is_no_cross_entropy_is_not_judged(models, check):
    model = models.classifier(CLASSES, "logits")
    found = check(model, lambda z, y: models.mean((z - models.column(y)) ** 2))
    assert "takes neither logits nor probabilities: nothing found" in found


def test_the_strict_mode_raises_and_the_model_is_left_as_it_was(models, check):
    loss, model = models.loss_over("softmax", "logits"), models.classifier(CLASSES, "probabilities")
    before = models.state(model)
    with pytest.raises(ValueError, match="a batch of 32"):
        check(model, loss, strict=True)
    assert same(before, models.state(model))


def test_models_of_other_makers_are_checked(models, check):
    wrapped = models.Wrapped(models.classifier(CLASSES, "logits"))
    for loss in (models.loss_over("softmax", "logits"), *models.losses_of_outputs()):
        assert "the model gives probabilities" in check(wrapped, loss)
    with pytest.raises(ValueError, match="must be one tensor"):
        check(models.of_two_outputs(), models.loss_over("softmax", "logits"))
    x, y = arrays(4)
    images = np.tile(x, (1, 4, 4, 3))
    for model, words in models.foreign_classifiers():
        loss = models.loss_over("softmax", "logits")
        assert words in check(model, loss, x=images, y=y), words


@TF
def test_tf_a_function_of_keras_is_checked(models, check):
    loss, y = models.keras.losses.categorical_crossentropy, np.eye(CLASSES, dtype="f4")
    found = check(models.classifier(CLASSES, "logits"), loss, y=y[arrays()[1][:32]])
    assert NOT_FORM.format("probabilities", "logits") in found


@PT
def test_pt_a_layer_that_merges_its_weights_to_predict_is_left_unmerged(technique, models):
    model, x = models.Merging(), models.torch.ones(2, 4)
    technique.check_loss(model, models.nn.CrossEntropyLoss(), x, models.tensor([0, 1]))
    assert not model.merged


# Gradients by margin -----------------------------------------------------------------------------


def test_a_loss_over_logits_keeps_its_gradient_at_every_margin(technique, models):
    for loss, classes in models.exact_losses():
        found = technique.gradient_by_margin(loss, num_classes=classes)
        assert list(found.values()) == pytest.approx([1] * len(found), rel=1e-3)


def test_a_loss_over_probabilities_loses_it(technique, models):
    for loss, classes, kept, lost in models.losses_over_probabilities():
        found = technique.gradient_by_margin(loss, num_classes=classes)
        assert all(found[m] == pytest.approx(1, rel=0.02) for m in found if m <= kept)
        assert all(not found[m] > 0.01 for m in found if m >= lost)


BENCHMARKED = {  # planted by the benchmark -> what is said of it alone
    "loss over probabilities": NOT_FORM.format("probabilities", "logits"),
    "gradient": "nan is left of that of a sample that is wrong by ",
}


def test_every_fault_that_the_benchmark_plants_is_found(impl, kit):
    spec = TASKS["digits-cnn"].model
    x = np.random.default_rng(2).uniform(0, 1, (64, *spec.input_shape)).astype(np.float32)
    model = kit.models.build(spec, init_weights(spec, seed=0))
    found = bench_loss_checks._faults(impl, model, *kit.data.to_device(x, np.arange(64) % 10))
    assert found.keys() == BENCHMARKED.keys()
    for fault, said in BENCHMARKED.items():
        assert found[fault].startswith(said)
        assert ";" not in found[fault]
