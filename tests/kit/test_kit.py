"""Models, data, training and runtime of either kit do what they say; twins stand in `test_parity`.

PyTorch has the CPU here, whatever the machine has.
"""

from __future__ import annotations

import functools
import random
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shared import cgroups
from shared.datasets import batch_order
from shared.specs import (
    NO_LABEL,
    TASKS,
    BottleneckSpec,
    CNNSpec,
    DetectorSpec,
    GPTSpec,
    Recipe,
    ResNetSpec,
    parameter_count,
    parameter_shapes,
)
from shared.weights import checksum, init_weights

FRAMEWORKS = ("pt", "tf", "tf_keras")
CNN = CNNSpec((9, 9, 2), ((4, 1), (6, 2)), num_classes=5)
RESNET = ResNetSpec((8, 8, 3), 1, (4, 6, 8), num_classes=5)
GPT = GPTSpec(vocabulary=11, sequence_length=6, width=8, heads=2, layers=2)
SPECS = {
    "cnn": CNN,
    "resnet": RESNET,
    "gpt": GPT,
    "bottleneck": BottleneckSpec((9, 13, 3), (1, 2), (4, 6), num_classes=7),
    "detector": DetectorSpec((9, 13, 3), ((4, 1), (5, 2), (5, 2)), (1, 2), (4.0,), 7),
}
SGD = Recipe("sgd", learning_rate=0.1, epochs=1, accuracy_batch_size=4)
PT = pytest.mark.only("pt")
EITHER = pytest.mark.only("pt", "tf")  # what Keras has no part in


def samples(spec, count=8):
    """Canonical NumPy inputs and labels."""
    stream = np.random.default_rng(0)
    if isinstance(spec, GPTSpec):
        codes = stream.integers(0, spec.vocabulary, (count, spec.sequence_length + 1))
        return codes[:, :-1], codes[:, 1:]
    x = stream.normal(size=(count, *spec.input_shape)).astype(np.float32)
    return x, stream.integers(0, spec.num_classes, count)


def noisy_weights(spec):
    """Weights in which no two tensors, and no tensor and its transpose, are alike."""
    stream = np.random.default_rng(1)
    weights = init_weights(spec, 0)
    return {n: stream.uniform(0.1, 1.0, w.shape).astype(np.float32) for n, w in weights.items()}


def made(kit, spec=CNN, recipe=SGD):
    """A model, its optimizer and the kit's step."""
    model = kit.models.build(spec, init_weights(spec, 0))
    optimizer = kit.training.make_optimizer(model, recipe)
    return (
        model,
        optimizer,
        kit.training.make_train_step(model, optimizer, kit.training.cross_entropy),
    )


def state(kit, model) -> str:
    return checksum(kit.models.export_weights(model))


# Models ------------------------------------------------------------------------------------------


def test_every_family_of_models_is_tested():
    assert {type(s) for s in SPECS.values()} == {type(t.model) for t in TASKS.values()}


