"""Keras's own trainer on either backend does what the framework's native code does."""

from __future__ import annotations

import importlib
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from bench.harness.machine import compiler
from bench.harness.plan import Work
from bench.train_step import bench_keras_backend as bench_file
from shared.specs import TASKS, CNNSpec, ResNetSpec
from shared.weights import init_weights
from tests.frameworks import apart

FRAMEWORKS = ("pt", "tf")
BAR = 1e-4  # of losses and updates of three steps, whose sums are taken in another order
CNN = CNNSpec((8, 8, 2), ((4, 2), (6, 1)), num_classes=3)
# Not of 6 channels: in channels_last torch 2.15 ends the process in their strided 1x1 convolution.
RESNET = ResNetSpec((32, 32, 3), 1, (8, 16), num_classes=3, large_stem=True)
TASK = replace(TASKS["digits-cnn"], model=CNN)


@pytest.fixture(scope="module")
def keras_kit(impl, technique):
    return importlib.import_module(f"{impl.__name__}.kit.keras_models")


def batch_of(spec, kit):
    random = np.random.default_rng(3)
    images = random.normal(size=(6, *spec.input_shape)).astype(np.float32)
    return kit.data.to_device(images, random.integers(0, 3, 6))


def compiled_model(technique, keras_kit, *, compiled=False):
    model = keras_kit.build(CNN, init_weights(CNN, seed=1))
    optimizer = keras_kit.make_optimizer(model, TASK.recipe)
    return technique.compile_keras(model, optimizer, keras_kit.cross_entropy(), compiled=compiled)


@pytest.mark.parametrize("spec", [CNN, RESNET], ids=["cnn", "resnet"])
def test_predictions_losses_and_updates_are_those_of_native_code(impl, kit, technique, spec):
    """The running variance is left out: Keras's is that of n values, PyTorch's of n - 1."""
    work = Work(replace(TASK, model=spec), "native", {}, 6, init_weights(spec, seed=1))
    batch, results = batch_of(spec, kit), []
    for variant in ("native", "keras"):
        row = bench_file.prepare(impl, replace(work, variant=variant))
        first = np.array(row.predict(batch[0]))
        losses = [kit.runtime.to_float(row.step(*batch)) for _ in range(3)]
        after = kit.models.export_weights(row.model)
        updates = {name: after[name] - start for name, start in work.weights.items()}
        results.append((first, losses, updates, np.array(row.predict(batch[0]))))
    (native, ours) = results
    assert apart(ours[0], native[0]) < BAR
    assert apart(ours[1], native[1]) < BAR
    assert ours[1][-1] < 0.99 * ours[1][0]
    assert ours[2].keys() == native[2].keys()
    far = {name: apart(update, native[2][name]) for name, update in ours[2].items()}
    assert {name: each for name, each in far.items() if each > BAR and "variance" not in name} == {}
    assert apart(ours[3], ours[0]) > 0.01


def proof(impl, kit, prepared_by, variant, mode="train", **settings):
    """The evidence of a row, and why it did not take effect, of what another row has prepared."""
    work = Work(TASK, prepared_by, {}, 6, init_weights(CNN, seed=1), mode)
    prepared = bench_file.prepare(impl, replace(work, settings=settings if settings else {}))
    work = replace(work, variant=variant, settings=settings)
    return bench_file.took_effect(impl, work, prepared, batch_of(CNN, kit))


@pytest.mark.parametrize("mode", ["train", "predict"])
def test_the_evidence_names_the_backend_and_whether_graphs_ran(
    impl, kit, technique, framework, mode
):
    evidence, fault = proof(impl, kit, "keras", "keras", mode)
    assert fault is None
    assert evidence["backend"] == {"pt": "torch", "tf": "tensorflow"}[framework]
    assert (evidence["graphs"] > 0, evidence["compiled"]) == (framework == "tf", 0)


