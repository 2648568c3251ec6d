"""Compiled steps and predictions do the baseline's work, and the evidence says what ran.

PyTorch's kernels are compiled into an empty folder: one train step and one prediction of a tiny
CNN. More of what is compiled, of models of others, stands in test_any_model.py.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest

from bench.harness.machine import compiler
from bench.harness.plan import Work
from bench.train_step import bench_compilation as bench
from shared.specs import TASKS
from shared.weights import init_weights
from tests.frameworks import apart
from tests.train_step import steps
from tests.train_step.steps import CNN

FRAMEWORKS = ("pt", "tf")
MODELS = "steps"
BAR = 1e-5  # of a CNN
BOOKKEEPING = {"clone", "copy_", "detach", "new_empty_strided", "ones_like"}
TASK = replace(TASKS["digits-cnn"], model=CNN, recipe=replace(steps.RECIPE, learning_rate=0.01))
PT, TF = pytest.mark.only("pt"), pytest.mark.only("tf")
needs_compiler = pytest.mark.skipif(not compiler(), reason="torch.compile needs a C++ compiler")
COMPILED = [PT, needs_compiler]


@pytest.fixture(scope="module")
def operators(impl):
    return import_module(f"{impl.__name__}.kit.operators")


@pytest.fixture(scope="module")
def old(impl, framework):
    """The kit's TorchScript, or its `fit`."""
    return import_module(f"{impl.__name__}.kit.{'torchscript' if framework == 'pt' else 'fitting'}")


@pytest.fixture(scope="module")
def reset(models):
    """Forgets what was compiled; a tf.function keeps its traces to itself."""

    def reset():
        if hasattr(models, "torch"):
            models.torch.compiler.reset()
            models.torch._dynamo.utils.counters.clear()

    return reset


@pytest.fixture(scope="module")
def trained(kit, technique, operators, reset):
    """`trained(name)`: five steps, what one more ran, and traces after each; "": of the baseline.

    And after another batch size, but for PyTorch's compiled steps.
    """

    @functools.cache
    def trained(name):
        reset()
        make = getattr(technique, f"{name}_train_step") if name else None
        prepared = steps.prepare(kit, CNN, make, recipe=TASK.recipe)
        stream = steps.batches(kit, CNN, 5)
        losses = steps.losses_of(kit, prepared, stream)
        weights, traces = steps.weights_of(kit, prepared.model), []
        traces.append(kit.runtime.trace_count(prepared.step))
        ran = operators.executed_graphs(prepared.step, *stream[0]) if name else None
        traces.append(kit.runtime.trace_count(prepared.step))
        if name == "graph":
            steps.losses_of(kit, prepared, steps.batches(kit, CNN, 1, 5))
            traces.append(kit.runtime.trace_count(prepared.step))
        return SimpleNamespace(losses=losses, weights=weights, ran=ran, traces=traces)

    return trained


# The same work -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        *("eager", "graph"),
        pytest.param("compiled", marks=COMPILED),
        pytest.param("fullgraph", marks=COMPILED),  # its kernels are those of "compiled"
        pytest.param("compiled", marks=TF),
        pytest.param("compiled_model", marks=TF),
    ],
)
def test_five_steps_equal_the_baselines_of_both_sides(framework, trained, agrees, name):
    """Losses, weights and BatchNorm's statistics; evidence traces nothing, nor do steady steps."""
    ours, baseline = trained(name), trained("")
    assert apart(ours.losses, baseline.losses) < BAR
    assert steps.farthest(ours.weights, baseline.weights) < BAR
    # Keras 3 keeps a biased variance.
    arrays = {n: v for n, v in ours.weights.items() if not n.endswith(".variance")}
    if name in ("eager", "graph"):
        agrees(f"five steps, {name}", {"losses": ours.losses} | arrays, BAR)
    if name == {"pt": "eager", "tf": "graph"}[framework]:
        assert ours.losses == baseline.losses
    before, after, *other = ours.traces
    if name == "eager":
        assert (before, after, ours.ran["graphs"]) == (None, None, 0)
    else:
        assert before == after > 0
    assert not other or other[0] > after  # another shape shows


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        *(("eager", (8, 5)), ("graph", (8, 5))),
        # A second size would cost another run of the C++ compiler.
        pytest.param("compiled", (8,), marks=COMPILED),
        pytest.param("compiled", (8, 5), marks=TF),
    ],
)
def test_predictions_equal_the_kits_for_any_batch_size(
    kit, framework, technique, operators, reset, name, sizes
):
    reset()
    prepared = steps.prepare(kit, CNN)
    steps.losses_of(kit, prepared, steps.batches(kit, CNN, 3))
    before = steps.weights_of(kit, prepared.model)
    exact = kit.training.make_predict(prepared.model)
    predict = getattr(technique, f"{name}_predict")(prepared.model)
    for size in sizes:
        ((x, _),) = steps.batches(kit, CNN, 1, size)
        error = np.abs(np.asarray(predict(x)) - np.asarray(exact(x))).max()
        assert error < 1e-5
        assert name != "graph" or error == 0.0
    ran = operators.executed_graphs(predict, steps.batches(kit, CNN)[0][0])
    if name == "graph":
        assert (ran["graphs"], ran["compiled"]) == (1, 0)
        assert ran["outside"][{"pt": "convolution", "tf": "Conv2D"}[framework]] == 2
    elif name == "compiled":
        assert (ran["graphs"], ran["compiled"]) == (1, 1)
        assert framework == "tf" or ran["outside"] == {}
    assert steps.same(before, steps.weights_of(kit, prepared.model))


