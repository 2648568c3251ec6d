"""Rounded weights are what they should be, training with them pays, and files compute the same.

How files are read, and which are refused, is in `test_post_training_quantization.py`.
"""

from __future__ import annotations

import copy
import functools
import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from bench.compression import bench_quantization_aware_training as bench
from bench.harness.plan import Work
from shared.specs import TASKS, CNNSpec
from shared.weights import init_weights
from tests import workers
from tests.compression import quick, teaching
from tests.frameworks import apart

FRAMEWORKS = ("pt", "tf", "tf_keras")  # tf_keras has TensorFlow Model Optimization's
MODELS = "quantization"
CNN = CNNSpec((8, 8, 2), ((8, 1), (12, 2)), num_classes=5)
TASK = replace(TASKS["digits-cnn"], model=CNN)
PT, TF = pytest.mark.only("pt"), pytest.mark.only("tf", "tf_keras")
KERAS_3, LEGACY = pytest.mark.only("tf"), pytest.mark.only("tf_keras")
COARSER = 1 if workers.has_vnni() else 2  # PyTorch's activations have 7 bits without VNNI


@functools.cache
def start():
    """Weights where no scale is 1 and no statistic is that of a new layer."""
    return teaching.teacher_weights(CNN, 7) | {"head.kernel": init_weights(CNN, 7)["head.kernel"]}


def images(kit, count, seed=11):
    """Noisy images of five classes, and their labels."""
    random = np.random.default_rng(seed)
    y = random.integers(0, 5, count)
    shapes = np.random.default_rng(3).normal(size=(5, *CNN.input_shape))
    x = random.normal(size=(count, *CNN.input_shape)) + shapes[y]
    return kit.data.to_device(x.astype(np.float32), y)


def train(kit, model, steps):
    """Losses of SGD with momentum over one stream."""
    optimizer = kit.training.make_optimizer(model, replace(TASK.recipe, learning_rate=0.05))
    step = kit.training.make_train_step(model, optimizer, kit.training.cross_entropy)
    stream = [images(kit, 32, seed=100 + number) for number in range(steps)]
    return teaching.losses_of(kit, step, stream)


def export(technique, models, model, x, path):
    return models.int8_files.save_as_it_is(technique.convert_qat(model, x), path)


@pytest.fixture(scope="module")
def trained(kit, technique, models):
    """`trained(bits)`: a model after ten steps, and what it and its source gave before them."""

    @functools.cache
    def make(bits):
        x, y = images(kit, 64)
        source = kit.models.build(CNN, start())
        model = technique.prepare_qat(source, x, weight_bits=bits)
        first, plain = (
            {"outputs": models.numpy(models.evaluate(m, x)), **models.gradients(m, x, y)}
            for m in (model, source)
        )
        losses = train(kit, model, 10)
        return SimpleNamespace(source=source, model=model, first=first, plain=plain, losses=losses)

    return make


@pytest.fixture(scope="module")
def written(kit, technique, models, trained, tmp_path_factory):
    """`written(bits)`: a path, what its reader predicts, and what the model then gave.

    `bits` None is the source in float32.
    """

    @functools.cache
    def make(bits):
        (x, _), path = images(kit, 64), tmp_path_factory.mktemp("files") / str(bits)
        if bits:
            export(technique, models, trained(bits).model, x, path)
            expected = models.evaluate(trained(bits).model, x)
        else:
            models.int8_files.keep_float32(trained(8).source, x, path)
            expected = models.evaluate(trained(8).source, x)
        with quick.without_code():  # static int8 of post-training quantization is compiled
            return path, models.int8_files.load_int8(path), models.numpy(expected)

    return make


def products(models, predict, path, x):
    """How many products of a prediction run over integers."""
    ran = models.integers.integer_operators(predict, path, x)
    return sum(count for name, count in ran.items() if bench.PRODUCTS.search(name))


# What is computed --------------------------------------------------------------------------------


def rounded(kernel, bits):
    """The kernel on its grid, in float64, and the grid's step for each output."""
    most = 2 ** (bits - 1) - 1
    step = np.abs(kernel).max((0, 1, 2)) / most
    return step * np.clip(np.round(kernel / step), -most, most), step


