"""Half width happens where it should, over float32 master weights, and twins agree.

Bounds come from bfloat16's unit roundoff u = 2^-8, the largest relative error of one rounding.
What tf_keras refuses stands in test_any_model.py.
"""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

from shared.specs import TASKS, layers
from shared.weights import init_weights
from tests.frameworks import apart
from tests.train_step import steps

FRAMEWORKS = ("pt", "tf")
U = 2.0**-8
TASK = TASKS["digits-cnn"]
CNN = replace(TASK.model, convolutions=TASK.model.convolutions[:2])
GPT = TASKS["text-gpt"].model
SAMPLES = {CNN: 32, GPT: 8}
RECIPES = {CNN: TASK.recipe, GPT: TASKS["text-gpt"].recipe}
# Rounding puts the odd ReLU on the other side of zero, which moves later losses by far more than
# it. Steps this small keep that out of the weights.
SMALL_STEPS = replace(TASK.recipe, learning_rate=2.0**-13)
FLOAT32, BFLOAT16 = {"float32"}, {"bfloat16"}


@pytest.fixture(scope="module")
def prepare(kit, technique):
    """`prepare(spec, **settings)`: a model and its step; the plain one without settings."""

    def prepare(spec=CNN, recipe=None, **settings):
        make = technique.make_train_step if settings else None
        return steps.prepare(kit, spec, make, recipe=recipe or RECIPES[spec], **settings)

    return prepare


@pytest.fixture(scope="module")
def batches(kit):
    return lambda spec=CNN, count=10: steps.batches(kit, spec, count, SAMPLES[spec])


@pytest.fixture(scope="module")
def train(kit, prepare, batches):
    """`train(spec, **settings)`: ten losses."""

    @functools.cache
    def train(spec=CNN, **settings):
        return steps.losses_of(kit, prepare(spec, **settings), batches(spec))

    return train


def roundings(spec):
    """Between input and loss: of each layer's input, weight and output."""
    return 3 * len(layers(spec))


# It happens --------------------------------------------------------------------------------------


def test_convolutions_and_products_run_in_the_dtype_but_for_layers_that_are_kept(
    kit, prepare, batches
):
    def ran(spec=CNN, **settings):
        return kit.runtime.operator_dtypes(prepare(spec, **settings).step, *batches(spec, 1)[0])

    whole, half = ran(dtype="float32", keep_fp32="head"), ran(dtype="bfloat16")
    assert set(whole["convolution"]) == set(whole["matmul"]) == FLOAT32
    assert set(half["convolution"]) == set(half["matmul"]) == BFLOAT16
    count = whole["convolution"]["float32"]
    assert half["convolution"]["bfloat16"] == count
    assert set(ran(GPT, dtype="bfloat16")["matmul"]) == BFLOAT16
    two = ran(dtype="bfloat16", keep_fp32="conv0, head")
    assert set(two["matmul"]) == FLOAT32
    # The first convolution: forward, and once backward, since its input is data.
    assert two["convolution"] == {"float32": 2, "bfloat16": count - 2}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_master_weights_gradients_and_optimizer_state_stay_float32(prepare, batches, models, dtype):
    prepared = prepare(recipe=RECIPES[GPT], dtype=dtype)  # AdamW
    prepared.step(*batches(CNN, 1)[0])
    assert models.dtypes(models.kept(prepared)) == FLOAT32


def test_gradients_are_rounded_but_right(kit, prepare, batches):
    """Forward and backward, each layer rounds its input, weight and output: so many u at worst.

    Below the head, ReLU's derivative jumps: BatchNorm gives it unit normal values, of which
    rounding moves a share of at most u to the other side of zero, and a share of wrong gates is
    the square of the gradient's relative error. Shares of the convolutions add up.
    """
    moved = {}
    for dtype in ("float32", "bfloat16", "float16"):
        prepared = prepare(recipe=steps.DESCENT, dtype=dtype)
        before = steps.trainable_of(kit, prepared.model, CNN)
        prepared.step(*batches(CNN, 1)[0])
        after = steps.trainable_of(kit, prepared.model, CNN)
        moved[dtype] = {name: before[name] - after[name] for name in before}
    exact = moved.pop("float32")
    errors = {dtype: {n: apart(g[n], exact[n]) for n in exact} for dtype, g in moved.items()}
    arithmetic = 2 * roundings(CNN) * U
    gates = ((len(layers(CNN)) - 1) * U) ** 0.5
    for name, error in errors["bfloat16"].items():
        assert U / 16 < error < arithmetic + (0 if name.startswith("head") else gates), name
    # float16 has three bits more.
    assert errors["float16"]["head.kernel"] < errors["bfloat16"]["head.kernel"] / 4


