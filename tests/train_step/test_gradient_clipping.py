"""Clipping does what NumPy does, and both sides do it alike.

The optimizer of most tests puts the gradient in the weight's place, so that gradients are compared.
"""

from __future__ import annotations

import math
import re
from functools import partial

import numpy as np
import pytest

from tests import workers
from tests.frameworks import apart
from tests.train_step import steps
from tests.train_step.steps import CNN, GPT, farthest

FRAMEWORKS = ("pt", *workers.keras())
MODELS = "steps"
PT, TF = pytest.mark.only("pt"), pytest.mark.only("tf", "tf_keras")
MAX_NORM, SCALE = 2.0, 2.0**12
LARGE = 64.0  # times the loss: gradients beside which PyTorch's 1e-6 is nothing
CLIP, EACH = "make_train_step", "make_per_variable_step"


def norm(tensors):
    return math.sqrt(sum(float((value.astype(float) ** 2).sum()) for value in tensors.values()))


@pytest.fixture(scope="module")
def large(kit):
    return lambda logits, labels: kit.training.cross_entropy(logits, labels) * LARGE


@pytest.fixture(scope="module")
def apply(kit, technique, models, large):
    """`apply(maker, **settings)`: the gradients that reach the optimizer, and the step."""

    def apply(maker=None, **settings):
        make = maker and getattr(technique, maker)
        prepared = steps.prepare(
            kit, GPT, make, optimizer=models.recorder, loss_fn=large, **settings
        )
        prepared.step(*steps.batches(kit, GPT)[0])
        return steps.trainable_of(kit, prepared.model, GPT), prepared.step

    return apply


@pytest.fixture(scope="module")
def plain(apply):
    return apply()[0]


# Clipping ----------------------------------------------------------------------------------------


def test_the_global_norm_is_clipped_as_numpy_does(apply, plain, agrees):
    clipped, step = apply(CLIP, max_norm=MAX_NORM)
    assert norm(plain) > 2 * MAX_NORM  # or there is nothing to see
    expected = {name: value * MAX_NORM / norm(plain) for name, value in plain.items()}
    assert farthest(clipped, expected) < 1e-5
    assert step.gradient_norm() == pytest.approx(norm(plain), rel=1e-5)
    agrees("clipped", clipped, 1e-4)


def test_each_variable_is_clipped_as_numpy_does(apply, plain, agrees):
    clipped, _ = apply(EACH, max_norm=MAX_NORM)
    sizes = {name: float(np.linalg.norm(value)) for name, value in plain.items()}
    assert min(sizes.values()) < 0.9 * MAX_NORM < 1.1 * MAX_NORM < max(sizes.values())
    expected = {name: value * min(1.0, MAX_NORM / sizes[name]) for name, value in plain.items()}
    assert farthest(clipped, expected) < 1e-5
    assert norm(clipped) > 1.1 * MAX_NORM  # not what the global norm gives
    agrees("each clipped", clipped, 1e-4)


@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize("max_norm", [1e4, math.inf])
def test_a_bound_that_does_not_bind_changes_nothing(apply, plain, max_norm, measured):
    """A norm is taken where it is needed or asked for."""
    applied, step = apply(CLIP, max_norm=max_norm, measure_norm=measured)
    assert farthest(applied, plain) < 1e-6
    if measured or max_norm < math.inf:
        assert step.gradient_norm() == pytest.approx(norm(plain), rel=1e-5)
    else:
        with pytest.raises(ValueError, match="no norm is taken: ask for it with measure"):
            step.gradient_norm()


def test_ten_steps_agree(kit, framework, technique, agrees):
    stream, losses = steps.batches(kit, CNN, 10), {}
    for name, make, settings in (
        ("plain", None, {}),
        ("clipped", technique.make_train_step, {"max_norm": 0.5}),
    ):
        prepared = steps.prepare(kit, CNN, make, **settings)
        losses[name] = steps.losses_of(kit, prepared, stream)
    assert kit.runtime.trace_count(prepared.step) == (None if framework == "pt" else 1)
    agrees("ten steps", {"losses": losses["clipped"]}, 1e-5)
    assert apart(losses["clipped"], losses["plain"]) > 1e-5


@pytest.mark.parametrize("maker", [CLIP, EACH])
def test_an_embedding_is_clipped_by_the_norm_of_its_gradient(technique, models, maker):
    """A row that is looked up three times gets the sum of three pulls, and that has the norm."""
    pulls = np.array([[3.0, 0.0], [1.0, 2.0], [0.0, 5.0], [2.0, 2.0]], np.float32)
    gradient = np.array([[0.0, 0.0], [6.0, 4.0], [0.0, 5.0], [0.0, 0.0]])
    model = models.embedding()
    step = getattr(technique, maker)(
        model,
        models.recorder(model),
        lambda output, pulls: models.total(output * pulls),
        max_norm=1.0,
    )
    step(models.tensor(np.array([1, 1, 2, 1])), models.tensor(pulls))
    size = np.linalg.norm(gradient)
    assert np.allclose(models.only_weight(model), gradient / size, rtol=1e-5)
    assert maker == EACH or step.gradient_norm() == pytest.approx(size, rel=1e-6)


HALF = [np.array([0, 3], np.float32), np.array([4], np.float16), None]
COMPLEX = [np.array([3 + 4j, 0], np.complex64), np.array([12], np.float32)]