@pytest.mark.parametrize("bits", [2, 4, 5, 8])
def test_a_kernel_and_its_input_are_on_their_grids(technique, models, framework, tmp_path, bits):
    """NumPy does the same; TensorFlow rounds the output to 8 bits, too."""
    random = np.random.default_rng(2)
    kernel = random.normal(size=(1, 1, 6, 4)).astype(np.float32)
    x = random.uniform(0, 1, (5, 3, 3, 6)).astype(np.float32)
    x.flat[:2] = 0, 1  # the range of the input
    given = models.images_of(x)
    model = technique.prepare_qat(models.convolution(kernel), given, weight_bits=bits)
    outputs = models.channels_last(models.evaluate(model, given))
    on_grid, step = rounded(kernel, bits)
    steps = 127 if framework == "pt" and not workers.has_vnni() else 255
    wanted = np.round(x * steps) / steps @ on_grid[0, 0]
    half_a_step = 0.0
    if framework != "pt":
        half_a_step = (max(wanted.max(), 0) - min(wanted.min(), 0)) / 255 / 2
    bound = 1.02 * half_a_step + 1e-5 * np.abs(wanted).max()
    assert np.abs(outputs - wanted).max() < bound
    assert np.abs(outputs - x @ kernel[0, 0]).max() > bound  # or rounding would not show
    path = export(technique, models, model, given, tmp_path / "file")
    assert models.levels(path) == [len(np.unique(np.round(on_grid / step)))]


def test_eight_bits_are_close_to_float32_in_outputs_and_gradients(trained):
    first, plain = trained(8).first, trained(8).plain
    assert first.keys() == plain.keys()
    assert 0 < apart(first.pop("outputs"), plain.pop("outputs")) < 0.03
    assert teaching.farthest(first, plain) < 0.2


@pytest.mark.parametrize(("bits", "bar"), [(8, 0.01), (2, 0.1)])
def test_twins_lose_alike(trained, agrees, bits, bar):
    """The closer, the finer the grid of weights: activations have 8 bits in all."""
    losses = trained(bits).losses
    assert losses[-1] < losses[0]
    agrees(f"ten steps of {bits} bits", {"losses": losses}, bar)


def test_two_bits_need_training_and_eight_do_not(kit, technique, models):
    """Accuracy on new images: float32, rounded after training, and trained on with rounding."""
    model, (x, y) = kit.models.build(CNN, init_weights(CNN, 1)), images(kit, 512, seed=1)

    def accuracy(model):
        logits = models.numpy(models.evaluate(model, x))
        return np.mean(logits.argmax(-1) == models.numpy(y))

    train(kit, model, 60)
    eight, two = (technique.prepare_qat(model, images(kit, 64)[0], weight_bits=b) for b in (8, 2))
    whole, coarse = accuracy(model), accuracy(two)
    assert whole > 0.8
    assert accuracy(eight) > whole - 0.02
    assert coarse < whole - 0.15
    train(kit, two, 60)
    assert accuracy(two) > (whole + coarse) / 2


# Files -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "sizes"), [(8, ()), (2, (3,))])  # each size compiles in PyTorch
def test_a_file_predicts_what_was_trained_over_integers(kit, models, written, bits, sizes):
    path, predict, expected = written(bits)
    x, _ = images(kit, 64)
    predicted = models.numpy(predict(x))
    assert apart(predicted, expected) < 0.03
    assert np.mean(predicted.argmax(-1) == expected.argmax(-1)) > 0.95
    for rows in sizes:
        assert apart(models.numpy(predict(x[:rows])), predicted[:rows]) < 0.03
    assert products(models, predict, path, x) == 3
    levels = models.levels(path)
    assert len(levels) == 3
    assert max(levels) <= 2**bits - 1
    assert min(levels) > (20 if bits == 8 else 1)


def test_a_float_file_predicts_what_the_model_does(kit, models, written):
    path, predict, expected = written(None)
    x, _ = images(kit, 64)
    assert apart(models.numpy(predict(x)), expected) < 1e-5
    assert products(models, predict, path, x) == 0
    assert written(8)[0].stat().st_size < path.stat().st_size