def test_statistics_of_batchnorm_stay_float32(technique, models):
    """The data has a mean of 40 times its deviation, which bfloat16 cannot resolve."""
    images = 4 + 0.1 * np.random.default_rng(3).normal(size=(64, 8, 8, 1))
    # What bfloat16 holds exactly, so that the convolution adds no rounding.
    images = (images.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)
    mean, variance = models.statistics(technique, images)
    assert mean == pytest.approx(images.astype(float).mean(), rel=1e-4)
    assert variance == pytest.approx(images.astype(float).var(), rel=1e-4)


# Nothing else does -------------------------------------------------------------------------------


def test_float32_is_the_baseline_to_the_last_bit(train):
    assert train(dtype="float32", keep_fp32="head") == train()


def test_making_steps_twice_stacks_nothing_and_leaves_the_model_as_it_was(
    kit, technique, models, prepare, batches, train
):
    stream = batches(CNN, 3)
    settings = {"dtype": "bfloat16", "keep_fp32": "head"}
    again = prepare(**settings)
    arguments = again.model, again.optimizer, kit.training.cross_entropy
    for keep in models.KEPT_TWICE:
        again.step = technique.make_train_step(*arguments, keep_fp32=keep)
        models.make_predict(again.model, keep_fp32=keep)
    assert steps.losses_of(kit, again, stream) == train(**settings)[:3] != train()[:3]
    models.make_predict(again.model, keep_fp32="conv0")(stream[0][0])
    kit.models.import_weights(again.model, init_weights(CNN, seed=1))
    optimizer = kit.training.make_optimizer(again.model, TASK.recipe)
    again.step = kit.training.make_train_step(again.model, optimizer, arguments[-1])
    assert steps.losses_of(kit, again, stream) == train()[:3]


# The twins ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "recipe", "bar"),
    [(CNN, SMALL_STEPS, TASK.parity), (GPT, None, TASKS["text-gpt"].parity)],
    ids=["cnn", "gpt"],
)
def test_twins_agree_in_float32(train, agrees, spec, recipe, bar):
    losses = train(spec, recipe=recipe, dtype="float32")
    agrees(f"{spec.family} in float32", {"losses": losses}, bar)


@pytest.mark.parametrize(("spec", "positions"), [(CNN, 32), (GPT, 8 * 64)], ids=["cnn", "gpt"])
def test_twins_agree_in_bfloat16(train, agrees, spec, positions):
    """Ten losses, each a mean over `positions`, behind as many roundings on either side.

    One rounding is uniform in ±u: a standard deviation of u / sqrt(3). Both sides' roundings are
    independent at worst: sqrt(2 roundings) of them, and the mean divides by sqrt(positions). A
    learning rate that is a tenth off is outside.
    """
    bound = U * (2 * roundings(spec) / 3 / positions) ** 0.5
    losses = train(spec, dtype="bfloat16")
    agrees(f"{spec.family} in bfloat16", {"losses": losses}, bound)
    off = replace(RECIPES[spec], learning_rate=1.1 * RECIPES[spec].learning_rate)
    assert apart(train(spec, recipe=off, dtype="bfloat16"), losses) > bound
    assert losses != train(spec, dtype="float32")


# Models that are not ours ------------------------------------------------------------------------


@pytest.mark.parametrize("keep", ["", "left", "block"])
def test_layers_of_a_custom_model_are_reached_and_kept(technique, models, keep):
    """The loss and the user get float32."""
    seen, losses = models.custom(technique, keep)
    assert losses[-1] < losses[0]
    assert seen["output"] == seen["predicted"] == FLOAT32
    if keep == "block":
        assert seen["block"] == FLOAT32
    else:
        assert seen["left"] == (FLOAT32 if keep else BFLOAT16)
        assert seen["right"] == seen["block"] == BFLOAT16


