"""Each rung changes what it says and no result, and all of them together still train.

PyTorch's compiled steps run the traced graphs on its own kernels ("aot_eager").
"""

from __future__ import annotations

import functools
import math
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from bench.harness.plan import Work
from bench.train_step import bench_stacking
from shared.specs import TASKS, CNNSpec
from shared.weights import init_weights
from tests import workers
from tests.frameworks import apart
from tests.train_step import steps

FRAMEWORKS = ("pt", *workers.keras())
PT, KERAS_3 = pytest.mark.only("pt"), pytest.mark.only("tf")
BAR = 1e-5
U = 2.0**-8  # the largest relative error of rounding to bfloat16
# Rounding of the same work in another order: of float32, and of each layer's half-width results.
BOUNDS = {"float32": BAR, "bfloat16": 2 * U, "float16": U / 4}
SPEC = CNNSpec((16, 16, 1), ((8, 2), (16, 2)), num_classes=4)
SHALLOW = CNNSpec((16, 16, 1), ((8, 2),), num_classes=4)
CHANNELS_LAST = {"memory_format": "channels_last"}
RUNGS = {
    "neutral": {},
    "channels_last": CHANNELS_LAST,
    "compiled": CHANNELS_LAST | {"compiled": True},
    "bfloat16": CHANNELS_LAST | {"dtype": "bfloat16"},
    "micro_batches": {"micro_batches": 2},
}
ALL = CHANNELS_LAST | {"compiled": True, "dtype": "bfloat16", "micro_batches": 2, "max_norm": 1.0}
# Of techniques, drawn at random; each part is traced anew.
SETS, MOST_PARTS = (14, 4) if workers.campaign() else (7, 3)


@pytest.fixture(scope="module")
def prepare(kit, technique, models):
    """`prepare(**settings)`: a model and its step."""

    def prepare(*, spec=SPEC, rate=0.02, fused=False, **settings):
        def make(model, optimizer, loss_fn):
            memory_format = settings.get("memory_format", "")
            model = technique.prepare_model(model, memory_format=memory_format)
            return technique.make_train_step(model, optimizer, loss_fn, **settings)

        optimizer = functools.partial(models.sgd, rate=rate, fused=fused)
        return steps.prepare(kit, spec, make, optimizer=optimizer)

    return prepare


@pytest.fixture(scope="module")
def stream(kit):
    """Images whose brightness tells the class."""
    random, made = np.random.default_rng(3), []
    for _ in range(6):
        y = random.integers(0, 4, 16)
        x = random.normal(size=(16, 16, 16, 1)) + y[:, None, None, None]
        made.append((x.astype(np.float32), y))
    return kit.data.resident_batches(made)


@pytest.fixture(scope="module")
def trained(kit, models, prepare, stream):
    """`trained(rung)`: losses and weights of six steps; without a rung, of the baseline."""

    @functools.cache
    def trained(rung=None, **settings):
        with workers.without_inductor():
            if rung:
                prepared = prepare(**RUNGS[rung], **settings)
            else:
                optimizer = functools.partial(models.sgd, rate=0.02)
                prepared = steps.prepare(kit, SPEC, optimizer=optimizer)
            losses = steps.losses_of(kit, prepared, stream)
        return {"losses": losses} | steps.trainable_of(kit, prepared.model, SPEC)

    return trained


def far(ours, theirs):
    return max(apart(ours[name], theirs[name]) for name in theirs)


# Rungs -------------------------------------------------------------------------------------------


def test_the_neutral_step_is_the_baseline_to_the_last_bit(trained):
    assert steps.same(trained("neutral"), trained())


@pytest.mark.parametrize("rung", ["neutral", "channels_last", "compiled"])
def test_float32_rungs_train_as_the_baseline_and_twins_agree(trained, agrees, rung):
    assert far(trained(rung), trained()) < BAR
    agrees(rung, trained(rung), BAR)


def test_micro_batches_agree_and_with_batchnorm_are_another_computation(trained, agrees):
    """So is another learning rate."""
    agrees("micro-batches", trained("micro_batches"), BAR)
    assert far(trained("micro_batches"), trained()) > BAR
    assert far(trained("neutral", rate=0.022), trained()) > BAR


@pytest.mark.only("pt", "tf")
def test_bfloat16_is_what_ran_and_float32_but_for_its_rounding(kit, prepare, stream, trained):
    """Three layers round their input, weight and output: nine roundings of u each at worst."""
    difference = apart(trained("bfloat16")["losses"], trained()["losses"])
    assert U / 64 < difference < 9 * U
    for rung, dtype in (("neutral", "float32"), ("bfloat16", "bfloat16")):
        ran = kit.runtime.operator_dtypes(prepare(**RUNGS[rung]).step, *stream[0])
        assert set(ran["convolution"]) == set(ran["matmul"]) == {dtype}


