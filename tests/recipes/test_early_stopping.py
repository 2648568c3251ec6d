"""A training ends when it should, and the best weights come back bit for bit."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    ("case", "stopped", "best", "weights"),
    [
        ("loss", 6, 1.9, 3),
        ("accuracy", 3, 2.0, 1),
        ("min_delta", 2, 3.0, 0),
        ("nan", 3, 2.0, 1),
        ("never", None, 1.0, 2),
    ],
)
def test_early_stopping_stops_and_the_best_weights_come_back(every, case, stopped, best, weights):
    found = every["early_stopping stopping"][case]
    assert found["stopped"] == stopped
    assert found["best"] == best
    assert found["weights of"] == [weights]


def test_a_buffer_that_no_state_holds_comes_back_with_the_best_weights(evidence):
    assert evidence["pt"]["early_stopping other_buffers"] == [[1.0, 1.0], [1.0, 1.0]]


def test_bad_settings_are_refused(every):
    patience, difference, nothing = every["early_stopping refusals"]
    assert patience.startswith("ValueError: patience and min_delta must be 0 or more, not -1")
    assert difference.startswith("ValueError: patience and min_delta must be 0 or more")
    assert nothing.startswith("ValueError: there are no best weights")
