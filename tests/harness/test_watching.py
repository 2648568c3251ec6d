"""What is seen of a training: when its target is reached, its time, how restless its loss is."""

from __future__ import annotations

import numpy as np
import pytest

from bench.harness import watching
from bench.harness.watching import EVERY, Watch
from tests.harness.fake_impl.kit.runtime import Clock

STEPS = 10 * EVERY


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """It passes by sleeping alone."""
    monkeypatch.setattr(watching, "time", Clock())


def watched(values, losses, target, rising, cost=0.0):
    """A training with the metric `values` at its evaluations and `losses` at its steps."""
    left, costs = iter(values), iter(losses)

    def evaluate():
        watching.time.sleep(cost)  # which is not the training's
        return next(left)

    def step(x, y):
        watching.time.sleep(cost)
        return next(costs)

    watch = Watch(step, evaluate, target=target, rising=rising)
    for _ in losses:
        watch(None, None)
    return {name: each["value"] for name, each in watch.metrics().items()}


@pytest.mark.parametrize(
    ("values", "target", "rising", "steps"),
    [
        ([50, 80, 91, 60], 90, True, 3 * EVERY),
        ([50, 90, 91, 60], 90, True, 2 * EVERY),
        ([50] * 10, 90, True, None),
        ([4.0, 3.0, 1.9, 5.0], 2.0, False, 3 * EVERY),
    ],
)
def test_the_target_is_reached_at_the_first_evaluation_that_shows_it(values, target, rising, steps):
    found = watched(values, [1.0] * STEPS, target, rising)
    assert found["steps_to_target"] == steps
    assert (found["cpu_time_to_target"] is None) == (steps is None)


def test_without_a_target_nothing_is_evaluated_and_no_row_has_missed_it():
    found = watched([], [1.0, 2.0] * STEPS, None, True)  # the first look would find no figure
    assert list(found) == ["loss_fluctuation"]


def test_the_time_is_that_of_the_steps_alone():
    found = watched([0, 0, 99], [1.0] * STEPS, 90, True, cost=0.001)
    assert found["cpu_time_to_target"] == pytest.approx(0.001 * 3 * EVERY)


def test_the_fluctuation_is_that_about_a_trend():
    noise = np.random.default_rng(0).normal(0, 0.1, 4000)
    trend = np.linspace(5, 1, 4000)
    found = watched([0] * 4000, list(trend + noise), 90, True)
    assert found["loss_fluctuation"] == pytest.approx(0.1, rel=0.05)
    calm = watched([0] * 4000, list(trend), 90, True)
    assert calm["loss_fluctuation"] < 0.001
