"""Every implementation of AdamW applies the same update, by other operators.

Weights are compared by relative L2 per tensor, as optimizer rules are, at 1e-6.
"""

from __future__ import annotations

import functools
from importlib import import_module

import numpy as np
import pytest

from bench.harness.machine import compiler
from bench.train_step.bench_optimizer_implementations import MARKS
from shared.specs import CNNSpec, parameter_shapes
from shared.weights import init_weights
from tests import workers
from tests.frameworks import apart
from tests.train_step import steps

FRAMEWORKS = ("pt", *workers.keras())
MODELS = "steps"
PT, TF = pytest.mark.only("pt"), pytest.mark.only("tf", "tf_keras")
BAR = 1e-6
SPEC = CNNSpec((8, 8, 2), ((4, 2), (6, 1)), num_classes=3)
SETTINGS = {"learning_rate": 0.01, "weight_decay": 0.1, "beta1": 0.8, "beta2": 0.95}
# The twins take their epsilon at different places: what is large here decides the first update.
LARGE_EPS = {"learning_rate": 0.1, "beta2": 0.95, "eps": 1.0}
TENSORS = len(parameter_shapes(SPEC))
random = np.random.default_rng(5)
# One set a step, in the canonical layout: away from zero, where epsilon would decide.
GRADIENTS = [
    {
        name: (random.choice([-1, 1], shape) * random.uniform(0.5, 1.5, shape)).astype("f4")
        for name, shape in parameter_shapes(SPEC).items()
    }
    for _ in range(5)
]


def rule(count=5, *, learning_rate, weight_decay=0.01, beta1=0.9, beta2=0.999, eps=1e-8):
    """AdamW as published, in float64."""
    weights = {}
    for name, w in init_weights(SPEC, seed=1).items():
        if name in GRADIENTS[0]:
            w, first, second = w.astype(float), 0.0, 0.0
            for step, gradients in enumerate(GRADIENTS[:count], 1):
                g = gradients[name].astype(float)
                first = beta1 * first + (1 - beta1) * g
                second = beta2 * second + (1 - beta2) * g**2
                root = np.sqrt(second / (1 - beta2**step)) + eps
                w = w * (1 - learning_rate * weight_decay)
                w = w - learning_rate * first / (1 - beta1**step) / root
            weights[name] = w
    return weights


@pytest.fixture(scope="module")
def run(kit, technique, models):
    """`run(make, count, **settings)`: weights after so many updates, and the update."""

    def run(make, count=5, **settings):
        weights = init_weights(SPEC, seed=1)
        model = kit.models.build(SPEC, weights)
        optimizer, buffers = make(model, **settings), models.buffers(model)
        update = kit.training.make_update(model, optimizer, buffers)
        for gradients in GRADIENTS[:count]:
            models.fill(buffers, kit.models.build(SPEC, weights | gradients))
            update()
        return steps.trainable_of(kit, model, SPEC), update

    return run


@pytest.fixture(scope="module")
def updated(impl, kit, technique, run):
    """`updated(name)`: weights, the operators of one more update, and traces before and after."""
    operators = import_module(f"{impl.__name__}.kit.operators")

    @functools.cache
    def updated(name):
        weights, update = run(getattr(technique, f"{name}_optimizer"), **SETTINGS)
        ran, traces = operators.update_operators(update), kit.runtime.trace_count(update)
        update()
        return weights, ran, (traces, kit.runtime.trace_count(update))

    return updated


COMPILER = pytest.mark.skipif(not compiler(), reason="torch.compile needs a C++ compiler")
EVERY = pytest.mark.parametrize(
    "name",
    [
        *("for_loop", "fused"),
        pytest.param("foreach", marks=PT),
        pytest.param("compiled", marks=TF),
        pytest.param("compiled", marks=[PT, COMPILER]),
    ],
)


@EVERY
def test_the_update_is_the_published_one_by_its_own_operators(framework, updated, name):
    weights, ran, traces = updated(name)
    assert steps.farthest(weights, rule(**SETTINGS)) < BAR
    wanted, others = MARKS[f"{framework}_impl", name]
    assert ran[wanted] > 0
    assert not set(others) & set(ran)
    if name == "compiled":
        assert traces[0] == traces[1] >= 1


def test_another_decay_or_epsilon_is_noticed(technique, run):
    """In the first update of an epsilon as large as the gradients, too."""
    weights, _ = run(technique.for_loop_optimizer, **SETTINGS | {"weight_decay": 0.11})
    assert steps.farthest(weights, rule(**SETTINGS)) > BAR
    weights, _ = run(technique.for_loop_optimizer, 1, **LARGE_EPS)
    assert steps.farthest(weights, rule(1, **LARGE_EPS)) < BAR
    assert steps.farthest(weights, rule(1, **LARGE_EPS | {"eps": 0.9})) > BAR


@pytest.mark.parametrize(
    ("name", "operator", "count"),
    [
        pytest.param("for_loop", "addcdiv_", TENSORS, marks=PT),
        pytest.param("foreach", "_foreach_addcdiv_", 1, marks=PT),
        pytest.param("fused", "_fused_adamw_", 1, marks=PT),
        # TensorFlow assigns each weight twice: its decay, then its update.
        pytest.param("for_loop", "AssignSubVariableOp", 2 * TENSORS, marks=TF),
        pytest.param("fused", "AssignSubVariableOp", TENSORS, marks=TF),
        pytest.param("fused", "ResourceApplyAdam", TENSORS, marks=TF),
    ],
)
def test_a_loop_takes_operators_per_tensor(updated, name, operator, count):
    assert updated(name)[1][operator] == count