def test_preparing_and_exporting_leave_models_as_they_were(
    kit, technique, models, trained, written, tmp_path
):
    """What was exported trains on."""
    ours, (x, _) = trained(8), images(kit, 64)
    assert teaching.farthest(teaching.weights_of(kit, ours.source), start()) == 0
    written(8)  # before its model moves on
    before = models.state(ours.model)
    export(technique, models, ours.model, x, tmp_path / "file")
    assert teaching.farthest(models.state(ours.model), before) == 0
    assert np.isfinite(train(kit, ours.model, 2)).all()
    assert teaching.farthest(models.state(ours.model), before) > 0


def test_a_file_that_differs_from_the_model_is_not_written(
    kit, technique, models, trained, tmp_path
):
    model, (x, _) = trained(2).model, images(kit, 64)
    with models.spoiled(model), pytest.raises(RuntimeError, match="outputs of the converted model"):
        export(technique, models, model, x, tmp_path / "file")
    assert not (tmp_path / "file").exists()


@pytest.mark.only("pt", "tf")
def test_what_cannot_be_exported_is_not_trained(technique, models, monkeypatch):
    monkeypatch.setattr(models.checks, "MOST_APART", -1.0)  # no file is as near as this
    model = models.convolution(KERNEL)
    with pytest.raises(RuntimeError, match="outputs of the converted model are "):
        technique.prepare_qat(model, models.images_of(X), weight_bits=8)
    assert teaching.farthest(models.state(model), models.state(models.convolution(KERNEL))) == 0


# Traits of models that the zoo has not -----------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        pytest.param("attention", {"pt": 4, "tf": 6}, marks=pytest.mark.only("pt", "tf")),
        *(pytest.param(name, {"tf": 2}, marks=KERAS_3) for name in ("concatenated", "activated")),
        pytest.param("shared", {"tf": 3}, marks=KERAS_3),
    ],
)
def test_products_run_over_integers_and_ranges_stay(
    technique, models, framework, tmp_path, name, wanted
):
    model, x = getattr(models, name)()
    prepared = technique.prepare_qat(model, x, weight_bits=8)
    expected, outputs, again = (
        models.numpy(models.evaluate(m, x)) for m in (model, prepared, prepared)
    )
    assert 1e-5 < apart(outputs, expected) < 0.05
    assert np.array_equal(outputs, again)  # no dropout, and no range that moves
    path = export(technique, models, prepared, x, tmp_path / "file")
    with quick.without_code():
        predict = models.int8_files.load_int8(path)
    assert apart(models.numpy(predict(x)), outputs) < 0.02
    assert products(models, predict, path, x) >= wanted[framework]
    losses = models.fitted(prepared, x)
    assert losses[-1] < 0.9 * losses[0]


@TF
def test_tf_more_than_ten_inputs_keep_their_order(technique, models, tmp_path):
    model, x = models.many_inputs()
    prepared = technique.prepare_qat(model, x, weight_bits=8)
    export(technique, models, prepared, x, tmp_path / "8")
    models.int8_files.keep_float32(model, x, tmp_path / "float")
    for name, source, most in (("8", prepared, 0.05), ("float", model, 1e-5)):
        predicted = models.int8_files.load_int8(tmp_path / name)(x)
        assert apart(models.numpy(predicted), models.numpy(models.evaluate(source, x))) < most


@PT
def test_pt_train_and_eval_switch_dropout_and_statistics(kit, technique, models):
    """Of a copy, too, and after a prediction, which sets `training` of each module back."""
    source, x = models.dropping()
    modes, kept = [module.training for module in source.modules()], models.state(source)
    model = technique.prepare_qat(source, x, weight_bits=4)
    assert [module.training for module in source.modules()] == modes
    assert teaching.farthest(models.state(source), kept) == 0
    assert {n for n, _ in model.named_parameters()} == {n for n, _ in source.named_parameters()}

    def between_two_passes(model):
        first, second = (models.numpy(model(x)) for _ in range(2))
        return apart(first, second)

    def moved(before):
        after = models.state(model)
        return [n for n in after if "running" in n and np.any(after[n] != before[n])]

    assert between_two_passes(model) > 0.2
    before = models.state(model)
    assert between_two_passes(model.eval()) < 0.02  # ranges move a little with every pass
    assert moved(before) == []
    assert between_two_passes(copy.deepcopy(model.train()).eval()) < 0.02
    kit.training.make_predict(model)(x)
    assert between_two_passes(model) > 0.2
    assert len(moved(before)) == 2


