"""Averages are those of NumPy, and statistics those of the data."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from bench.harness.plan import Work
from bench.recipes import bench_averaging
from shared.specs import TASKS
from shared.weights import init_weights
from tests import workers
from tests.compression.teaching import (
    CNN,
    batches,
    farthest,
    optimizer_of,
    student_of,
    trainable_of,
    weights_of,
)
from tests.recipes.samples import same

FRAMEWORKS = ("pt", *workers.keras())
MODELS = "recipes"
DECAY = 0.8
RANDOM = np.random.default_rng(0)
TF = pytest.mark.only("tf", "tf_keras")


@pytest.fixture
def made(kit):
    """A new model and its train step."""

    def make():
        model = student_of(kit)
        optimizer = optimizer_of(kit, model)
        return model, kit.training.make_train_step(model, optimizer, kit.training.cross_entropy)

    return make


# Averages ----------------------------------------------------------------------------------------


def exponential(seen):
    average = seen[0]
    for weights in seen[1:]:
        average = {n: DECAY * average[n] + (1 - DECAY) * value for n, value in weights.items()}
    return average


def equal(seen):
    return {name: np.mean([weights[name] for weights in seen], axis=0) for name in seen[0]}


@pytest.mark.parametrize("formula", [exponential, equal])
def test_the_average_is_that_of_numpy_and_leaves_no_trace(kit, technique, made, formula):
    model, step = made()
    average = technique.make_equal_average(model)
    if formula is exponential:
        average = technique.make_exponential_average(model, decay=DECAY)
    step, seen = technique.make_averaging_step(step, model, average), []
    for batch in batches(kit, CNN, 10):
        step(*batch)
        seen.append(trainable_of(kit, model, CNN))
    before = weights_of(kit, model)
    with technique.averaged(model, average):
        inside = trainable_of(kit, model, CNN)
    assert farthest(inside, formula(seen)) < 1e-6
    assert farthest(inside, seen[-1]) > 1e-3  # or there was nothing to average
    assert farthest(weights_of(kit, model), before) == 0
    with pytest.raises(RuntimeError), technique.averaged(model, average):
        raise RuntimeError("an evaluation that fails")
    assert farthest(weights_of(kit, model), before) == 0
    technique.apply_average(model, average)
    assert farthest(trainable_of(kit, model, CNN), inside) == 0


def test_an_average_is_of_the_variables_that_trained_when_it_was_made(technique, models):
    model = models.dense_layers()
    first, second = models.layers(model)
    models.fill(model, 1.0)
    models.train_layer(second, False)
    average = technique.make_equal_average(model)
    average.update_parameters(model)
    models.train_layer(first, False)
    models.train_layer(second, True)
    average.update_parameters(model)
    with technique.averaged(model, average):
        assert all((weight == 1).all() for weight in models.parameters(model).values())


@pytest.fixture
def average_of(technique, models):
    """`average_of(dtype, values, make)`: what a layer's average is after it had these values."""

    def average(dtype, values, make, **settings):
        model = models.dense_of(dtype)
        models.fill(model, values[0])
        average = getattr(technique, f"make_{make}_average")(model, **settings)
        for value in values:
            models.fill(model, value)
            average.update_parameters(model)
        with technique.averaged(model, average):
            inside = next(iter(models.parameters(model).values())).ravel()[0]
        return inside, next(iter(models.parameters(model).values())).ravel()[0]

    return average


def test_an_average_is_more_exact_than_weights_in_half_precision(average_of):
    """It moves by less than they can, and of small ones that stay it is not rounded."""
    values = [1.0] + [2.0] * 200
    inside, after = average_of("bfloat16", values, "exponential", decay=0.999)
    assert inside == pytest.approx(2 - 0.999**200, abs=2**-8)
    assert after == 2
    inside, after = average_of("float16", [1e-6] * 40, "exponential", decay=0.9)
    assert inside == after


def test_an_average_of_doubles_is_as_exact_as_they_are(average_of):
    inside, _ = average_of("float64", [1.0, 2.0, 4.0], "equal")
    assert inside == pytest.approx(7 / 3, rel=1e-14)
    inside, _ = average_of("float64", [1.0, 2.0, 4.0], "exponential", decay=DECAY)
    assert inside == pytest.approx(DECAY * (DECAY + 0.2 * 2) + 0.2 * 4, rel=1e-14)


