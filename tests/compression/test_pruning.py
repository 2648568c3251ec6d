"""The smallest weights become zero, on schedule, and stay so, alike in both frameworks."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from functools import partial
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest

from bench.compression import bench_pruning
from bench.harness.plan import Work
from bench.harness.stages import Stages
from shared.specs import TASKS
from shared.weights import init_weights
from tests.compression import teaching
from tests.compression.teaching import CNN, GPT
from tests.frameworks import apart

FRAMEWORKS = ("pt", "tf", "tf_keras")  # tf_keras has TensorFlow Model Optimization's
PT, TF = pytest.mark.only("pt"), pytest.mark.only("tf", "tf_keras")
KERAS_3, LEGACY = pytest.mark.only("tf"), pytest.mark.only("tf_keras")
FINAL, BEGIN, END = 0.8, 2, 14
SCHEDULE = {"final_sparsity": FINAL, "begin_step": BEGIN, "end_step": END, "frequency": 4}
UPDATES = (2, 6, 10, 14)
AT_ONCE = {"final_sparsity": 0.8, "begin_step": 0, "end_step": 4, "frequency": 4}
NOW = {"final_sparsity": 0.5, "begin_step": 0, "end_step": 1, "frequency": 1}
RECIPE = TASKS["digits-cnn"].recipe
KERNELS = ("conv0.kernel", "conv1.kernel", "head.kernel")


@functools.cache
def start(spec=CNN, *, ties=False):
    """Initial weights; with `ties` few different magnitudes, zero among them."""
    weights = init_weights(spec, seed=1)
    for name, value in weights.items():
        if ties and name.endswith("kernel"):
            weights[name] = (np.round(4 * value) / 4).astype(np.float32)
    return weights


@pytest.fixture(scope="module")
def prune(kit, technique):
    """`prune(settings)`: a model with its step, pruned and updated by it if there are settings."""

    def make(settings, spec=CNN, *, rate=RECIPE.learning_rate, weights=None, how="apply_pruning"):
        model = source = kit.models.build(spec, weights or start(spec))
        update, steps = None, count(1)
        if settings:
            model, update = getattr(technique, how)(source, **settings)
        optimizer = kit.training.make_optimizer(model, replace(RECIPE, learning_rate=rate))
        plain = kit.training.make_train_step(model, optimizer, kit.training.cross_entropy)

        def step(x, y):
            if update:
                update(next(steps))
            return plain(x, y)

        return SimpleNamespace(source=source, model=model, update=update, plain=plain, step=step)

    return make


@pytest.fixture(scope="module")
def stream(kit):
    return teaching.batches(kit, CNN, 16, samples=16)


@pytest.fixture(scope="module")
def pruned_now(technique, models):
    """`pruned_now(source, x)`: a model of which half went at its first step, without masks."""

    def make(source, *x, **settings):
        model, update = technique.apply_pruning(source, **NOW | settings)
        update(1)
        models.forward(model, *x)
        return technique.finalize_pruning(model)

    return make


def kept(size, share):
    """How many of `size` weights stay, in float32 and rounded half to even."""
    return max(int(np.round(np.float32(size) * (np.float32(1) - np.float32(share)))), 1)


def splits(weights, mask):
    """Whether a mask parts the smaller weights from the larger ones, ties together."""
    size = np.abs(weights)
    return mask.all() or size[mask == 0].max() < size[mask == 1].min()


def flat(arrays):
    return np.concatenate([np.ravel(arrays[name]) for name in KERNELS])


# Schedule and masks ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def masks(models, prune, stream):
    """`masks(ties)`: those after each of 16 steps that change no weight."""

    @functools.cache
    def make(ties):
        made, after = prune(SCHEDULE, rate=0.0, weights=start(ties=ties)), []
        for batch in stream:
            made.step(*batch)
            after.append({name: np.array(m) for name, m in models.masks(made.model).items()})
        return after

    return make


def test_zeros_follow_the_cubic_schedule_and_are_the_smallest_weights(masks, agrees):
    for step, now in enumerate(masks(False), 1):
        last = max((update for update in UPDATES if update <= step), default=BEGIN)
        left = np.float32(1) - np.float32(last - BEGIN) / np.float32(END - BEGIN)
        share = np.float32(FINAL) - np.float32(FINAL) * left * left * left
        assert set(now) == set(KERNELS)
        for name, mask in now.items():
            assert int(mask.sum()) == kept(mask.size, share), (step, name)
            assert splits(start()[name], mask)
    shares = [1 - flat(now).mean() for now in masks(False)]
    assert shares[:5] == [0.0] * 5  # also at begin_step, where the schedule gives zero
    assert shares[9] == pytest.approx(0.8 * (1 - (1 / 3) ** 3), abs=0.005)
    assert shares[-1] == pytest.approx(0.8, abs=0.005)
    assert shares[13] == shares[-1] > shares[12] == shares[9] > shares[8] == shares[5] > 0.4
    agrees("distinct", {str(n): flat(masks(False)[n - 1]) for n in UPDATES}, 1e-9)


def test_weights_that_tie_stay_together(masks, agrees):
    last = masks(True)[-1]
    more = [mask.sum() - kept(mask.size, FINAL) for mask in last.values()]
    assert min(more) >= 0 < max(more)
    assert all(splits(start(ties=True)[name], mask) for name, mask in last.items())
    agrees("ties", {str(n): flat(masks(True)[n - 1]) for n in UPDATES}, 1e-9)


def test_the_schedule_goes_by_steps_whatever_the_forward_passes_of_a_step(
    models, prune, stream, masks
):
    two, none, late = (prune(SCHEDULE, rate=0.0) for _ in range(3))
    for number, (x, y) in enumerate(stream, 1):
        two.update(number)
        models.forward(two.model, x)
        two.plain(x, y)
        none.plain(x, y)
        assert teaching.farthest(models.masks(two.model), masks(False)[number - 1]) == 0
    assert flat(models.masks(none.model)).all()  # without an update there is no mask
    late.update(14)  # a run goes on at any step
    late.plain(*stream[0])
    assert teaching.farthest(models.masks(late.model), masks(False)[13]) == 0


def test_small_layers_stay_dense_where_that_is_asked_for(kit, technique, pruned_now, stream):
    """Kernels have 72, 216 and 30 weights."""
    source = kit.models.build(CNN, start())
    settings = {"final_sparsity": 0.8, "min_weights": 216}
    weights = teaching.weights_of(kit, pruned_now(source, stream[0][0], **settings))
    shares = [float((weights[name] == 0).mean()) for name in KERNELS]
    assert shares == pytest.approx([0.0, 0.8, 0.0], abs=0.005)
    with pytest.raises(ValueError, match="no dense or convolution layer of 217 weights or more"):
        technique.apply_pruning(source, **AT_ONCE, min_weights=217)


def test_counts_are_rounded_in_float32(models, pruned_now):
    """4.5 of 45 weights stay in real numbers."""
    assert kept(45, 0.9) == 5
    assert round(45 * (1 - 0.9)) == 4  # what float64 would give
    source = models.linear(np.arange(1.0, 46.0, dtype=np.float32).reshape(9, 5))
    model = pruned_now(source, models.ONES, final_sparsity=0.9)
    assert sum(models.zeros(model).values()) * 45 == pytest.approx(40)


def test_of_more_weights_than_float32_counts_no_more_stay_than_there_are(technique):
    share, many = technique._sparsity(1, 0.5, 1, 101), 2**24 + 3
    assert float(np.float32(many)) > many
    assert [technique._kept(size, share) for size in (many, 10)] == [many, 10]


@pytest.mark.only("pt", "tf")
def test_global_magnitude_has_one_threshold(models, prune, stream, agrees):
    made = prune(AT_ONCE, rate=0.0, how="apply_global_pruning")
    for batch in stream[:4]:
        made.step(*batch)
    masks = models.masks(made.model)
    assert splits(flat(start()), flat(masks))
    assert flat(masks).sum() == kept(flat(masks).size, 0.8)
    shares = [mask.mean() for mask in masks.values()]
    assert max(shares) - min(shares) > 0.1  # not layer by layer
    agrees("global magnitude", {"masks": flat(masks)}, 1e-9)


@KERAS_3
def test_tf_global_magnitude_spans_dtypes(technique, models):
    model, update = technique.apply_global_pruning(
        models.two_widths(), **AT_ONCE | {"final_sparsity": 0.5}
    )
    update(4)
    kernels = technique.finalize_pruning(model).get_weights()
    assert [kernel.tolist() for kernel in kernels] == [[[0.0, 0.0], [3.0, 4.0]]] * 2
    assert [str(kernel.dtype) for kernel in kernels] == ["float16", "float32"]


# Training ----------------------------------------------------------------------------------------


def test_masks_hold_while_sgd_with_momentum_trains(kit, technique, models, prune, stream):
    made = prune(AT_ONCE)
    for batch in stream[:4]:
        made.step(*batch)
    masks = {name: np.array(mask) for name, mask in models.masks(made.model).items()}
    for batch in stream[4:12]:
        made.step(*batch)
    assert teaching.farthest(models.masks(made.model), masks) == 0
    x = stream[0][0]
    final = technique.finalize_pruning(made.model)
    weights = teaching.weights_of(kit, final)
    for name, mask in masks.items():
        assert np.array_equal(weights[name] != 0, mask == 1), name
        assert mask.sum() == kept(mask.size, 0.8)
    for name in weights.keys() - masks.keys():
        assert (weights[name] == 0).sum() <= (start()[name] == 0).sum(), name
    masked, *others = (
        models.numpy(kit.training.make_predict(model)(x))
        for model in (made.model, final, kit.models.build(CNN, weights))
    )
    assert np.abs(masked).max() > 0.1
    for other in others:
        assert np.allclose(masked, other, rtol=1e-6, atol=1e-6)
    # The model that was given has no masks; the final one can be pruned again.
    assert models.masks(made.source) == {}
    assert teaching.farthest(teaching.weights_of(kit, made.source), start()) == 0
    technique.apply_pruning(final, **AT_ONCE)


def test_a_sparsity_of_zero_is_the_baseline(kit, technique, prune, stream, framework):
    dense, none = (
        prune(settings) for settings in (None, AT_ONCE | {"final_sparsity": 0.0, "frequency": 1})
    )
    losses, plain = (teaching.losses_of(kit, one.step, stream[:10]) for one in (none, dense))
    assert apart(losses, plain) < 1e-6
    assert losses == plain or framework == "tf"
    weights = teaching.weights_of(kit, technique.finalize_pruning(none.model))
    for name, value in teaching.weights_of(kit, dense.model).items():
        assert np.allclose(weights[name], value, rtol=1e-5, atol=1e-6), name


@pytest.mark.parametrize(("spec", "bar"), [(CNN, 1e-5), (GPT, 1e-4)], ids=["cnn", "gpt"])
def test_twins_lose_alike_while_they_prune(kit, prune, agrees, spec, bar):
    losses = teaching.losses_of(kit, prune(AT_ONCE, spec).step, teaching.batches(kit, spec, 10))
    agrees(f"ten steps of {type(spec).__name__}", {"losses": losses}, bar)


def test_pruned_weights_return_under_tfmot_alone(models, prune, stream, flavour):
    """Which is the difference that the docstrings name. Steps are large here."""
    made = prune({**AT_ONCE, "end_step": 200, "frequency": 1}, rate=0.5)
    returned, last = 0, None
    for batch in stream[:10]:
        made.step(*batch)
        now = flat(models.masks(made.model))
        returned += 0 if last is None else int(((last == 0) & (now == 1)).sum())
        last = now
    assert (returned > 0) == (flavour == "tf_keras")


# The benchmark -----------------------------------------------------------------------------------


@pytest.mark.only("pt", "tf_keras")
def test_the_benchmark_prunes_a_trained_model_while_it_trains_on(
    impl, kit, models, stream, tmp_path, monkeypatch
):
    """A stage is trained by the first row that needs it; another seed has its own."""
    task, rows, epochs = replace(TASKS["digits-cnn"], model=CNN), [], []
    work = Work(task, "sparsity_80", AT_ONCE | {"end_step": 1, "frequency": 1}, 16, start())
    make, stream = bench_pruning._row, stream[:4]

    def row(*given):
        rows.append(make(*given))
        return rows[-1]

    def fit(step, count):
        epochs.append(count)
        for batch in stream:
            step(*batch)

    monkeypatch.setattr(bench_pruning, "_row", row)
    shared = Stages(impl, task, start(), 0, tmp_path, fit)
    predicted = models.numpy(bench_pruning.prepare(impl, work).train(shared)(stream[0][0]))
    dense, pruned = shared.plain(), teaching.weights_of(kit, rows[-1].model)
    for seed in (0, 0, 1):  # rows without settings
        other = Stages(impl, task, start(), seed, tmp_path, fit)
        bench_pruning.prepare(impl, replace(work, settings={})).train(other)
    assert epochs == [4] * 5  # the recipe's, then more
    names = sorted(path.name.rpartition("-")[0] for path in tmp_path.iterdir())
    assert names == [f"digits-cnn-seed{seed}-plain-4" for seed in (0, 0, 1, 1)]
    straight = make(impl, replace(work, settings={}))  # from the same weights, nothing kept
    for batch in stream:
        straight.step(*batch)
    for name, value in teaching.weights_of(kit, straight.model).items():
        assert np.allclose(dense[name], value, rtol=1e-5, atol=1e-6), name
    for name in KERNELS:
        size = np.abs(dense[name])
        stays = size >= np.sort(size, axis=None)[::-1][kept(size.size, 0.8) - 1]
        assert not np.allclose(dense[name], start()[name]), name  # it was trained before,
        assert np.array_equal(pruned[name] != 0, stays), name  # the smallest of that are gone,
        assert not np.allclose(pruned[name][stays], dense[name][stays]), name  # the rest goes on
    rebuilt = kit.training.make_predict(kit.models.build(CNN, pruned))(stream[0][0])
    assert np.allclose(predicted, models.numpy(rebuilt), rtol=1e-5, atol=1e-5)


# Models of foreign construction ------------------------------------------------------------------


@PT
def test_pt_convolutions_and_linear_layers_get_zeros(technique, models):
    """Depthwise kernels, embeddings and attention's stay dense."""
    model, update = technique.apply_pruning(models.Foreign(), **NOW)
    update(1)
    model(models.torch.from_numpy(models.LEFT), models.codes())
    zeros = models.zeros(technique.finalize_pruning(model))
    assert zeros.pop("conv.weight") == zeros.pop("inside.head.weight") == 0.5
    # The attention's and the norm's biases start at zero.
    assert not any(share for name, share in zeros.items() if not name.endswith("bias"))
    assert zeros["depthwise.bias"] == 0.0


