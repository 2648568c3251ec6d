"""Exported files predict what their models do, in every runtime, alike from both frameworks."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from bench.deployment.bench_export import ROUTES, TECHNIQUE
from shared import operators, runtimes
from shared.provenance import class_names, provenance
from shared.specs import TASKS
from shared.weights import init_weights
from tests import workers
from tests.compression import teaching
from tests.flipped import flipped

FRAMEWORKS = ("pt", *workers.keras())  # legacy Keras differs in what a model is alone
PT, TF = (pytest.mark.only(name) for name in ("pt", "tf"))
BOTH = pytest.mark.only("pt", "tf")
KINDS = [*(pytest.param(kind, marks=BOTH) for kind in ("onnx", "openvino"))]
KINDS.append(pytest.param("litert", marks=TF))
SUFFIX = {"onnx": "onnx", "openvino": "xml", "litert": "tflite", "executorch": "pte"}
# PyTorch's, of packages in the extra "edge": .venv-edge/bin/pytest --campaign <this file> -k pt
EDGE = {"litert": "litert_torch", "executorch": "executorch"}
EDGES = [
    pytest.param(
        kind,
        marks=[
            PT,
            pytest.mark.campaign,
            pytest.mark.skipif(find_spec(module) is None, reason=f"{module} is not installed"),
        ],
    )
    for kind, module in EDGE.items()
]
ROUNDED = 1e-5  # outputs of a file and of its model, as a share of the largest
LENGTHS = {1: 64, 3: 40, 64: 7}  # of text, by batch size
MODELS_OF = {task: TASKS[task].model for task in ("digits-cnn", "text-gpt")}
# All kinds of its layers, in fewer and narrower ones.
MODELS_OF["photos-resnet50"] = replace(
    TASKS["photos-resnet50"].model, input_shape=(64, 64, 3), blocks=(1, 2), widths=(16, 32)
)
LEFT, RIGHT = np.random.default_rng(5).normal(size=(2, 64, 5)).astype(np.float32)


def apart(ours, theirs):
    """The largest difference, as a share of the largest value."""
    ours, theirs = np.array(ours), np.array(theirs)
    assert ours.shape == theirs.shape
    return np.abs(ours - theirs).max() / np.abs(theirs).max()


@functools.cache
def start(task):
    """Weights of which residual branches count: they begin with a scale of 0."""
    weights = init_weights(MODELS_OF[task], seed=1)
    for name, value in weights.items():
        if name.endswith("gamma") and not value.any():
            weights[name] = np.full_like(value, 0.2)
    return weights


def about(task):
    return provenance(TASKS[task], start(task))


@pytest.fixture(scope="module")
def model(kit):
    """`model(task)`."""
    return functools.cache(lambda task: kit.models.build(MODELS_OF[task], start(task)))


@pytest.fixture(scope="module")
def inputs(kit):
    """`inputs(task, size)`: on the device."""

    def make(task, size):
        random = np.random.default_rng(size)
        if task == "text-gpt":
            x = random.integers(0, 98, (size, LENGTHS[size]))
        else:
            x = random.normal(size=(size, *MODELS_OF[task].input_shape)).astype(np.float32)
        return kit.data.to_device(x, x)[0]

    return make


@pytest.fixture(scope="module")
def predicted(kit, models, model):
    """`predicted(task, x)`: what the model itself does.

    Keras's takes whole windows of text alone, of which the beginning is used: attention looks to
    the left, so that what follows a shorter text changes nothing.
    """

    def predict(task, x):
        if task != "text-gpt":
            return models.numpy(kit.training.make_predict(model(task))(x))
        x = np.asarray(x)
        whole = np.pad(x, ((0, 0), (0, 64 - x.shape[1])))
        whole, _ = kit.data.to_device(whole, whole)
        return models.numpy(kit.training.make_predict(model(task))(whole))[:, : x.shape[1]]

    return predict


@pytest.fixture(scope="module")
def write(technique, model, inputs, tmp_path_factory):
    """`write(kind, task, size, **settings)`: a file of the task's model by an example."""

    @functools.cache
    def make(kind, task="digits-cnn", size=1, **settings):
        path = tmp_path_factory.mktemp("files") / f"{task}.{SUFFIX[kind]}"
        opened = {"dynamic_sequence": True} if task == "text-gpt" else {}
        example = model(task), inputs(task, size), path, about(task)
        return getattr(technique, f"export_{kind}")(*example, **opened, **settings)

    return make


