"""Sparse kernels predict what dense ones do and hold what is not zero, in both frameworks."""

from __future__ import annotations

import re
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from bench.compression.bench_sparse_inference import narrower, prepare, pruned
from shared.specs import TASKS, GPTSpec, parameter_shapes
from shared.weights import init_weights
from tests import workers
from tests.compression import teaching
from tests.frameworks import apart

FRAMEWORKS = ("pt", *workers.keras())
PT, TF = pytest.mark.only("pt"), pytest.mark.only("tf", "tf_keras")
GPT = GPTSpec(vocabulary=11, sequence_length=6, width=16, heads=2, layers=1)
ROWS = {"qkv": 48, "projection": 16, "up": 64, "down": 16, "head": 11}  # of the layers of GPT
random = np.random.default_rng(3)
CODES = random.integers(0, 11, (4, 6))
LEFT, RIGHT = random.normal(size=(2, 9, 5)).astype(np.float32)
WIDE, HEAD = (random.normal(size=size).astype(np.float32) for size in ((5, 8), (8, 3)))
BIAS = random.normal(size=8).astype(np.float32)
WIDE[random.random((5, 8)) < 0.8] = 0.0  # the head has no zeros
WIDE[:, 2] = 0.0  # a row of the CSR matrix without values


def weights(sparsity):
    start = init_weights(GPT, seed=1)
    return {name: pruned(name, 20 * value, sparsity) for name, value in start.items()}


@pytest.fixture(scope="module")
def codes(kit):
    return kit.data.to_device(CODES, CODES)[0]


# A transformer -----------------------------------------------------------------------------------


@pytest.mark.parametrize("sparsity", [0.5, 0.9])
def test_sparse_kernels_predict_what_dense_ones_do(kit, technique, models, agrees, codes, sparsity):
    """They hold 4 bytes for a value, 4 for its column, 4 for each row and one more."""
    model = kit.models.build(GPT, weights(sparsity))
    predict = technique.make_predict(model, min_sparsity=sparsity - 0.02)
    dense = models.numpy(kit.training.make_predict(model)(codes))
    assert np.abs(dense).max() > 0.1
    assert apart(models.numpy(predict(codes)), dense) < 1e-5
    assert apart(models.numpy(predict(codes[:2])), dense[:2]) < 1e-5
    assert models.numpy(predict(codes[:0])).shape == (0, *dense.shape[1:])
    kernels = {n.removesuffix(".kernel"): v for n, v in weights(sparsity).items() if "kernel" in n}
    assert predict.layers.keys() == kernels.keys()
    for name, (whole, sparse) in predict.layers.items():
        assert whole == kernels[name].nbytes
        rows = ROWS[name.rpartition(".")[2]]
        assert sparse == 8 * np.count_nonzero(kernels[name]) + 4 * (rows + 1)
    assert teaching.farthest(teaching.weights_of(kit, model), weights(sparsity)) == 0
    agrees(f"{sparsity}", {"predictions": models.numpy(predict(codes))}, 1e-4)


def test_sparse_kernels_are_copies(kit, technique, models, codes):
    """Which shows that the predictions come from them."""
    model = kit.models.build(GPT, weights(0.9))
    predict = technique.make_predict(model)
    before = models.numpy(predict(codes))
    changed = {n: 2 * v if n.endswith(".kernel") else v for n, v in weights(0.9).items()}
    kit.models.import_weights(model, changed)
    dense = kit.training.make_predict(model)(codes)
    assert apart(models.numpy(predict(codes)), before) < 1e-6
    assert apart(models.numpy(dense), before) > 0.1


# Files of TensorFlow -----------------------------------------------------------------------------


@TF
def test_tf_a_sparse_file_is_smaller_and_predicts_the_same(kit, models, codes, tmp_path):
    model, size = kit.models.build(GPT, weights(0.9)), {}
    dense = models.numpy(kit.training.make_predict(model)(codes))
    for sparse, tensors in ((True, 5), (False, 0)):  # all kernels
        path = models.sparse_files.export_file(
            model, codes[:1], tmp_path / str(sparse), sparse=sparse
        )
        predict = models.sparse_files.load_file(path)
        assert apart(models.numpy(predict(codes)), dense) < 1e-5
        assert apart(models.numpy(predict(codes[:2])), dense[:2]) < 1e-5
        assert predict.sparse == tensors
        size[sparse] = path.stat().st_size
    # 4 bytes each of 3,248 kernel weights, of which a tenth stays with its place.
    assert size[False] - size[True] > 0.5 * 4 * 3_248
    assert teaching.farthest(teaching.weights_of(kit, model), weights(0.9)) == 0


@TF
def test_tf_a_sparse_file_gives_all_outputs_of_its_model_or_is_not_there(
    models, tmp_path, monkeypatch
):
    files, (model, x) = models.sparse_files, models.two_outputs()
    outputs = files.load_file(files.export_file(model, x, tmp_path / "two"))(x)
    for ours, theirs in zip(outputs, model(x), strict=True):
        assert apart(models.numpy(ours), models.numpy(theirs)) < 1e-5
    load = files.load_file
    monkeypatch.setattr(files, "load_file", lambda path: lambda x: [2 * y for y in load(path)(x)])
    with pytest.raises(RuntimeError, match="LiteRT computes something else with it: 100"):
        files.export_file(model, x, tmp_path / "another")
    assert list(tmp_path.glob("another*")) == []