# What ran ----------------------------------------------------------------------------------------


def test_captured_steps_run_graphs_and_compile_none(framework, trained):
    ran = trained("graph").ran
    # PyTorch: forward and loss, backward, update, and the loss that is detached.
    assert (ran["graphs"], ran["compiled"]) == ({"pt": 4, "tf": 1}[framework], 0)
    for operator in {
        "pt": ("convolution", "convolution_backward"),
        "tf": ("Conv2D", "Conv2DBackpropFilter"),
    }[framework]:
        assert ran["outside"][operator] == 2


@PT
@needs_compiler
@pytest.mark.parametrize("name", ["compiled", "fullgraph"])
def test_compiled_steps_of_pytorch_leave_bookkeeping_alone_outside(trained, name):
    ran = trained(name).ran
    assert ran["graphs"] == ran["compiled"] == 3  # forward and loss, backward, update
    assert ran["outside"].keys() <= BOOKKEEPING
    assert any("backward" in reason for reason in ran["breaks"]) == (name == "compiled")


@PT
@needs_compiler
def test_what_is_left_to_eager_is_named_and_no_fault(impl, technique, models, reset):
    torch = models.torch

    class Recurrent(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.head = torch.nn.LSTM(3, 2), torch.nn.Linear(2, 2)

        def forward(self, x):
            return torch.tanh(self.head(self.lstm(x)[0]))

    reset()
    predict = technique.compiled_predict(Recurrent())
    work = SimpleNamespace(mode="predict", variant="compiled")
    prepared = SimpleNamespace(predict=predict, loop=None)
    ran, reason = bench.took_effect(impl, work, prepared, (torch.randn(4, 5, 3),))
    assert reason is None
    assert ran["compiled"] > 0
    assert "lstm" in ran["not_compiled"]


@TF
def test_xla_takes_the_whole_step_or_the_model_alone(kit, technique, operators, trained):
    whole, alone = trained("compiled").ran, trained("compiled_model").ran
    assert (whole["graphs"], whole["compiled"], whole["outside"]) == (1, 1, {})
    assert (alone["graphs"], alone["compiled"]) == (3, 2)  # the step; forward and backward
    assert "SparseSoftmaxCrossEntropyWithLogits" in alone["outside"]
    assert not [name for name in alone["outside"] if "Conv" in name or "MatMul" in name]
    # A model that was compiled is so in any step.
    prepared = steps.prepare(
        kit,
        CNN,
        lambda model, *rest: kit.training.make_train_step(technique.apply_compile(model), *rest),
        recipe=TASK.recipe,
    )
    stream = steps.batches(kit, CNN, 5)
    assert apart(steps.losses_of(kit, prepared, stream), trained("").losses) < BAR
    assert operators.executed_graphs(prepared.step, *stream[0])["compiled"] == 2


@TF
def test_xla_draws_other_masks_of_the_same_share(models):
    masks = []
    for settings in ({}, {}, {"jit_compile": True}):
        models.keras.utils.set_random_seed(0)
        layer = models.layers.Dropout(0.5)
        draw = models.tf.function(lambda x, layer=layer: layer(x, training=True), **settings)
        masks.append(np.array(draw(models.tf.ones((40, 50)))) > 0)
    assert np.array_equal(masks[0], masks[1])
    assert 0.4 < (masks[0] != masks[2]).mean() < 0.6
    assert masks[2].mean() == pytest.approx(0.5, abs=0.05)


@PT
def test_a_graph_break_in_the_model_shows_and_fullgraph_refuses_it(
    technique, models, operators, reset, trained
):
    torch = models.torch

    class Branching(torch.nn.Linear):
        def forward(self, x):
            x = super().forward(x)
            return x + 1 if x.sum() > 1e9 else x

    x, y, said = torch.ones(16, 4), torch.zeros(16, 3), "Data-dependent branching"
    reset()
    model = Branching(4, 3)
    step = technique.graph_train_step(model, models.descent(model), models.squares)
    ran, whole = operators.executed_graphs(step, x, y), trained("graph").ran
    assert ran["graphs"] > whole["graphs"]
    assert said in ran["breaks"]
    assert said not in whole["breaks"]
    reset()
    model = Branching(4, 3)
    step = technique.fullgraph_train_step(model, models.descent(model), models.squares)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=said):
        step(x, y)
    assert model.weight.grad is None  # it stopped before the backward pass


