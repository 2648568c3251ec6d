"""One framework's share of the reduced-precision tests, in a process of its own.

`python -m tests.deployment.reduced_precision_worker pt|tf|tf_keras` runs every scenario and prints
one line of JSON: scenario -> what was found, or {"error": traceback}.
`test_reduced_precision.py` judges it.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial

import numpy as np

from shared.specs import TASKS
from tests import workers
from tests.train_step import steps
from tests.train_step.steps import same
from tests.workers import raised

FRAMEWORK = "pt" if sys.argv[1:] == ["pt"] else "tf"
impl = workers.implementation(FRAMEWORK, "deployment.reduced_precision")
technique, kit = impl.deployment.reduced_precision, impl.kit
CNN = TASKS["digits-cnn"].model
CNN = replace(CNN, convolutions=CNN.convolutions[:2])
prepare, batches, run = (
    partial(function, kit) for function in (steps.prepare, steps.batches, steps.losses_of)
)


def predict():
    """Predictions of each dtype after three steps, and what predicting leaves behind."""
    prepared = prepare(CNN)
    x = batches(CNN, 1)[0][0]
    run(prepared, batches(CNN, 3))
    before = kit.models.export_weights(prepared.model)
    exact = np.asarray(kit.training.make_predict(prepared.model)(x))
    found = {}
    for name, settings in (
        ("float32", {"dtype": "float32"}),
        ("bfloat16", {"dtype": "bfloat16"}),
        ("head", {"dtype": "bfloat16", "keep_fp32": "head"}),
        ("float16", {"dtype": "float16"}),
    ):
        logits = technique.make_predict(prepared.model, **settings)(x)
        error = float(np.abs(np.asarray(logits) - exact).max() / np.abs(exact).max())
        dtype = getattr(logits.dtype, "name", str(logits.dtype)).removeprefix("torch.")
        found[name] = {"dtype": dtype, "error": error}
    found["weights_kept"] = same(before, kit.models.export_weights(prepared.model))
    return found


def operators():
    """The dtypes that convolutions and matrix products ran in."""
    model, (x, y) = prepare(CNN).model, batches(CNN, 1)[0]
    found = {}
    for dtype in ("float32", "bfloat16"):
        predict = technique.make_predict(model, dtype=dtype)
        found[dtype] = kit.runtime.operator_dtypes(lambda x, y, run=predict: run(x), x, y)
    return found


def refusals():
    """What bad input raises."""
    model = prepare(CNN).model
    return {
        "dtype": raised(technique.make_predict, model, dtype="half"),
        "layer": raised(technique.make_predict, model, keep_fp32="haed"),
    }


def tf_keras():
    """What tf_keras refuses."""
    return raised(technique.make_predict, prepare(CNN).model)


def main() -> None:
    kit.runtime.configure(threads=1, seed=0)
    workers.report([tf_keras] if sys.argv[1] == "tf_keras" else [predict, operators, refusals])


if __name__ == "__main__":
    main()