def load(kind, path, **settings):
    return getattr(runtimes, f"load_{kind}")(path, threads=1, **settings)


# ONNX --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "task", ["digits-cnn", "text-gpt", pytest.param("photos-resnet50", marks=BOTH)]
)
def test_onnx_predicts_what_the_model_does_at_any_batch_size_and_length(
    kit, agrees, model, inputs, predicted, write, task
):
    """On neutral ground twins agree. A file has all weights, and says what it is."""
    path = write("onnx", task)
    predict = load("onnx", path)
    for size in (1, 3, 64) if task != "photos-resnet50" else (1, 3):
        x = inputs(task, size)
        ours, theirs = predict(x), predicted(task, x)
        assert np.abs(theirs).max() > 0.1
        assert apart(ours, theirs) < ROUNDED
        assert (np.argmax(ours, -1) == np.argmax(theirs, -1)).mean() > 0.999
    outputs = np.asarray(predict(inputs(task, 3)))
    agrees(task, {"outputs": outputs[:, :5] if task == "text-gpt" else outputs}, 1e-4)
    assert predict.threads == 1
    assert [part.name for part in path.parent.iterdir()] == [f"{task}.onnx"]
    assert predict.metadata == about(task)
    assert predict.metadata["made_by"] == "twinbench"
    assert predict.metadata["task"] == task
    assert len(predict.metadata["weights_sha256"]) == 64
    assert json.loads(predict.metadata["class_names"]) == class_names(TASKS[task].dataset)
    assert teaching.farthest(teaching.weights_of(kit, model(task)), start(task)) == 0


def test_files_hold_the_operators_of_their_model(inputs, write):
    """And not, say, a training graph: BatchNorm is folded, dropout is gone."""
    path = write("onnx")
    cnn, runs = (operators.onnx_operators(path, optimized=optimized) for optimized in (False, True))
    assert cnn["Conv"] == 4
    assert not {"BatchNormalization", "Dropout"} & cnn.keys()
    assert operators.onnx_operators(write("onnx", "text-gpt"))["Softmax"] == 2
    assert runs != cnn
    assert sum(n for name, n in runs.items() if "Conv" in name) == 4
    assert "Relu" not in runs  # it is part of the convolution
    assert operators.onnx_integer_layers(path, np.asarray(inputs("digits-cnn", 1))) == {}


def test_class_names_are_as_many_as_classes():
    assert class_names(TASKS["digits-cnn"].dataset) == list("0123456789")
    names = class_names(TASKS["text-gpt"].dataset)
    assert len(names) == len(set(names)) == TASKS["text-gpt"].model.vocabulary
    assert len(class_names(TASKS["photos-resnet50"].dataset)) == 6
    with pytest.raises(ValueError, match="photos are the names of its folders"):
        class_names(TASKS["photos"].dataset)


CLEAN = """
import sys
sys.path.append(sys.argv[1])
absent = []
for name in ("torch", "tensorflow", "keras", "onnx", "shared", "pt_impl", "tf_impl", "bench"):
    try:
        __import__(name)
    except ModuleNotFoundError:
        absent.append(name)
import json
import numpy
import onnxruntime
session = onnxruntime.InferenceSession(sys.argv[2], providers=["CPUExecutionProvider"])
about = session.get_modelmeta().custom_metadata_map
(given,) = session.get_inputs()
shape = [size if isinstance(size, int) else 5 for size in given.shape]
x = numpy.random.default_rng(0).normal(size=shape).astype("float32")
logits = session.run(None, {given.name: x})[0]
names = json.loads(about["class_names"])
found = {"classes": [names[i] for i in logits.argmax(-1)], "task": about["task"]}
print(json.dumps(found | {"absent": len(absent), "logits": logits.tolist(), "shape": shape}))
"""


