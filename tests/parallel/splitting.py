"""What the tests of model and tensor parallelism share: the net, the samples and the bars."""

from __future__ import annotations

import functools
import re
from math import prod

import numpy as np
import pytest

from shared.specs import TASKS, parameter_shapes
from tests.frameworks import apart
from tests.parallel.replicas import assert_equal_work

STEPS, SEED, BATCH = 10, 3, 8
RATE, MOMENTUM = 0.05, 0.9
BARS = {"cnn": 1e-5, "mixed": 1e-5, "norm": 1e-5, "gpt": 1e-4}


def weights(norm: bool) -> dict[str, np.ndarray]:
    """Canonical weights of the small convolutional net."""
    random = np.random.default_rng(1)
    shapes = {"conv0.kernel": (3, 3, 3, 8), "conv1.kernel": (3, 3, 8, 8)}
    shapes |= {"up.kernel": (8, 16), "up.bias": (16,), "down.kernel": (16, 10), "down.bias": (10,)}
    found = {name: random.normal(0, 0.3, shape) for name, shape in shapes.items()}
    if norm:
        found |= {"bn.gamma": np.ones(8), "bn.beta": np.zeros(8)}
        found |= {"bn.mean": np.zeros(8), "bn.variance": np.ones(8)}
    return {name: value.astype(np.float32) for name, value in found.items()}


@functools.cache
def dataset(name):
    """More than one epoch of it is taken. Images are NHWC."""
    random = np.random.default_rng(0)
    if name == "mixed":
        numbers = random.normal(size=(44, 6)).astype(np.float32)
        x = {"numbers": numbers, "codes": random.integers(0, 12, (44, 4))}
        return x, random.integers(0, 10, 44)
    if name == "gpt":
        codes = random.integers(0, 98, (40, 65))
        return codes[:, :-1].copy(), codes[:, 1:].copy()
    images = random.normal(size=(44, 12, 12, 3)).astype(np.float32)
    return images, random.integers(0, 10, 44)


def sizes(model):
    """Elements of each parameter."""
    if model == "cnn":
        return {name: value.size for name, value in weights(norm=False).items()}
    if model == "mixed":
        found = {"codes": 12 * 8, "numbers.kernel": 6 * 8, "numbers.bias": 8}
        found |= {"up.kernel": 8 * 16, "up.bias": 16, "down.kernel": 16 * 10, "down.bias": 10}
        return found
    shapes = parameter_shapes(TASKS["text-gpt"].model)
    return {name: prod(shape) for name, shape in shapes.items()}


def assert_work_of_one_process(run, model, alone, agrees, name):
    """And of both frameworks; on the clock of the caller, one step ends after another."""
    # BatchNorm sees a micro-batch at a time, as in gradient accumulation.
    one = alone(model, in_parts=True) if model == "norm" else alone(model)
    assert len(one.losses) == STEPS
    assert one.losses[-1] != one.losses[0]
    assert_equal_work(run.result, one, BARS[model])
    if model == "norm":
        gammas = (result.weights["bn.gamma"] for result in (run.result, alone("norm")))
        assert apart(*gammas) > 1e-3
    assert len(run.times) == STEPS + 2
    assert run.times == sorted(run.times)
    if model != "mixed":  # Keras feeds the running variance with the biased one
        kept = {n: v for n, v in run.result.weights.items() if v.size < 700}
        kept = {n: v for n, v in kept.items() if "variance" not in n}
        agrees(name, {"losses": list(map(float, run.result.losses)), **kept}, BARS[model])


def assert_local(marks):
    """Processes use the loopback interface alone, and share the threads."""
    for mark in marks:
        # A socket of both versions of IP shows the loopback of the fourth as mapped.
        assert set(mark["addresses"]) <= {"127.0.0.1", "::ffff:127.0.0.1"}
        assert mark["addresses"]
        assert mark["threads"] == 1


def assert_biases_do_not_decay(weights):
    """Those of `undecayed`, which are ones."""
    assert weights.keys() == {"up/kernel", "up/bias", "down/kernel", "down/bias"}
    assert weights["up/bias"].mean() == weights["down/bias"].mean() == 1.0


def assert_refused(call, message, **settings):
    words = f"^{re.escape(message)}"
    with pytest.raises((ValueError, NotImplementedError), match=words) as raised:
        call(**settings)
    assert "\n" not in str(raised.value)
