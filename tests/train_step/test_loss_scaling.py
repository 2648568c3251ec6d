"""A loss is scaled, steps that overflow are skipped, and both frameworks do so alike."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from tests.train_step import steps
from tests.train_step.steps import CNN

FRAMEWORKS = ("pt", "tf")
MODELS = "steps"
HALF = 2.0**-11  # the largest relative error of rounding to float16


@pytest.fixture(scope="module")
def prepare(kit, technique):
    return functools.partial(steps.prepare, kit, CNN, technique.make_train_step)


@pytest.fixture(scope="module")
def batches(kit):
    return functools.partial(steps.batches, kit, CNN)


def test_a_scaled_loss_in_float32_is_the_baseline_to_the_last_bit(kit, prepare, batches, agrees):
    """A power of two rounds nothing. In float16 three layers round input, weight and output."""
    stream = batches(10)
    plain = steps.losses_of(kit, steps.prepare(kit, CNN), stream)
    assert steps.losses_of(kit, prepare(dtype="float32"), stream) == plain
    half = steps.losses_of(kit, prepare(), stream)[0]
    assert 0 < abs(half / plain[0] - 1) < 9 * HALF
    agrees("float16", {"loss": half}, 9 * HALF)


def test_overflow_skips_the_step_and_halves_the_scale_until_training_recovers(
    kit, models, prepare, batches
):
    prepared = prepare(
        recipe=replace(steps.RECIPE, learning_rate=0.1), initial_scale=2.0**30, growth_interval=3
    )
    ((x, y),) = batches()
    scales, losses, moved = [prepared.step.loss_scale()], [], []
    assert scales == [2.0**30]
    before, state = steps.trainable_of(kit, prepared.model, CNN), models.state(prepared.optimizer)
    for _ in range(25):
        losses.append(kit.runtime.to_float(prepared.step(x, y)))
        after = steps.trainable_of(kit, prepared.model, CNN)
        moved.append(not steps.same(before, after))
        scales.append(prepared.step.loss_scale())
        assert any(moved) or models.state(prepared.optimizer) == state
        before = after
    first = moved.index(True)
    assert first > 0
    for has_moved, (old, new) in zip(moved, pairwise(scales), strict=True):
        assert new in (old, 2 * old) if has_moved else new == old / 2
    assert moved[first : first + 3] == [True] * 3
    assert scales[first : first + 4] == [scales[first]] * 3 + [2 * scales[first]]
    assert len(set(losses[: first + 1])) == 1  # nothing changed until then
    assert losses[-1] < 0.8 * losses[0]
    prepared.step(x * float("inf"), y)
    assert steps.same(before, steps.trainable_of(kit, prepared.model, CNN))
    assert prepared.step.loss_scale() == scales[-1] / 2


@pytest.mark.parametrize(("scale", "moves"), [(1.0, False), (65536.0, True)])
def test_scaling_saves_gradients_from_underflow(kit, prepare, batches, scale, moves):
    """Of a loss of 2^-24 of the usual size."""
    prepared = prepare(
        recipe=replace(steps.DESCENT, learning_rate=0.05 * 2.0**24),
        loss_fn=lambda logits, y: kit.training.cross_entropy(logits, y) * 2.0**-24,
        initial_scale=scale,
    )
    before = steps.trainable_of(kit, prepared.model, CNN)
    prepared.step(*batches()[0])
    assert steps.same(before, steps.trainable_of(kit, prepared.model, CNN)) != moves


@pytest.mark.only("pt")
def test_a_scale_is_saved_and_resumed_with_its_count_of_good_steps(
    kit, technique, models, prepare, batches
):
    prepared = prepare(initial_scale=1024.0, growth_interval=2)
    ((x, y),) = batches()
    for factor in (1.0, 1.0, 1.0, float("inf"), 1.0):
        prepared.step(x * factor, y)
    saved = json.loads(json.dumps(prepared.step.state_dict()))
    arguments = prepared.model, prepared.optimizer, kit.training.cross_entropy
    resumed, fresh = (
        technique.make_train_step(*arguments, initial_scale=1024.0, growth_interval=2)
        for _ in range(2)
    )
    resumed.load_state_dict(saved)
    scales = []
    for step in (prepared.step, resumed, fresh):
        step(x, y)
        scales.append(step.loss_scale())
    assert scales == [2048.0, 2048.0, 1024.0]
    assert technique.LossScaler(prepared.model, enabled=False).state_dict() == {}


@pytest.mark.only("pt")
def test_two_optimizers_of_a_loss_are_scaled_as_by_hand(technique, models):
    torch = models.torch
    x, y = torch.ones(6, 4), torch.zeros(6, 3)
    weights = []
    for ours in (True, False):
        model = models.dense()
        scaler = technique.LossScaler(model, initial_scale=1024.0, growth_interval=2)
        plain = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        optimizers = [torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()]
        for _ in range(3):
            model.zero_grad()
            with torch.autocast("cpu", torch.float16):
                output = model(x)
            loss = models.squares(output.float(), y)
            if ours:
                scaler.backward(loss)
                scaler.step(*optimizers)
            else:
                plain.scale(loss).backward()
                for optimizer in optimizers:
                    plain.step(optimizer)
                plain.update()
        weights.append(model.weight)
    assert torch.equal(*weights)


@pytest.mark.only("tf")
@pytest.mark.parametrize("rule", ["Adam", "Nadam", "Adafactor"])
def test_the_optimizer_counts_all_that_a_resumed_training_needs(kit, technique, models, rule):
    """Of which Keras's LossScaleOptimizer leaves out what Nadam and Adafactor hold besides."""
    x, y = models.normal(4, 6), models.tf.constant([0, 1, 2, 0])
    trained = []
    for _ in range(2):
        model = models.dense(6)
        optimizer = getattr(models.keras.optimizers, rule)(0.1)
        step = technique.make_train_step(model, optimizer, kit.training.cross_entropy)
        trained.append((step, [*model.variables, *step.optimizer.variables]))
    (first, ours), (second, theirs) = trained
    for _ in range(3):
        first(x, y)
    for variable, saved in zip(theirs, ours, strict=True):
        variable.assign(saved)
    for step in (first, second) * 2:
        step(x, y)
    assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))