@pytest.mark.only("pt")
def test_a_kept_layer_that_runs_again_in_the_backward_pass_does_so_in_float32(technique, models):
    torch = models.torch
    from torch.utils.checkpoint import checkpoint

    class Net(torch.nn.Module):
        def __init__(self, again):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.kept = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
            self.run = checkpoint if again else lambda layer, x, **settings: layer(x)

        def forward(self, x):
            return self.run(self.kept, torch.relu(self.first(x)), use_reentrant=False)

    losses = []
    for model in (Net(False), Net(True)):
        step = technique.make_train_step(
            model, models.descent(model), lambda output, y: output.square().mean(), keep_fp32="kept"
        )
        losses.append([step(torch.ones(16, 8), None).item() for _ in range(5)])
    assert losses[0] == losses[1]


@pytest.mark.only("tf")
def test_switching_a_built_model_equals_keras_own_global_policy(kit, technique, models):
    keras, loss_fn = models.keras, kit.training.cross_entropy
    x, y = [models.normal(16, 6, 8, seed=seed) for seed in (0, 1)], models.tf.range(16) % 3
    losses, logits = {}, {}
    for name, policy, dtype in (
        ("float32", "float32", "float32"),
        ("technique", "float32", "bfloat16"),
        ("policy", "mixed_bfloat16", "float32"),
    ):
        keras.config.set_dtype_policy(policy)
        model = models.attentive()
        keras.config.set_dtype_policy("float32")
        step = technique.make_train_step(model, models.descent(model), loss_fn, dtype=dtype)
        losses[name] = [float(step(x, y)) for _ in range(5)]
        logits[name] = np.array(models.cast(models.make_predict(model, dtype=dtype)(x), "float32"))
        assert step.experimental_get_tracing_count() == 1
        assert name == "policy" or models.policies(model) == ["float32"]
    assert losses["technique"] == losses["policy"] != losses["float32"]
    assert np.array_equal(logits["technique"], logits["policy"])


@pytest.mark.only("tf")
def test_other_policies_of_a_layer_stay(models):
    names = ("float32", "mixed_float16", "float64")
    dense = [models.layers.Dense(4, dtype=name, name=name) for name in names]
    model = models.keras.Sequential([models.keras.Input((4,)), *dense])
    logits = models.make_predict(model, keep_fp32="mixed_float16")(models.tf.zeros((2, 4)))
    assert models.dtypes([logits]) == {"float64"}
    assert [layer.dtype_policy.name for layer in model.layers] == list(names)


@pytest.mark.only("tf")
@pytest.mark.parametrize("kind", ["Decorated", "Helped"])
def test_a_call_that_is_a_graph_of_its_own_is_traced_anew(models, kind):
    x = models.tf.reshape(models.tf.range(20), (4, 5))  # integers look the same in any policy
    moved = []
    for make in (models.Reader, getattr(models, kind)):
        model = make()
        plain = model(x)
        moved.append(models.difference(models.make_predict(model)(x), plain))
        assert not {"call", "read"} & vars(model).keys()
    assert moved[0] == moved[1] > 0
    model = make()
    model(x[:1])
    models.make_predict(model)(x)  # traced in bfloat16 before it is in float32
    assert models.dtypes([model(x)]) == FLOAT32


@pytest.mark.only("tf")
def test_layers_that_read_raw_data_read_all_of_it(models):
    """Of which Keras's own policy keeps 8 bits: 2026 would be 2024."""
    keras, layers = models.keras, models.layers
    years = models.tf.constant([[float(year)] for year in range(1990, 2030)])
    bins = [float(year) for year in range(1991, 2030)]

    def own_policy(**settings):
        keras.utils.set_random_seed(0)
        norm = layers.Normalization(mean=2010.0, variance=130.0, **settings)
        return keras.Sequential([keras.Input((1,)), norm, layers.Dense(4, **settings)])

    assert models.difference(own_policy(dtype="mixed_bfloat16")(years), own_policy()(years)) > 0.2
    for reader in (
        layers.Normalization(mean=2010.0, variance=130.0),
        layers.Rescaling(1 / 20, offset=-2010 / 20),
        layers.Discretization(bin_boundaries=bins, output_mode="one_hot"),
        layers.CategoryEncoding(2100, output_mode="one_hot"),
    ):
        keras.utils.set_random_seed(0)
        inputs, dense = keras.Input((1,)), layers.Dense(4)
        functional = keras.Model(inputs, dense(reader(inputs)))
        plain = functional(years)
        for model in (functional, keras.Sequential([keras.Input((1,)), reader, dense])):
            rounded = models.difference(models.make_predict(model)(years), plain)
            assert 0 < rounded < 0.02, reader.name  # Dense itself is rounded
    recurrent = layers.SimpleRNN(1, "linear", use_bias=False)
    masked = keras.Sequential([keras.Input((2, 1)), layers.Masking(-1.0), recurrent])
    predict = models.make_predict(masked)
    recurrent.set_weights([np.ones((1, 1))] * 2)
    for last, result in ((-1.001, 2.0), (-1.0, 3.0)):  # -1 is padding
        assert float(predict(models.tf.constant([[[3.0], [last]]]))[0, 0]) == result