@EITHER
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_weights_survive_the_round_trip_and_are_copies(kit, models, spec):
    weights = noisy_weights(spec)
    before = checksum(weights)
    model = kit.models.build(spec, weights)
    for value in weights.values():
        value[...] = 0
    exported = kit.models.export_weights(model)
    assert checksum(exported) == before
    kit.models.import_weights(model, init_weights(spec, 0))
    assert checksum(exported) == before != state(kit, model)
    named = kit.models.named_parameters(model)
    canonical = {n: kit.models.to_canonical(n, models.numpy(p)).shape for n, p in named.items()}
    assert canonical == parameter_shapes(spec)
    assert kit.models.parameter_count(model) == parameter_count(spec)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda w: w.pop("head.kernel"), "missing head.kernel"),
        (lambda w: w.update({"tail.kernel": w["head.kernel"]}), "unknown tail.kernel"),
        (
            lambda w: w.update({"head.kernel": w["head.kernel"].T}),
            "head.kernel has shape (5, 6), not (6, 5)",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused_before_anything_changes(kit, change, problem):
    model, weights = kit.models.build(CNN), noisy_weights(CNN)
    before = state(kit, model)
    change(weights)
    with pytest.raises(ValueError, match=f"do not fit the model: {re.escape(problem)}$"):
        kit.models.import_weights(model, weights)
    assert state(kit, model) == before


@EITHER
def test_frozen_parameters_are_not_counted(kit, models):
    model = kit.models.build(CNN)
    models.freeze_head(model)
    assert kit.models.parameter_count(model) == parameter_count(CNN) - 6 * 5 - 5


@PT
def test_canonical_layouts_mean_what_they_say(kit):
    """A kernel with one entry, at a place that no mistaken layout has."""
    weights = {name: np.zeros_like(w) for name, w in init_weights(CNN, 0).items()}
    weights["conv0.kernel"][0, 2, 1, 2] = 7.0  # row 0, column 2, from channel 1 to filter 2
    weights["head.kernel"][2, 3] = 5.0
    model = kit.models.build(CNN, weights)
    assert model.conv0.conv.weight[2, 1, 0, 2] == 7.0
    assert model.head.weight[3, 2] == 5.0


@PT
def test_qkv_columns_are_q_k_v_each_head_by_head(kit, models):
    """Attention from the canonical weights by hand, in NumPy."""
    weights = noisy_weights(GPT)
    x = np.random.default_rng(2).normal(size=(6, 8)).astype(np.float32)
    heads = []
    for head in range(2):
        q, k, v = (
            x @ weights["block0.qkv.kernel"][:, part * 8 + head * 4 : part * 8 + head * 4 + 4]
            for part in range(3)
        )
        scores = np.where(np.tri(6, dtype=bool), q @ k.T / 2.0, -np.inf)
        shares = np.exp(scores - scores.max(1, keepdims=True))
        heads.append(shares / shares.sum(1, keepdims=True) @ v)
    expected = np.concatenate(heads, 1) @ weights["block0.projection.kernel"]
    block = kit.models.build(GPT, weights).block0
    attended = models.numpy(block.attend(models.tensor(x)[None]))
    np.testing.assert_allclose(attended[0], expected, rtol=1e-4)


@EITHER
def test_gpt_drops_half_in_training_alone(kit, models):
    spec = replace(GPT, layers=1)
    weights = noisy_weights(spec)
    plain, model = (kit.models.build(replace(spec, dropout=p), weights) for p in (0.0, 0.5))
    x, _ = kit.data.to_device(*samples(GPT))
    answers = [models.numpy(kit.training.make_predict(one)(x)) for one in (plain, model)]
    assert np.array_equal(*answers)
    drawn = [models.numpy(models.in_training(model, x)) for _ in "ab"]
    assert not np.array_equal(*drawn)
    assert 0.3 < models.share_dropped(model) < 0.7


@PT
def test_batchnorm_takes_momentum_and_epsilon_from_the_spec(kit, models):
    spec = replace(CNN, bn_momentum=0.25, bn_eps=0.5)
    layer = kit.models.build(spec, init_weights(spec, 0)).train().conv0
    y = layer.conv(kit.data.to_device(*samples(spec))[0])
    normalised, y = models.numpy(layer.bn(y)), models.numpy(y)
    mean, variance = (f(y, (0, 2, 3), keepdims=True) for f in (np.mean, np.var))
    assert np.allclose(layer.bn.running_mean, 0.25 * mean.ravel(), atol=1e-6)
    assert np.allclose(normalised, (y - mean) / np.sqrt(variance + 0.5), atol=1e-5)


@PT
def test_the_resnets_are_the_standard_ones(kit, models):
    """With its weights torchvision's (ResNet-50: v1.5) give the same logits; 20 has 20 layers."""
    small = kit.models.build(TASKS["digits-resnet20"].model)
    shapes = [tuple(p.shape) for p in small.parameters() if p.ndim > 1]
    assert len([shape for shape in shapes if shape[2:] != (1, 1)]) == 20
    for depth in (18, 50):
        spec = replace(TASKS[f"photos-resnet{depth}"].model, num_classes=1000)
        ours, theirs = models.with_weights_of_torchvision(kit.models.build(spec), depth)
        assert np.allclose(ours, theirs, rtol=1e-4, atol=1e-4)


# Data --------------------------------------------------------------------------------------------


@PT
def test_images_become_contiguous_nchw_copies(kit):
    x, y = samples(CNN)
    x.flags.writeable = False
    tensor, labels = kit.data.to_device(x, y)
    assert (str(tensor.dtype), str(labels.dtype)) == ("torch.float32", "torch.int64")
    assert tensor.is_contiguous()
    assert np.array_equal(tensor, x.transpose(0, 3, 1, 2))
    tensor.zero_()
    assert x.any()


@EITHER
def test_batches_of_codes_stay_as_they_are_and_in_order(kit, models):
    batches = [samples(GPT, count) for count in (2, 3, 4)]
    for tensors, arrays in zip(kit.data.resident_batches(batches), batches, strict=True):
        for tensor, array in zip(map(models.numpy, tensors), arrays, strict=True):
            assert tensor.dtype == np.int64
            assert np.array_equal(tensor, array)


@EITHER
def test_fit_follows_the_shared_batch_order(kit, models):
    x, y = kit.data.to_device(np.arange(23.0, dtype=np.float32), np.arange(23))
    seen = []

    def step(rows, labels):
        assert np.array_equal(models.numpy(rows), models.numpy(labels))
        seen.append(models.numpy(labels).tolist())
        return rows[0]

    last = kit.training.fit(step, x, y, batch_size=5, epochs=3, seed=11)
    order = [rows for epoch in range(3) for rows in batch_order(23, 5, seed=11, epoch=epoch)]
    assert seen == [rows.tolist() for rows in order]
    assert last == seen[-1][0]
    with pytest.raises(ValueError, match="no batch of 24 in 2 epochs of 23 samples"):
        kit.training.fit(step, x, y, batch_size=24, epochs=2, seed=0)


# Training ----------------------------------------------------------------------------------------


@EITHER
@pytest.mark.parametrize("batch_size", [1, 7, 64])
@pytest.mark.parametrize("share", [1.0, 0.4])
def test_metrics_and_losses_are_those_of_numpy(kit, models, batch_size, share):
    """Over the places that have a label; the loss of narrow logits is computed in float32."""
    stream = np.random.default_rng(5)
    logits = stream.normal(size=(20, 6, 5)).astype(np.float32)
    labels = stream.integers(0, 5, (20, 6))
    asked = stream.random((20, 6)) < share
    y = models.tensor(np.where(asked, labels, NO_LABEL))

    def predict(rows):
        assert 0 < len(rows) <= batch_size
        return models.tensor(logits[models.numpy(rows)])

    def score(metric):
        x = models.tensor(np.arange(20))
        return kit.training.evaluate(predict, x, y, metric=metric, batch_size=batch_size)

    chances = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    nats = -np.log(np.take_along_axis(chances, labels[..., None], -1))[asked].mean()
    assert score("bits_per_character") == pytest.approx(nats / np.log(2), rel=1e-6)
    right = (logits.argmax(-1) == labels)[asked].mean()
    assert score("accuracy") == pytest.approx(100 * right, rel=1e-6)
    with pytest.raises(ValueError, match="unknown metric 'f1': accuracy or bits_per_character"):
        score("f1")
    losses = [kit.training.masked_cross_entropy]
    losses += [kit.training.cross_entropy] if share == 1 else []
    for loss in losses:
        assert float(loss(models.tensor(logits), y)) == pytest.approx(nats, rel=1e-6)
        narrow = loss(models.bfloat16(logits), y)
        assert models.numpy(narrow).dtype == np.float32
        assert float(narrow) == pytest.approx(nats, rel=1e-3)
        assert float(narrow) != pytest.approx(nats, rel=1e-6)


def test_predictions_change_nothing_and_see_the_newest_weights(kit, models):
    x, y = kit.data.to_device(*samples(CNN))
    losses = {}
    for predicts in (False, True):
        model, _, step = made(kit)
        predict, losses[predicts], answers = kit.training.make_predict(model), [], []
        for _ in range(3):
            losses[predicts].append(kit.runtime.to_float(step(x, y)))
            if predicts:
                before = state(kit, model)
                answers.append(models.numpy(predict(x)))
                assert state(kit, model) == before
    assert losses[True] == losses[False]
    assert not np.allclose(answers[0], answers[1])
    # Statistics of the batch play no part: each sample alone gives the same.
    alone = np.concatenate([models.numpy(predict(x[n : n + 1])) for n in range(8)])
    assert np.allclose(alone, answers[-1], atol=1e-5)


@PT
def test_predict_leaves_modes_as_found(kit, models):
    model = kit.models.build(RESNET).train()
    predict, (x, _) = kit.training.make_predict(model), kit.data.to_device(*samples(RESNET))
    for change in (model.train, model.stem.bn.eval, model.eval):  # one is a frozen BatchNorm
        change()
        modes = [m.training for m in model.modules()]
        assert not predict(x).requires_grad
        with pytest.raises(RuntimeError):
            predict(x[:, :1])
        assert [m.training for m in model.modules()] == modes
    for make_predict in models.PREDICTS:
        model, modes = models.fine_tuned_head()  # all but the head is in evaluation mode already
        one, other = (make_predict(model)(models.tensor(np.ones((3, 4), "f4"))) for _ in "ab")
        assert np.array_equal(models.numpy(one), models.numpy(other))
        assert [m.training for m in model.modules()] == modes


@pytest.fixture(scope="module")
def without_losses(kit, models):
    """`without_losses(step)`: loss and kernel after a step of a model that has none itself."""
    x, y = kit.data.to_device(*samples(CNN))
    return functools.cache(lambda name: models.with_losses(name, x, y, None))


@pytest.mark.only("tf")
@pytest.mark.parametrize("name", ["baseline", "sparse", "features", "stored", "teacher"])
def test_steps_add_the_losses_of_the_model_itself(kit, models, without_losses, name):
    """A quarter of the squares of its kernel, whose gradient is half the kernel."""
    x, y = kit.data.to_device(*samples(CNN))
    (loss, after), kernel = models.with_losses(name, x, y, 0.25), models.kernel_of(0.25)
    plain, without = without_losses("sparse" if name == "sparse" else "baseline")
    assert loss - plain == pytest.approx(0.25 * np.square(kernel).sum(), rel=1e-5)
    assert np.allclose(after - without, -0.1 * 0.5 * kernel, atol=1e-6)


# Runtime -----------------------------------------------------------------------------------------


def test_configure_sets_and_reads_back_threads_and_seeds(kit, models):
    """The process has begun with one; between operators that is settled."""

    def drawn(seed):
        assert kit.runtime.configure(threads=1, seed=seed) == {"intra_op": 1, "inter_op": 1}
        return random.random(), np.random.rand(), models.draw()

    assert drawn(1) == drawn(1)
    assert all(a != b for a, b in zip(drawn(1), drawn(2), strict=True))
    models.other_threads()


@PT
def test_float32_means_float32(models):
    assert models.tf32() == ("ieee", "ieee", False, "highest")


def test_versions_and_device(kit, models, flavour):
    versions = kit.runtime.versions()
    packages = {"pt": "torch", "tf": "keras", "tf_keras": "tf_keras"}
    assert versions.keys() & {"torch", "keras", "tf_keras"} == {packages[flavour]}
    assert all(isinstance(version, str) and version for version in versions.values())
    assert kit.runtime.device_info()["name"]
    kit.runtime.synchronize()
    kit.runtime.reset_device_peak()
    assert (kit.runtime.device_peak() is None) == (kit.runtime.device() in ("cpu", "CPU:0"))
    device, expected = models.device()
    assert device == expected


@pytest.mark.parametrize(("name", "slots"), [("sgd", 1), ("adamw", 2), ("rmsprop", 1)])
def test_bytes_of_the_state(kit, framework, name, slots):
    model, optimizer, step = made(kit, CNN, replace(SGD, optimizer=name))
    size, lazy = 4 * parameter_count(CNN), framework == "pt"  # Keras has all from the start
    before = kit.runtime.state_bytes(model, optimizer)
    step(*kit.data.to_device(*samples(CNN)))
    after = kit.runtime.state_bytes(model, optimizer)
    assert before == ({"parameters": size, "gradients": 0, "optimizer": 0} if lazy else after)
    assert after["parameters"] == after["gradients"] == size
    # Some rules count their steps: PyTorch's in a scalar a tensor, and Keras keeps its rate, too.
    scalars = 4 * len(parameter_shapes(CNN)) if lazy else 16
    assert slots * size <= after["optimizer"] <= slots * size + scalars


def test_an_unknown_optimizer_is_refused(kit):
    with pytest.raises(ValueError, match="unknown optimizer 'lion': sgd, adamw or rmsprop"):
        made(kit, CNN, replace(SGD, optimizer="lion"))


@EITHER
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "convolutions", "products", "attentions"),
    [
        # Forward and both gradients of each layer, but for the gradient of the images.
        ("cnn", 2, 3, 0),
        ("resnet", 1 + 3 * 2 + 2, 3, 0),
        ("gpt", 0, 2 * 4 * 3 + 3, 2),  # four dense layers a block
    ],
)
def test_operators_and_their_dtypes(kit, models, name, convolutions, products, attentions, dtype):
    x, y = kit.data.to_device(*samples(SPECS[name]))
    with models.computing_in(dtype):
        step = models.step_in(dtype, *made(kit, SPECS[name]))
        ran = kit.runtime.operator_dtypes(step, x, y)
    expected = {"matmul": products + attentions * models.ATTENTION}
    if convolutions:
        expected["convolution"] = models.CONVOLUTION * convolutions - (models.CONVOLUTION - 2)
    assert ran == {kind: {dtype: count} for kind, count in expected.items()}