@pytest.mark.only("pt", "tf")
def test_everything_together_trains_compiled_in_bfloat16_over_float32(
    kit, framework, models, prepare, stream
):
    with workers.without_inductor():
        prepared = prepare(fused=framework == "pt", rate=0.1, spec=SHALLOW, **ALL)
        losses = steps.losses_of(kit, prepared, stream * 6)
    assert np.isfinite(losses).all()
    assert np.mean(losses[-6:]) < 0.5 * np.mean(losses[:6])
    traces = kit.runtime.trace_count(prepared.step)
    prepared.step(*stream[0])
    assert kit.runtime.trace_count(prepared.step) == traces
    assert models.dtypes(models.kept(prepared)) == {"float32"}
    assert models.is_compiled_in_bfloat16(kit, prepared.step, *stream[0])


# Random sets of techniques -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def apart_from_plain(technique, models):
    """`apart_from_plain(**settings)`: relative differences of losses and of updates."""

    def three_steps(model, step):
        before, batch = models.weights(model), models.plain_batch()
        losses = np.array([float(step(*batch)) for _ in range(3)])
        return losses, models.weights(model) - before

    @functools.cache
    def by_plain_code(dtype, max_norm):
        model = models.plain_model(dtype)
        step = models.plain_step(model, 4.0, dtype=dtype, max_norm=max_norm)
        return three_steps(model, step)

    def apart_from_plain(*, fused=False, rate=4.0, recomputed="", **settings):
        model = models.plain_model("float32")
        memory_format = settings.get("memory_format", "")
        used = technique.prepare_model(model, memory_format=memory_format, recomputed=recomputed)
        optimizer = models.sgd(used, rate, fused=fused)
        with workers.without_inductor():
            step = technique.make_train_step(used, optimizer, models.small_loss, **settings)
            found = three_steps(model, step)
        dtype, max_norm = settings.get("dtype", "float32"), settings.get("max_norm", math.inf)
        return [apart(*pair) for pair in zip(found, by_plain_code(dtype, max_norm), strict=True)]

    return apart_from_plain


