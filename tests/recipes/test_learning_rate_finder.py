"""The range test's curve is that of plain training, and everything is as before it."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest

from tests import workers
from tests.recipes.samples import same

FRAMEWORKS = ("pt", *workers.keras())
MODELS = "recipes"
STEPS = 60
PT, TF = pytest.mark.only("pt"), pytest.mark.only("tf")


@pytest.fixture
def batches(kit):
    """`batches(count)`: labels that a linear map of the inputs gives."""

    def make(count=4):
        random = np.random.default_rng(0)
        teacher = random.normal(size=(8, 4))
        xs = [random.normal(size=(64, 8)).astype(np.float32) for _ in range(count)]
        return kit.data.resident_batches([(x, (x @ teacher).argmax(1)) for x in xs])

    return make


@pytest.fixture
def start(kit, models):
    """`start(rule)`: a model, its optimizer and its step."""

    def make(rule="sgd", dropout=0.0):
        random = np.random.default_rng(1)
        kernels = random.normal(size=(8, 16)) / 3, random.normal(size=(16, 4)) / 4
        model = models.with_batch_norm([kernel.astype(np.float32) for kernel in kernels], dropout)
        optimizer = getattr(models, rule)(model, 0.01)
        step = kit.training.make_train_step(model, optimizer, kit.training.cross_entropy)
        return model, optimizer, step

    return make


@pytest.fixture
def find(technique, batches):
    """`find(model, optimizer, step)`: the result on these batches."""

    def run(model, optimizer, step, given=None, **settings):
        given = batches() if given is None else given
        return technique.find_learning_rate(model, optimizer, step, given, **settings)

    return run


def test_the_curve_is_that_of_plain_training_at_these_rates(models, agrees, start, find, batches):
    """Twins find the same one."""
    model, optimizer, step = start()
    found, again = (
        find(model, optimizer, step, lowest=1e-3, highest=30.0, steps=STEPS) for _ in range(2)
    )
    assert found == again
    assert len(found.rates) == len(found.losses) == len(found.smoothed)
    assert np.allclose(np.diff(np.log(found.rates)), np.log(30 / 1e-3) / 59)
    assert found.rates[0] == pytest.approx(1e-3)
    losses, stream = [], batches()
    for number, rate in enumerate(found.rates):
        models.set_rate(optimizer, rate)
        losses.append(float(step(*stream[number % len(stream)])))
    assert found.losses == losses
    means = [np.mean(losses[max(0, at - 4) : at + 5]) for at in range(len(losses))]
    assert np.allclose(found.smoothed, means, rtol=1e-12)
    # Up to the lowest point: beyond it a training that diverges amplifies the last bit.
    end = int(np.argmin(means))
    assert end > 20
    assert 1e-3 < found.suggestion < found.rates[end]
    curve = {"losses": list(found.losses[:20]), "suggestion": float(found.suggestion)}
    agrees("the curve", curve, 1e-4)


@pytest.mark.parametrize("steps_before", [0, 3])
def test_everything_comes_back_and_training_goes_on_as_if_nothing_had_happened(
    models, start, find, batches, steps_before
):
    outcomes = []
    for tested in (False, True):
        model, optimizer, step = start("adamw", models.DROPOUT)
        for batch in batches(steps_before):
            step(*batch)
        before = models.state(model, optimizer)
        if tested:
            find(model, optimizer, step, lowest=1e-4, steps=STEPS)
            assert same(before, models.state(model, optimizer))
        losses = [np.float32(step(*batch)) for batch in batches(3)]
        outcomes.append([*losses, *models.state(model, optimizer)])
    assert same(*outcomes)


@pytest.mark.only("pt", "tf")  # optimizers of legacy Keras keep no list of what they train
def test_what_a_loss_trains_comes_back_too(models, start, find):
    model, *_ = start()
    scale, optimizer, step = models.step_of_own_loss(model)
    before = models.state(scale)
    find(model, optimizer, step, lowest=1e-3, highest=10.0, steps=STEPS)
    assert same(before, models.state(scale))


@TF
def test_tf_the_scale_of_a_loss_stays(models, kit, start, find):
    model, *_ = start()
    optimizer = models.loss_scaled(model)
    optimizer.dynamic_scale.assign(128.0)
    before = len(optimizer.variables)
    step = kit.training.make_train_step(model, optimizer, kit.training.cross_entropy)
    find(model, optimizer, step, lowest=1e-4, steps=STEPS)
    assert len(optimizer.variables) == before
    assert float(optimizer.dynamic_scale) == 128.0


@PT
def test_pt_groups_keep_their_ratio_and_get_their_rates_back(models, kit, start, find):
    """A rate that is a tensor stays this tensor, a layer that merges its weights is merged again.

    And a loss that the step does not detach is no reason for a warning.
    """
    model, merging = start()[0], models.Merging()
    model.append(merging)
    first = models.tensor(0.1)
    optimizer = models.sgd_of([{"params": model[0].parameters(), "lr": first}], 0.1)
    optimizer.add_param_group({"params": model[4].parameters(), "lr": 0.01})
    seen, plain = [], kit.training.make_train_step(model, optimizer, kit.training.cross_entropy)

    def step(x, y):
        seen.append([float(group["lr"]) for group in optimizer.param_groups])
        model.train()
        return plain(x, y).clone().requires_grad_()

    model.eval()
    weight = merging.weight.clone()
    models.torch.set_warn_always(True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rates = find(model, optimizer, step, highest=10.0, steps=STEPS).rates
    models.torch.set_warn_always(False)
    assert np.allclose(seen[: len(rates)], [[rate, rate / 10] for rate in rates])
    assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([0.1, 0.01])
    assert optimizer.param_groups[0]["lr"] is first
    assert merging.merged
    assert (weight == merging.weight).all()


# Where it stops and what it suggests -------------------------------------------------------------


FALLING = [2.0 - 0.04 * at for at in range(40)]
RISING = [*FALLING, *(0.4 + 0.5 * at**2 for at in range(60))]


def taken_until_divergence(losses):
    means = [np.mean(losses[max(0, at - 4) : at + 1]) for at in range(len(losses))]
    return next(at for at, mean in enumerate(means) if mean - min(means[: at + 1]) > 2 * means[0])


@pytest.mark.parametrize(
    ("losses", "taken"),
    [
        (RISING, taken_until_divergence(RISING) + 1),
        ([*FALLING, math.nan, *[0.0] * 59], 40),
        ([loss - 3 for loss in FALLING] + [-2.0] * 60, 100),  # a loss may be negative
    ],
    ids=["rises", "nan", "below zero"],
)
def test_it_stops_where_the_loss_diverges(start, find, losses, taken):
    model, optimizer, _ = start()
    given = iter(losses)
    result = find(model, optimizer, lambda x, y: next(given))
    assert len(result.losses) == taken
    assert taken >= 40


@pytest.mark.parametrize(("noise", "bar"), [(0.0, 0.05), (0.05, 0.2)])
def test_the_suggestion_is_the_steepest_fall(start, find, noise, bar):
    """Of a logistic fall over the rate's logarithm, whose steepest point is known."""
    model, optimizer, _ = start()
    exponents, draws = np.linspace(-6, 0, 100), np.random.default_rng(2).normal(0, noise, 100)
    losses = iter((2 - 1.5 / (1 + np.exp(-(exponents + 2.5) / 0.3)) + draws).tolist())
    result = find(model, optimizer, lambda x, y: next(losses))
    assert np.log10(result.suggestion) == pytest.approx(-2.5, abs=bar)