@EITHER
def test_operators_of_a_prediction(kit):
    predict = kit.training.make_predict(kit.models.build(CNN))
    x, y = kit.data.to_device(*samples(CNN))
    ran = kit.runtime.operator_dtypes(lambda x, y: predict(x), x, y)
    assert ran == {"convolution": {"float32": 2}, "matmul": {"float32": 1}}
    assert kit.runtime.operator_dtypes(lambda x, y: x + 1, x, y) == {}


@PT
def test_operators_of_one_wide_layer_and_below_the_compiler(kit, models):
    x, y = kit.data.to_device(*samples(CNN))
    step = models.with_a_wide_head(*made(kit))
    ran = {"convolution": {"float32": 4}, "matmul": {"float64": 3}}
    assert kit.runtime.operator_dtypes(step, x, y) == ran
    if shutil.which("c++") is None:
        pytest.skip("torch.compile needs a C++ compiler")
    compiled, x = models.compiled_product()
    assert kit.runtime.operator_dtypes(compiled, x, x) == {"matmul": {"bfloat16": 2}}
    assert kit.runtime.trace_count(compiled) >= 1


@pytest.mark.only("tf")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_operators_of_xla(kit, models, dtype):
    """What XLA makes of bfloat16 depends on the CPU; the number of operators does not."""
    with models.computing_in(dtype):
        step = models.by_xla(made(kit)[2])
        ran = kit.runtime.operator_dtypes(step, *kit.data.to_device(*samples(CNN)))
    assert {kind: sum(n.values()) for kind, n in ran.items()} == {"convolution": 5, "matmul": 3}
    assert dtype == "bfloat16" or {*ran["convolution"], *ran["matmul"]} == {"float32"}