# Bad input ---------------------------------------------------------------------------------------

BAD_SCALE = "initial_scale must be positive and growth_interval at least 1"


def make(technique, models, optimizer=None, **settings):
    model = models.dense()
    return technique.make_train_step(
        model, optimizer or models.descent(model), models.squares, **settings
    )


def second(technique, models):
    scaler = technique.LossScaler(models.dense())
    scaler.wrap(models.descent(None))
    scaler.wrap(models.descent(None))


TF = pytest.mark.only("tf")
REFUSALS = [
    (lambda t, m: make(t, m, initial_scale=0.0), BAD_SCALE),
    (lambda t, m: make(t, m, growth_interval=0), BAD_SCALE),
    (lambda t, m: make(t, m, dtype="half"), "unknown dtype 'half': choose one of bfloat16"),
    (lambda t, m: make(t, m, keep_fp32="haed"), "no layer 'haed'; it has "),
    pytest.param(
        lambda t, m: t.LossScaler(m.torch.nn.ReLU()),
        "the model has no parameters",
        marks=pytest.mark.only("pt"),
    ),
    pytest.param(lambda t, m: make(t, m, m.scaling()[0]), "pass the optimizer itself", marks=TF),
    pytest.param(lambda t, m: make(t, m, m.scaling()[1]), "pass the optimizer itself", marks=TF),
    pytest.param(second, "float16: one optimizer holds the loss's", marks=TF),
    pytest.param(lambda t, m: t.LossScaler(m.unbuilt()), "model has no variables yet", marks=TF),
]


@pytest.mark.parametrize(("call", "message"), REFUSALS)
def test_a_refusal_says_why(technique, models, call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call(technique, models)