@PT
def test_pt_what_capturing_might_lose_stays(technique, models, tmp_path):
    """Ranges of each side of a concatenation, BatchNorm after sums, its epsilon and momentum."""
    source = models.Parts()
    x = models.tensor(np.random.default_rng(0).normal(size=(32, 3, 6, 6)).astype("f4"))
    prepared = technique.prepare_qat(source, x, weight_bits=8)
    path = export(technique, models, prepared, x, tmp_path / "file")
    assert len(models.levels(path)) == 9  # all kernels there are

    def distances(outputs):
        wanted = models.evaluate(source, x)
        return {name: apart(models.numpy(outputs[name]), wanted[name]) for name in wanted}

    with workers.without_inductor():  # what the file computes, not with which kernels
        file = distances(models.int8_files.load_int8(path)(x))
    first = distances(models.evaluate(prepared, x))
    later = copy.deepcopy(prepared).eval()
    for _ in range(200):  # ranges follow every pass
        later(x)
    assert max(first["joined"], distances(models.evaluate(later, x))["joined"]) < 0.03
    assert max(file[name] for name in ("residual", "constant", "convolution plus 1")) < 0.03
    assert max(found[b] for found in (first, file) for b in ("bias", "no bias")) < 0.02 * COARSER
    source.train()(x), prepared.train()(x)
    ours, theirs = (
        [v for n, v in models.state(m).items() if "literal" in n and "_var" in n]
        for m in (prepared, source)
    )
    assert len(ours) == 2
    assert max(map(apart, ours, theirs)) < 0.02


@PT
@pytest.mark.parametrize("kind", ["no weights", "no statistics", "transposed"])
def test_pt_norms_that_cannot_be_folded_stay_as_they_are(technique, models, tmp_path, kind):
    source = models.unfolded_norm(kind)
    x = models.tensor(np.random.default_rng(0).normal(size=(32, 3, 6, 6)).astype("f4"))
    prepared = technique.prepare_qat(source, x, weight_bits=8)
    source(x), prepared(x)
    ours, theirs = (
        [v.astype(float) for n, v in models.state(m).items() if "running" in n]
        for m in (prepared, source)
    )
    assert len(ours) == (0 if kind == "no statistics" else 2)
    assert all(far < 0.02 for far in map(apart, ours, theirs))
    path = export(technique, models, prepared, x, tmp_path / "file")
    wanted = models.numpy(models.evaluate(source, x))
    assert 1e-5 < apart(models.numpy(models.evaluate(prepared, x)), wanted) < 0.03 * COARSER
    with workers.without_inductor():
        predicted = models.int8_files.load_int8(path)(x)
    assert apart(models.numpy(predicted), wanted) < 0.03 * COARSER


@PT
def test_pt_operators_that_name_a_gpu_name_the_cpu_in_what_is_exported(models):
    program = models.pt2e_repairs.copy_to_cpu(models.graph_of_a_gpu())
    assert program(models.tensor(np.ones(2, np.float32))).tolist() == [2.0, 2.0]


# Bad input ---------------------------------------------------------------------------------------

KERNEL = np.random.default_rng(1).normal(size=(1, 1, 6, 4)).astype(np.float32)
X = np.random.default_rng(2).normal(size=(8, 3, 3, 6)).astype(np.float32)


def prepare(technique, models, model=None, x=X, bits=8):
    x = models.images_of(x) if isinstance(x, np.ndarray) else x
    model = models.convolution(KERNEL) if model is None else model
    technique.prepare_qat(model, x, weight_bits=bits)


def of(make, *arguments, **settings):
    """A refusal of the model that the helpers make of a name."""
    return lambda t, m: prepare(t, m, getattr(m, make)(*arguments), **settings)


