"""Quantized files predict what the model does, over integers, are small, and hold no code.

Each framework runs in a process of its own (`post_training_quantization_worker.py`).
"""

from __future__ import annotations

import re

import numpy as np
import pytest

from tests import workers

WORKERS = ("pt", "tf")
WRITERS = (
    "keep_float32",
    "apply_static_int8",
    "apply_dynamic_int8",
    "keep_onnxruntime_float32",
    "quantize_onnxruntime_int8",
)
LAYERS = 4  # three convolutions and a dense head


@pytest.fixture(scope="module")
def evidence():
    """What each worker found: {"pt": {scenario: ...}, ...}."""
    return workers.run("compression.post_training_quantization_worker", WORKERS)


@pytest.fixture(params=WORKERS)
def found(request, evidence):
    return evidence[request.param]


def apart(ours, theirs):
    """Relative L2."""
    ours, theirs = np.array(ours), np.array(theirs)
    assert ours.shape == theirs.shape
    return np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)


def agreement(ours, theirs):
    """Share of samples with the same class."""
    return np.mean(np.argmax(ours, -1) == np.argmax(theirs, -1))


@pytest.mark.parametrize("way", ["float32", "onnxruntime float32"])
def test_float32_files_predict_what_the_model_does(found, way):
    case = found["variants"]
    assert apart(case[way]["logits"], case["model"]) < 1e-5
    assert case[way]["operators"] == {}


@pytest.mark.parametrize("way", ["static", "dynamic", "onnxruntime"])
def test_int8_files_predict_nearly_what_the_model_does(found, way):
    """They round to 256 levels: not the same values, and the same classes but where it is close."""
    case = found["variants"]
    assert 1e-5 < apart(case[way]["logits"], case["model"]) < 0.05
    assert agreement(case[way]["logits"], case["model"]) > 0.9


@pytest.mark.parametrize("way", ["static", "dynamic"])
def test_a_quantized_model_in_memory_predicts_what_its_file_does(found, way):
    case = found["variants"][way]
    assert apart(case["in memory"], case["logits"]) < 1e-2  # a value on an edge may round elsewhere


def test_every_layer_of_a_static_file_runs_over_integers(found):
    case = found["variants"]
    operators = {
        ("pt", "static"): {"onednn::qconv": 3, "onednn::qlinear": 1},
        ("tf", "static"): {"CONV_2D(int8, int8)": 3, "FULLY_CONNECTED(int8, int8)": 1},
        ("pt", "onnxruntime"): {"QLinearConv": 3, "QGemm": 1},
        ("tf", "onnxruntime"): {"QLinearConv": 3, "QLinearMatMul": 1},
    }
    for way in ("static", "onnxruntime"):
        ran = case[way]["operators"]
        for start, number in operators[found.framework, way].items():
            assert sum(n for name, n in ran.items() if name.startswith(start)) == number, ran


def test_dynamic_files_quantize_what_their_docstrings_say(found):
    ran = found["variants"]["dynamic"]["operators"]
    if found.framework == "pt":
        assert sum(ran.values()) == 1
        assert "qlinear" in next(iter(ran))
    else:  # kernels of 1,024 weights and more: not the first convolution's 144
        assert ran == {"CONV_2D(float32, int8)": 2, "FULLY_CONNECTED(float32, int8)": 1}


@pytest.mark.parametrize(("way", "whole"), [("static", "float32"), ("onnxruntime",) * 2])
def test_files_shrink(found, way, whole):
    whole = "onnxruntime float32" if way == "onnxruntime" else whole
    case = found["variants"]
    assert case[way]["bytes"] < case[whole]["bytes"] / 3.3
    assert all(case[name]["same path"] for name in (way, whole))


@pytest.mark.parametrize("way", ["static", "onnxruntime"])
def test_any_number_of_samples(found, way):
    case = found["variants"][way]
    for other in case["others"]:
        assert apart(other, case["logits"][: len(other)]) < 1e-6


def test_the_model_is_left_as_it_was(found):
    assert found["variants"]["kept"]
    assert found["variants"]["mode"] in (True, None)


def test_tf_xnnpack_runs_the_whole_file(evidence):
    found = evidence["tf"]["variants"]
    assert [found[name]["delegated"] for name in ("float32", "static", "dynamic")] == [True] * 3


def test_a_file_that_is_loaded_may_be_written_over(found):
    found = found["variants"]
    assert apart(found["overwritten"], found["static"]["logits"][:1]) < 1e-6


def test_the_same_tool_agrees_across_frameworks(evidence):
    """Both models went through their exporter and then through ONNX Runtime's own quantizer."""
    pt, tf = (evidence[name]["variants"]["onnxruntime"]["logits"] for name in WORKERS)
    assert apart(tf, pt) < 1e-3


def test_own_runtimes_agree_across_frameworks(evidence):
    pt, tf = (evidence[name]["variants"]["static"]["logits"] for name in WORKERS)
    assert apart(tf, pt) < 0.05


def test_models_that_are_not_ours(found):
    for name, (expected, *quantized) in found["foreign"].items():
        for logits in quantized:
            assert 1e-5 < apart(logits, expected) < 0.05, name
            assert agreement(logits, expected) > 0.9