@pytest.mark.only("tf")
@pytest.mark.skipif(
    not Path("/proc/cpuinfo").exists() or "avx512_bf16" not in Path("/proc/cpuinfo").read_text(),
    reason="grappler rewrites into bfloat16 only for CPUs that have it",
)
def test_operators_that_grappler_rewrote(kit, models):
    with models.rewritten():
        ran = kit.runtime.operator_dtypes(made(kit)[2], *kit.data.to_device(*samples(CNN)))
    assert ran == {"convolution": {"bfloat16": 5}, "matmul": {"bfloat16": 3}}


def test_traces_are_counted(kit, models, framework):
    """Of the step, and of a step around one; an eager one has none."""

    def around(step):
        return lambda x, y: step(x, y)

    x, y = kit.data.to_device(*samples(CNN))
    eager = made(kit)[2] if framework == "pt" else lambda x, y: x
    eager(x, y)
    for compiled in models.compiled_steps(made(kit)):
        before = kit.runtime.trace_count(compiled)
        compiled(x, y)
        first = kit.runtime.trace_count(compiled)
        loss = compiled(x, y)
        assert kit.runtime.trace_count(compiled) == first > before
        compiled(x[:5], y[:5])  # another shape
        assert kit.runtime.trace_count(compiled) > first
        assert kit.runtime.trace_count(around(compiled)) > first
        assert (models.numpy(loss).dtype, models.numpy(loss).shape) == (np.float32, ())
    assert kit.runtime.trace_count(eager) is None


@EITHER
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_the_machines_flops_divide_the_work_by_the_best_time(kit, monkeypatch, framework, dtype):
    clock = iter([0.0, 1.0, 5.0, 6.0, 6.5, 7.0, 9.0, 20.0])  # products of 4, 0.5 and 2 seconds
    monkeypatch.setattr(kit.runtime, "perf_counter", lambda: next(clock))
    assert kit.runtime.matmul_flops(size=10, dtype=dtype, seconds=15) == 2 * 10**3 / 0.5
    if framework == "pt" and dtype != "int8":
        monkeypatch.undo()
        ran = kit.runtime.operator_dtypes(
            lambda x, y: kit.runtime.matmul_flops(size=32, dtype=dtype, seconds=0.0), None, None
        )
        assert [*ran] == ["matmul"]
        assert [*ran["matmul"]] == [dtype]


@EITHER
def test_operations_have_one_thread_within_and_then_as_many_as_before(kit, framework):
    def used():
        if framework == "pt":
            return kit.runtime.torch.get_num_threads()
        return len(cgroups.processors())

    before = used()
    with kit.runtime.one_thread():
        assert used() == 1
        assert kit.runtime.matmul_flops(size=16, dtype="float32", seconds=0.0) > 0
    assert used() == before
