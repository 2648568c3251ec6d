"""Plain is the game of two heads by hand, and each rung has its effect on top of it."""

from __future__ import annotations

import numpy as np

from tests.ladders.test_image_classification import apart


def of(found, scenario):
    return found[f"domain_adaptation {scenario}"]


def test_the_plain_program_is_two_gradients_by_hand(every):
    found = of(every, "plain")
    assert apart(found["epochs"], found["by hand"]) < 1e-4
    assert len(found["epochs"]) == 6  # two epochs of 24 images in batches of 8


def test_twins_agree_in_their_first_losses(evidence):
    ours, theirs = (of(evidence[side], "plain")["shared"] for side in ("pt", "tf"))
    assert apart(ours, theirs) < 1e-5


def test_the_pipeline_gives_the_same_batches_another_way(every):
    assert apart(of(every, "input_pipeline")["epochs"], of(every, "plain")["epochs"]) < 1e-4


def test_mixed_precision_computes_in_bfloat16_over_float32_weights(every):
    found = of(every, "mixed_precision")
    for part in ("step", "predict"):
        assert set(found[part]["convolution"]) == {"bfloat16"}
    assert found["weights"] == ["float32"]


def test_clipping_goes_the_same_way_less_far(every):
    plain, clipped = (np.array(of(every, "clipping")[name]) for name in ("plain", "clipped"))
    # The rate times the norm, of which the domain head has a part.
    assert np.linalg.norm(clipped) <= 0.02 * 0.01 * 1.001 < np.linalg.norm(plain)
    cosine = plain @ clipped / np.linalg.norm(plain) / np.linalg.norm(clipped)
    assert cosine > 0.9999


def test_compiled_steps_are_compiled_and_the_same(every):
    found = of(every, "compiled")
    assert apart(found["shared"], of(every, "plain")["shared"]) < 1e-4
    assert found["graphs"]


def test_all_rungs_at_once_train_and_predict(every):
    found = of(every, "everything")
    assert np.isfinite(found["losses"]).all()
    assert found["predicts"] == [16, 6]
    assert found["bytes"] >= 4 * found["weights"]
