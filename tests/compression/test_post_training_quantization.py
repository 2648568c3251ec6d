"""Quantized files predict what the model does, over integers, are small, and hold no code."""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import re
from types import SimpleNamespace

import numpy as np
import pytest

from shared import onnx_quantization, operators
from shared.specs import CNNSpec
from tests.compression import quick, teaching
from tests.frameworks import apart

FRAMEWORKS = ("pt", "tf")
MODELS = "quantization"
PT, TF = (pytest.mark.only(name) for name in FRAMEWORKS)
SPEC = CNNSpec((16, 16, 1), ((16, 2), (64, 1), (128, 2)), num_classes=10)
IMAGES = np.random.default_rng(5).normal(size=(120, 16, 16, 1)).astype(np.float32)
INT8 = ("static", "dynamic", "onnxruntime")
WAYS = (*INT8, "float32", "onnxruntime float32")
OPERATORS = {  # that run over integers: three convolutions and a dense head
    ("pt", "static"): {"onednn::qconv": 3, "onednn::qlinear": 1},
    ("tf", "static"): {"CONV_2D(int8, int8)": 3, "FULLY_CONNECTED(int8, int8)": 1},
    ("pt", "onnxruntime"): {"QLinearConv": 3, "QGemm": 1},
    ("tf", "onnxruntime"): {"QLinearConv": 3, "QGemm": 1},
    ("pt", "dynamic"): {"onednn::qlinear": 1},
    # Kernels of 1,024 weights and more: not the first convolution's 144.
    ("tf", "dynamic"): {"CONV_2D(float32, int8)": 2, "FULLY_CONNECTED(float32, int8)": 1},
}


def write(technique, models, way, model, x, path, **settings):
    """The file of a model."""
    if way == "float32":
        return models.int8_files.keep_float32(model, x, path)
    if way == "onnxruntime float32":
        return technique.keep_onnxruntime_float32(model, x, path)
    if way == "onnxruntime":
        return technique.quantize_onnxruntime_int8(model, x, path)
    quantized = getattr(technique, f"apply_{way}_int8")(model, x, **settings)
    return models.int8_files.save_int8(quantized, model, x, path)


def load(technique, models, way, path, **settings):
    read = technique.load_onnxruntime if "onnx" in way else models.int8_files.load_int8
    return read(path, **settings)


@pytest.fixture(scope="module")
def cnn(kit, models):
    """A model of the suite, its inputs, and what it gives for the first 64 of them."""
    model, x = kit.models.build(SPEC, teaching.teacher_weights(SPEC)), models.images_of(IMAGES)
    return model, x, models.numpy(kit.training.make_predict(model)(x[:64]))


@pytest.fixture(scope="module")
def files(technique, models, cnn, tmp_path_factory):
    """`files(way)`: a file of the CNN, its reader, and what that predicts.

    The static one is compiled as users have it, and all others are its kind.
    """

    @functools.cache
    def make(way):
        model, x, _ = cnn
        path = tmp_path_factory.mktemp("files") / way
        assert write(technique, models, way, model, x[64:], path) == path
        with contextlib.nullcontext() if way == "static" else quick.without_code():
            predict = load(technique, models, way, path, threads=1)
        return SimpleNamespace(path=path, predict=predict, logits=models.numpy(predict(x[:64])))

    return make


def ran(models, file, way, x):
    """Operators over integers of one prediction."""
    if "onnx" in way:
        return onnx_quantization.integer_operators(file.path, (np.asarray(x),))
    return models.integers.integer_operators(file.predict, file.path, x)


@pytest.mark.parametrize("way", ["float32", "onnxruntime float32"])
def test_float32_files_predict_what_the_model_does(models, cnn, files, way):
    assert apart(files(way).logits, cnn[2]) < 1e-5
    assert ran(models, files(way), way, cnn[1][:64]) == {}


@pytest.mark.parametrize("way", INT8)
def test_int8_files_predict_nearly_what_the_model_does(models, framework, cnn, files, agrees, way):
    """They round to 256 levels: not the same values, and the same classes but where it is close.

    ONNX Runtime is the same tool on both sides.
    """
    logits = files(way).logits
    assert 1e-5 < apart(logits, cnn[2]) < 0.05
    assert np.mean(logits.argmax(-1) == cnn[2].argmax(-1)) > 0.9
    found = ran(models, files(way), way, cnn[1][:64])
    wanted = OPERATORS[framework, way]
    counts = {start: sum(n for k, n in found.items() if k.startswith(start)) for start in wanted}
    assert counts == wanted, found
    if way != "dynamic":
        agrees(way, {"logits": logits}, {"static": 0.05, "onnxruntime": 1e-3}[way])


