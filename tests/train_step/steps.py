"""Small models, batches and train steps, which the tests of this folder share."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from bench.harness import memory
from shared.specs import TASKS, CNNSpec, GPTSpec, ResNetSpec
from shared.weights import init_weights
from tests.compression.teaching import (  # noqa: F401
    farthest,
    teacher_weights,
    trainable_of,
    weights_of,
)

CNN = CNNSpec((8, 8, 2), ((4, 1), (6, 2)), num_classes=10, bn_momentum=0.25)
RESNET = ResNetSpec((8, 8, 1), 1, (4, 8), num_classes=3)
GPT = GPTSpec(vocabulary=11, sequence_length=6, width=8, heads=2, layers=1)
RECIPE = replace(TASKS["digits-cnn"].recipe, learning_rate=2.0**-5)
DESCENT = replace(RECIPE, learning_rate=1.0, momentum=0.0)  # moves weights by their gradients


def batches(kit, spec, count=1, samples=8):
    """Random inputs with labels that can be learned, the same in every process."""
    random = np.random.default_rng(11)
    made = []
    for _ in range(count):
        if isinstance(spec, GPTSpec):
            x = random.integers(0, spec.vocabulary, (samples, spec.sequence_length))
            y = (3 * x + 1) % spec.vocabulary
        else:
            y = random.integers(0, spec.num_classes, samples)
            x = random.normal(size=(samples, *spec.input_shape)) + y[:, None, None, None] / 5
            x = x.astype(np.float32)
        made.append((x, y))
    return kit.data.resident_batches(made)


def prepare(
    kit, spec, make=None, *, recipe=RECIPE, optimizer=None, loss_fn=None, weights=None, **settings
):
    """A model, its optimizer and its step: that of `make`, else the plain one."""
    model = kit.models.build(spec, weights or init_weights(spec, seed=1))
    optimizer = optimizer(model) if optimizer else kit.training.make_optimizer(model, recipe)
    make = make or kit.training.make_train_step
    step = make(model, optimizer, loss_fn or kit.training.cross_entropy, **settings)
    return SimpleNamespace(model=model, optimizer=optimizer, step=step)


def losses_of(kit, prepared, stream) -> list[float]:
    return [kit.runtime.to_float(prepared.step(*batch)) for batch in stream]


def same(one: dict, other: dict) -> bool:
    """Whether arrays are equal to the last bit, name by name."""
    return all(np.array_equal(one[name], other[name]) for name in one)


def peak(run: Callable) -> int:
    """Bytes that `run` peaks above what was resident before it, on Linux."""
    gc.collect()
    before = memory.resident()
    if not memory.reset_peak():
        pytest.skip("the kernel counts no new peak")
    run()
    return memory.peak() - before


def applied(kit, models, spec, make, stream, **settings) -> list[dict[str, np.ndarray]]:
    """The "loss", the gradients that reach the optimizer, and statistics after each batch's step.

    Of each batch from the same start, in which no scale is 1 and no statistic that of a new layer.
    """
    weights = teacher_weights(spec)
    settings |= {"optimizer": models.recorder, "weights": weights}
    prepared, found = prepare(kit, spec, make, **settings), []
    for batch in stream:
        kit.models.import_weights(prepared.model, weights)
        loss = kit.runtime.to_float(prepared.step(*batch))
        found.append(weights_of(kit, prepared.model) | {"loss": np.array(loss)})
    return found


def statistics(arrays: dict) -> dict:
    return {name: arrays[name] for name in arrays if name.endswith((".bn.mean", ".bn.variance"))}


def gradients(arrays: dict) -> dict:
    return {name: arrays[name] for name in arrays.keys() - statistics(arrays).keys() - {"loss"}}


def weighted(parts: list[dict], shares) -> dict:
    """The weighted sum of arrays, name by name."""
    return {
        name: sum(share * part[name] for share, part in zip(shares, parts, strict=True))
        for name in parts[0]
    }
