"""The guard stops in time and says why, and both sides alike.

Each framework runs in a process of its own (`finite_guard_worker.py`), tf_keras in a third.
"""

from __future__ import annotations

import re

import pytest

from tests import workers

WORKERS = ("pt", *workers.keras())
CULPRITS = {
    "input": "3 of 1024 values of input x are not finite: look at the data",
    "loss": "1 of 1 values of the loss are not finite: look at the learning rate",
    "gradient": "10 of 10 values of the gradient of head.bias are not finite: look for sqrt",
    "overflow": "each gradient is finite but their norm overflows: look at the scale",
}


@pytest.fixture(scope="module")
def evidence():
    """What each worker found: {"pt": {scenario: ...}, ...}."""
    return workers.run("train_step.finite_guard_worker", WORKERS)


@pytest.fixture(params=["pt", "tf"])
def found(request, evidence):
    return evidence[request.param]


@pytest.fixture(params=WORKERS)
def every(request, evidence):
    return evidence[request.param]


def test_a_guarded_step_is_the_plain_one(every):
    losses = every["losses"]
    assert losses["guarded"] == pytest.approx(losses["plain"], rel=1e-6)


@pytest.mark.parametrize("culprit", [*CULPRITS, "gradient clipped"])
def test_the_guard_stops_in_time_and_names_the_culprit(every, culprit):
    case = every["guard"][culprit]
    said = case["said"].replace("head/bias:0", "head.bias").replace("head/bias", "head.bias")
    assert said.startswith(f"FloatingPointError: step 3: {CULPRITS[culprit.split()[0]]}")
    assert "\n" not in said
    assert case["kept"]
    assert case["state"]
    assert case["goes on"] is None
    assert case["moved"]


def test_pt_the_guard_waits_for_the_device_once_a_step(evidence):
    assert evidence["pt"]["reads"] == 1


def test_the_guard_names_what_it_is_in_a_model_of_two_inputs(found):
    foreign = found["foreign"]
    assert foreign["good"] is None
    # Only one of the two layers is behind the root.
    left = r"8 of 8 values of the gradient of (two(_\d+)?/)?left[./](weight|kernel) are not finite"
    assert re.search(left, foreign["gradient"])
    assert "step 1: 2 of 24 values of input x[1] are not finite" in foreign["input"]
    assert "step 1: 6 of 6 values of input y[0] are not finite" in foreign["target"]
    # It does not reach the loss: the input itself has been looked at.
    assert "step 1: 1 of 1000 values of input y[1] are not finite" in foreign["ignored"]


@pytest.mark.parametrize("framework", ["pt", "tf"])
def test_the_guard_looks_at_sparse_and_complex_inputs(evidence, framework):
    said = evidence[framework]["kinds_of_inputs"]
    assert said.pop("sound") is None
    for name, line in said.items():
        place = "x[1]" if name == "complex" else "x[0]"
        assert line.startswith("FloatingPointError: step 1: 1 of "), name
        assert f"values of input {place} are not finite" in line, name


def test_tf_a_dictionary_of_inputs(evidence):
    functional = evidence["tf"]["functional"]
    assert functional["good"] is None
    assert "step 2: 4 of 24 values of input x['b'] are not finite" in functional["bad"]


def test_a_model_that_trains_nothing_is_refused(found):
    assert found["refusals"]["frozen"].startswith("ValueError: the model has no trainable")


def test_tf_models_and_optimizers_that_are_refused(evidence):
    foreign = evidence["tf"]["foreign"]
    assert foreign["unbuilt"].startswith("ValueError: the model has no trainable variables")
    for kind in ("scaling", "factor"):
        assert foreign[kind].startswith("ValueError: pass the optimizer itself")