@pytest.mark.parametrize("mode", ["train", "predict"])
@pytest.mark.only("tf")
def test_tf_xla_compiles_what_keras_is_asked_to_compile(impl, kit, technique, mode):
    evidence, fault = proof(impl, kit, "keras", "keras_compiled", mode, compiled=True)
    assert fault is None
    assert evidence["compiled"] > 0


@pytest.mark.campaign
@pytest.mark.only("pt")
@pytest.mark.skipif(not compiler(), reason="torch.compile needs a C++ compiler")
def test_pt_torch_compiles_what_keras_is_asked_to_compile(impl, kit, technique):
    evidence, fault = proof(impl, kit, "keras", "keras_compiled", compiled=True)
    assert fault is None
    assert evidence["compiled"] > 0


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"backend": "jax"}, "its weights are jax's"),
        ({"apart": 0.1}, "its predictions are others"),
        ({"compiled": 2}, "graphs ran, 2 of them compiled"),
    ],
)
def test_what_is_not_as_the_row_says_is_a_fault(impl, change, fault):
    backend = bench_file.BACKENDS[impl.__name__]
    right = {"backend": backend, "apart": 0.0, "graphs": int(backend != "torch"), "compiled": 0}
    row = SimpleNamespace(settings={})
    assert bench_file._fault(impl, row, right) is None
    assert fault in bench_file._fault(impl, row, right | change)
    row = SimpleNamespace(settings={"compiled": True})
    assert bench_file._fault(impl, row, right) == "nothing compiled ran"


@pytest.mark.only("pt")
def test_pt_a_keras_model_is_a_module_whose_mode_its_layers_do_not_read(kit, technique, keras_kit):
    model, (x, _) = compiled_model(technique, keras_kit), batch_of(CNN, kit)
    x = keras_kit.images(x)
    wanted = technique.make_predict(model)(x)
    assert sum(parameter.numel() for parameter in model.parameters()) == model.count_params()
    assert apart(model.train()(x).detach(), wanted) < 1e-6
    assert apart(model(x, training=True).detach(), wanted) > 0.01


def test_weights_go_to_the_other_backend_as_keras_lists_them(kit, technique, keras_kit):
    """The same order and layout on both: that of the suite's canonical weights."""
    model, weights = compiled_model(technique, keras_kit), init_weights(CNN, seed=1)
    names = [*("conv0.kernel", "conv0.bn.gamma", "conv0.bn.beta"), "conv0.bn.mean"]
    for name, array in zip(names, model.get_weights()[:4], strict=True):
        assert np.array_equal(array, weights[name]), name


def no_model(technique, keras_kit):
    technique.compile_keras(object(), None, None)


def model_that_no_compiler_takes(technique, keras_kit):
    model = keras_kit.build(CNN)
    model.layers[1].supports_jit = False
    technique.compile_keras(model, "sgd", keras_kit.cross_entropy(), compiled=True)


def model_of_two_arguments(technique, keras_kit):
    class Both(technique.keras.Model):
        def call(self, image, vector):
            return vector

    technique.compile_keras(Both(), "sgd", "mse")


REFUSALS = [
    (model_of_two_arguments, NotImplementedError, "its call takes image and vector"),
    (no_model, ValueError, "a object is no keras.Model"),
    (model_that_no_compiler_takes, NotImplementedError, "Keras does not compile it: a layer of it"),
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSALS)
@pytest.mark.filterwarnings("ignore:Model doesn't support")
def test_a_refusal_says_why(technique, keras_kit, call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call(technique, keras_kit)


def test_another_backend_is_refused(monkeypatch, technique, keras_kit):
    model = compiled_model(technique, keras_kit)
    monkeypatch.setattr(technique.keras.config, "backend", lambda: "jax")
    with pytest.raises(ValueError, match="Keras computes with jax: set KERAS_BACKEND="):
        technique.compile_keras(model, "sgd", "mse")
