"""Frozen predictions are the model's, do not move with it, and come soon from a carried cache."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bench.deployment import bench_frozen_inference as bench_file
from bench.harness.plan import Work
from shared.specs import TASKS, CNNSpec
from shared.weights import init_weights
from tests.compression import teaching
from tests.frameworks import apart

FRAMEWORKS = ("pt", "tf")
SPEC = CNNSpec((8, 8, 1), ((4, 2), (6, 1)), num_classes=10)
IMAGES = np.random.default_rng(6).normal(size=(5, 8, 8, 1)).astype(np.float32)


def array(tensor):
    return np.asarray(tensor)


@pytest.fixture
def cnn(kit):
    """A model, its inputs, and what it predicts."""
    model = kit.models.build(SPEC, teaching.teacher_weights(SPEC))
    x, _ = kit.data.to_device(IMAGES, np.zeros(5, np.int64))
    return model, x, array(kit.training.make_predict(model)(x))


def test_frozen_predictions_are_those_of_the_weights_at_first(kit, technique, cnn):
    model, x, wanted = cnn
    predict = technique.frozen_predict(model)
    first = array(predict(x))
    assert apart(first, wanted) < 1e-5
    doubled = {name: 2 * value for name, value in teaching.teacher_weights(SPEC).items()}
    kit.models.import_weights(model, doubled)
    assert np.array_equal(array(predict(x)), first)
    assert apart(array(kit.training.make_predict(model)(x)), wanted) > 0.1


@pytest.mark.only("tf")
def test_tf_a_frozen_graph_reads_no_variable_and_serves_any_number_of_samples(technique, cnn):
    model, x, wanted = cnn
    predict = technique.frozen_predict(model)
    assert apart(array(predict(x)), wanted) < 1e-5
    assert apart(array(predict(x[:2])), wanted[:2]) < 1e-5
    (run,) = predict.graphs.values()
    assert not [node for node in run.graph.get_operations() if "Variable" in node.type]


@pytest.mark.only("pt")
def test_pt_batch_norm_is_in_the_convolution_and_the_model_is_left(kit, technique, cnn):
    model, x, wanted = cnn
    model.train()
    fused = technique.fuse_conv_bn(model)
    assert model.training
    assert not [name for name in kit.models.export_weights(fused) if ".bn." in name]
    assert apart(array(kit.training.make_predict(fused)(x)), wanted) < 1e-5


@pytest.mark.only("pt")
@pytest.mark.parametrize(
    ("name", "message"),
    [("twice", "conv is called 2 times"), ("branch", "cannot trace the model")],
)
def test_pt_a_model_that_cannot_be_fused_is_refused(technique, models, name, message):
    with pytest.raises(NotImplementedError, match=message):
        technique.fuse_conv_bn(getattr(models, name)())


@pytest.mark.only("pt")
def test_pt_a_carried_cache_compiles_nothing_again(technique, models, cnn, tmp_path):
    model, x, wanted = cnn
    with models.new_cache():
        technique.frozen_predict(model)(x)
        path = technique.save_cache(tmp_path / "cache")
    with models.new_cache():
        before = models.cache_hits()
        assert technique.load_cache(path) > 0
        assert apart(array(technique.frozen_predict(model)(x)), wanted) < 1e-5
        assert models.cache_hits() > before
    (tmp_path / "other").write_bytes(b"no cache")
    with pytest.raises(ValueError, match="is no cache"):
        technique.load_cache(tmp_path / "other")


# The benchmark -----------------------------------------------------------------------------------


@pytest.fixture
def judged(impl, kit, technique):
    """`judged(way)`: the benchmark's evidence of a row with a small model, and its verdict."""

    def judge(way):
        task, weights = replace(TASKS["digits-cnn"], model=SPEC), init_weights(SPEC, 1)
        work = Work(task, way, {"way": way}, 5, weights, "predict")
        batch = kit.data.to_device(IMAGES, np.zeros(5, np.int64))
        return bench_file.took_effect(impl, work, bench_file.prepare(impl, work), batch)

    return judge


@pytest.mark.parametrize("way", [pytest.param("fused", marks=pytest.mark.only("pt")), "frozen"])
def test_the_benchmark_proves_each_row(judged, way):
    evidence, reason = judged(way)
    assert reason is None, evidence


@pytest.mark.only("pt")
def test_the_benchmark_sees_weights_that_are_not_frozen(kit, technique, judged, monkeypatch):
    monkeypatch.setattr(technique, "frozen_predict", kit.training.make_predict)
    assert judged("frozen")[1] == "predictions follow weights that are changed later"