@pytest.mark.parametrize(
    ("clipper", "given", "sizes"),
    [
        ("GradientClipper", HALF, (5.0, 5.0)),
        ("GradientClipper", COMPLEX, (13.0, 13.0)),
        ("VariableClipper", COMPLEX, (5.0, 12.0)),
    ],
    ids=["half", "complex", "each complex"],
)
def test_gradients_of_several_dtypes_are_one_vector(technique, models, clipper, given, sizes):
    """One of them may be missing."""
    clipped, total = models.clipped(partial(getattr(technique, clipper), max_norm=1.0), given)
    assert total is None or total == pytest.approx(sizes[0], rel=1e-3)
    for ours, gradient, size in zip(clipped, given, sizes, strict=False):
        np.testing.assert_allclose(ours, gradient / size, rtol=1e-3)
        assert ours.dtype == gradient.dtype


@PT
@pytest.mark.parametrize("maker", [CLIP, EACH])
def test_what_trains_later_is_clipped_too(technique, models, maker):
    torch = models.torch
    model = torch.nn.Sequential(models.dense(4, 4).requires_grad_(False), models.dense())
    optimizer = models.descent(model, 0.0)
    step = getattr(technique, maker)(model, optimizer, models.squares, max_norm=1e-3)
    x, y = torch.ones(3, 4), torch.full((3, 3), 100.0)
    step(x, y)
    model.requires_grad_(True)
    step(x, y)
    sizes = [parameter.grad.norm().item() for parameter in model.parameters()]
    total = np.linalg.norm(sizes) if maker == CLIP else sizes
    assert np.allclose(total, 1e-3, rtol=1e-4)


@PT
def test_the_norm_is_of_what_the_optimizer_holds(technique, models):
    """The other layer's gradients are never put to zero, and would add up from step to step."""
    torch = models.torch
    model = torch.nn.Sequential(models.dense(4, 4), models.dense())
    optimizer = models.descent(model[1], 0.0)
    settings = {"max_norm": math.inf, "measure_norm": True}
    step = technique.make_train_step(model, optimizer, models.squares, **settings)
    for _ in range(3):
        step(torch.ones(3, 4), torch.full((3, 3), 100.0))
        held = torch.nn.utils.get_total_norm([p.grad for p in model[1].parameters()])
        assert step.gradient_norm() == pytest.approx(held.item(), rel=1e-6)


@PT
@pytest.mark.parametrize("maker", [CLIP, EACH])
def test_a_step_does_not_wait_for_the_device(kit, technique, models, maker):
    prepared, (batch,) = steps.prepare(kit, GPT, getattr(technique, maker)), steps.batches(kit, GPT)
    prepared.step(*batch)
    assert models.reads(prepared.step, *batch) == 0


@pytest.mark.only("tf")
@pytest.mark.parametrize(("setting", "maker"), [("global_clipnorm", CLIP), ("clipnorm", EACH)])
def test_keras_own_settings_mean_what_is_said(kit, models, apply, large, setting, maker):
    def clipping(model):
        optimizer = models.recorder(model)
        setattr(optimizer, setting, MAX_NORM)
        return optimizer

    prepared = steps.prepare(kit, GPT, optimizer=clipping, loss_fn=large)
    prepared.step(*steps.batches(kit, GPT)[0])
    ours = apply(maker, max_norm=MAX_NORM)[0]
    assert farthest(steps.trainable_of(kit, prepared.model, GPT), ours) < 1e-6


# Loss scaling ------------------------------------------------------------------------------------


@pytest.mark.only("pt", "tf")  # tf_keras's LossScaleOptimizer has another interface
@pytest.mark.parametrize("max_norm", [MAX_NORM, math.inf])
def test_scaled_gradients_are_clipped_as_if_they_were_not_scaled(
    kit, technique, models, apply, large, max_norm
):
    """Clipped before they are unscaled, gradients would be too small by the scale."""
    applied = {}
    for in_order in (True, False):
        prepared = steps.prepare(kit, GPT, optimizer=models.recorder)
        (batch,) = steps.batches(kit, GPT)
        models.scaled(technique, prepared, large, *batch, SCALE, max_norm, in_order)
        applied[in_order] = steps.trainable_of(kit, prepared.model, GPT)
    assert farthest(applied[True], apply(CLIP, max_norm=max_norm)[0]) < 1e-6
    if max_norm == MAX_NORM:
        assert norm(applied[False]) == pytest.approx(MAX_NORM / SCALE, rel=1e-4)


# Bad input ---------------------------------------------------------------------------------------


def make(technique, models, maker, model=None, optimizer=None, **settings):
    model = model or models.dense()
    optimizer = optimizer or models.descent(model)
    return getattr(technique, maker)(model, optimizer, models.squares, **settings)


REFUSALS = [
    *(
        (
            lambda t, m, maker, bad=bad: make(t, m, maker, max_norm=bad),
            "max_norm must be above 0 (inf does not clip), not ",
        )
        for bad in (0, -1.0, math.nan, "1", None)
    ),
    (lambda t, m, maker: make(t, m, maker, m.freeze(m.dense())), "the model has no trainable"),
    pytest.param(
        lambda t, m, maker: make(t, m, maker, m.unbuilt()),
        "the model has no trainable variables",
        marks=TF,
    ),
    *(
        pytest.param(
            lambda t, m, maker, kind=kind: make(t, m, maker, optimizer=m.scaling()[kind]),
            "pass the optimizer itself",
            marks=pytest.mark.only("tf"),
        )
        for kind in (0, 1)
    ),
]


@pytest.mark.parametrize("maker", [CLIP, EACH])
@pytest.mark.parametrize(("call", "message"), REFUSALS)
def test_a_refusal_says_why(technique, models, call, message, maker):
    with pytest.raises(ValueError, match=re.escape(message)):
        call(technique, models, maker)
