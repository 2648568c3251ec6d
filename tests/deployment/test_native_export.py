"""Packages and compiled predictions give what their models do; damaged ones are refused."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from bench.deployment.bench_native_export import ROUTES, TECHNIQUE, prepare
from shared.provenance import provenance
from shared.specs import TASKS, GPTSpec
from shared.weights import init_weights
from tests import workers
from tests.compression import teaching
from tests.flipped import flipped

FRAMEWORKS = ("pt", *workers.keras())
MODELS = "export"
PT, TF = pytest.mark.only("pt"), pytest.mark.only("tf", "tf_keras")
ROUNDED = 1e-5  # outputs of a file and of its model, as a share of the largest
GPT = GPTSpec(vocabulary=11, sequence_length=8, width=16, heads=2, layers=1)
CNN = TASKS["digits-cnn"]
# A C++ compiler takes seconds for each layer's kernels.
CNN = replace(CNN, model=replace(CNN.model, convolutions=CNN.model.convolutions[:2]))
random = np.random.default_rng(5)
IMAGES = random.normal(size=(64, 32, 32, 1)).astype(np.float32)
CODES = random.integers(0, 11, (5, 8))
LEFT, RIGHT = random.normal(size=(2, 64, 5)).astype(np.float32)
OPEN = {"dynamic_sequence": True}


def apart(ours, theirs):
    """The largest difference, as a share of the largest value."""
    ours, theirs = np.array(ours), np.array(theirs)
    assert ours.shape == theirs.shape
    return np.abs(ours - theirs).max() / np.abs(theirs).max()


def start():
    return init_weights(CNN.model, seed=1)


@pytest.fixture(scope="module")
def cnn(kit, models):
    """A model, its inputs, and what it predicts."""
    model, (x, _) = kit.models.build(CNN.model, start()), kit.data.to_device(IMAGES, IMAGES)
    return model, x, models.numpy(kit.training.make_predict(model)(x))


@pytest.fixture(scope="module")
def package(technique, models, cnn, tmp_path_factory):
    """The CNN in a file, or a folder."""
    path = tmp_path_factory.mktemp("package") / models.PACKAGE
    return technique.export_package(cnn[0], cnn[1][:1], path, provenance(CNN, start()))


def test_in_place_predictions_are_compiled_and_those_of_the_model(
    kit, technique, models, framework, cnn
):
    _, x, wanted = cnn
    model = kit.models.build(CNN.model, start())
    if framework == "pt":
        with pytest.raises(ValueError, match="training mode"):
            technique.compiled_predict(model)
    predict = technique.compiled_predict(models.built(model, x))
    assert apart(predict(x), wanted) < ROUNDED
    assert apart(predict(x[:3]), wanted[:3]) < ROUNDED
    assert models.is_compiled(models.program(predict, x))
    assert teaching.farthest(teaching.weights_of(kit, model), start()) == 0


def test_a_package_predicts_what_the_model_does_at_any_batch_size(kit, technique, cnn, package):
    """It says what it is, and leaves the model alone."""
    model, x, wanted = cnn
    array, predict = np.asarray(x), technique.load_package(package, threads=1)
    for size in (1, 3, 64):
        assert apart(predict(array[:size]), wanted[:size]) < ROUNDED
    assert apart(predict(np.asfortranarray(array)), wanted) < ROUNDED
    said = predict.threads, predict.precision, predict.metadata
    assert said == (1, "float32", provenance(CNN, start()))
    assert teaching.farthest(teaching.weights_of(kit, model), start()) == 0


def test_a_package_takes_texts_of_any_length(kit, technique, models, tmp_path):
    """Attention looks to the left: the beginning of a text gives the beginning of its outputs."""
    model = kit.models.build(GPT, init_weights(GPT, seed=1))
    codes, _ = kit.data.to_device(CODES, CODES)
    path = technique.export_package(model, codes, tmp_path / models.PACKAGE, **OPEN)
    predict = technique.load_package(path, threads=1)
    wanted = models.numpy(kit.training.make_predict(model)(codes))
    assert apart(predict(CODES), wanted) < ROUNDED
    assert apart(predict(CODES[:2, :3]), wanted[:2, :3]) < ROUNDED


def test_bfloat16_is_a_precision_of_its_own_or_refused(technique, models, framework, cnn, tmp_path):
    model, x, wanted = cnn
    given = model, x[:1], tmp_path / models.PACKAGE
    if framework == "tf":
        with pytest.raises(NotImplementedError, match="a SavedModel computes as its model does"):
            technique.export_package(*given, precision="bfloat16")
        return
    path = technique.export_package(*given, precision="bfloat16")
    predict = technique.load_package(path, threads=1)
    assert 1e-4 < apart(predict(np.asarray(x)), wanted) < 5e-2
    assert predict.precision == "bfloat16"
    assert models.dtypes(model) == {"torch.float32"}


def test_names_and_modes_are_kept(technique, models, tmp_path):
    model, x = models.named(), models.named_inputs(LEFT, RIGHT)
    export, load = (getattr(technique, f"{verb}_{models.NAMED_BY}") for verb in ("export", "load"))
    modes = models.modes(model)
    predict = load(export(model, x, tmp_path / "named"), threads=1)
    assert models.modes(model) == modes
    outputs = predict({"left": LEFT, "right": RIGHT})
    wanted = models.named_outputs(model, x)
    assert set(predict.inputs) == {"left", "right"}
    assert outputs.keys() == wanted.keys() == models.NAMED
    for name, value in wanted.items():
        assert apart(outputs[name], value) < ROUNDED, name
    compiled = technique.compiled_predict(models.built(model, x))(x)
    logits = compiled["logits"] if isinstance(compiled, dict) else compiled.logits
    assert apart(logits, wanted["logits"]) < ROUNDED
    with pytest.raises(ValueError, match=re.escape("takes float32 (any, 5), not float32 (64, 4)")):
        predict({"left": LEFT, "right": RIGHT[:, 1:]})


@TF
def test_tf_words_are_looked_up_in_a_package(technique, models, tmp_path):
    model, words = models.texts(), ["a b", "c", ""]
    path = technique.export_package(model, models.tensor(words), tmp_path / "words")
    given = technique.load_package(path, threads=1)(np.array(words))
    assert np.array_equal(given, models.numpy(model(models.tensor(words))))


@PT
def test_pt_a_trace_that_holds_for_any_input_is_taken(technique, models, tmp_path, capfd):
    """`torch.export` refuses the branch, and would print its graph."""
    x, path = models.tensor(LEFT), tmp_path / "file"
    technique.export_torchscript(models.loop(), x, path)
    capfd.readouterr()
    with pytest.warns():  # of the trace, that it takes one side
        technique.export_torchscript(models.always(), x, path)
    assert "graph" not in capfd.readouterr().err


# Bad input ---------------------------------------------------------------------------------------


def test_what_does_not_fit_gets_one_clear_line(technique, models, cnn, package):
    x, predict = np.asarray(cnn[1]), technique.load_package(package, threads=1)
    takes = f"takes float32 (any, {str(models.SIDES)[1:]}"
    for bad, message in (
        (x[:, :, 1:], f"{takes}, not float32 (64, "),
        (x.astype(np.float64), f"{takes}, not float64 (64, "),
        ((x, x), f"the model takes 1 inputs ({models.INPUT})"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            predict(bad)
    with pytest.raises(FileNotFoundError, match="no f"):
        technique.load_package(package.with_name("nothing"), threads=1)


def test_damaged_and_foreign_packages_get_one_clear_line(technique, models, package, tmp_path):
    files = []
    for number, part in enumerate(models.PARTS):
        copied = tmp_path / f"{number}-{package.name}"
        (shutil.copytree if part else shutil.copy)(package, copied)
        file = copied / part if part else copied
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        files.append(copied)
    (tmp_path / "empty").mkdir()
    files += [tmp_path / "empty"] if package.is_dir() else []
    for file in files:
        refused(technique.load_package, file)


@PT
def test_pt_damaged_and_foreign_files_get_one_clear_line(technique, models, package, tmp_path):
    path = tmp_path / "torchscript"
    technique.export_torchscript(models.nothing(), models.tensor(LEFT), path)
    other = tmp_path / "other"
    for load, whole in (
        (technique.load_package, package.read_bytes()),
        (technique.load_torchscript, path.read_bytes()),
    ):
        for content in (whole[: len(whole) // 2], b"no package"):
            other.write_bytes(content)
            refused(load, other)
        other.write_bytes(flipped(whole))
        # A sum that is wrong, or data that zlib can't decompress: members may be either kind.
        assert re.search("in it is damaged$|while decompressing", refused(load, other))
        refused(load, models.archive(other))
    refused(technique.load_torchscript, package)


def refused(load, path):
    with pytest.raises(ValueError, match=r"^can't load ") as caught:
        load(path, threads=1)
    assert "\n" not in str(caught.value)
    return str(caught.value)


OTHER = "the file does not give what the model gives"
SIZE = re.escape(
    "the model branches on a size that is open: a file gives something else at (64, 9)"
)
AOT = "AOTInductor can't take this"
REFUSALS = [  # the export, the model, settings, and what is said
    ("package", "nothing", {"precision": "int8"}, "unknown precision 'int8': float32 or bfloat16"),
    pytest.param("torchscript", "random", {}, f"{OTHER}.*from the model's", marks=PT),
    pytest.param("torchscript", "loop", OPEN, OTHER, marks=PT),
    # Packages have the same check, after ten seconds of a C++ compiler.
    pytest.param("torchscript", "last_eight", OPEN, SIZE, marks=PT),
    pytest.param("package", "branch", {}, f"{AOT}.*data-dependent", marks=PT),
    pytest.param("package", "random", {}, f"{OTHER}.*from the model's", marks=TF),
    pytest.param("package", "unbuilt", {}, "the model has no variables yet", marks=TF),
]


@pytest.mark.parametrize(("kind", "make", "settings", "message"), REFUSALS)
def test_a_refusal_says_why_and_leaves_no_file(
    technique, models, tmp_path, kind, make, settings, message
):
    path = tmp_path / models.PACKAGE
    with pytest.raises((ValueError, NotImplementedError), match=message) as caught:
        getattr(technique, f"export_{kind}")(
            getattr(models, make)(), models.tensor(LEFT), path, **settings
        )
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@TF
def test_tf_what_a_package_cannot_hold_is_refused(technique, models, flavour, package, tmp_path):
    x = np.random.default_rng(5).normal(size=(2, 6, 4)).astype(np.float32)
    window = models.built(models.Function(models.window), models.tensor(x))
    with pytest.raises(NotImplementedError, match=OTHER):
        technique.export_package(window, models.tensor(x), tmp_path / "window", **OPEN)
    if flavour == "tf":  # in tf_keras its states are variables
        message = "kept would lose the state that it keeps .*: make the model with stateful=False"
        with pytest.raises(NotImplementedError, match=message):
            technique.export_package(*models.stateful(), tmp_path / "kept", dynamic_batch=False)
    with pytest.raises(RuntimeError, match="TensorFlow runs already with 1 threads"):
        technique.load_package(package, threads=7)


@PT
def test_pt_what_a_machine_lacks_is_said(technique, models, tmp_path, monkeypatch):
    with pytest.raises(NotImplementedError, match="Torch-TensorRT needs an NVIDIA"):
        technique.tensorrt_predict(models.nothing())
    with models.no_compiler(), pytest.raises(NotImplementedError, match=AOT) as caught:
        technique.export_package(*models.small(), tmp_path / "refused.pt2")
    assert "\n" not in str(caught.value)
    monkeypatch.setattr(models.torch.cuda, "is_available", lambda: True)
    message = "torch-tensorrt is not installed: pip install torch-tensorrt"
    with pytest.raises(NotImplementedError, match=message):
        technique.tensorrt_predict(models.nothing())


# The benchmark -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("route", "words"),
    [
        ("torchscript", "TorchScript is only in PyTorch"),
        ("tensorrt", "built without TensorRT.*load_tensorrt"),
    ],
)
def test_what_tensorflow_lacks_is_said_before_anything_is_made(route, words):
    framework = SimpleNamespace(__name__="tf_impl")
    work = SimpleNamespace(settings={"route": route})
    with pytest.raises(NotImplementedError, match=words):
        prepare(framework, work)


def test_every_row_has_a_route():
    assert all(variant.settings["route"] in ROUTES for variant in TECHNIQUE.variants)