@pytest.mark.only("tf")
def test_a_layer_that_writes_its_kernel_writes_all_of_it(kit, technique, models):
    keras, layers = models.keras, models.layers
    kernels = []
    for dtype in ("float32", "bfloat16"):
        keras.utils.set_random_seed(0)
        normed = layers.SpectralNormalization(layers.Dense(8))
        model = keras.Sequential([keras.Input((6,)), normed, layers.Dense(3)])
        arguments = model, models.descent(model, 0.0), kit.training.cross_entropy
        step = technique.make_train_step(*arguments, dtype=dtype)
        step(models.tf.ones((4, 6)), models.tf.zeros(4, "int64"))
        kernels.append(np.array(normed.layer.kernel))
    assert apart(*kernels) < 1e-6


# Bad input ---------------------------------------------------------------------------------------

REFUSALS = [
    (lambda m, make: make(dtype="bf16"), "unknown dtype 'bf16': choose one of bfloat16, float16"),
    (lambda m, make: make(keep_fp32="head, haed"), "no layer 'haed'; it has "),
    (lambda m, make: make(dtype="float32", keep_fp32="haed"), "no layer 'haed'; it has "),
    (lambda m, make: m.make_predict(m.half()), "master weights are float32, but "),
    pytest.param(
        lambda m, make: m.make_predict(m.unbuilt()),
        "the model has no variables yet",
        marks=pytest.mark.only("tf"),
    ),
    pytest.param(
        lambda m, make: m.make_predict(m.torch.nn.Linear(2, 2, device="meta"), dtype="float16"),
        "torch has no autocast",
        marks=pytest.mark.only("pt"),
    ),
]


@pytest.mark.parametrize(("call", "message"), REFUSALS)
def test_a_refusal_says_why_and_changes_nothing(kit, technique, models, prepare, call, message):
    prepared = prepare()
    before = steps.weights_of(kit, prepared.model)
    arguments = prepared.model, prepared.optimizer, kit.training.cross_entropy
    with pytest.raises((ValueError, NotImplementedError), match=re.escape(message)) as raised:
        call(models, lambda **settings: technique.make_train_step(*arguments, **settings))
    assert "\n" not in str(raised.value)
    assert steps.same(steps.weights_of(kit, prepared.model), before)


@pytest.mark.only("pt")
def test_a_layer_without_a_kernel_is_refused_and_can_be_kept(models):
    torch = models.torch

    class Pair(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.pair = torch.nn.Bilinear(4, 4, 2)

        def forward(self, x):
            return self.pair(x, x)

    with pytest.raises(
        NotImplementedError, match=r"a CPU's autocast does not cast.*keep_fp32='pair'"
    ):
        models.make_predict(Pair())
    kept = models.make_predict(Pair(), keep_fp32="pair")(torch.ones(3, 4))
    assert (kept.dtype, kept.shape) == (torch.float32, (3, 2))
    recurrent = torch.nn.Sequential(torch.nn.LSTM(2, 2))
    with mock.patch("torch.backends.cpu.get_cpu_capability", return_value="AVX2"):
        with pytest.raises(NotImplementedError, match=r"no nn.LSTM in half.*keep_fp32='0'"):
            models.make_predict(recurrent)
        kept, _ = models.make_predict(recurrent, keep_fp32="0")(torch.ones(3, 2))
    assert kept.dtype == torch.float32