def test_a_resumed_training_keeps_its_average_and_its_best_weights(
    kit, technique, models, made, tmp_path
):
    """In one go, and from a file after three steps."""
    outcomes = []
    for interrupted in (False, True):
        model, step = made()
        average = technique.make_equal_average(model)
        stopping = models.early_stopping.EarlyStopping(model, patience=1)
        stopped = []
        for number, batch in enumerate(batches(kit, CNN, 3)):
            step(*batch)
            average.update_parameters(model)
            stopped.append(stopping.step([2.0, 1.0, 3.0][number]))
        if interrupted:
            kept = {"average": models.kept(average), "stopping": stopping.state_dict()}
            models.checkpoints.save_checkpoint(tmp_path / "kept", model, None, kept)
            model, _ = made()
            average = technique.make_equal_average(model)
            stopping = models.early_stopping.EarlyStopping(model, patience=1)
            kept = models.checkpoints.load_checkpoint(tmp_path / "kept", model)
            models.take(average, kept["average"])
            stopping.load_state_dict(kept["stopping"])
        average.update_parameters(model)
        stopped.append(stopping.step(4.0))
        assert stopped == [False, False, False, True]
        with technique.averaged(model, average):
            mean = trainable_of(kit, model, CNN)
        assert stopping.restore() == 1.0
        outcomes.append((mean, weights_of(kit, model)))
    for one, other in zip(*outcomes, strict=True):
        assert farthest(one, other) == 0


@pytest.mark.parametrize("way", ["averaging", "augmenting", "checked"])
def test_what_a_step_has_beside_one_around_it_has(technique, models, framework, made, way):
    def step(x, y):
        return 0.0

    def around():
        model, _ = made()
        if way == "averaging":
            return technique.make_averaging_step(step, model, technique.make_equal_average(model))
        if way == "augmenting":
            policy = models.augmentation.Policy()
            return models.augmentation.make_augmenting_step(step, policy, None)
        return models.nonfinite.make_checked_step(step, model, None)

    own = {"loss_scale", "state_dict", "load_state_dict", "optimizer"}
    assert not own & set(dir(around()))
    for name in own - ({"optimizer"} if framework == "pt" else {"state_dict", "load_state_dict"}):
        setattr(step, name, name.upper())
        assert getattr(around(), name) == name.upper()


# Statistics of BatchNorm -------------------------------------------------------------------------


def test_statistics_are_the_mean_over_batches_and_nothing_else_changes(
    kit, technique, models, made, flavour
):
    model, step = made()
    stream = batches(kit, CNN, 3)
    for batch in stream:
        step(*batch)
    before, state = weights_of(kit, model), models.modes_of_norms(model)
    technique.update_statistics(model, [x for x, _ in stream])
    after = weights_of(kit, model)
    changed = {name for name in after if not np.array_equal(before[name], after[name])}
    assert "conv0.bn.mean" in changed
    assert changed.isdisjoint(trainable_of(kit, model, CNN))
    assert models.modes_of_norms(model) == state
    values = [models.first_convolution(model, x).astype(float) for x, _ in stream]
    # PyTorch keeps the unbiased variance, and the fused kernel of legacy Keras divides by n - 1.
    variance = np.mean([v.var(0, ddof=flavour != "tf") for v in values], axis=0)
    mean = np.mean([v.mean(0) for v in values], axis=0)
    assert np.allclose(after["conv0.bn.mean"], mean, rtol=1e-4, atol=1e-6)
    assert np.allclose(after["conv0.bn.variance"], variance, rtol=1e-4)


def test_batches_are_read_one_by_one_and_the_statistics_stay_where_one_fails(kit, technique, made):
    model, _ = made()
    before, changed = weights_of(kit, model), []

    def unreadable(first):
        yield from first
        changed.append(farthest(weights_of(kit, model), before) > 0)
        raise RuntimeError("a batch that can't be read")

    for first in ([], [batches(kit, CNN)[0][0]]):
        with pytest.raises(RuntimeError):
            technique.update_statistics(model, unreadable(first))
        assert farthest(weights_of(kit, model), before) == 0
    assert changed == [False, True]


def test_statistics_of_a_frozen_normalization_stay(technique, models):
    x = RANDOM.normal(size=(64, 3)).astype(np.float32) + 5
    model = models.two_norms(models.tensor(x))
    models.train_layer(models.layers(model)[0], False)
    technique.update_statistics(model, [models.tensor(x)])
    frozen, other = map(models.mean_of, models.layers(model))
    assert frozen.tolist() == [0, 0, 0]
    assert np.allclose(other, x.mean(0), rtol=1e-2)


def test_statistics_of_all_that_a_normalization_is_given(technique, models):
    """Of two inputs by name, and of a normalization that each pass goes through twice."""
    stream = [RANDOM.normal(at, 1, (2, 16, 3)).astype(np.float32) for at in range(3)]
    model = models.Siamese(shared=False)
    models.call(model, stream[0])
    given = [dict(zip(("left", "right"), map(models.tensor, pair), strict=True)) for pair in stream]
    technique.update_statistics(model, given)
    wanted = np.mean([pair.sum(0).mean(0) for pair in stream], axis=0)
    assert np.allclose(models.mean_of(model.norm), wanted, atol=1e-5)
    model = models.Siamese(shared=True)
    models.call(model, stream[0])
    technique.update_statistics(model, [tuple(map(models.tensor, pair)) for pair in stream])
    assert np.allclose(models.mean_of(model.norm), np.mean(stream, (0, 1, 2)) + 2.5, atol=1e-5)
    assert "call" not in vars(model.norm)