REFUSALS = [
    *(
        (partial(prepare, bits=bits), f"weight_bits must be 2 to 8, not {bits!r}")
        for bits in (1, 9, 0, 2.5, "8", None)
    ),
    (of("without_kernels"), "the model has no "),
    (
        lambda t, m: t.convert_qat(m.convolution(KERNEL), m.images_of(X)),
        "the model has no fake quantization",
    ),
    (partial(prepare, x=X[:0]), "inputs must have samples, as many in each tensor, not [0]"),
    (partial(prepare, x=3), "inputs must be tensors with samples along an axis, not int"),
    (partial(prepare, x=X * np.inf), "inputs hold values that are not finite"),
    (partial(prepare, x=X[..., :1]), "the model takes no samples of float32 "),
    (partial(prepare, x=X.astype(float)), "the model takes no samples of float64 "),
    pytest.param(of("Branches"), "torch.export cannot capture it: ", marks=PT),
    pytest.param(
        partial(prepare, x=X[:1]),
        "example_inputs must be tensors of at least two samples",
        marks=PT,
    ),
    *(
        pytest.param(
            lambda t, m, kind=kind: prepare(
                t, m, getattr(m.convolution(KERNEL), kind)(), getattr(m.images_of(X), kind)()
            ),
            f"is {dtype}: torchao rounds models of float32",
            marks=PT,
        )
        for kind, dtype in (("half", "torch.float16"), ("double", "torch.float64"))
    ),
    *(
        pytest.param(
            of("in_precision", policy),
            f"'own' computes in {dtype}: models of float32",
            marks=KERAS_3,
        )
        for policy, dtype in (("mixed_bfloat16", "bfloat16"), ("float64", "float64"))
    ),
    pytest.param(
        lambda t, m: t.prepare_qat(*m.amplifying(), weight_bits=8),
        "so that no file is near it",
        marks=KERAS_3,
    ),
    pytest.param(
        partial(prepare, bits=3), "LiteRT would put 3 bits on the grid of 4: take 2 or 4", marks=TF
    ),
    pytest.param(of("unbuilt"), "the model has no variables yet", marks=TF),
    pytest.param(
        of("subclassed"), "functional and Sequential models, not subclassed", marks=LEGACY
    ),
    pytest.param(of("within"), "Model inside another", marks=LEGACY),
    pytest.param(of("unknown_layer"), "LayerNormalization", marks=LEGACY),
]


@pytest.mark.parametrize(("call", "message"), REFUSALS)
def test_a_refusal_says_why(technique, models, call, message):
    with pytest.raises((ValueError, NotImplementedError, RuntimeError)) as caught:
        call(technique, models)
    assert re.search(re.escape(message), " ".join(str(caught.value).split()))


# The benchmark -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["train", "predict"])
def test_the_benchmark_proves_that_it_rounds_and_sees_what_does_not(impl, kit, tmp_path, mode):
    (tmp_path / "data").mkdir()
    random = np.random.default_rng(3)
    np.save(tmp_path / "data" / "train_x.npy", random.normal(size=(256, 8, 8, 2)).astype("f4"))
    np.save(tmp_path / "data" / "train_y.npy", random.integers(0, 5, 256))
    batch, weights = images(kit, 64), start()
    place = {"mode": mode, "data": str(tmp_path / "data")}

    def judge(variant, judged, settings):
        folder = tmp_path / variant
        folder.mkdir()
        work = Work(TASK, variant, settings, 32, weights, **place, folder=folder)
        prepared = bench.prepare(impl, work)
        if prepared.write:
            prepared.write(folder / "model")
            with quick.without_code():
                predict = prepared.read(folder / "model")
            prepared = replace(prepared, predict=predict, artifact=folder / "model")
        prepared.step(*batch) if mode == "train" else prepared.predict(batch[0])
        works = [replace(work, variant=name, settings=EIGHT[name]) for name in judged]
        return [bench.took_effect(impl, one, prepared, batch) for one in works]

    (evidence, reason), (_, feigned) = judge("fp32", ("fp32", "qat_8"), {})
    assert reason is None
    ran = "the step has no fake quantization", "0 of 3 products ran on integers"
    assert feigned == ran[mode == "predict"]
    ((evidence, reason),) = judge("qat_8", ("qat_8",), EIGHT["qat_8"])
    assert reason is None
    if mode == "train":
        assert sum(evidence["fake_quantizers"].values()) >= 6
    else:
        assert sum(evidence["operators"].values()) == 3


EIGHT = {"fp32": {}, "qat_8": {"weight_bits": 8}}
