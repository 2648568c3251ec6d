"""The first that is not finite is named, and a checked step gives the weights back."""

from __future__ import annotations

import pytest

from tests import workers

FIRST = {
    "input": "not finite: batch 7: x: 1 infinite of 512 values",
    "gradient": "not finite: batch 7: gradient of ",
    "loss": "not finite: batch 7: loss: it is inf",
}
NAMED = {
    ("pt", "parameter"): "not finite: batch 7: parameter 1.weight: 1 NaN of 512 values",
    ("tf", "parameter"): "first/kernel",
    ("pt", "layer"): "not finite: batch 7: output of layer 3: 64 infinite of 64 values",
    ("tf", "layer"): "not finite: batch 7: output of layer log: 64 infinite of 64 values",
    ("pt", "gradient"): "gradient of 2.bias",
    ("tf", "gradient"): "batch_normalization",
    ("pt", "scripted"): "not finite: batch 7: output of layer 3: 64 infinite of 64 values",
    ("pt", "resnet18"): "parameter layer2.0.conv1.weight: 1 NaN of",
    ("tf", "keras.applications"): "block_3_expand_BN/gamma",
}


def test_the_first_that_is_not_finite_is_named(every):
    found = every["nonfinite nonfinite"]
    assert found["clean"] == "batch 7: nothing found"
    for name, text in FIRST.items():
        assert text in found[name]
    assert found["left as it was"]
    assert found["no trace"]


@pytest.mark.parametrize(("framework", "case"), NAMED)
def test_parts_of_models_are_named(evidence, framework, case):
    for worker in workers.keras() if framework == "tf" else ("pt",):
        assert NAMED[framework, case] in evidence[worker]["nonfinite nonfinite"][case]


def test_pt_a_checked_step_takes_a_model_of_any_state(evidence):
    said, calls = evidence["pt"]["nonfinite any_state"]
    assert said == "not finite: batch 1: x: 8 infinite of 8 values"
    assert calls == 1


def test_a_checked_step_names_the_batch_and_gives_the_weights_back(every):
    found = every["nonfinite step"]
    assert found["clean"]["said"] is None
    assert found["clean"]["steps"] == 8
    bad = found["bad batch"]
    assert bad["steps"] == 5
    assert bad["said"] == "not finite: batch 5: x: 1 NaN of 512 values"
    assert bad["weights of before"]
    diverged = found["diverges"]
    assert 1 <= diverged["steps"] < 8
    assert "not finite: batch" in diverged["said"]
    assert diverged["weights of before"]
