"""A loss is scaled, steps that overflow are skipped, and both frameworks do so alike.

Each framework runs in a process of its own (`loss_scaling_worker.py`).
"""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from tests import workers

TASK_PARITY = 1e-5  # of digits-cnn
HALF = 2.0**-11  # the largest relative error of rounding to float16


@pytest.fixture(scope="module")
def evidence():
    """What each worker found: {"pt": {scenario: ...}, ...}."""
    return workers.run("train_step.loss_scaling_worker", ("pt", "tf"))


@pytest.fixture(params=["pt", "tf"])
def found(request, evidence):
    return evidence[request.param]


def test_a_scaled_loss_in_float32_is_the_baseline_to_the_last_bit(found):
    """A power of two rounds nothing."""
    assert found["losses"]["float32"] == found["losses"]["baseline"]
    assert found["losses"]["float16"] != found["losses"]["baseline"]


def test_the_first_loss_in_float16_is_float32s_but_for_its_rounding(found):
    """Three layers round their input, weight and output."""
    ours, plain = (found["losses"][name][0] for name in ("float16", "baseline"))
    assert 0 < abs(ours / plain - 1) < 9 * HALF


def test_twins_agree(evidence):
    pt, tf = (evidence[side]["losses"] for side in ("pt", "tf"))
    assert pt["float16"][0] == pytest.approx(tf["float16"][0], rel=9 * HALF)


def test_overflow_skips_the_step_and_halves_the_scale(found):
    overflow = found["overflow"]
    scales = [overflow["start"], *overflow["scale"]]
    skipped = [not moved for moved in overflow["moved"]]
    assert overflow["start"] == 2.0**26
    assert skipped[0]
    assert overflow["state_kept"]
    for step, (before, after) in enumerate(pairwise(scales)):
        assert (after == before / 2) == skipped[step], f"step {step}: {before} -> {after}"
        assert after in (before / 2, before, before * 2)


def test_scale_doubles_after_the_interval_and_training_recovers(found):
    overflow = found["overflow"]
    first = overflow["moved"].index(True)
    assert overflow["moved"][first : first + 3] == [True] * 3
    start = overflow["scale"][first - 1]
    assert overflow["scale"][first : first + 3] == [start, start, 2 * start]
    assert len(set(overflow["loss"][: first + 1])) == 1  # nothing changed until then
    assert overflow["loss"][-1] < 0.8 * overflow["loss"][0]


def test_gradients_that_are_not_finite_change_no_weight(found):
    infinite, scale = found["overflow"]["infinite"], found["overflow"]["scale"][-1]
    assert infinite == {"kept": True, "scale": scale / 2}


def test_scaling_saves_gradients_from_underflow(found):
    assert found["underflow"] == {"1.0": False, "65536.0": True}


def test_tf_the_optimizer_counts_all_that_a_resumed_training_needs(evidence):
    """Of which Keras's LossScaleOptimizer leaves out what Nadam and Adafactor hold besides."""
    resumed = evidence["tf"]["resumed"]
    assert resumed == dict.fromkeys(("Adam", "Nadam", "Adafactor"), 0.0)


# Bad input ------------------------------------------------------------------------------------


def test_bad_settings_get_one_clear_line_and_change_nothing(found):
    refusals = dict(found["refusals"])
    assert refusals.pop("unchanged")
    for name in ("scale", "growth"):
        assert "initial_scale must be positive and growth_interval at least 1" in refusals[name]
    assert re.search("unknown dtype .*: choose one of bfloat16, float16", refusals["dtype"])
    assert re.search("no layer 'haed'; it has .*conv0.*head", refusals["layer"])
    for message in refusals.values():
        assert message.startswith("ValueError: ")
        assert "\n" not in message


def test_pt_a_model_without_parameters_is_refused(evidence):
    assert evidence["pt"]["nothing"].startswith("ValueError: the model has no parameters")


def test_tf_an_optimizer_that_scales_already_is_refused(evidence):
    refused = evidence["tf"]["refused"]
    assert refused["scaling"].startswith("ValueError: pass the optimizer itself")
    assert refused["factor"] == refused["scaling"]
    assert refused["second"].startswith("ValueError: float16: one optimizer holds the loss's")
    assert refused["unbuilt"].startswith("ValueError: the model has no variables yet")