def test_dropout_is_not_in_the_statistics(technique, models):
    x = models.tensor(RANDOM.normal(2, 1, (8, 8, 3)).astype(np.float32))
    model, norm, expected = models.behind_dropout(x)
    before = models.random_state()
    technique.update_statistics(model, [x])
    assert np.array_equal(before, models.random_state())
    assert np.allclose(models.mean_of(norm), expected, rtol=1e-4)


def test_statistics_leave_a_kernel_that_is_normalized_in_training(technique, models):
    model = models.with_spectral_norm(9)
    before = list(models.parameters(model).values())
    technique.update_statistics(model, [models.tensor(np.eye(8, dtype=np.float32))])
    assert same(before, list(models.parameters(model).values()))


@pytest.mark.only("pt")
def test_pt_what_no_batch_goes_through_stays(technique, models):
    """The statistics of another domain, and a layer that merges its weights to predict."""
    model, x = models.TwoDomains(), models.tensor(RANDOM.normal(5, 1, (64, 3)).astype(np.float32))
    model(x, 1)
    before = models.state(model.norms[1])
    technique.update_statistics(model, [x])
    assert same(before, models.state(model.norms[1]))
    assert np.allclose(models.mean_of(model.norms[0]), x.mean(0), atol=1e-5)
    assert not model.other.merged


@TF
def test_tf_noise_is_refused_and_the_statistics_stay(technique, models):
    """It can't be switched off. NaN, which is no other than NaN, is not taken for noise."""
    x = models.tensor(np.ones((8, 3), np.float32))
    technique.update_statistics(models.norm_beside(models.layers_.Rescaling(np.nan), x), [x])
    model = models.norm_beside(models.layers_.GaussianNoise(0.5), x)
    before = models.state(model)
    with pytest.raises(NotImplementedError, match="draws at random"):
        technique.update_statistics(model, [x])
    assert same(before, models.state(model))


@TF
def test_tf_statistics_of_a_model_that_is_a_graph_of_its_own(technique, models):
    model, stream = models.Decorated(), RANDOM.normal(size=(3, 16, 2)).astype(np.float32)
    model(stream[0])
    technique.update_statistics(model, [models.tensor(x) for x in stream])
    assert np.allclose(models.mean_of(model.norm), stream.mean((0, 1)), atol=1e-6)


def never_updated(t, m):
    model = m.dense_layers()
    t.apply_average(model, t.make_equal_average(model))


NO_COPY = "cannot copy the model"
REFUSALS = [
    (lambda t, m: t.make_exponential_average(m.dense_layers(), decay=1.0), "decay must be"),
    (never_updated, "the average has seen no weights yet"),
    (lambda t, m: t.update_statistics(m.with_spectral_norm(9), []), "at least one batch"),
    *(
        pytest.param(call, NO_COPY, marks=pytest.mark.only("pt"))
        for call in (
            lambda t, m: t.make_equal_average(m.of_weight_norm()),
            lambda t, m: t.make_exponential_average(m.of_weight_norm()),
        )
    ),
]


@pytest.mark.parametrize(("call", "message"), REFUSALS)
def test_a_refusal_says_why(technique, models, call, message):
    with pytest.raises((ValueError, NotImplementedError), match=re.escape(message)):
        call(technique, models)


# Rows --------------------------------------------------------------------------------------------


def test_early_stopping_keeps_the_best_average(impl, kit, technique):
    """Which is that of the first two of three epochs; with statistics of its own."""
    recipe = replace(TASKS["digits-few"].recipe, epochs=6, accuracy_batch_size=8)
    task = replace(TASKS["digits-few"], model=CNN, recipe=recipe)
    work = Work(task, "row", {"kept": ["swa", "stop"]}, 16, init_weights(CNN, seed=1))
    x = RANDOM.normal(0.3, 1, (144, *CNN.input_shape)).astype(np.float32)
    data = kit.data.to_device(x, RANDOM.integers(0, CNN.num_classes, 144))
    model, _, step, average = bench_averaging._build(impl, work)
    seen, fit = [], kit.training.fit

    def fit_and_look(*arguments, **settings):
        fit(*arguments, **settings)
        seen.append(trainable_of(kit, model, CNN))

    stages = SimpleNamespace(split=lambda name: data, seed=0, epochs=0, metrics={})
    with (
        mock.patch.object(kit.training, "fit", fit_and_look),
        mock.patch.object(kit.training, "evaluate_task", side_effect=[1.0, 3.0, 2.0]) as look,
    ):
        bench_averaging._train(impl, work, stages, model, step, None, average)
    assert look.call_count == 3
    assert stages.metrics["epochs"]["value"] == 6
    kept = trainable_of(kit, model, CNN)
    assert farthest(kept, equal(seen[3:5])) < 1e-5
    assert farthest(kept, seen[5]) > 1e-4
    before, rest = weights_of(kit, model), data[0][bench_averaging.HELD_OUT :]
    technique.update_statistics(model, [rest[at : at + 8] for at in range(0, len(rest), 8)])
    assert farthest(weights_of(kit, model), before) == 0
