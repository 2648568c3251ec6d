"""Predictions run in half width, are float32 of rounded arithmetic, and leave the model as it was.

Each framework runs in a process of its own (`reduced_precision_worker.py`), tf_keras in a third.

Bounds come from bfloat16's unit roundoff u = 2^-8, the largest relative error of one rounding.
"""

from __future__ import annotations

import pytest

from tests import workers

U = 2.0**-8
ROUNDINGS = 9  # between input and output: two convolutions and a head, of input, weight and output


@pytest.fixture(scope="module")
def evidence():
    """What each worker found: {"pt": {scenario: ...}, ...}."""
    return workers.run("deployment.reduced_precision_worker", ("pt", "tf", "tf_keras"))


@pytest.fixture(params=["pt", "tf"])
def found(request, evidence):
    return evidence[request.param]


def test_predictions_are_float32_of_rounded_arithmetic(found):
    predicted = found["predict"]
    assert all(predicted[name]["dtype"] == "float32" for name in ("bfloat16", "head", "float16"))
    assert predicted["float32"]["error"] == 0.0
    assert U / 16 < predicted["bfloat16"]["error"] < ROUNDINGS * U
    assert predicted["float16"]["error"] < predicted["bfloat16"]["error"] / 4
    assert predicted["weights_kept"]


def test_convolutions_and_products_run_in_the_dtype(found):
    ran = found["operators"]
    for dtype in ("float32", "bfloat16"):
        assert set(ran[dtype]["convolution"]) == set(ran[dtype]["matmul"]) == {dtype}


def test_bad_settings_get_one_clear_line(found):
    refusals = found["refusals"]
    assert refusals["dtype"].startswith("ValueError: unknown dtype 'half': choose one of bfloat16")
    assert "no layer 'haed'; it has " in refusals["layer"]


def test_tf_keras_is_refused(evidence):
    said = "NotImplementedError: tf_keras cannot switch a built model"
    assert evidence["tf_keras"]["tf_keras"].startswith(said)
