"""What decays is what was asked for, by both kinds of decay, and labels and dropout do theirs."""

from __future__ import annotations

import numpy as np
import pytest

from tests import workers

DECAY = 0.3  # of the scenarios
OTHERS = workers.keras()


@pytest.mark.parametrize("case", ["kernels", "everything"])
def test_the_penalty_and_its_gradient_are_those_of_the_formula(every, case):
    found = every["regularization penalty"]
    drawn = {name: np.array(value) for name, value in found["draws"].items()}
    wanted = {"kernel"} if case == "kernels" else set(drawn)
    value = DECAY / 2 * sum(np.square(drawn[name]).sum() for name in wanted)
    assert found[case]["value"] == pytest.approx(value, rel=1e-6)
    for name, gradient in found[case]["gradients"].items():
        if name in wanted:
            assert np.allclose(gradient, DECAY * drawn[name], rtol=1e-6)
        else:
            assert gradient is None


@pytest.mark.parametrize("case", ["kernels", "biases", "norms", "embeddings"])
def test_only_what_was_asked_for_decays(every, case):
    found = every["regularization decayed"][case]
    left = (1 - 0.1 * DECAY) ** 3
    words = {"biases": "dense.bias", "norms": "norm", "embeddings": "embedding"}
    for name, ratio in found["ratios"].items():
        dotted = name.replace("/", ".")
        kernel = "dense.weight" in dotted or "dense.kernel" in dotted
        decays = kernel or words.get(case, "no such") in dotted
        assert ratio == pytest.approx(left if decays else 1.0, rel=1e-5), name
        assert (name in found["said"]) == decays, name


def test_under_sgd_both_are_one_and_under_adam_they_are_not(every):
    found = {case: np.array(value) for case, value in every["regularization under_adam"].items()}
    assert np.allclose(found["sgd, l2"], found["sgd, decoupled"], atol=2e-4)
    assert np.all(found["sgd, nothing"] - found["sgd, l2"] > 0.01)
    share = (1 - 1e-2 * 0.1) ** 200
    assert np.allclose(found["adam, decoupled"], share, atol=0.02)  # the same for both weights
    lost = found["adam, nothing"] - found["adam, l2"]
    # The penalty is divided by the size of the gradient: a hundredth of it moves the other weight.
    assert lost[0] > 0.05
    assert lost[0] > 20 * lost[1]


def test_twins_train_alike_with_either_decay(evidence):
    ours = evidence["pt"]["regularization under_adam"]
    for other in OTHERS:
        theirs = evidence[other]["regularization under_adam"]
        for case, weights in ours.items():
            assert theirs[case] == pytest.approx(weights, rel=1e-4), case


@pytest.mark.parametrize("share", ["0.0", "0.1", "0.5"])
def test_smoothed_labels_are_those_of_the_formula(every, share):
    found = every["regularization smoothing"]
    logits, labels = np.array(found["logits"], float), np.array(found["labels"])
    log = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    target = np.eye(7)[labels] * (1 - float(share)) + float(share) / 7
    assert found[share]["value"] == pytest.approx(-(target * log).sum(-1).mean(), rel=1e-5)
    assert np.allclose(found[share]["gradient"], (np.exp(log) - target) / 10, atol=1e-6)


@pytest.mark.parametrize("case", ["sequential", "with a tail"])
def test_dropout_stands_before_the_head(every, case):
    found = every["regularization dropout"][case]
    assert found["training"] == [0.0, 4.0]  # what is kept is divided by a quarter
    assert found["kept"] == pytest.approx(0.25, abs=0.03)
    assert found["inference"] == [1.0]
    assert found["names"]
    assert found["kept at a quarter"] == pytest.approx(0.75, abs=0.03)
    assert found["set"] == 1
    assert "set_dropout_rate" in found["twice"]


@pytest.mark.parametrize("case", ["behind a block", "by keyword"])
def test_dropout_stands_before_the_head_of_modules_of_others(evidence, case):
    found = evidence["pt"]["regularization dropout"][case]
    assert found["kept"] == pytest.approx(0.25, abs=0.03)


def test_a_sample_s_output_depends_on_its_companions_by_batchnorm_alone(every):
    found = every["regularization batch_norm"]
    plain, without = found["none"], found["without_batchnorm"]
    assert plain["moved"] > 0.1
    assert without["moved"] < 1e-6
    assert plain["same kernels"]
    assert without["same kernels"]
    assert plain["biases"] == ["head.bias"]
    assert without["biases"] == [*(f"conv{number}.bias" for number in range(4)), "head.bias"]
    assert without["said"] == [{"tensors": 10}, None]
    assert "conv0.bn.mean" in found["with it"]  # what the row would say of a model that has one
    for row in (plain, without):
        assert row["losses"][-1] < 0.5 * row["losses"][0]


def test_rates_of_dropouts_that_are_on_change(every):
    found = every["regularization rates"]
    assert found["rates"] == [0.6, 0.0, 0.6, 0.6, 0.6]
    assert found["said"]


def test_what_can_not_be_done_is_said(every):
    found = every["regularization refusals"]
    assert len(found) >= 9
    for case, said in found.items():
        assert said, f"{case} was not refused"


def test_kernels_of_models_of_others_decay(every):
    found = every["regularization foreign_models"]
    assert found["decayed"] == found["layers"] > 20


def test_kernels_that_are_computed_from_others_decay(evidence):
    """Behind spectral and weight normalisation: not an embedding, nor what normalises inputs."""
    assert evidence["pt"]["regularization computed_kernels"] == [
        "1.parametrizations.weight.original",
        "2.parametrizations.weight.original0",
        "2.parametrizations.weight.original1",
    ]
    for other in workers.keras():
        names = evidence[other]["regularization computed_kernels"]
        assert len(names) == 2
        assert all("kernel" in name for name in names)


def test_groups_are_split_without_a_loss(evidence):
    found = evidence["pt"]["regularization split"]
    assert found["same"]
    assert found["once each"]
    assert found["of a part"] == ["dense.weight"]  # not what another optimizer may train


def test_what_was_frozen_decays_once_it_trains_as_the_rest_does(every):
    """Each group with the names of its own parameters, where the optimizer knows them."""
    found = every["regularization thawed"]
    assert found["left"] == pytest.approx([0.95, 1.0, 0.95, 1.0])
    assert found["penalty"] == pytest.approx(0.5 / 2 * 8)
    assert found["wide"] == "float64"
    if every.framework == "pt":
        assert found["names"] == [["0.weight", "1.weight"], ["0.bias", "1.bias"]]


def test_kernels_that_are_no_matrices_decay_under_muon_as_the_rest_does(evidence):
    assert evidence["tf"]["regularization under_muon"] == pytest.approx([0.95, 1.0, 0.95, 1.0])


def test_an_epoch_takes_the_same_share_away_at_any_batch(every):
    scaled = every["regularization scaled"]
    assert (1 - 0.1 * scaled) ** 4 == pytest.approx((1 - 0.1 * 0.01) ** 16, rel=1e-4)


def test_rows_of_twice_the_batch_have_the_decay_as_it_is_and_scaled(every):
    found = every["regularization twice_the_batch"]
    assert found["decoupled"] == [pytest.approx(0.05), None]
    assert found["decoupled_x2"] == [pytest.approx(0.05), 120]
    assert found["decoupled_x2_scaled"] == [pytest.approx(0.1), 120]


@pytest.mark.parametrize("framework", workers.keras())
def test_a_model_with_dropout_is_called_as_before(evidence, framework):
    assert evidence[framework]["regularization structures"] == {"same": True, "dtype": "int32"}