@TF
@pytest.mark.parametrize("name", ["graph", "compiled"])
def test_what_xla_cannot_compile_raises_before_the_update(technique, models, name):
    """Python in the model's graph: it runs captured."""
    tf = models.tf

    class OnTheHost(models.layers.Layer):
        def call(self, x):
            return tf.reshape(tf.py_function(lambda v: v, [x], tf.float32), (-1, 3))

    model = models.keras.Sequential([models.dense(), OnTheHost()])
    x, y = tf.ones((16, 4)), tf.zeros((16, 3))
    model(x)
    before = model.get_weights()
    step = getattr(technique, f"{name}_train_step")(model, models.descent(model), models.squares)
    if name == "graph":
        step(x, y)
        assert not np.array_equal(model.get_weights()[0], before[0])
    else:
        with pytest.raises(tf.errors.InvalidArgumentError, match="Detected unsupported operations"):
            step(x, y)
        assert all(map(np.array_equal, model.get_weights(), before))


# The benchmark's verdict -------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["train", "predict"])
@pytest.mark.parametrize(
    "name",
    [
        "baseline",
        *(
            pytest.param(name, marks=PT, id=name)
            for name in ("torchscript_trace", "torchscript_script")
        ),
        *(
            pytest.param(name, marks=TF, id=name)
            for name in ("eager", "compiled", "fit", "fit_steps_per_execution")
        ),
    ],
)
def test_variants_take_effect_or_say_why_not(impl, kit, framework, reset, name, mode):
    (variant,) = (
        variant
        for variant in bench.TECHNIQUE.variants
        if variant.name == name and framework in variant.frameworks
    )
    reset()
    (batch,) = steps.batches(kit, CNN)
    work = Work(TASK, name, variant.settings, 8, init_weights(CNN, 1), mode)
    if name == "torchscript_script" or ("fit" in name and mode == "predict"):
        # Our own CNN looks its layers up by name.
        refused = "TorchScript refuses the model: " if framework == "pt" else ""
        with pytest.raises(NotImplementedError, match=refused):
            bench.prepare(impl, work)
        return
    prepared = bench.prepare(impl, work)
    ran, reason = bench.took_effect(impl, work, prepared, batch)
    assert reason is None
    if name == "torchscript_trace" and mode == "train":
        assert ran["torchscript"] == "TopLevelTracedModule"
    if name == "fit_steps_per_execution":
        assert (ran["calls"], ran["steps"]) == (2, 20)
    if name == "baseline":  # what did not happen is not applied
        other = {"pt": "graph_only", "tf": "eager"}[framework]
        for wrong in ("compiled", "model_alone", other):
            _, reason = bench.took_effect(impl, replace(work, variant=wrong), prepared, batch)
            assert "was asked for, but a call ran" in reason