def test_a_file_loads_where_only_onnx_runtime_is(models, write, tmp_path):
    """An interpreter without site-packages, this project and environment, but two packages."""
    packages = Path(sysconfig.get_paths()["purelib"])
    for name in ("onnxruntime", "numpy", "numpy.libs", "flatbuffers", "google", "packaging"):
        if (packages / name).exists():
            (tmp_path / name).symlink_to(packages / name)
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", CLEAN, tmp_path, write("onnx")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"]},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["absent"] == 8
    assert answer["task"] == "digits-cnn"
    assert answer["shape"] == [5, *models.SIDES]
    assert answer["classes"] == [str(number) for number in np.argmax(answer["logits"], -1)]
    x = np.random.default_rng(0).normal(size=answer["shape"]).astype("float32")
    np.testing.assert_allclose(answer["logits"], load("onnx", write("onnx"))(x), atol=1e-5)


# OpenVINO and LiteRT -----------------------------------------------------------------------------


@BOTH
def test_openvino_predicts_what_the_model_does_and_rounds_where_it_is_asked_alone(
    inputs, predicted, write
):
    """It reports nothing to its makers."""
    path, x = write("openvino"), inputs("digits-cnn", 64)
    predict, wanted = load("openvino", path), predicted("digits-cnn", x)
    assert apart(predict(x), wanted) < ROUNDED
    assert apart(predict(x[:1]), wanted[:1]) < ROUNDED
    said = predict.threads, predict.precision, predict.metadata
    assert said == (1, "float32", about("digits-cnn"))
    parameters = sum(value.nbytes for value in start("digits-cnn").values())
    assert path.with_suffix(".bin").stat().st_size >= 0.9 * parameters  # not float16 by itself
    assert operators.openvino_integer_layers(path, np.asarray(x)) == {}
    assert sys.modules.get("openvino_telemetry") is None
    if said := workers.raised(load, "openvino", path, precision="bfloat16"):
        assert "OpenVINO computes in f32 on this CPU" in said
    else:
        assert 1e-4 < apart(load("openvino", path, precision="bfloat16")(x), wanted) < 5e-2


@pytest.mark.parametrize("kind", KINDS)
def test_threads_may_predict_at_the_same_time(inputs, write, kind):
    predict = load(kind, write(kind))
    batches = [np.asarray(inputs("digits-cnn", size)) for size in (1, 2, 3, 64)] * 25
    wanted = {len(x): predict(x) for x in batches}
    with ThreadPoolExecutor(4) as pool:
        for x, output in zip(batches, pool.map(predict, batches), strict=True):
            assert apart(output, wanted[len(x)]) < ROUNDED


@pytest.mark.parametrize("kind", KINDS[1:])
def test_other_runtimes_take_texts_of_any_length(inputs, predicted, write, kind):
    x = inputs("text-gpt", 3)
    assert apart(load(kind, write(kind, "text-gpt"))(x), predicted("text-gpt", x)) < ROUNDED


@TF
@pytest.mark.parametrize(("precision", "bar"), [("float32", ROUNDED), ("float16", 5e-3)])
def test_tf_litert_predicts_what_the_model_does(inputs, predicted, write, precision, bar):
    x, path = inputs("digits-cnn", 64), write("litert", precision=precision)
    predict, wanted = load("litert", path), predicted("digits-cnn", x)
    assert apart(predict(x), wanted) < bar
    assert apart(predict(x[:1]), wanted[:1]) < bar
    assert predict.metadata == about("digits-cnn")
    if precision == "float16":
        assert apart(predict(x), wanted) > ROUNDED
        assert path.stat().st_size < 0.65 * write("litert", precision="float32").stat().st_size


@TF
def test_tf_litert_lays_a_file_out_anew_where_its_signature_opens_a_size(
    model, inputs, predicted, write, tmp_path
):
    """As in PyTorch's files, which have the sizes of their example."""
    fixed = write("litert", size=3, dynamic_batch=False).read_bytes()
    path = tmp_path / "file.tflite"
    path.write_bytes(fixed[: fixed.index(b"PK\x03\x04")])
    x = inputs("digits-cnn", 64)
    with pytest.raises(ValueError, match=re.escape("takes float32 (3, ")):
        load("litert", path)(x)
    runtimes.describe(path, {"a": "b"}, inputs=["x"], outputs=["output"], open_axes=[[0]])
    predict = load("litert", path)
    assert (predict.inputs, predict.metadata) == (["x"], {"a": "b"})
    for size in (64, 1):
        x = inputs("digits-cnn", size)
        assert apart(predict(x), predicted("digits-cnn", x)) < ROUNDED