@pytest.mark.parametrize("way", ["static", "dynamic"])
def test_a_quantized_model_in_memory_predicts_what_its_file_does(
    technique, models, cnn, files, way
):
    quantized = getattr(technique, f"apply_{way}_int8")(cnn[0], cnn[1][64:])
    # A value on an edge may round elsewhere.
    assert apart(models.numpy(models.run(quantized, cnn[1][:64])), files(way).logits) < 1e-2


@pytest.mark.parametrize(
    ("way", "whole"), [("static", "float32"), ("onnxruntime", "onnxruntime float32")]
)
def test_files_shrink(files, way, whole):
    assert files(way).path.stat().st_size < files(whole).path.stat().st_size / 3.3


@pytest.mark.parametrize("way", ["static", "onnxruntime"])
def test_any_number_of_samples(technique, models, framework, cnn, files, tmp_path, way):
    """A file that is loaded may be written over."""
    path = tmp_path / "file"
    path.write_bytes(files(way).path.read_bytes())
    with quick.without_code():
        predict = load(technique, models, way, path)
    path.write_bytes(b"something else")
    for size in (1,) if framework == "pt" else (7, 1):  # each one compiles in PyTorch
        assert apart(models.numpy(predict(cnn[1][:size])), files(way).logits[:size]) < 1e-6


def test_the_model_is_left_as_it_was(kit, cnn, files, framework):
    for way in WAYS:
        files(way)
    assert teaching.farthest(teaching.weights_of(kit, cnn[0]), teaching.teacher_weights(SPEC)) == 0
    assert framework == "tf" or cnn[0].training


@TF
@pytest.mark.parametrize("way", ["float32", "static", "dynamic"])
def test_tf_xnnpack_runs_the_whole_file(files, way):
    assert operators.litert_delegated(files(way).path)


@PT
@quick.without_code()
def test_pt_layers_are_found_whichever_way_a_model_calls_them(technique, models, cnn, tmp_path):
    model, x, path = models.Functions(), cnn[1], tmp_path / "file"
    write(technique, models, "static", model, x, path)
    predict = load(technique, models, "static", path)
    assert sum(models.integers.integer_operators(predict, path, x).values()) == 2
    assert 1e-5 < apart(models.numpy(predict(x)), models.numpy(models.evaluate(model, x))) < 0.05


@PT
@quick.without_code()
def test_pt_dynamic_files_leave_convolutions_alone(technique, models, cnn, tmp_path):
    """What a convolution gives is what it gives in float32, but for rounding errors of that."""
    model, path = models.TwoOutputs(), tmp_path / "file"
    write(technique, models, "dynamic", model, cnn[1], path)
    predicted, wanted = load(technique, models, "dynamic", path)(cnn[1]), model(cnn[1])
    assert apart(models.numpy(predicted["conv"]), models.numpy(wanted["conv"])) < 1e-6
    assert 1e-4 < apart(models.numpy(predicted["head"]), models.numpy(wanted["head"])) < 0.05


@quick.without_code()
def test_activations_of_16_bits(technique, models, tmp_path, framework):
    """They are closer to the model, where the runtime has them; or nothing is written.

    The kernel lies on a grid of 8 bits, so that only activations are rounded.
    """
    random = np.random.default_rng(5)
    kernel = random.integers(-127, 128, (24, 48)).astype(np.float32) / 127
    kernel[0] = 1
    rows = random.normal(size=(40, 24)).astype(np.float32)
    model, x = models.linear(kernel), models.tensor(rows)

    def off(bits):
        path = tmp_path / str(bits)
        write(technique, models, "static", model, x, path, activation_bits=bits)
        predicted = load(technique, models, "static", path)(x)
        return apart(models.numpy(predicted), rows @ kernel)

    with pytest.raises(ValueError, match="activation_bits must be 8 or 16, not 4"):
        off(4)
    if framework == "tf":
        assert off(16) < off(8) / 50
    else:
        with pytest.raises(NotImplementedError, match="oneDNN's integer kernels take "):
            off(16)
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("way", [pytest.param("static", marks=TF), "onnxruntime"])
def test_threads_are_those_asked_for(technique, models, cnn, files, way):
    """TorchInductor uses the one pool of the process."""
    path, x = files(way).path, cnn[1][:1]
    load(technique, models, way, path, threads=1)(x)
    before = len(os.listdir("/proc/self/task"))
    predict = load(technique, models, way, path, threads=3)
    predict(x)
    assert len(os.listdir("/proc/self/task")) - before == 2  # and the caller's own
    assert predict.threads == 3


# Bad input ---------------------------------------------------------------------------------------


def of(make):
    """The model that the helpers make of a name, with the images."""
    return lambda m, model, x: (getattr(m, make)(), x)


