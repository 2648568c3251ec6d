"""A training ends when it should, and the best weights come back bit for bit."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests import workers
from tests.recipes.samples import same

FRAMEWORKS = ("pt", *workers.keras())
MODELS = "recipes"
NAN = math.nan


@pytest.mark.parametrize(
    ("values", "settings", "stopped", "best"),
    [
        ([3.0, 2.0, 2.5, 1.9, 2.0, 2.1, 2.2, 1.0], {"patience": 2}, 6, 3),
        ([1.0, 2.0, 1.5, 1.4, 9.0], {"patience": 1, "higher_is_better": True}, 3, 1),
        ([3.0, 2.95, 2.9, 2.85, 2.8], {"patience": 1, "min_delta": 0.2}, 2, 0),
        ([NAN, 2.0, NAN, NAN, 1.0], {"patience": 1}, 3, 1),
        ([3.0, 2.0, 1.0], {"patience": 0}, None, 2),
    ],
    ids=["loss", "accuracy", "min_delta", "nan", "never"],
)
def test_it_stops_and_the_best_weights_come_back(
    technique, models, values, settings, stopped, best
):
    model = models.with_spectral_norm(4)
    stopping, states = technique.EarlyStopping(model, **settings), []
    for number, value in enumerate(values):
        x = np.full((4, 8), number, np.float32)
        models.trained_output(model, models.tensor(x))  # moves statistics
        models.fill(models.layers(model)[0], 1.0 + number)
        states.append(models.state(model))
        if stopping.step(value):
            assert number == stopped
            break
    else:
        assert stopped is None
    assert stopping.restore() == values[best]
    assert [same(state, models.state(model)) for state in states].index(True) == best


@pytest.mark.only("pt")
def test_pt_a_buffer_that_no_state_holds_comes_back_with_the_best_weights(technique, models):
    """Though it was put elsewhere, and each time."""
    model = models.dense_layers()
    model.register_buffer("mask", models.tensor([0.0, 0.0]), persistent=False)
    stopping = technique.EarlyStopping(model)
    model.mask.fill_(1.0)
    stopping.step(1.0)
    model.mask = models.tensor([9.0, 9.0, 9.0])
    stopping.step(2.0)
    for _ in range(2):
        stopping.restore()
        assert model.mask.tolist() == [1.0, 1.0]
        model.mask.fill_(7.0)


def test_bad_settings_are_refused(technique, models):
    model = models.dense_layers()
    for settings in ({"patience": -1}, {"min_delta": -0.1}):
        with pytest.raises(ValueError, match="patience and min_delta must be 0 or more"):
            technique.EarlyStopping(model, **settings)
    with pytest.raises(ValueError, match="there are no best weights"):
        technique.EarlyStopping(model).restore()