@TF
def test_tf_what_is_no_sparse_file_is_refused(kit, models, codes, tmp_path):
    files, full = models.sparse_files, kit.models.build(GPT, weights(0.0))
    with pytest.raises(ValueError, match="no kernel of the model has zeros enough"):
        files.export_file(full, codes, tmp_path / "full")
    assert not (tmp_path / "full").exists()
    with pytest.raises(ValueError, match="the model has pruning masks: finalize it first"):
        files.export_file(models.masked(), models.tensor(LEFT), tmp_path / "masked")
    path = files.export_file(full, codes, tmp_path / "whole", sparse=False)
    (tmp_path / "cut").write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match="cut is not a complete LiteRT file"):
        files.load_file(tmp_path / "cut")
    with pytest.raises(FileNotFoundError):
        files.load_file(tmp_path / "missing")


def test_pt_sparse_files_are_refused_before_anything_is_made():
    framework = SimpleNamespace(__name__="pt_impl")
    work = SimpleNamespace(settings={"sparsity": 0.9, "file": "sparse"})
    with pytest.raises(NotImplementedError, match="PyTorch has no file with sparse kernels"):
        prepare(framework, work)


# Models of foreign construction ------------------------------------------------------------------


def near(predicted, names, bar=1e-6):
    dense, sparse, layers = predicted
    assert apart(sparse, dense) < bar
    assert layers == names


def test_a_layer_within_another_is_sparse_and_one_without_zeros_is_not(models, agrees):
    """Of a model of two inputs."""
    model = models.two_inputs(WIDE, BIAS, HEAD)
    predicted = models.predicted(model, (models.tensor(LEFT), models.tensor(RIGHT)))
    near(predicted, [models.WIDE])
    agrees("two inputs", {"sparse": predicted[1]}, 1e-5)


@PT
@pytest.mark.parametrize(("make", "count"), [("encoder", 4), ("padded", 4)])
def test_pt_its_own_encoders(technique, models, make, count):
    model, x = getattr(models, make)()
    dense, sparse, layers = models.predicted(model, x)
    assert apart(sparse, dense) < 1e-6
    assert len(layers) == count


@PT
def test_pt_a_layer_of_several_names_is_sparse_in_all_places(models):
    ran, names = models.what_ran_of_three_places()
    assert (ran.count("_SparseLinear"), ran.count("Linear")) == (3, 0)
    assert names == ["0"]


@PT
def test_pt_a_sparse_layer_is_what_a_dense_one_is(models):
    """Alone, where a model asks for its dtype, and with its hooks; what hooks make is dense."""
    x = models.tensor(LEFT)
    near(models.predicted(models.linear(WIDE, BIAS), x), [""])
    near(models.predicted(models.Asking(WIDE), x), ["wide"])
    near(models.predicted(models.hooked(WIDE), x), ["0"])


@TF
def test_tf_an_activation_may_be_over_any_axis(models):
    x = models.tensor(np.concatenate([LEFT, RIGHT]).reshape(6, 3, 5))
    dense, sparse, _ = models.predicted(models.softmax_over_places(WIDE, BIAS), x)
    assert apart(sparse, dense) < 1e-6


@TF
def test_tf_layers_of_the_same_name_are_all_listed(technique, models):
    """Kernels of 4 by 2, 2 by 3 and 3 by 5 zeros: no values, and a row for each unit and one."""
    layers = technique.make_predict(models.same_names()).layers
    assert layers == {"up": (32, 12), "up_1": (24, 16), "up_1_1": (60, 24)}


# Bad input ---------------------------------------------------------------------------------------


def predict(technique, models, **settings):
    technique.make_predict(models.linear(WIDE, BIAS), **settings)


def of(make, *arguments):
    """A refusal of the model that the helpers make of a name."""
    return lambda t, m: t.make_predict(getattr(m, make)(*arguments))


MASKS = "the model has pruning masks: finalize it first"
REFUSALS = [
    *(
        (
            partial(predict, min_sparsity=share),
            f"min_sparsity must be above 0 and at most 1, not {share}",
        )
        for share in (0.0, 1.1, float("nan"))
    ),
    *(
        pytest.param(
            of("linear", WIDE + 1, BIAS),
            f"no {kind} layer of the model has 70% of zeros: prune it",
            marks=marks,
        )
        for kind, marks in (("linear", PT), ("dense", TF))
    ),
    (of("half"), "bfloat16"),
    (of("masked"), MASKS),
    pytest.param(of("masked_after_a_prediction"), MASKS, marks=PT),
    pytest.param(of("no_copy"), "Python cannot copy the model: Only Tensors", marks=PT),
    pytest.param(of("Two"), "the model has no variables yet: call it once", marks=TF),
]


@pytest.mark.parametrize(("call", "message"), REFUSALS)
def test_a_refusal_says_why(technique, models, call, message):
    with pytest.raises((ValueError, NotImplementedError)) as caught:
        call(technique, models)
    assert re.search(re.escape(message), " ".join(str(caught.value).split()))


# The benchmark -----------------------------------------------------------------------------------


def test_the_benchmark_prunes_the_smallest_weights_of_kernels_alone():
    kernel = np.array([[0.3, -0.1], [0.2, -0.4]], np.float32)
    assert pruned("up.kernel", kernel, 0.5).tolist() == [[kernel[0, 0], 0], [0, kernel[1, 1]]]
    assert kernel[0, 1] != 0
    assert pruned("up.bias", kernel, 0.5) is kernel
    assert pruned("up.kernel", kernel, 0.0) is kernel


@pytest.mark.parametrize("share", [0.5, 0.8, 0.9, 0.95])
def test_the_benchmarks_narrower_transformer_has_the_weights_that_are_left(share):
    spec = TASKS["text-gpt-wide"].model
    small, whole = (
        sum(int(np.prod(shape)) for name, shape in parameter_shapes(s).items() if "kernel" in name)
        for s in (narrower(spec, share), spec)
    )
    assert small / whole == pytest.approx(1 - share, abs=0.01)
