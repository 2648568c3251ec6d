"""Exported files predict what their models do, in every runtime, alike from both frameworks.

Each framework runs in a process of its own (`export_worker.py`), tf_keras in a third.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from bench.deployment.bench_export import ROUTES, TECHNIQUE, prepare
from shared import operators
from shared.provenance import class_names
from shared.runtimes import check_same, load_onnx, predictor
from shared.specs import TASKS
from tests import workers

WORKERS = ("pt", *workers.keras())
NEUTRAL = 1e-4  # outputs of both frameworks' files in one runtime, as a share of the largest
ROUNDED = 1e-5  # outputs of a file and of its model


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: tmp_path_factory.mktemp(name) for name in WORKERS}


@pytest.fixture(scope="module")
def evidence(folders):
    """What each worker found: {"pt": {scenario: ...}, ...}."""
    return workers.run("deployment.export_worker", WORKERS, lambda name: [folders[name]])


@pytest.fixture(params=["pt", "tf"])
def found(request, evidence):
    return evidence[request.param]


@pytest.fixture(params=WORKERS)
def every(request, evidence):
    """Both flavours of Keras are written by the same code: what legacy Keras shares is not here."""
    return evidence[request.param]


def apart(ours, theirs):
    """The largest difference, as a share of the largest value."""
    ours, theirs = np.array(ours), np.array(theirs)
    assert ours.shape == theirs.shape
    return np.abs(ours - theirs).max() / np.abs(theirs).max()


# ONNX -------------------------------------------------------------------------------------------


def test_onnx_predicts_what_the_model_does_at_any_batch_size_and_length(every):
    assert every["tasks"].keys() >= {"digits-cnn", "text-gpt"}
    for task, case in every["tasks"].items():
        for ours, theirs in zip(case["file"], case["own"], strict=True):
            assert np.abs(theirs).max() > 0.1, task
            assert apart(ours, theirs) < ROUNDED, task
            assert (np.argmax(ours, -1) == np.argmax(theirs, -1)).mean() > 0.999, task
        assert case["threads"] == 1


@pytest.mark.parametrize("task", ["digits-cnn", "text-gpt", "photos-resnet50"])
def test_on_neutral_ground_twins_agree(evidence, task):
    """The same weights and inputs, exported by both frameworks, in the same ONNX Runtime."""
    names = WORKERS if task != "photos-resnet50" else WORKERS[:2]
    pt, *others = (evidence[name]["tasks"][task]["file"] for name in names)
    for other in others:
        assert all(apart(*pair) < NEUTRAL for pair in zip(other, pt, strict=True))


def test_files_hold_the_operators_of_their_model(every):
    """And not, say, a training graph: BatchNorm is folded, dropout is gone."""
    cnn, gpt = (every["tasks"][task] for task in ("digits-cnn", "text-gpt"))
    assert cnn["operators"]["Conv"] == 4
    assert not {"BatchNormalization", "Dropout"} & cnn["operators"].keys()
    assert gpt["operators"]["Softmax"] == 2
    runs = cnn["optimized"]
    assert runs != cnn["operators"]
    assert sum(n for name, n in runs.items() if "Conv" in name) == 4
    assert "Relu" not in runs  # it is part of the convolution


def test_one_file_with_all_weights_that_says_what_it_is(every):
    for task, case in every["tasks"].items():
        assert case["files"] == [f"{task}.onnx"]
        about = case["metadata"]
        assert about == case["expected metadata"]
        assert about["made_by"] == "twinbench"
        assert about["task"] == task
        assert len(about["weights_sha256"]) == 64
        assert json.loads(about["class_names"]) == class_names(TASKS[task].dataset)


def test_the_model_is_left_as_it_is(every):
    assert all(case["kept"] for case in every["tasks"].values())
    assert all(case["kept"] for case in every["foreign"].values())
    if every.framework == "pt":  # Two, inside, head, norm (frozen), drop
        modes = every["foreign"]["two inputs"]["modes"]
        assert modes == [True, True, True, False, True]


def test_class_names_are_as_many_as_classes():
    assert class_names(TASKS["digits-cnn"].dataset) == list("0123456789")
    names = class_names(TASKS["text-gpt"].dataset)
    assert len(names) == len(set(names)) == TASKS["text-gpt"].model.vocabulary
    assert len(class_names(TASKS["photos-resnet50"].dataset)) == 6
    with pytest.raises(ValueError, match="photos are the names of its folders"):
        class_names(TASKS["photos"].dataset)


# A clean environment ----------------------------------------------------------------------------

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


def test_a_file_loads_where_only_onnx_runtime_is(every, folders, tmp_path):
    """An interpreter without site-packages, this project and environment, but two packages."""
    packages = Path(sysconfig.get_paths()["purelib"])
    for name in ("onnxruntime", "numpy", "numpy.libs", "flatbuffers", "google", "packaging"):
        if (packages / name).exists():
            (tmp_path / name).symlink_to(packages / name)
    path = folders[every.name] / "digits-cnn.onnx"
    assert every["tasks"]  # the file is there
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", CLEAN, tmp_path, path],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"]},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["absent"] == 8
    assert answer["task"] == "digits-cnn"
    assert answer["shape"] == ([5, 1, 32, 32] if every.framework == "pt" else [5, 32, 32, 1])
    expected = np.argmax(answer["logits"], -1)
    assert answer["classes"] == [str(number) for number in expected]
    x = np.random.default_rng(0).normal(size=answer["shape"]).astype("float32")
    np.testing.assert_allclose(answer["logits"], load_onnx(path, threads=1)(x), atol=1e-5)


# OpenVINO and LiteRT ----------------------------------------------------------------------------


def test_openvino_predicts_what_the_model_does_in_float32(found):
    case = found["openvino"]
    assert apart(case["float32"], case["own"]) < ROUNDED
    assert apart(case["one"], case["own"][:1]) < ROUNDED
    assert case["says"] == [1, "float32", True]
    assert case["weights"] >= 0.9 * case["parameters"]  # not rounded to float16 by itself


def test_openvino_takes_bfloat16_where_it_is_asked_for_alone(found):
    case = found["openvino"]
    if "no bfloat16" in case:
        assert "OpenVINO computes in f32 on this CPU" in case["no bfloat16"]
        return
    assert 1e-4 < apart(case["bfloat16"], case["own"]) < 5e-2


def test_other_runtimes_take_texts_of_any_length(found):
    case = found["text"]
    runtimes = {"openvino"} | ({"litert"} if found.framework == "tf" else set())
    assert case.keys() == {"own"} | runtimes
    for runtime in runtimes:
        assert apart(case[runtime], case["own"]) < ROUNDED, runtime


def test_openvino_reports_nothing_to_its_makers(found):
    assert found["openvino"]["reports to its makers"] is False


def test_tf_litert_predicts_what_the_model_does(evidence):
    case = evidence["tf"]["litert"]
    said = "ValueError: unknown precision 'int4': float32, float16 or int8"
    assert case["unknown to litert"] == said
    for precision, bar in (("float32", ROUNDED), ("float16", 5e-3)):
        assert apart(case[precision], case["own"]) < bar
        assert apart(case[f"{precision} one"], case["own"][:1]) < bar
        assert case[f"{precision} says"]
    assert apart(case["float16"], case["own"]) > ROUNDED
    assert case["float16 bytes"] < 0.65 * case["float32 bytes"]


# int8 -------------------------------------------------------------------------------------------

LAYERS = 1 + 3 * 3 + 2 + 1  # stem, three blocks, shortcuts, head


def test_int8_runs_every_layer_over_integers_and_predicts_nearly_the_same(found):
    case = found["int8"]
    runtimes = {"onnx", "openvino"} | ({"litert"} if found.framework == "tf" else set())
    assert case["files"].keys() == runtimes
    for runtime, given in case["files"].items():
        assert sum(given["layers"].values()) == LAYERS, (runtime, given["layers"])
        assert 1e-3 < apart(given["out"], case["own"]) < 0.1, runtime
        assert apart(given["one"], given["out"][:1]) < 1e-5, runtime
        assert given["says"], runtime
        assert given["share"] < 0.75, runtime  # of the weights in float32; the graph is as large


def test_only_layers_are_counted():
    found = operators._layers({"Convert": 4, "Convolution": 2, "Add": 3, "FullyConnected": 1})
    assert found == {"Convolution": 2, "FullyConnected": 1}


def test_float32_files_have_no_layer_over_integers(found):
    assert found["openvino"]["integer layers"] == {}
    assert found["tasks"]["digits-cnn"]["integer layers"] == {}


def test_int8_of_a_fixed_batch(found):
    case = found["int8"]["fixed batch"]
    assert apart(case["out"], case["own"]) < 0.1
    if found.framework == "tf":
        case = found["int8"]["fixed batch litert"]
        assert apart(case["out"], case["own"]) < 0.1


def test_int8_refuses_what_it_cannot_be_calibrated_with(found):
    said = dict(found["int8"]["refusals"])
    no_layer = said.pop("onnx no layer")
    assert no_layer == "NotImplementedError: the model has no layer that ONNX Runtime quantizes"
    assert said.keys() == {
        f"{runtime} {name}"
        for runtime in ("onnx", "openvino", *(["litert"] if found.framework == "tf" else []))
        for name in ("none", "not finite")
    }
    for name, line in said.items():
        wanted = "calibration samples hold" if "finite" in name else "calibration needs samples"
        assert line.startswith(f"ValueError: {wanted}"), name


# Models that are not ours -----------------------------------------------------------------------


def test_models_that_are_not_ours_in_every_runtime(every):
    case = every["foreign"]["two inputs"]
    for runtime in runtimes_of(every):
        for size, given in case[runtime].items():
            for ours, theirs in zip(given, case["own"], strict=True):
                assert apart(ours, theirs[: int(size)]) < 1e-5, (runtime, size)


def test_twins_agree_on_a_model_that_is_not_ours(evidence):
    pt, *others = (evidence[name]["foreign"]["two inputs"]["onnx"]["64"] for name in WORKERS)
    assert all(
        apart(ours, theirs) < 1e-5 for o in others for ours, theirs in zip(o, pt, strict=True)
    )


def runtimes_of(found):
    return ("onnx", "openvino", *(["litert"] if found.framework == "tf" else []))


def test_eleven_outputs_come_in_the_model_s_order(found):
    """As text, output_10 comes before output_2."""
    for kind in runtimes_of(found):
        case = found["names"][f"eleven {kind}"]
        assert case["outputs"] == "tuple"
        assert case["apart"] < 1e-5, kind


def test_inputs_and_outputs_keep_their_names(found):
    """A dict in; a dataclass out (PyTorch), a dict out and adapted statistics in it (Keras)."""
    outputs = {"pt": ["logits", "inside.z", "inside.a"], "tf": ["logits", "inside"]}
    for kind in runtimes_of(found):
        case = found["names"][f"named {kind}"]
        assert set(case["inputs"]) == {"left", "right"}
        assert set(case["outputs"]) == set(outputs[found.framework])
        assert case["apart"] < 1e-5, kind
        said = found["names"][f"misnamed {kind}"]
        assert said.startswith("ValueError: the model takes ")
        assert said.endswith(", not left, wrong")


def test_a_file_is_compared_with_its_model_before_it_is_written(found, folders):
    said = found["names"]["random"]
    assert said.startswith("NotImplementedError: the file does not give what the model gives: its")
    assert said.endswith("from the model's")
    assert not list(folders[found.name].glob("refused-*"))
    assert found["names"]["no folder"].startswith("FileNotFoundError: no folder ")


def test_what_has_no_tensors_is_refused(found):
    if found.framework == "pt":
        assert found["names"]["object"] == (
            "NotImplementedError: a file's outputs are tensors, not str"
        )
        return
    assert "are texts" in found["names"]["text"]
    assert found["names"]["text"].startswith("NotImplementedError: ")
    assert found["names"]["text int8"] == found["names"]["text"]


def test_tf_loops_and_groups_of_keras(evidence):
    found = evidence["tf"]
    for kind in runtimes_of(found):
        assert found["names"][f"lstm {kind}"]["apart"] < 1e-5, kind
    said = found["names"]["open loop"]
    assert said.startswith("NotImplementedError: LiteRT's loops over time")
    assert said.endswith("dynamic_batch=False")
    said = found["names"]["loop in int8"]
    assert said == "NotImplementedError: LiteRT's loops over time (LSTM, GRU) can't be in int8"


def test_tf_litert_needs_no_other_runtime(evidence):
    assert evidence["tf"]["names"]["litert alone"] is None


# Bad input --------------------------------------------------------------------------------------

SIDES = {"pt": "(any, 1, 32, 32)", "tf": "(any, 32, 32, 1)"}


def test_what_does_not_fit_gets_one_clear_line(found):
    refusals, takes = found["refusals"], SIDES[found.framework]
    given = {"pt": "(3, 1, 32, 32)", "tf": "(3, 32, 32, 1)"}[found.framework]
    smaller = {"pt": "(3, 1, 31, 32)", "tf": "(3, 32, 31, 1)"}[found.framework]
    for runtime in ("onnx", "openvino", *(["litert"] if found.framework == "tf" else [])):
        shape, rank = refusals[f"{runtime} shape"], refusals[f"{runtime} rank"]
        assert shape.startswith("ValueError: input '")
        assert shape.endswith(f"takes float32 {takes}, not float32 {smaller}")
        assert rank.endswith(f"takes float32 {takes}, not float32 {given.replace('3, ', '', 1)}")
        assert refusals[f"{runtime} dtype"].endswith(f"takes float32 {takes}, not float64 {given}")
        assert refusals[f"{runtime} number"].startswith("ValueError: the model takes 1 inputs (")
        assert refusals[f"{runtime} number"].endswith("), not 2")
        assert refusals[f"{runtime} after"] is True
        assert refusals[f"{runtime} layout"] is True
        assert refusals[f"{runtime} byte order"] is True
    assert "takes float32 (3, " in refusals["other batch"]
    assert refusals["the batch"] is True


def test_damaged_and_foreign_files_get_one_clear_line(found):
    refusals = found["refusals"]
    for runtime in ("onnx", "openvino", *(["litert"] if found.framework == "tf" else [])):
        for kind in ("half", "empty", "text"):
            said = refusals[f"{runtime} {kind}"]
            assert said is not None, (runtime, kind)
            assert said.startswith("ValueError: ")
            assert "damaged." in said
            assert "\n" not in said
            counted = refusals[f"{runtime} {kind} counted"]
            assert counted.startswith("ValueError: ")
            assert "damaged." in counted
            assert "\n" not in counted
            assert refusals[f"operators {kind}"].startswith("ValueError: ")
        assert refusals[f"{runtime} gone"].startswith("FileNotFoundError: no file ")
    assert "unchecked.onnx" in refusals["onnx unchecked"]
    assert refusals["onnx unchecked"].startswith("ValueError: ONNX Runtime can't load ")
    assert refusals["openvino without weights"].startswith("ValueError: OpenVINO can't load ")


def test_tf_litert_files_are_ours_and_damaged_or_of_others(evidence):
    refusals = evidence["tf"]["refusals"]
    for kind in ("tail", "flipped", "renamed"):
        said = refusals[f"litert {kind}"]
        assert said is not None, kind
        assert said.startswith("ValueError: LiteRT can't load "), said
        assert "\n" not in said
    assert refusals["litert of others"] == [{}, {}]


def test_a_missing_package_is_named(found):
    names = {"onnxruntime": "onnxruntime", "onnx": "onnx", "openvino": "openvino"}
    names["ai_edge_litert.interpreter"] = "ai-edge-litert"
    names |= {"pt": {"onnxscript": "onnxscript"}, "tf": {"tf2onnx.convert": "tf2onnx"}}[
        found.framework
    ]
    for module, package in names.items():
        said = found["refusals"][f"without {module}"]
        assert said == f"ModuleNotFoundError: {package} is not installed: pip install {package}"


def test_an_operator_that_the_format_lacks_is_named(found):
    refusals = found["refusals"]
    kinds = {"pt": ("onnx", "xml"), "tf": ("onnx", "xml", "tflite")}[found.framework]
    for kind in kinds:
        said = refusals[f"operator {kind}"]
        assert said.startswith("NotImplementedError: "), kind
        assert "eig" in said.lower()
        assert "\n" not in said
        misfit = refusals[f"misfit {kind}"]
        assert misfit.startswith(("NotImplementedError: ", "ValueError: ")), kind
        assert "\n" not in misfit
    if found.framework == "pt":
        assert "data-dependent" in refusals["branch onnx"]
        assert "data-dependent" in refusals["branch xml"]
    else:
        assert refusals["unbuilt"].startswith("ValueError: the model has no variables yet")


def test_a_branch_on_an_open_size_is_seen(found):
    refusals = found["refusals"]
    if found.framework == "tf":
        assert refusals["lookup"].startswith("NotImplementedError: the model looks values up in")
        assert refusals["stateful"].startswith("NotImplementedError: kept would lose the state")
        assert refusals["window"].startswith("NotImplementedError: the file does not give what the")
        return
    branches = "NotImplementedError: the model branches on a size that is open: a file gives "
    assert refusals["window of 6 onnx"] == branches + "something else at (2, 9, 4)"
    assert refusals["window of 12 xml"] == branches + "something else at (2, 8, 4)"
    assert refusals["same on both sides"] is None


def test_no_refused_file_is_left(found, folders):
    assert found["refusals"]
    assert not list(folders[found.name].glob("refused*"))


def test_settings_and_machines_that_lack_something(found):
    refusals = found["refusals"]
    for runtime in ("onnx", "openvino"):
        said = found["litert"][f"unknown to {runtime}"]
        assert said == "ValueError: unknown precision 'int4': float32 or int8"
    assert refusals["precision"] == "ValueError: unknown precision 'int8': float32 or bfloat16"
    assert refusals["tensorrt"].startswith("NotImplementedError: this ONNX Runtime has no TensorRT")


# The benchmark ----------------------------------------------------------------------------------


def test_complex_outputs_are_compared_in_both_of_their_parts():
    wanted = [np.array([1 + 1j])]
    for value, said in ((1 + 1j, None), (1 + 2j, "its output is 70.7% from the model's")):
        run = predictor([], ["output"], lambda arrays, value=value: [np.array([value])])
        with nullcontext() if said is None else pytest.raises(ValueError, match=said):
            check_same(run, [((), wanted)], bound=1e-3)


def test_what_pytorch_lacks_is_said_before_anything_is_made():
    framework = SimpleNamespace(__name__="pt_impl")
    work = SimpleNamespace(settings={"route": "litert"})
    with pytest.raises(NotImplementedError, match=r"PyTorch has no LiteRT exporter.*litert-torch"):
        prepare(framework, work)


def test_every_row_has_a_route_and_half_precision_its_own_bar():
    for variant in TECHNIQUE.variants:
        assert variant.settings["route"] in ROUTES
        half = any("precision" in variant.settings.get(part, {}) for part in ("export", "load"))
        assert (variant.loss_tolerance is not None) == half