@PT
def test_pt_shared_tensors(models, technique, pruned_now):
    final = pruned_now(models.language(), models.codes())
    zeros = [float((module.weight == 0).float().mean()) for module in final]
    assert zeros[0] == zeros[2] == 0.0 < zeros[1]  # embeddings stay dense, as those of Keras do
    assert final[2].weight is final[0].weight
    model, _ = technique.apply_pruning(models.twice(), **NOW)
    assert [hasattr(module, "weight_mask") for module in model] == [True, False, True]


@PT
def test_pt_kernels_that_are_computed_stay_dense(models, technique, pruned_now):
    model = models.computed()
    with pytest.raises(NotImplementedError, match="Python cannot copy the model: Only T"):
        technique.apply_pruning(model, **NOW)
    models.forward(model.requires_grad_(False))  # now it can be copied
    zeros = [float((layer.weight == 0).float().mean()) for layer in pruned_now(model)]
    assert zeros == [0.0, 0.0, 0.0, 0.5]


@TF
@pytest.mark.parametrize("kind", ["functional", "sequential", "nested", "built_late"])
def test_tf_half_of_each_kernel_goes_in_a_copy(technique, models, pruned_now, kind):
    source = getattr(models, kind)()
    before = [np.array(value) for value in source.weights]
    masked, _ = technique.apply_pruning(source, **NOW)
    assert models.shared_layers(source, masked) == set()
    final = pruned_now(source, *([models.INPUTS[kind]] if kind in models.INPUTS else []))
    for name, share in models.zeros(final).items():
        if not re.search("bias|beta", name):
            assert share == (0.5 if "kernel" in name else 0.0), name
    assert all(map(np.array_equal, before, map(np.array, source.weights)))


