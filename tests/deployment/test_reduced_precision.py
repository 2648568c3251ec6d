"""Predictions run in half width, are float32 of rounded arithmetic, and leave the model as it was.

Bounds come from bfloat16's unit roundoff u = 2^-8, the largest relative error of one rounding.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shared.specs import TASKS
from tests.compression import teaching

FRAMEWORKS = ("pt", "tf", "tf_keras")
BOTH = pytest.mark.only("pt", "tf")
U = 2.0**-8
ROUNDINGS = 9  # between input and output: two convolutions and a head, of input, weight and output
CNN = TASKS["digits-cnn"].model
CNN = replace(CNN, convolutions=CNN.convolutions[:2])


@pytest.fixture(scope="module")
def cnn(kit):
    """A model and three batches."""
    return teaching.student_of(kit, CNN), teaching.batches(kit, CNN, 3)


@BOTH
def test_predictions_are_float32_of_rounded_arithmetic(kit, technique, cnn):
    """After three steps."""
    model, stream = cnn
    optimizer = teaching.optimizer_of(kit, model)
    step = kit.training.make_train_step(model, optimizer, kit.training.cross_entropy)
    teaching.losses_of(kit, step, stream)
    x, before = stream[0][0], teaching.weights_of(kit, model)
    exact = np.asarray(kit.training.make_predict(model)(x))

    def error(**settings):
        logits = technique.make_predict(model, **settings)(x)
        assert "float32" in str(logits.dtype)
        return np.abs(np.asarray(logits) - exact).max() / np.abs(exact).max()

    rounded = error(dtype="bfloat16")
    assert error(dtype="float32") == 0.0
    assert U / 16 < rounded < ROUNDINGS * U
    assert error(dtype="float16") < rounded / 4
    error(dtype="bfloat16", keep_fp32="head")
    assert teaching.farthest(teaching.weights_of(kit, model), before) == 0


@BOTH
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_convolutions_and_products_run_in_the_dtype(kit, technique, cnn, dtype):
    predict = technique.make_predict(teaching.student_of(kit, CNN), dtype=dtype)
    ran = kit.runtime.operator_dtypes(lambda x, y: predict(x), *cnn[1][0])
    assert set(ran["convolution"]) == set(ran["matmul"]) == {dtype}


REFUSALS = [
    pytest.param({"dtype": "half"}, "unknown dtype 'half': choose one of bfloat16", marks=BOTH),
    pytest.param({"keep_fp32": "haed"}, "no layer 'haed'; it has ", marks=BOTH),
    pytest.param({}, "tf_keras cannot switch a built model", marks=pytest.mark.only("tf_keras")),
]


@pytest.mark.parametrize(("settings", "message"), REFUSALS)
def test_a_refusal_says_why(technique, cnn, settings, message):
    with pytest.raises((ValueError, NotImplementedError), match=message):
        technique.make_predict(cnn[0], **settings)
