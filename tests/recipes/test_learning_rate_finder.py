"""The range test's curve is that of plain training, and everything is as before it."""

from __future__ import annotations

import numpy as np
import pytest

from tests import workers


def test_the_curve_is_that_of_plain_training_at_these_rates(every):
    found = every["learning_rate_finder curve"]
    assert len(found["rates"]) == len(found["losses"]) == len(found["smoothed"])
    ratios = np.diff(np.log(found["rates"]))
    assert np.allclose(ratios, np.log(30 / 1e-3) / 59)
    assert found["rates"][0] == pytest.approx(1e-3)
    assert found["losses"] == found["plain"]
    assert found["again"]
    means = [
        np.mean(found["losses"][max(0, at - 4) : at + 5]) for at in range(len(found["losses"]))
    ]
    assert np.allclose(found["smoothed"], means, rtol=1e-12)
    best = found["rates"][int(np.argmin(means))]
    assert 1e-3 < found["suggestion"] < best


def test_twins_find_the_same_curve_and_suggestion(evidence):
    ours = evidence["pt"]["learning_rate_finder curve"]
    for other in workers.keras():
        theirs = evidence[other]["learning_rate_finder curve"]
        assert np.allclose(ours["rates"], theirs["rates"], rtol=1e-12)
        # Up to the lowest point: beyond it a training that diverges amplifies the last bit.
        end = int(np.argmin(ours["smoothed"]))
        assert end > 20
        assert np.allclose(ours["losses"][:end], theirs["losses"][:end], rtol=1e-4)
        assert ours["suggestion"] == pytest.approx(theirs["suggestion"])


@pytest.mark.parametrize("case", ["new", "trained"])
def test_everything_comes_back_and_training_goes_on_as_if_nothing_had_happened(every, case):
    found = every["learning_rate_finder put_back"]
    assert found[f"{case}: same"]
    assert found[f"{case}: goes on"]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("no batches", "no batches"),
        ("an iterator that ends", "no batches"),
        ("nan at once", "first loss"),
        ("never falls", "never falls"),
        ("rising at once", "never falls"),
        ("range", "lowest < highest"),
        ("window", "odd window"),
        ("few steps", "steps"),
        ("the step fails", "KeyError"),
        ("the step sets the rate", "sets the rate"),
        ("schedule", "schedule"),
    ],
)
def test_what_can_not_be_tested_is_said_and_everything_is_as_before(every, case, words):
    said, same = every["learning_rate_finder failures"][case]
    assert words in (said or "")
    assert same


def test_it_stops_where_the_loss_diverges(every):
    found = every["learning_rate_finder divergence"]
    assert found["nan"]["taken"] == 40
    losses = found["rises"]["losses"]
    means = [np.mean(losses[max(0, at - 4) : at + 1]) for at in range(len(losses))]
    wanted = next(at for at, mean in enumerate(means) if mean - min(means[: at + 1]) > 2 * means[0])
    assert 40 < wanted < 60
    assert found["rises"]["taken"] == wanted + 1
    assert found["below zero"]["taken"] == 100  # a loss may be negative


@pytest.mark.parametrize("case", ["smooth", "noisy"])
def test_the_suggestion_is_the_steepest_fall(every, case):
    found = np.log10(every["learning_rate_finder suggestions"][case])
    assert found == pytest.approx(-2.5, abs=0.05 if case == "smooth" else 0.2)


def test_groups_keep_their_ratio_and_get_their_rates_back(evidence):
    found = evidence["pt"]["learning_rate_finder groups"]
    for rate, seen in zip(found["rates"], found["seen"], strict=True):
        assert seen == pytest.approx([rate, rate / 10])
    assert found["after"] == pytest.approx([0.1, 0.01])
    assert found["same tensor"]
    assert found["merged"]
    assert not found["warnings"]


def test_what_a_loss_trains_comes_back_too(evidence):
    # tf_keras's optimizers keep no list of what they train.
    assert evidence["pt"]["learning_rate_finder own_loss"] == 0
    assert evidence["tf"]["learning_rate_finder own_loss"] == 0


def test_the_scale_of_a_loss_stays(evidence):
    before, after = evidence["tf"]["learning_rate_finder scaled"]
    assert before == after == [before[0], 128.0]