# What it can't do --------------------------------------------------------------------------------


def nothing_to_learn():
    random = np.random.default_rng(5)
    x = random.normal(size=(64, 8)).astype(np.float32)
    return [(x, random.integers(0, 4, 64)) for _ in range(STEPS)]


NAN = [(np.full((4, 8), np.nan, np.float32), np.zeros(4, int))]


@pytest.mark.parametrize(
    ("given", "settings", "words"),
    [
        ([], {}, "no batches"),
        (iter, {}, "no batches"),
        (NAN, {}, "first loss"),
        (nothing_to_learn(), {"highest": 1e-5}, "never falls"),
        (None, {"lowest": 50.0, "highest": 1e4}, "never falls"),
        (None, {"lowest": 1.0}, "lowest < highest"),
        (None, {"window": 8}, "odd window"),
        (None, {"steps": 9}, "steps"),
    ],
)
def test_a_refusal_says_why_and_everything_is_as_before(
    kit, models, start, find, batches, given, settings, words
):
    model, optimizer, step = start("adamw", models.DROPOUT)
    if given is iter:
        given = iter(batches())  # which ends
    elif given:
        given = kit.data.resident_batches(given)
    before = models.state(model, optimizer)
    with pytest.raises(ValueError, match=words):
        find(model, optimizer, step, given, **settings)
    assert same(before, models.state(model, optimizer))


def test_where_the_step_fails_everything_is_as_before(models, start, find):
    model, optimizer, step = start("adamw", models.DROPOUT)
    before, seen = models.state(model, optimizer), []

    def failing(x, y):
        seen.append(step(x, y))
        if len(seen) == 3:
            raise KeyError("the third")
        return seen[-1]

    with pytest.raises(KeyError, match="the third"):
        find(model, optimizer, failing, steps=STEPS)
    assert same(before, models.state(model, optimizer))


def test_a_schedule_is_refused(models, start, find):
    model, _, step = start()
    with pytest.raises(ValueError, match="schedule"):
        find(model, models.scheduled(model), step)


@PT
def test_pt_a_step_that_sets_the_rate_itself_is_refused(models, start, find):
    model, optimizer, step = start()

    def scheduled(x, y):
        models.set_rate(optimizer, models.rate_of(optimizer) * 0.9)
        return step(x, y)

    with pytest.raises(ValueError, match="sets the rate"):
        find(model, optimizer, scheduled, steps=STEPS)
    assert models.rate_of(optimizer) == 0.01