@pytest.mark.parametrize("kind", EDGES)
def test_pt_files_for_devices_predict_what_the_model_does(inputs, predicted, write, kind):
    """At more samples than the example has: the 1x1 convolutions of a ResNet bound none."""
    task = "photos-resnet50"
    path = write(kind, task)
    predict = load(kind, path)
    for size in (1, 3, 64):
        x = inputs(task, size)
        assert apart(predict(x), predicted(task, x)) < ROUNDED
    assert predict.metadata == about(task)
    if kind == "executorch":
        assert predict.threads == 1
        ran = operators.executorch_operators(path)
        assert ran.pop("XnnpackBackend") >= 1
        assert set(ran) <= {"aten::mean"}, ran
        with pytest.raises(ValueError, match=r"the file takes at most \(256, "):
            predict(np.concatenate([np.asarray(inputs(task, 64))] * 5))
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"not a model " * 99, flipped(whole)):
        with pytest.raises(ValueError, match=r"can't load .*damaged") as caught:
            load(kind, damage(path, content))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", EDGES[:1])
def test_pt_litert_says_where_an_operator_holds_the_batch(technique, model, inputs, tmp_path, kind):
    """Of images with one channel the transposition is a reshape."""
    example = model("digits-cnn"), inputs("digits-cnn", 3), tmp_path / "file.tflite"
    with pytest.raises(
        NotImplementedError, match=r"can't resize the inputs of the file to .*: an oper"
    ):
        technique.export_litert(*example)
    predict = load(kind, technique.export_litert(*example, dynamic_batch=False))
    assert len(predict(inputs("digits-cnn", 3))) == 3


# int8 --------------------------------------------------------------------------------------------

LAYERS = 1 + 3 * 3 + 2 + 1  # stem, three blocks, shortcuts, head


@pytest.mark.parametrize("kind", KINDS)
def test_int8_runs_every_layer_over_integers_and_predicts_nearly_the_same(
    technique, model, inputs, predicted, tmp_path, kind
):
    """It is calibrated with what it then predicts."""
    task, path = "photos-resnet50", tmp_path / f"file.{SUFFIX[kind]}"
    x = inputs(task, 16)
    getattr(technique, f"export_{kind}")(model(task), x, path, about(task), precision="int8")
    predict = load(kind, path)
    layers = getattr(operators, f"{kind}_integer_layers")(path, np.asarray(x[:2]))
    assert sum(layers.values()) == LAYERS, layers
    assert 1e-3 < apart(predict(x), predicted(task, x)) < 0.1
    assert apart(predict(x[:1]), np.asarray(predict(x))[:1]) < 1e-5
    assert predict.metadata == about(task)
    weighs = path.with_suffix(".bin") if kind == "openvino" else path
    whole = sum(value.nbytes for value in start(task).values())
    assert weighs.stat().st_size < 0.75 * whole  # the graph is as large


@BOTH
def test_int8_of_a_fixed_batch(technique, models, framework, model, inputs, predicted, tmp_path):
    fixed = {"dynamic_batch": False, "precision": "int8"}
    x, path = inputs("digits-cnn", 16), tmp_path / "file"
    technique.export_onnx(model("digits-cnn"), x, path, **fixed)
    assert apart(load("onnx", path)(x), predicted("digits-cnn", x)) < 0.1
    if framework == "tf":
        reshaping, x = models.reshaping()
        technique.export_litert(reshaping, x, path, **fixed)
        assert apart(load("litert", path)(x), models.numpy(reshaping(x))) < 0.1


def test_only_layers_are_counted():
    counted = operators._layers({"Convert": 4, "Convolution": 2, "Add": 3, "FullyConnected": 1})
    assert counted == {"Convolution": 2, "FullyConnected": 1}


