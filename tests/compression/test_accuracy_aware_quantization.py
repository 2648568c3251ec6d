"""The search finds the layers of a planted outlier, and these in float give the accuracy back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.compression import bench_accuracy_aware_quantization as bench_file
from bench.harness.plan import Work
from shared import datasets, operators
from shared.layer_search import distance, find_layers_to_keep, plant_outlier
from shared.specs import TASKS, CNNSpec
from shared.weights import init_weights
from tests.compression import quick, teaching

FRAMEWORKS = ("pt", "tf")
MODELS = "quantization"
# The convolution that reads the outlier has a stride, so that padding stands between in TensorFlow.
SPEC = CNNSpec((16, 16, 1), ((16, 1), (32, 2), (32, 2)), num_classes=10)
IMAGES = np.random.default_rng(5).normal(size=(64, 16, 16, 1)).astype(np.float32)
LAYERS = 4
# The one that reads the outlier; where outputs are rounded, too, the one that makes it.
CULPRITS = {"pt": [1], "tf": [0, 1], "onnxruntime": [0, 1]}


def test_the_layer_that_costs_most_is_kept_first_until_the_error_is_small():
    costs, asked = {0: 0.1, 1: 0.5, 2: 0.3, 3: 0.05}, []

    def error_of(kept):
        asked.append(kept)
        return sum(cost for number, cost in costs.items() if number not in kept)

    search = find_layers_to_keep("abcd", error_of, most=0.2)
    assert search.alone == pytest.approx(tuple(costs.values()))
    assert search.kept == (1, 2)
    assert [kept for kept, _ in search.tried] == [(), (1,), (1, 2)]
    assert search.as_json()["kept_in_float"] == ["b", "c"]
    assert len(asked) == 7


def test_nothing_is_kept_where_integers_are_good_enough_and_never_everything():
    good = find_layers_to_keep("ab", lambda kept: 0.01, most=0.1)
    assert good.kept == good.alone == ()
    assert find_layers_to_keep("abc", lambda kept: 1.0, most=0.1).kept == (0, 1)


@pytest.fixture(scope="module")
def planted(kit, models):
    """The planted model, images, its predictions, and those of the model before."""
    before = teaching.teacher_weights(SPEC)
    weights = plant_outlier(before, layer="conv0", reader="conv1")
    x, built = models.images_of(IMAGES), [kit.models.build(SPEC, w) for w in (weights, before)]
    return built[0], x, *(models.numpy(kit.training.make_predict(model)(x)) for model in built)


def test_an_outlier_changes_nothing_in_float(planted):
    _, _, found, before = planted
    assert np.array_equal(found, before)


def test_layers_of_the_outlier_stay_in_float_and_the_rest_are_integers(
    impl, technique, models, framework, planted, tmp_path
):
    model, x, wanted, _ = planted
    quantization = impl.compression.post_training_quantization
    errors = {}

    def error(predict):
        return distance(models.numpy(predict(x)), wanted)

    with quick.without_code():  # each attempt would be compiled; the file below is
        quantized, search = technique.apply_accuracy_aware_int8(model, x, error, most=0.1)
    errors["own"] = [value for _, value in search.tried]
    assert list(search.kept) == CULPRITS[framework]
    path = models.int8_files.save_as_it_is(quantized, tmp_path / "model")
    ran = impl.kit.integers.integer_operators(models.int8_files.load_int8(path), path, x)
    assert sum(ran.values()) == LAYERS - len(search.kept)

    search = technique.search_onnxruntime_int8(model, x, error, most=0.1)
    errors["onnxruntime"] = [value for _, value in search.tried]
    assert list(search.kept) == CULPRITS["onnxruntime"]
    path = quantization.quantize_onnxruntime_int8(
        model, x, tmp_path / "model.onnx", keep_float=search.kept
    )
    ran = operators.onnx_integer_layers(path, IMAGES if framework == "tf" else models.numpy(x))
    assert sum(ran.values()) == LAYERS - len(search.kept)
    for seen in errors.values():
        assert seen[0] > 0.2
        assert seen[-1] < 0.05


@pytest.mark.only("pt")
def test_pt_the_deprecated_route_predicts_as_the_new_one(impl, technique, models, planted):
    """With an outlier both lose as much; without, neither does."""
    model, x, wanted, _ = planted
    quantization = impl.compression.post_training_quantization
    lost = distance(models.numpy(quantization.apply_fx_int8(model, x)(x)), wanted)
    assert lost > 0.2
    whole = impl.kit.models.build(SPEC, teaching.teacher_weights(SPEC))
    fine = models.numpy(quantization.apply_fx_int8(whole, x)(x))
    assert distance(fine, wanted) < 0.05


# The benchmark -----------------------------------------------------------------------------------


ROWS = ("all_int8", "accuracy_aware", "onnxruntime_all_int8", "onnxruntime_accuracy_aware")


def test_the_search_in_onnxruntime_is_compared_with_what_differs_by_it_only():
    rows = {one.name: one for one in bench_file.TECHNIQUE.variants}
    searched = rows["onnxruntime_accuracy_aware"]
    like = rows[searched.against]
    assert like.settings | {"searches": True} == searched.settings
    assert like.frameworks == searched.frameworks


@pytest.mark.parametrize("name", ROWS)
def test_the_benchmark_proves_each_row(impl, kit, technique, tmp_path, name):
    (variant,) = [one for one in bench_file.TECHNIQUE.variants if one.name == name]
    small = datasets.DatasetSpec("small-digits", "digits", train_size=600, test_size=10)
    spec = CNNSpec((32, 32, 1), ((8, 2), (16, 2), (16, 2)), num_classes=10)
    task = replace(TASKS["digits-cnn"], dataset=small, model=spec)
    folder = datasets.materialise(small, tmp_path / "data")
    weights = init_weights(spec, 1)
    work = Work(
        task, name, variant.settings, 8, weights, "predict", data=str(folder), folder=tmp_path
    )
    prepared = bench_file.prepare(impl, work)
    path = tmp_path / "model"
    prepared.write(path)
    prepared = replace(prepared, artifact=path, predict=prepared.read(path))
    x, y = datasets.load(Path(folder), "train")
    batch = kit.data.to_device(np.array(x[:8]), np.array(y[:8]))
    evidence, reason = bench_file.took_effect(impl, work, prepared, batch)
    assert reason is None, evidence
