"""The guard stops in time and says why, and both sides alike."""

from __future__ import annotations

import math
import re
from functools import partial

import numpy as np
import pytest

from tests import workers
from tests.frameworks import apart
from tests.train_step import steps
from tests.train_step.steps import CNN

FRAMEWORKS = ("pt", *workers.keras())
TF = pytest.mark.only("tf")
CULPRITS = {
    "input": "3 of 1024 values of input x are not finite: look at the data",
    "loss": "1 of 1 values of the loss are not finite: look at the learning rate",
    "gradient": "10 of 10 values of the gradient of head[./]bias(:0)? are not",
    "overflow": "each gradient is finite but their norm overflows: look at the scale",
}


def test_a_guarded_step_is_the_plain_one(kit, technique):
    plain, guarded = (
        steps.losses_of(kit, steps.prepare(kit, CNN, make), steps.batches(kit, CNN, 10))
        for make in (None, technique.make_train_step)
    )
    assert apart(guarded, plain) < 1e-6


@pytest.mark.parametrize("culprit", [*CULPRITS, "gradient clipped"])
def test_the_guard_stops_in_time_and_names_the_culprit(kit, technique, models, culprit):
    """A poisoned third step changes nothing, and the fourth goes on."""
    clips, kind = culprit.endswith("clipped"), culprit.split()[0]
    make = partial(models.clipping_step, technique) if clips else technique.make_train_step

    def loss_fn(logits, labels):
        # A factor that a graph cannot take for a constant: 1, or what poisons the loss.
        return kit.training.cross_entropy(logits, labels) * (models.FACTOR + 0.0)

    prepared = steps.prepare(kit, CNN, make, loss_fn=models.root if kind == "gradient" else loss_fn)
    stream = steps.batches(kit, CNN, 4)
    steps.losses_of(kit, prepared, stream[:2])
    before, state = steps.trainable_of(kit, prepared.model, CNN), models.state(prepared.optimizer)
    x, y = stream[2]
    if kind == "input":
        x = models.with_nan(x, 3)
    elif kind == "gradient":
        y = -1 - y
    else:
        set_factor(models, math.inf if kind == "loss" else 1e30)
    with pytest.raises(FloatingPointError, match=f"^step 3: {CULPRITS[kind]}") as raised:
        prepared.step(x, y)
    set_factor(models, 1.0)
    assert "\n" not in str(raised.value)
    assert steps.same(before, steps.trainable_of(kit, prepared.model, CNN))
    assert models.state(prepared.optimizer) == state
    prepared.step(*stream[3])
    assert not steps.same(before, steps.trainable_of(kit, prepared.model, CNN))


def set_factor(models, value):
    fill = models.FACTOR.fill_ if hasattr(models.FACTOR, "fill_") else models.FACTOR.assign
    fill(value)


@pytest.mark.only("pt")
def test_the_guard_waits_for_the_device_once_a_step(kit, technique, models):
    prepared, stream = (
        steps.prepare(kit, CNN, technique.make_train_step),
        steps.batches(kit, CNN, 2),
    )
    prepared.step(*stream[0])
    assert models.reads(prepared.step, *stream[1]) == 1


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("good", None),
        # Only one of the two layers is behind the root.
        (
            "gradient",
            r"8 of 8 values of the gradient of (two(_\d+)?/)?left[./](weight|kernel)(:0)? are not",
        ),
        ("input", r"step 1: 2 of 24 values of input x\[1\] are not finite"),
        ("target", r"step 1: 6 of 6 values of input y\[0\] are not finite"),
        # It does not reach the loss: the input itself has been looked at.
        ("ignored", r"step 1: 1 of 1000 values of input y\[1\] are not finite"),
    ],
)
def test_the_guard_names_what_it_is_in_a_model_of_two_inputs(technique, models, kind, said):
    a, b = np.random.default_rng(3).normal(size=(2, 6, 4)).astype(np.float32)
    y, spare = np.zeros(6, np.float32), np.zeros(1000, np.float32)
    a, b, y, spare = (models.tensor(value) for value in (a, b, y, spare))
    model = models.two(a, b)
    step = technique.make_train_step(
        model, models.descent(model, 0.01), lambda output, y: models.squares(output, y[0])
    )
    x = (a * 0 if kind == "gradient" else a, models.with_nan(b, 2) if kind == "input" else b)
    y = y / 0 if kind == "target" else y, models.with_nan(spare, 1) if kind == "ignored" else spare
    if said is None:
        step(x, y)
    else:
        with pytest.raises(FloatingPointError, match=said):
            step(x, y)


@pytest.mark.parametrize(
    "kind", ["sound", "sparse", "complex", pytest.param("compressed", marks=pytest.mark.only("pt"))]
)
def test_the_guard_looks_at_sparse_and_complex_inputs(technique, models, kind):
    graph, x = np.eye(4, dtype=np.float32), np.ones((4, 3), np.complex64)
    if kind == "complex":
        x[0, 0] = math.nan
    elif kind != "sound":
        graph[0, 0] = math.nan
    model, x = models.mixed(graph, x, kind)
    step = technique.make_train_step(model, models.descent(model), models.squares)
    call = partial(step, x, models.tensor(np.zeros((4, 2), np.float32)))
    if kind == "sound":
        call()
    else:
        place = r"x\[1\]" if kind == "complex" else r"x\[0\]"
        with pytest.raises(
            FloatingPointError, match=f"step 1: 1 of .* values of input {place} are"
        ):
            call()


@TF
def test_a_dictionary_of_inputs(technique, models):
    keras, layers = models.keras, models.layers
    a, b = keras.Input((4,), name="a"), keras.Input((4,), name="b")
    model = keras.Model({"a": a, "b": b}, layers.Dense(2)(layers.Add()([a, b])))
    arguments = model, models.descent(model), lambda output, y: models.squares(output, 0.0)
    step = technique.make_train_step(*arguments)
    ones = models.tf.ones((6, 4))
    step({"a": ones, "b": ones}, None)
    with pytest.raises(
        FloatingPointError, match=r"step 2: 4 of 24 values of input x\['b'\] are not"
    ):
        step({"a": ones, "b": models.with_nan(ones, 4)}, None)


# Bad input ---------------------------------------------------------------------------------------


def make(technique, models, model=None, optimizer=None):
    model = model or models.dense()
    return technique.make_train_step(model, optimizer or models.descent(model), models.squares)


REFUSALS = [
    (lambda t, m: make(t, m, m.freeze(m.dense())), "the model has no trainable"),
    pytest.param(lambda t, m: make(t, m, m.unbuilt()), "no trainable variables", marks=TF),
    pytest.param(
        lambda t, m: make(t, m, optimizer=m.scaling()[0]), "pass the optimizer itself", marks=TF
    ),
    pytest.param(
        lambda t, m: make(t, m, optimizer=m.scaling()[1]), "pass the optimizer itself", marks=TF
    ),
]


@pytest.mark.parametrize(("call", "message"), REFUSALS)
def test_a_refusal_says_why(technique, models, call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call(technique, models)
