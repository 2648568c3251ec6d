"""The hand-written loops and fit do the kit's work: the same losses from the same weights."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

STEPS = {"pt_impl": ("kit", "hand_written"), "tf_impl": ("kit", "hand_written", "fit")}
PROGRAM = """
import json, sys
from importlib import import_module
import numpy as np
from shared.specs import TASKS
from shared.weights import init_weights
baseline, data, models, training, runtime = (
    import_module(f"{sys.argv[1]}.{name}")
    for name in ("train_step.baseline", "kit.data", "kit.models", "kit.training", "kit.runtime")
)
runtime.configure(threads=2, seed=0)
task = TASKS["digits-cnn"]
weights = init_weights(task.model, seed=3)
random = np.random.default_rng(0)
batches = data.resident_batches([
    (random.normal(size=(8, 32, 32, 1)).astype(np.float32), random.integers(0, 10, 8))
    for _ in range(6)
])
losses = {}
for name in sys.argv[2:]:
    model = models.build(task.model, weights)
    optimizer = training.make_optimizer(model, task.recipe)
    if name == "kit":
        step = training.make_train_step(model, optimizer, training.cross_entropy)
    elif name == "hand_written":
        step = baseline.make_hand_written_step(model, optimizer)
    else:
        loop = baseline.make_fit_loop(model, optimizer)
        seconds, mean = loop(batches)
        losses["fit"], losses["fit_seconds"] = mean, seconds
        continue
    losses[name] = [runtime.to_float(step(*batch)) for batch in batches]
print(json.dumps(losses))
"""


def train(package):
    answer = subprocess.run(
        [sys.executable, "-c", PROGRAM, package, *STEPS[package]],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "2"},
    )
    return json.loads(answer.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def evidence():
    """What each kit trained, at the same time."""
    with ThreadPoolExecutor() as pool:
        return dict(zip(STEPS, pool.map(train, STEPS), strict=True))


@pytest.mark.parametrize("package", STEPS)
def test_hand_written_step_does_the_work_of_the_kit(evidence, package):
    losses = evidence[package]
    assert losses["hand_written"] == pytest.approx(losses["kit"], rel=1e-6)
    assert losses["kit"][0] != pytest.approx(losses["kit"][-1], rel=1e-3)  # it trains


def test_tf_fit_does_the_work_of_the_kit(evidence):
    losses = evidence["tf_impl"]
    assert losses["fit"] == pytest.approx(sum(losses["kit"]) / 6, rel=1e-5)
    assert losses["fit_seconds"] > 0