def test_twins_agree_on_a_model_that_is_not_ours(evidence):
    pt, tf = (evidence[name]["foreign"]["two inputs"] for name in WORKERS)
    assert apart(pt[0], tf[0]) < 1e-5
    assert apart(pt[2], tf[2]) < 0.02


def test_models_of_other_construction(found):
    """Residual, depthwise, grouped, GELU, LSTM, attention, tied; dicts in, structures out; a table
    of columns of other sizes."""
    cases = dict(found["constructions"])
    if found.framework == "tf":
        assert "cannot calibrate inside of a loop" in cases.pop("recurrent, static")
        assert "on a grid of" in cases.pop("masked, static")
    assert len(cases) >= 8
    for name, apart in cases.items():
        assert isinstance(apart, list), (name, apart)  # of each output
        coarse = "onnxruntime" in name and not workers.has_vnni()  # its weights have 7 bits there
        most = 1e-5 if "float32" in name else 0.12 if coarse else 0.06
        assert max(apart) < most, (name, apart)
        assert "float32" in name or max(apart) > 1e-5, name
        assert "static" not in name or min(apart) > 1e-5, name


def test_pt_dynamic_files_leave_convolutions_alone(evidence):
    """What a convolution gives is what it gives in float32, but for rounding errors of that."""
    found = evidence["pt"]["untouched"]
    assert found["conv"] < 1e-6
    assert 1e-4 < found["head"] < 0.05


def test_activations_of_16_bits(found):
    """They are closer to the model, where the runtime has them; or nothing is written."""
    wide = found["wide"]
    assert wide["4"] == "ValueError: activation_bits must be 8 or 16, not 4"
    if found.framework == "pt":
        assert wide["16"].startswith("NotImplementedError: oneDNN's integer kernels take ")
        assert wide["files"] == ["8"]
    else:
        assert wide["16"] < wide["8"] / 50
        assert wide["files"] == ["16", "8"]


def test_pt_layers_are_found_whichever_way_a_model_calls_them(evidence):
    found = evidence["pt"]["written_otherwise"]
    assert sum(found["operators"].values()) == 2
    assert 1e-5 < found["apart"] < 0.05


def test_pt_a_layer_that_is_called_twice_is_refused(evidence):
    said = evidence["pt"]["refusals"]["twice"]["apply_static_int8"]
    assert said == "NotImplementedError: a layer is called twice, the one of conv.weight"


BAD = {
    "empty": "ValueError: inputs must have samples, as many in each tensor, not [0]",
    "array": "ValueError: inputs must be tensors with samples along an axis, not ndarray",
    "two lengths": "ValueError: inputs must have samples, as many in each tensor, not [120, 5]",
    "infinite": "ValueError: inputs hold values that are not finite",
    "shape": "ValueError: the model takes no samples of float32 ",
    "dtype": "ValueError: the model takes no samples of float64 ",
    "no tensor": "NotImplementedError: the model returns str, which is no tensor",
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("write", WRITERS)
def test_bad_input_gets_one_clear_line(found, case, write):
    said = found["refusals"][case][write]
    assert said.startswith(BAD[case])
    assert "\n" not in said


@pytest.mark.parametrize("write", [name for name in WRITERS if not name.startswith("keep")])
def test_a_model_without_layers_to_quantize_is_refused(found, write):
    said = found["refusals"]["no layer"][write]
    assert said.startswith("NotImplementedError: the model has no layer that ")


def test_what_upstream_cannot_convert_is_refused(found):
    if found.framework == "pt":
        case, said = "branches", "NotImplementedError: torch.export cannot capture it: "
        assert all(line.startswith(said) for line in found["refusals"][case].values())
    else:
        refused = found["refusals"]["inverse"]
        said = "NotImplementedError: LiteRT's converter refuses it: "
        assert all(refused[w].startswith(said) for w in WRITERS[:3])
        assert all(
            w.startswith("ValueError: the model has no variables yet")
            for w in found["refusals"]["unbuilt"].values()
        )


def test_a_file_that_is_far_off_is_refused_with_what_8_bits_do_to_the_inputs(found):
    """Which says whether it is the model that amplifies rounding."""
    refusals = found["refusals"]
    said = re.fullmatch(
        r"RuntimeError: outputs of the file are [\d.]+% off the model's, which move by ([\d.]+)% "
        "where its inputs alone have 8 bits",
        refusals["far"],
    )
    assert float(said[1]) == pytest.approx(100 * refusals["moved"], rel=0.05, abs=0.01)
    assert refusals["moved"] > 1e-4


def test_refusals_leave_no_file(found):
    assert found["refusals"]["files"] == []


@pytest.mark.parametrize("way", ["static", "onnxruntime"])
def test_damaged_and_foreign_files_get_one_clear_line(found, way):
    cases = dict(found["files"][way])
    assert cases.pop("missing").startswith("FileNotFoundError: there is no file ")
    assert len(cases) >= 6
    for name, said in cases.items():
        assert said is not None, name
        assert said.startswith("ValueError: "), name
        assert "/damaged is no whole " in said
        assert "\n" not in said


def test_loading_executes_no_code(found):
    assert found["files"]["burst"] == [False, True]  # and where pickle does, the bomb goes off


def test_threads_are_those_asked_for(found):
    for added, stated in found["threads"].values():
        assert stated == 3
        assert added == 2  # and the caller's own