# TorchScript -------------------------------------------------------------------------------------


@PT
def test_torchscript_does_the_same_and_leaves_no_mark(kit, technique, models, old):
    """Losses of a traced and a scripted model with BatchNorm, and the statistics after it."""
    torch, nn, rows = models.torch, models.torch.nn, []
    x, y = torch.linspace(-1.0, 1.0, 288).reshape(8, 1, 6, 6), torch.arange(8) % 3
    for change, kind in (
        (lambda model: model, "Sequential"),
        (lambda model: old.traced_model(model, x), "TopLevelTracedModule"),
        (old.scripted_model, "RecursiveScriptModule"),
    ):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
        )
        used = change(model)
        assert type(used).__name__ == kind
        assert int(model[1].num_batches_tracked) == model[1].running_mean.sum() == 0
        step = technique.eager_train_step(used, models.descent(used), kit.training.cross_entropy)
        losses = [step(x, y).item() for _ in range(5)]
        rows.append([losses, models.numpy(model[1].running_mean), models.numpy(model[0].weight)])
    for row in rows[1:]:
        assert max(apart(a, b) for a, b in zip(row, rows[0], strict=True)) < BAR


@PT
def test_tracing_leaves_a_buffer_that_the_model_replaces(models, old):
    torch = models.torch

    class Counting(torch.nn.Linear):
        def __init__(self):
            super().__init__(3, 2)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls = self.calls + 1
            return super().forward(x)

    model = Counting()
    old.traced_model(model, torch.zeros(1, 3))
    assert model.calls == 0


# fit ---------------------------------------------------------------------------------------------


@TF
@pytest.mark.parametrize(("size", "calls", "count"), [(1, 6, 6), (4, 3, 12)])
def test_fit_trains_on_each_batch_once(kit, old, trained, size, calls, count):
    prepared, stream = steps.prepare(kit, CNN, recipe=TASK.recipe), steps.batches(kit, CNN, 6)
    arguments = prepared.model, prepared.optimizer, kit.training.cross_entropy
    loop = old.fit_loop(*arguments, steps_per_execution=size)
    losses = [loop([batch])[1] for batch in stream[:5]]
    assert apart(losses, trained("").losses) < 1e-6
    before = int(prepared.optimizer.iterations)
    seconds, _ = loop(stream)
    assert seconds > 0
    assert int(prepared.optimizer.iterations) - before == count
    assert loop(stream[:1])[0] == 0.0  # of one batch there is no time
    loop(stream)
    assert loop.calls() == calls
    assert prepared.model.jit_compile is False  # what "auto" is on a CPU


@TF
def test_fit_refuses_what_it_cannot_do(kit, models, old):
    with pytest.raises(ValueError, match="steps_per_execution must be at least 1"):
        old.fit_loop(models.dense(), models.descent(None), models.squares, steps_per_execution=0)
    keras, inputs = models.keras, models.keras.Input((4,))
    two = keras.Model(inputs, [models.layers.Dense(2)(inputs) for _ in range(2)])
    loop = old.fit_loop(two, models.descent(two), lambda output, y: output[0][0, 0])
    with pytest.raises(NotImplementedError, match="`fit` of Keras 3 has a loss for each"):
        loop([(models.tf.ones((3, 4)), models.tf.ones((3, 2)))])


# Bad input ---------------------------------------------------------------------------------------


@PT
def test_bad_modes_are_refused(technique, models):
    model = models.dense()
    arguments = model, models.descent(model), models.squares
    for name in ("compiled_train_step", "compiled_model_train_step"):
        with pytest.raises(ValueError, match="unknown mode 'fastest': choose one of def"):
            getattr(technique, name)(*arguments, mode="fastest")
    with pytest.raises(ValueError, match="unknown mode 'fastest': choose one of def"):
        technique.compiled_predict(model, mode="fastest")
    for mode in ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"):
        technique.compiled_train_step(*arguments, mode=mode)


@TF
@pytest.mark.parametrize("name", ["eager", "graph", "compiled", "compiled_model"])
def test_a_model_without_variables_is_refused(technique, models, name):
    make, model = getattr(technique, f"{name}_train_step"), models.unbuilt()
    with pytest.raises(ValueError, match="the model has no variables yet"):
        make(model, models.descent(model), models.squares)
