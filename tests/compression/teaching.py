"""Small students and teachers of both frameworks, for the tests of distillation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import numpy as np

from shared import teacher
from shared.specs import TASKS, CNNSpec, GPTSpec, ResNetSpec, parameter_shapes
from shared.weights import init_weights
from tests.frameworks import apart

CNN = CNNSpec((8, 8, 2), ((4, 1), (6, 2)), num_classes=5)
RESNET = ResNetSpec((8, 8, 2), 1, (8, 12, 16), num_classes=5)  # the teacher of CNN
GPT = GPTSpec(vocabulary=11, sequence_length=6, width=8, heads=2, layers=1)
WIDE = replace(GPT, width=16, layers=2)  # the teacher of GPT
RECIPE = replace(TASKS["digits-cnn"].recipe, learning_rate=2.0**-5)
LEFT, RIGHT = np.random.default_rng(3).normal(size=(2, 9, 4)).astype(np.float32)
TARGET = np.array([0, 1, 2, 0, 1, 2, 0, 1, 2])


def batches(kit, spec, count=1, samples=8, signal=0.0):
    """Batches of random data, the same in every process; images may show their labels."""
    random = np.random.default_rng(11)
    made = []
    for _ in range(count):
        if isinstance(spec, GPTSpec):
            x = random.integers(0, spec.vocabulary, (samples, spec.sequence_length))
            y = (3 * x + 1) % spec.vocabulary
        else:
            y = random.integers(0, spec.num_classes, samples)
            x = random.normal(size=(samples, *spec.input_shape))
            x = (x + signal * y[:, None, None, None]).astype(np.float32)
        made.append((x, y))
    return kit.data.resident_batches(made)


def teacher_weights(spec, seed=3):
    """Weights with opinions on every class, and statistics that are not those of a batch."""
    random = np.random.default_rng(seed)
    weights = init_weights(spec, seed)
    for name, value in weights.items():
        if name.endswith(("gamma", "variance")):
            weights[name] = random.uniform(0.5, 1.5, value.shape).astype(np.float32)
        elif name.endswith(("beta", "bias", "mean")):
            weights[name] = random.normal(0.0, 0.3, value.shape).astype(np.float32)
        elif name == "head.kernel":
            weights[name] = random.normal(0.0, 1.0, value.shape).astype(np.float32)
    return weights


def student_of(kit, spec=CNN):
    return kit.models.build(spec, init_weights(spec, 1))


def teacher_of(kit, spec=RESNET):
    return kit.models.build(spec, teacher_weights(spec))


def optimizer_of(kit, model):
    return kit.training.make_optimizer(model, RECIPE)


def losses_of(kit, step, stream) -> list[float]:
    return [kit.runtime.to_float(step(*batch)) for batch in stream]


def weights_of(kit, model) -> dict[str, np.ndarray]:
    return {name: np.array(value) for name, value in kit.models.export_weights(model).items()}


def trainable_of(kit, model, spec) -> dict[str, np.ndarray]:
    exported = weights_of(kit, model)
    return {name: exported[name] for name in parameter_shapes(spec)}


def farthest(ours: dict, theirs: dict) -> float:
    """The largest relative distance of two arrays of a name."""
    assert ours.keys() == theirs.keys()
    return max(apart(ours[name], theirs[name]) for name in theirs)


def never(*arguments):
    raise AssertionError("this must not be called")


@contextlib.contextmanager
def small_teacher(spec: ResNetSpec) -> Iterator[None]:
    """The benchmarks load a small teacher inside."""
    small = teacher.Teacher(teacher_weights(spec), 0.0)
    with (
        mock.patch.object(teacher, "TASK", replace(teacher.TASK, model=spec)),
        mock.patch.object(teacher, "load", return_value=small),
    ):
        yield