@LEGACY
def test_tf_latency_pruning_takes_pointwise_convolutions_alone(technique, models):
    source = models.mobile()
    model, update = technique.apply_latency_pruning(source, **NOW)
    for number in (1, 2):
        update(number)
        models.forward(model, models.PIXELS)
    dense = dict.fromkeys(("first", "wide", "depthwise", "narrow", "head"), 0)
    final = technique.finalize_pruning(model)
    assert models.zeros_by_layer(final) == dense | {"wide": 0.5, "narrow": 0.5}
    assert models.zeros_by_layer(source) == dense


@KERAS_3
def test_keras_3_prunes_in_fit(technique, models):
    """Four epochs of three steps; new masks at steps 2 and 4, half of the cubic way and all."""
    source, steps, zeros = models.adapted(), count(1), []
    model, update = technique.apply_pruning(source, **NOW | {"end_step": 4, "frequency": 2})
    assert np.array_equal(models.numpy(model(models.LEFT)), models.numpy(source(models.LEFT)))
    losses = models.fit(
        model,
        np.random.default_rng(3).normal(size=(9, 2)),
        lambda batch, logs: update(next(steps)),
        lambda batch, logs: zeros.append(1 - models.masks(model)["twice.kernel"].mean()),
    )
    assert losses[-1] < losses[0]
    assert zeros == [0.0, *[7 / 16] * 2, *[0.5] * 9]
    masked = model.predict(models.LEFT, verbose=0)
    final = technique.finalize_pruning(model)
    assert np.allclose(masked, final.predict(models.LEFT, verbose=0), rtol=0, atol=1e-6)
    kernels = [np.array(w) for w in final.trainable_variables if "kernel" in w.path]
    assert [(kernel == 0).mean() for kernel in kernels] == [0.5] * 3


