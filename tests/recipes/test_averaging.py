"""Averages are those of NumPy, and statistics those of the data."""

from __future__ import annotations

import numpy as np
import pytest

from tests import workers

DECAY = 0.8  # of the worker


def exponential(seen):
    average = {name: np.array(value, float) for name, value in seen[0].items()}
    for weights in seen[1:]:
        for name, value in weights.items():
            average[name] = DECAY * average[name] + (1 - DECAY) * np.array(value, float)
    return average


def equal(seen):
    return {name: np.mean([np.array(w[name], float) for w in seen], axis=0) for name in seen[0]}


def apart(ours, theirs):
    """The largest relative L2 difference of a tensor."""
    return max(
        np.linalg.norm(np.array(ours[name]) - theirs[name]) / np.linalg.norm(theirs[name])
        for name in theirs
        if np.linalg.norm(theirs[name])
    )


@pytest.mark.parametrize(("name", "formula"), [("exponential", exponential), ("equal", equal)])
def test_the_average_is_that_of_numpy_and_leaves_no_trace(every, name, formula):
    found = every["averaging averages"]
    assert apart(found[name], formula(found["seen"])) < 1e-6
    last = {key: np.array(value) for key, value in found["seen"][-1].items()}
    assert apart(found[name], last) > 1e-3  # or there was nothing to average
    assert found[f"{name}: as before"]
    assert found[f"{name}: as before a failure"]
    assert found["applied"]


def test_statistics_are_the_mean_over_batches_and_nothing_else_changes(every):
    found = every["averaging statistics"]
    mean, variance = found["moments"]
    assert found["changed"]
    assert np.allclose(found["mean"], mean, rtol=1e-4, atol=1e-6)
    assert np.allclose(found["variance"], variance, rtol=1e-4)
    assert found["parameters as before"]
    assert found["modes as before"]


def test_batches_are_read_one_by_one_and_the_statistics_stay_where_one_fails(every):
    found = every["averaging failing"]
    assert found["1: taken in"]
    assert found["1: stays"]
    assert found["0: stays"]


def test_dropout_is_not_in_the_statistics(every):
    found = every["averaging dropout"]
    assert np.allclose(found["mean"], found["expected"], rtol=1e-4)


@pytest.mark.parametrize("framework", workers.keras())
def test_noise_is_refused_and_the_statistics_stay(evidence, framework):
    found = evidence[framework]["averaging noise"]
    assert "draws at random" in found["said"]
    assert found["stayed"]


def test_a_resumed_training_keeps_its_average_and_its_best_weights(every):
    one_go, resumed = every["averaging resumed"]
    assert resumed["stopped"] == one_go["stopped"] == [False, False, False, True]
    assert resumed["best"] == one_go["best"] == 1.0
    for kind in ("mean", "weights"):
        for name, wanted in one_go[kind].items():
            assert np.array_equal(resumed[kind][name], wanted), (kind, name)


@pytest.mark.parametrize("way", ["averaging", "augmenting", "checked"])
def test_what_a_step_has_beside_one_around_it_has(every, way):
    found = every["averaging step_of_others"]
    assert not found["plain"][way]
    passed = found["passed on"][way]
    assert passed == {name: name.upper() for name in passed}
    assert len(passed) > 1


def test_a_model_that_python_cannot_copy_is_refused(evidence):
    found = evidence["pt"]["averaging computed_weight"]
    assert len(found) == 2
    assert all("cannot copy the model" in line for line in found)


def test_bad_settings_are_refused(every):
    assert all(every["averaging refusals"].values())


def test_early_stopping_keeps_the_best_average(every):
    """Which is that of the first two of three epochs; with statistics of its own."""
    found = every["averaging stopped_average"]
    assert (found["epochs"], found["looks"]) == (6, 3)
    for name, kept in found["kept"].items():
        wanted = np.mean([found["seen"][epoch][name] for epoch in (3, 4)], axis=0)
        assert np.allclose(kept, wanted, atol=1e-6)
        assert not np.allclose(kept, found["seen"][5][name], atol=1e-6)
    assert found["its own statistics"]


@pytest.mark.parametrize("framework", workers.keras())
def test_statistics_of_a_model_that_is_a_graph_of_its_own(evidence, framework):
    made, mean = evidence[framework]["averaging statistics_of_graphs"]
    assert np.allclose(made, mean, atol=1e-6)


def test_statistics_of_a_frozen_normalization_stay(every):
    frozen, other = every["averaging frozen"]
    assert frozen == [0, 0, 0]
    assert all(abs(mean - 5) < 1 for mean in other)


def test_statistics_of_a_normalization_that_no_batch_goes_through_stay(every):
    found = every["averaging two_domains"]
    half = len(found) // 2
    assert found[:half] == found[half:]


def test_an_average_is_of_the_variables_that_trained_when_it_was_made(every):
    assert every["averaging thawed"] == [1.0, 0.0]


def test_statistics_of_inputs_by_name(every):
    found = every["averaging named_inputs"]
    assert np.allclose(found["mean"], found["expected"], atol=1e-5)


def test_an_average_of_weights_in_half_precision_moves_by_less_than_they_can(every):
    inside, after = every["averaging half_precision"]
    assert inside == pytest.approx(2 - 0.999**200, abs=2**-8)
    assert after == 2


def test_an_average_of_small_halves_is_not_rounded_as_they_are(every):
    inside, weight = every["averaging small_halves"]
    assert inside == weight


def test_an_average_of_doubles_is_as_exact_as_they_are(every):
    equal, exponential = every["averaging double_precision"]
    assert equal == pytest.approx(7 / 3, rel=1e-14)
    wanted = DECAY * (DECAY + (1 - DECAY) * 2) + (1 - DECAY) * 4
    assert exponential == pytest.approx(wanted, rel=1e-14)


def test_statistics_of_a_shared_normalization_are_the_mean_over_all_that_it_is_given(every):
    found = every["averaging shared"]
    assert np.allclose(found["mean"], found["expected"], atol=1e-5)
    assert not found["call"]


@pytest.mark.parametrize("framework", workers.keras())
def test_statistics_leave_a_kernel_that_is_normalized_in_training(evidence, framework):
    assert evidence[framework]["averaging normalized_kernel"]