# Models of foreign construction ------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_and_outputs_keep_their_names_and_modules_their_modes(
    technique, models, tmp_path, kind
):
    model, path = models.named(), tmp_path / f"file.{SUFFIX[kind]}"
    modes, example = models.modes(model), models.named_inputs(LEFT[:2], RIGHT[:2])
    predict = load(kind, getattr(technique, f"export_{kind}")(model, example, path))
    assert models.modes(model) == modes
    outputs = predict({"left": LEFT, "right": RIGHT})
    wanted = models.named_outputs(model, models.named_inputs(LEFT, RIGHT))
    assert set(predict.inputs) == {"left", "right"}
    assert outputs.keys() == wanted.keys() == models.NAMED
    for name, value in wanted.items():
        assert np.abs(outputs[name] - value).max() < 1e-5, name
    with pytest.raises(ValueError, match=r"the model takes .*, not left, wrong$"):
        predict({"left": LEFT, "wrong": RIGHT})


@TF
@pytest.mark.parametrize("kind", KINDS)
def test_tf_loops_and_groups_of_keras(technique, models, tmp_path, kind):
    model, x = models.recurrent(), models.tensor(LEFT[:60].reshape(15, 5, 4))
    path = tmp_path / f"file.{SUFFIX[kind]}"
    getattr(technique, f"export_{kind}")(model, x, path, dynamic_batch=False)
    assert apart(load(kind, path)(x.numpy()), models.numpy(model(x))) < 1e-5


@TF
def test_tf_litert_needs_no_other_runtime(technique, models, tmp_path, monkeypatch):
    for name in ("onnx", "onnxruntime", "tf2onnx", "tf2onnx.convert", "openvino"):
        monkeypatch.setitem(sys.modules, name, None)
    technique.export_litert(models.eigenvalues().inside, models.tensor(LEFT[:, :4]), tmp_path / "x")


# Bad input ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_what_does_not_fit_gets_one_clear_line(models, inputs, predicted, write, kind):
    predict, x = load(kind, write(kind)), np.asarray(inputs("digits-cnn", 3))
    takes, given = f"takes float32 (any, {str(models.SIDES)[1:]}", f"(3, {str(models.SIDES)[1:]}"
    for bad, message in (
        (x[:, :, 1:], f"{takes}, not float32 {x[:, :, 1:].shape}"),
        (x[0], f"{takes}, not float32 {models.SIDES}"),
        (x.astype(np.float64), f"{takes}, not float64 {given}"),
        ((x, x), "), not 2"),
    ):
        with pytest.raises(ValueError, match=re.escape(message) + "$") as caught:
            predict(bad)
        assert str(caught.value).startswith(("input '", "the model takes 1 inputs ("))
    wanted = predicted("digits-cnn", inputs("digits-cnn", 3))
    # It goes on; the same values in another order in memory, and of bytes.
    for same in (x, np.asfortranarray(x), x.astype(x.dtype.newbyteorder())):
        assert np.allclose(predict(same), wanted, atol=1e-5)


@BOTH
def test_a_fixed_batch_is_of_one_size(inputs, write):
    x = np.asarray(inputs("digits-cnn", 3))
    predict = load("onnx", write("onnx", size=3, dynamic_batch=False))
    assert len(predict(x)) == 3
    with pytest.raises(ValueError, match=re.escape("takes float32 (3, ")):
        predict(x[:2])