@TF
def test_tf_a_regularizer_of_outputs_counts_as_without_masks(technique, models):
    source = models.regularized()
    model, update = technique.apply_pruning(source, **NOW | {"final_sparsity": 0.0})
    update(1)
    models.forward(source), models.forward(model)
    plain, pruned = (float(sum(one.losses)) for one in (source, model))
    assert plain > 0.0
    assert pruned == pytest.approx(plain, rel=1e-6)


# Bad input ---------------------------------------------------------------------------------------


def prune_linear(technique, models, **settings):
    source = models.linear(np.ones((4, 3), np.float32))
    return technique.apply_pruning(source, **AT_ONCE | settings)


def of(make, how="apply_pruning", **settings):
    """A refusal of the model that the helpers make of a name."""
    return lambda t, m: getattr(t, how)(getattr(m, make)(), **NOW | settings)


NO_MASKS = "the model has no masks"
REFUSALS = [
    *(
        (
            partial(prune_linear, final_sparsity=value),
            f"final_sparsity must be at least 0 and below 1, not {value}",
        )
        for value in (1.0, -0.1, float("nan"))
    ),
    *(
        (
            partial(prune_linear, begin_step=value),
            f"begin_step must be at least 0 and below end_step, not {value} and 4",
        )
        for value in (4, -1)
    ),
    (partial(prune_linear, frequency=0), "frequency must be at least 1, not 0"),
    (partial(prune_linear, frequency=3), "4 - 0 must be a multiple of the frequency, 3"),
    (lambda t, m: prune_linear(t, m)[1](0), "steps are counted from 1, not from 0"),
    (
        lambda t, m: t.apply_pruning(prune_linear(t, m)[0], **AT_ONCE),
        "the model has pruning masks already",
    ),
    (lambda t, m: t.finalize_pruning(m.linear(np.ones((4, 3), np.float32))), NO_MASKS),
    (lambda t, m: t.finalize_pruning(t.finalize_pruning(prune_linear(t, m)[0])), NO_MASKS),
    (of("without_kernels"), "no dense or convolution layer"),
    pytest.param(of("tied"), "0.weight has two owners", marks=PT),
    pytest.param(
        lambda t, m: t.apply_pruning(m.language()[::2], **NOW),
        "the model has no dense or convolution",
        marks=PT,
    ),
    pytest.param(of("unbuilt"), "the model has no variables yet: call it once", marks=TF),
    pytest.param(of("subclassed"), "a subclassed model says nothing of its inputs", marks=KERAS_3),
    pytest.param(
        of("mobile", "apply_latency_pruning"),
        "tfmot's pruning_policy takes only models of",
        marks=KERAS_3,
    ),
    *(
        pytest.param(of(*case), message, marks=LEGACY)
        for *case, message in (
            ("sequential", "apply_global_pruning", "tfmot prunes each layer by itself"),
            ("subclassed", "functional and Sequential models, not subclassed"),
            ("within", "'deep' is within another layer"),
            ("twice", "'shared' runs more than once"),
            ("transposed", "does not know Conv1DTranspose, as 'up' is"),
            (
                "pooled",
                "apply_latency_pruning",
                "XNNPACK has no sparse kernels for it: Layer MaxPooling2D is not supported",
            ),
            (
                "sequential",
                "apply_latency_pruning",
                "XNNPACK has no sparse kernels for it: Could not find",
            ),
        )
    ),
    pytest.param(
        of("mobile", "apply_latency_pruning", frequency=0),
        "frequency must be at least 1",
        marks=LEGACY,
    ),
]


@pytest.mark.parametrize(("call", "message"), REFUSALS)
def test_a_refusal_says_why(technique, models, call, message):
    with pytest.raises((ValueError, NotImplementedError)) as caught:
        call(technique, models)
    assert re.search(re.escape(message), " ".join(str(caught.value).split()))