NOT_CAPTURED = "torch.export cannot capture it: "
NOT_CONVERTED = "LiteRT's converter refuses it: "
OF_LITERT = ("static", "dynamic", "float32")
REFUSALS = [  # what is given, what is said, and which ways refuse it
    (
        lambda m, model, x: (model, x[:0]),
        "inputs must have samples, as many in each tensor, not [0]",
        WAYS,
    ),
    (
        lambda m, model, x: (model, IMAGES),
        "inputs must be tensors with samples along an axis, not ndarray",
        WAYS,
    ),
    (
        lambda m, model, x: (model, (x, x[:5])),
        "inputs must have samples, as many in each tensor, not [120, 5]",
        WAYS,
    ),
    (lambda m, model, x: (model, x * np.inf), "inputs hold values that are not finite", WAYS),
    (
        lambda m, model, x: (model, m.images_of(IMAGES[..., [0, 0]])),
        "the model takes no samples of float32 ",
        WAYS,
    ),
    (
        lambda m, model, x: (model, m.images_of(IMAGES.astype(float))),
        "the model takes no samples of float64 ",
        WAYS,
    ),
    (of("no_tensor"), "the model returns str, which is no tensor", WAYS),
    (of("nothing"), "the model has no layer that ", INT8),
    pytest.param(
        of("Twice"), "a layer is called twice, the one of conv.weight", ["static"], marks=PT
    ),
    pytest.param(
        lambda m, model, x: (m.Branches(), m.images_of(np.zeros((8, 3, 3, 6), np.float32))),
        NOT_CAPTURED,
        WAYS,
        marks=PT,
    ),
    pytest.param(of("inverse"), NOT_CONVERTED, OF_LITERT, marks=TF),
    pytest.param(of("unbuilt"), "the model has no variables yet", WAYS, marks=TF),
    pytest.param(of("recurrent"), "cannot calibrate inside of a loop", ["static"], marks=TF),
    pytest.param(
        lambda m, model, x: (m.masked(), m.masked_inputs()), "on a grid of", ["static"], marks=TF
    ),
]


@pytest.mark.parametrize(("make", "message", "ways"), REFUSALS)
def test_a_refusal_says_why_and_writes_nothing(
    technique, models, cnn, tmp_path, make, message, ways
):
    given = make(models, *cnn[:2])
    for way in ways:
        with pytest.raises((ValueError, NotImplementedError), match=re.escape(message)) as caught:
            write(technique, models, way, *given, tmp_path / "x")
        assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_far_off_is_refused_with_what_8_bits_do_to_the_inputs(
    kit, technique, models, cnn, tmp_path, monkeypatch
):
    """Which says whether it is the model that amplifies rounding."""
    monkeypatch.setattr(models.int8_files, "MOST_APART", -1.0)  # no file is as near as this
    with pytest.raises(RuntimeError) as caught:
        write(technique, models, "static", *cnn[:2], tmp_path / "x")
    said = re.fullmatch(
        r"outputs of the file are [\d.]+% off the model's, which move by ([\d.]+)% "
        "where its inputs alone have 8 bits",
        str(caught.value),
    )
    step = (max(IMAGES[:32].max(), 0) - min(IMAGES[:32].min(), 0)) / 255
    rounded = models.images_of(np.float32(np.round(IMAGES[:32] / step) * step))
    moved = apart(models.numpy(kit.training.make_predict(cnn[0])(rounded)), cnn[2][:32])
    assert moved > 1e-4
    assert float(said[1]) == pytest.approx(100 * moved, rel=0.05, abs=0.01)
    assert list(tmp_path.iterdir()) == []


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("way", ["static", "onnxruntime"])
def test_damaged_and_foreign_files_get_one_clear_line_and_run_nothing(
    technique, models, cnn, files, tmp_path, way
):
    whole, mark, damaged = files(way).path.read_bytes(), tmp_path / "mark", tmp_path / "damaged"
    bomb = pickle.dumps(Bomb(mark))
    contents = {f"first {share}%": whole[: len(whole) * share // 100] for share in (0, 10, 60, 99)}
    contents |= {"text": b"no model\n" * 99, "pickle": bomb, "cut short": whole[:-16]}
    contents |= models.bombs(mark, Bomb(mark), whole) if way == "static" else {}
    for name, content in contents.items():
        damaged.write_bytes(content)
        with pytest.raises(ValueError, match="/damaged is not a complete ") as caught:
            load(technique, models, way, damaged)(cnn[1][:1])
        assert "\n" not in str(caught.value), name
        assert not mark.exists(), name
    pickle.loads(bomb)
    assert mark.exists()  # the bomb is one
    with pytest.raises(FileNotFoundError, match="there is no file "):
        load(technique, models, way, tmp_path / "none")