def damage(path, content):
    """A file of other content beside the whole one."""
    other = path.with_name(f"damaged{path.suffix}")
    other.write_bytes(content)
    return other


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_and_foreign_files_get_one_clear_line(write, kind):
    path = write(kind)
    whole = path.read_bytes()
    count = getattr(operators, f"{kind}_integer_layers")
    readers = [functools.partial(load, kind), lambda file: count(file, np.zeros((1, 1), "f4"))]
    readers += [operators.onnx_operators] if kind == "onnx" else []
    for content in (whole[: len(whole) // 2], b"", b"not a model " * 99):
        for read in readers:
            with pytest.raises(ValueError, match=r"damaged\.") as caught:
                read(damage(path, content))
            assert "\n" not in str(caught.value)
    with pytest.raises(FileNotFoundError, match="no file "):
        load(kind, path.with_name("nothing"))
    if kind == "onnx":
        with pytest.raises(ValueError, match=r"ONNX Runtime can't load .*damaged"):
            load(kind, damage(path, whole[: len(whole) // 2]), check=False)
    if kind == "openvino":
        with pytest.raises(ValueError, match="OpenVINO can't load "):
            load(kind, damage(path, whole))  # without its weights


@TF
def test_tf_litert_files_are_ours_and_damaged_or_of_others(write):
    """Their metadata is in an archive behind the model; others have none, or their own."""
    path = write("litert")
    whole = path.read_bytes()
    name = whole.rindex(b"metadata.json")
    renamed = whole[:name] + b"M" + whole[name + 1 :]
    for content in (whole[:-10], flipped(whole), renamed):
        with pytest.raises(ValueError, match="LiteRT can't load ") as caught:
            load("litert", damage(path, content))
        assert "\n" not in str(caught.value)
    other = damage(path, whole[: whole.index(b"PK\x03\x04")])
    assert load("litert", other).metadata == {}
    with zipfile.ZipFile(other, "a") as archive:
        archive.writestr("labels.txt", "cat")
    assert load("litert", other).metadata == {}


@BOTH
def test_a_missing_package_is_named(technique, models, model, inputs, write, tmp_path, monkeypatch):
    whole = {kind: write(kind) for kind in ("onnx", "openvino")}
    example = model("digits-cnn"), inputs("digits-cnn", 3), tmp_path / "file"
    calls = {
        "onnxruntime": lambda: load("onnx", whole["onnx"]),
        "openvino": lambda: load("openvino", whole["openvino"]),
        "ai_edge_litert.interpreter": lambda: load("litert", tmp_path / "file.tflite"),
        "onnx": lambda: technique.export_onnx(*example),
        models.EXPORTER: lambda: technique.export_onnx(*example),
    }
    for module, call in calls.items():
        package = module.partition(".")[0].replace("_", "-")
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, module, None)
            message = f"^{package} is not installed: pip install {package}$"
            with pytest.raises(ModuleNotFoundError, match=message):
                call()


@PT
def test_pt_packages_for_devices_are_named(technique, model, inputs, tmp_path, monkeypatch):
    example = model("digits-cnn"), inputs("digits-cnn", 3), tmp_path / "file"
    calls = {
        "litert_torch": lambda: technique.export_litert(*example),
        "executorch.exir": lambda: technique.export_executorch(*example),
        "executorch.extension.pybindings.portable_lib": lambda: load("executorch", example[2]),
    }
    for module, call in calls.items():
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(ModuleNotFoundError) as caught:
            call()
        package = module.partition(".")[0].replace("_", "-")
        said = f"{package} is not installed: pip install {package}"
        where = ", in an environment with torch 2.14 (docs/install.md)"
        assert str(caught.value) == said + (where if package == "litert-torch" else "")


def given(make, *shape, **settings):
    """A refused export of the model that the helpers make of a name, for ones."""
    x = np.ones(shape or (4, 4), np.float32)
    return lambda m: (getattr(m, make)(), m.tensor(x)), settings


def misfit(models):
    """A model that takes other images."""
    sides = [side if side > 1 else 3 for side in models.SIDES]
    return "digits-cnn", models.tensor(np.zeros((2, *sides), np.float32))


INT8 = {"precision": "int8"}
OPEN = {"dynamic_sequence": True}
NONE, HOLED = np.ones((0, 4), np.float32), np.full((4, 4), np.nan, np.float32)
BRANCHES = "the model branches on a size that is open: a file gives something else at "
OTHER = "the file does not give what the model gives: its"
TIME = "LiteRT's loops over time"
UNKNOWN = "unknown precision 'int4': float32"


def windowed(length):
    x = np.random.default_rng(length).normal(size=(2, length, 4)).astype(np.float32)
    return lambda m: (m.built(m.Function(m.window), m.tensor(x)), m.tensor(x))


def of(make):
    """A model that the helpers make of a name, and its inputs."""
    return lambda m: getattr(m, make)()


def sequence(m):
    return m.recurrent(), m.tensor(LEFT[:60].reshape(15, 5, 4))


ALL = ("onnx", "openvino", "litert")
REFUSALS = [  # kinds, what is given, settings, what is said
    (ALL, lambda m: (m.eigenvalues(), m.tensor(NONE)), INT8, "calibration needs samples"),
    (ALL, lambda m: (m.eigenvalues(), m.tensor(HOLED)), INT8, "calibration samples hold"),
    (ALL, *given("eigenvalues", precision="int4"), UNKNOWN),
    (["onnx"], *given("nothing", 4, 3, **INT8), "the model has no layer that ONNX Runtime quanti"),
    (["onnx"], *given("random", 64, 5), OTHER),
    (ALL, *given("eigenvalues"), "(?i)eig"),
    (ALL, misfit, {}, ""),
    (["onnx"], of("words"), {}, "a file's outputs are tensors, not str|are texts"),
    pytest.param(("onnx", "openvino"), *given("branch"), "data-dependent", marks=PT),
    pytest.param(["onnx"], windowed(6), OPEN, re.escape(f"{BRANCHES}(2, 9, 4)"), marks=PT),
    pytest.param(["openvino"], windowed(12), OPEN, re.escape(f"{BRANCHES}(2, 8, 4)"), marks=PT),
    pytest.param(["onnx"], windowed(6), OPEN, "the file does not give what the", marks=TF),
    pytest.param(["onnx"], of("words"), INT8, "are texts", marks=TF),
    pytest.param(["onnx"], *given("unbuilt"), "the model has no variables yet", marks=TF),
    pytest.param(["litert"], sequence, {}, f"{TIME}.*dynamic_batch=False$", marks=TF),
    pytest.param(
        ["litert"],
        sequence,
        INT8 | {"dynamic_batch": False},
        rf"{TIME} \(LSTM, GRU\) can't be in int8$",
        marks=TF,
    ),
    *(
        pytest.param(["onnx"], of(make), {"dynamic_batch": False}, message, marks=TF)
        for make, message in (
            ("lookup", "the model looks values up in"),
            ("stateful", "kept would lose the state"),
        )
    ),
]


@BOTH
@pytest.mark.parametrize(("kinds", "make", "settings", "message"), REFUSALS)
def test_a_refusal_says_why_and_leaves_no_file(
    technique, models, model, tmp_path, kinds, make, settings, message
):
    source, x = make(models)
    source = model(source) if isinstance(source, str) else source
    for kind in set(kinds) & set(models.KINDS):
        path = tmp_path / f"refused.{SUFFIX[kind]}"
        with pytest.raises((ValueError, NotImplementedError), match=message) as caught:
            getattr(technique, f"export_{kind}")(source, x, path, **settings)
        assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@PT
def test_pt_a_branch_that_computes_the_same_on_both_sides_is_taken(technique, models, tmp_path):
    x = models.tensor(np.ones((2, 5, 4), np.float32))
    technique.export_onnx(models.Function(models.same_on_both_sides), x, tmp_path / "file", **OPEN)


@BOTH
def test_settings_and_machines_that_lack_something(technique, models, write, tmp_path):
    with pytest.raises(FileNotFoundError, match="no folder "):
        technique.export_onnx(*given("nothing", 4, 3)[0](models), tmp_path / "nowhere" / "file")
    with pytest.raises(ValueError, match="unknown precision 'int8': float32 or bfloat16"):
        load("openvino", write("openvino"), precision="int8")
    with pytest.raises(NotImplementedError, match="this ONNX Runtime has no TensorRT"):
        load("tensorrt", write("onnx"))


def test_complex_outputs_are_compared_in_both_of_their_parts():
    wanted = [np.array([1 + 1j])]
    for value, said in ((1 + 1j, None), (1 + 2j, "its output is 70.7% from the model's")):
        run = runtimes.predictor([], ["output"], lambda arrays, value=value: [np.array([value])])
        with nullcontext() if said is None else pytest.raises(ValueError, match=said):
            runtimes.check_same(run, [((), wanted)], bound=1e-3)


# The benchmark -----------------------------------------------------------------------------------


def test_every_row_has_a_route_and_half_precision_its_own_bar():
    for variant in TECHNIQUE.variants:
        assert variant.settings["route"] in ROUTES
        half = any("precision" in variant.settings.get(part, {}) for part in ("export", "load"))
        assert (variant.loss_tolerance is not None) == half