@pytest.mark.parametrize(
    "name",
    [*("for_loop", "fused"), pytest.param("foreach", marks=PT), pytest.param("compiled", marks=TF)],
)
def test_of_ids_that_repeat_only_keras_3_squares_the_slices_apart(flavour, technique, models, name):
    """Slices of 1 and 2: (1 + 2) / sqrt(1 + 4) there, and 3 / 3 by the rule."""
    squared_apart = flavour == "tf" and name != "fused"
    row = -3 / 5**0.5 if squared_apart else -1.0
    moved = models.looked_up(getattr(technique, f"{name}_optimizer"))
    assert moved == pytest.approx([0.5 * row, -0.5, 0.0], rel=1e-4)


@PT
def test_fused_sgd_is_sgd_in_one_kernel(technique, models, run):
    def plain(model, learning_rate, momentum):
        return models.torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=momentum)

    from pt_impl.kit import operators

    (weights, _), (fused, update) = (
        run(make, learning_rate=0.1, momentum=0.9) for make in (plain, technique.fused_sgd)
    )
    assert steps.farthest(fused, weights) < BAR
    assert operators.update_operators(update)["_fused_sgd_"] == 1


@TF
def test_the_fused_optimizer_trains_in_fit_as_keras_own(technique, models):
    """With slices, clipping and a schedule; each row is looked up once."""
    keras, layers = models.keras, models.layers
    random, weights = np.random.default_rng(0), []
    x, y = random.permutation(32)[:, None], random.normal(size=(32, 2))
    for kind in (keras.optimizers.AdamW, technique.FusedAdamW):
        keras.utils.set_random_seed(0)
        parts = [layers.Embedding(32, 4), layers.Flatten(), layers.Dense(2)]
        model = keras.Sequential([keras.Input((1,)), *parts])
        before = [np.array(value) for value in model.get_weights()]
        rate = keras.optimizers.schedules.CosineDecay(0.3, 12)
        # An epsilon that keeps Adam from amplifying how gradients were rounded, and moments whose
        # complements float32 has: the two round them at different places.
        settings = {"weight_decay": 0.1, "beta_1": 0.5, "beta_2": 0.75, "epsilon": 1e-2}
        model.compile(kind(rate, **settings, global_clipnorm=0.5), "mse")
        model.fit(x, y, batch_size=8, epochs=3, shuffle=False, verbose=0)
        weights.append(model.get_weights())
    assert min(np.abs(a - b).max() for a, b in zip(before, weights[0], strict=True)) > 0.05
    assert max(apart(a, b) for a, b in zip(*weights, strict=True)) < BAR


@TF
def test_the_compiled_optimizer_trains_in_fit(technique, models):
    random, losses = np.random.default_rng(0), []
    x, y = random.normal(size=(32, 4)), random.normal(size=(32, 3))
    for make in (technique.for_loop_optimizer, technique.compiled_optimizer):
        model = models.dense()
        model.compile(make(model, learning_rate=0.05, eps=1e-3), "mse")
        history = model.fit(x, y, batch_size=8, epochs=3, shuffle=False, verbose=0)
        losses.append(history.history["loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[1][-1] < 0.9 * losses[1][0]


@TF
def test_the_compiled_optimizer_updates_the_variables_that_it_is_given(technique, models):
    """Some of them, in an order of their own."""
    tf, weights = models.tf, []
    for make in (technique.for_loop_optimizer, technique.compiled_optimizer):
        frozen = models.dense(4, 4)
        frozen.trainable = False
        parts = [models.keras.Input((4,)), models.dense(4, 4), frozen, models.dense(4, 4)]
        model = models.keras.Sequential(parts)
        optimizer = make(model, learning_rate=0.05, eps=1e-3)
        for variables in (model.trainable_variables[::-1], model.trainable_variables[2:]):
            filled = [(tf.fill(v.shape, 1.0 + place), v) for place, v in enumerate(variables)]
            optimizer.apply_gradients(filled)
        weights.append(model.get_weights())
    assert max(apart(a, b) for a, b in zip(*weights, strict=True)) < BAR
    with pytest.raises(ValueError, match="the optimizer was made for other variables"):
        optimizer.apply_gradients([(tf.ones(4), tf.Variable(tf.zeros(4)))])


# Bad input ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "share"),
    [
        *((f"{name}_optimizer", "beta2") for name in ("for_loop", "fused", "compiled")),
        pytest.param("foreach_optimizer", "beta2", marks=PT),
        pytest.param("fused_sgd", "momentum", marks=PT),
    ],
)
def test_bad_settings_are_refused(technique, models, name, share):
    make = getattr(technique, name)
    with pytest.raises(ValueError, match="must be at least 0"):
        make(models.dense(), learning_rate=-0.1)
    with pytest.raises(ValueError, match=r"in \[0, 1\)"):
        make(models.dense(), **{"learning_rate": 0.1, share: 1.0})


@PT
def test_fused_kernels_refuse_complex_parameters(technique, models):
    layer = models.nn.Linear(2, 2, dtype=models.torch.complex64)
    technique.for_loop_optimizer(layer, learning_rate=0.1)
    for make in (technique.fused_optimizer, technique.fused_sgd):
        with pytest.raises(NotImplementedError, match="torch's fused kernels update no"):
            make(layer, learning_rate=0.1)


@TF
def test_the_fused_optimizer_refuses_amsgrad(technique, models):
    with pytest.raises(NotImplementedError, match="ResourceApplyAdam has no amsgrad"):
        technique.FusedAdamW(amsgrad=True).build(models.dense().trainable_variables)