def test_any_set_of_techniques_is_plain_training(flavour, models, apart_from_plain):
    """Losses and updates of three steps of a model whose layers do not mix samples."""
    legacy, drawn = flavour == "tf_keras", []

    # The same sets in each run, all of them new: none is shrunk, as the set itself says enough.
    @hypothesis_settings(
        max_examples=SETS,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(
        memory_format=st.sampled_from(["", "channels_last"]),
        recomputed=st.sampled_from([""] if legacy else ["", "body"]),
        dtype=st.sampled_from(["float32"] if legacy else list(BOUNDS)),
        micro_batches=st.integers(1, MOST_PARTS),
        max_norm=st.sampled_from([math.inf, 0.2 * models.SMALL]),
        compiled=st.booleans(),
        fused=st.booleans() if flavour == "pt" else st.just(False),
    )
    def compare(**chosen):
        if chosen not in drawn:
            drawn.append(chosen)
            losses, updates = apart_from_plain(**chosen)
            assert losses < BOUNDS[chosen["dtype"]], chosen
            assert updates < 10 * BOUNDS[chosen["dtype"]], chosen

    compare()
    assert len(drawn) >= (10 if workers.campaign() else 6)
    for name in ("memory_format", "micro_batches", "max_norm", "compiled"):
        assert len({one[name] for one in drawn}) > 1


def test_a_rate_that_is_off_by_a_hundredth_would_be_seen(apart_from_plain):
    assert apart_from_plain(micro_batches=3, rate=4.04)[1] > 100 * BOUNDS["float32"]


def test_a_ragged_batch_is_cut_by_its_samples(apart_from_plain):
    assert max(apart_from_plain(micro_batches=4)) < BAR


@KERAS_3
def test_a_batch_in_float64_is_cut_too(technique, models):
    tf, losses = models.tf, []
    x, y = models.plain_batch()
    for parts in (1, 4):
        models.keras.utils.set_random_seed(0)
        layers = [models.layers.Flatten(dtype="float64"), models.layers.Dense(3, dtype="float64")]
        model = models.keras.Sequential([models.keras.Input((6, 6, 3)), *layers])
        optimizer = models.sgd(model, 4.0)
        make = technique.make_train_step
        step = make(model, optimizer, models.small_loss, micro_batches=parts)
        losses.append([float(step(tf.cast(x, tf.float64), y)) for _ in range(3)])
    assert apart(losses[1], losses[0]) < 1e-6  # shares are float32


@KERAS_3
@pytest.mark.parametrize(
    ("name", "settings"),
    [("traced", CHANNELS_LAST | {"dtype": "bfloat16"}), ("compiled", bench_stacking.BF16)],
)
def test_the_benchmark_tells_where_xla_runs_bfloat16_in_float32(impl, kit, name, settings):
    task = replace(TASKS["digits-cnn"], model=SHALLOW)
    work = Work(task, name, settings, 8, init_weights(SHALLOW, 0))
    (batch,) = steps.batches(kit, SHALLOW)
    prepared = bench_stacking.prepare(impl, work)
    if name == "traced":
        assert bench_stacking.took_effect(impl, work, prepared, batch)[1] is None
    else:
        said = workers.raised(bench_stacking.took_effect, impl, work, prepared, batch)
        assert said is None or "XLA runs bfloat16 layers in float32 on this device" in said


# PyTorch's own rungs -----------------------------------------------------------------------------


@PT
def test_channels_last_holds_from_kernel_to_optimizer(technique, models):
    """The kernel, its momentum, and what the convolution read and wrote in both parts."""
    model, seen = models.plain_model("float32"), []
    model.stem.register_forward_hook(lambda m, x, y: seen.extend([x[0], y]))
    model = technique.prepare_model(model, **CHANNELS_LAST)
    optimizer = models.sgd(model, 0.1, fused=True)
    settings = CHANNELS_LAST | {"micro_batches": 2}
    technique.make_train_step(model, optimizer, models.small_loss, **settings)(
        *models.plain_batch()
    )
    kernel, last = model.stem.weight, models.torch.channels_last
    tensors = [kernel, optimizer.state[kernel]["momentum_buffer"], *seen]
    assert len(tensors) == 6
    assert all(v.is_contiguous(memory_format=last) and not v.is_contiguous() for v in tensors)


@PT
def test_what_the_optimizer_holds_is_clipped_by_its_own_norm(technique, models):
    """Other layers' gradients add up, and stay scaled."""
    model = models.plain_model("float16")
    arguments = model, models.sgd(model.head, 0.0), models.small_loss
    step = technique.make_train_step(*arguments, dtype="float16", max_norm=1e-3)
    for _ in range(2):
        step(*models.plain_batch())
    norm = models.nn.utils.get_total_norm([p.grad for p in model.head.parameters()])
    assert norm.item() == pytest.approx(1e-3, rel=1e-2)


@PT
@pytest.mark.parametrize("fused", [False, True])
def test_a_fused_update_is_not_compiled(prepare, fused):
    with workers.without_inductor():
        optimizer = prepare(fused=fused, compiled=True).optimizer
    update = getattr(optimizer.step, "__func__", optimizer.step)
    assert hasattr(update, "_torchdynamo_orig_callable") != fused


# Bad input ---------------------------------------------------------------------------------------


def make(technique, models, model=None, optimizer=None, **settings):
    model = model or models.plain_model("float32")
    optimizer = optimizer or models.sgd(model, 0.1)
    return technique.make_train_step(model, optimizer, models.small_loss, **settings)


def change(technique, models, **settings):
    return technique.prepare_model(models.plain_model("float32"), **settings)


def few(technique, models):
    return make(technique, models, micro_batches=4)(*models.plain_batch(3))


def unbuilt(technique, models):
    optimizer = models.keras.optimizers.SGD(0.1)
    return technique.make_train_step(models.unbuilt(), optimizer, models.small_loss)


KERAS = pytest.mark.only("tf", "tf_keras")
LEGACY = pytest.mark.only("tf_keras")
REFUSALS = [
    (
        lambda t, m: make(t, m, dtype="half"),
        "unknown dtype 'half': choose one of bfloat16, float16, float32",
    ),
    (
        lambda t, m: make(t, m, micro_batches=0),
        "micro_batches must be an integer of at least 1, not 0",
    ),
    (
        lambda t, m: make(t, m, max_norm=0.0),
        "max_norm must be above 0 (inf does not clip), not 0.0",
    ),
    (few, "3 samples do not fill 4 micro-batches"),
    (lambda t, m: change(t, m, memory_format="NHWC"), "unknown memory format 'NHWC'"),
    pytest.param(
        lambda t, m: change(t, m, recomputed="blok"),
        "the model has no block 'blok'",
        marks=pytest.mark.only("pt", "tf"),
    ),
    pytest.param(
        lambda t, m: t.prepare_model(m.nn.Conv3d(1, 1, 1), **CHANNELS_LAST),
        "torch has no channels_last for 5-D",
        marks=PT,
    ),
    pytest.param(unbuilt, "the model has no variables yet", marks=KERAS),
    pytest.param(
        lambda t, m: make(t, m, m.half(), dtype="bfloat16"),
        "master weights are float32",
        marks=KERAS_3,
    ),
    pytest.param(
        lambda t, m: make(t, m, optimizer=m.scaling()[1]),
        "pass the optimizer itself, without",
        marks=KERAS_3,
    ),
    pytest.param(
        lambda t, m: make(t, m, dtype="bfloat16"),
        "tf_keras cannot switch a built model",
        marks=LEGACY,
    ),
    pytest.param(
        lambda t, m: change(t, m, recomputed="body"), "tf_keras would draw other", marks=LEGACY
    ),
]


@pytest.mark.parametrize(("call", "message"), REFUSALS)
def test_a_refusal_says_why(technique, models, call, message):
    with pytest.raises((ValueError, NotImplementedError), match=re.escape(message)) as raised:
        call(technique, models)
    assert "\n" not in str(raised.value) or call is few  # TensorFlow tells where it was traced
