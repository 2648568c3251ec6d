"""Rounded weights are what they should be, training with them pays, and files compute the same.

Each framework runs in a process of its own (`quantization_aware_training_worker.py`): PyTorch,
Keras 3, and tf_keras with TensorFlow Model Optimization.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests import workers

WORKERS = ("pt", "tf_keras", "tf")
KERAS = ("tf_keras", "tf")
STEPS = {"pt": 255 if workers.has_vnni() else 127, "tf": 255, "tf_keras": 255}  # of activations


@pytest.fixture(scope="module")
def evidence():
    """What each worker found: {"pt": {scenario: ...}, ...}."""
    return workers.run("compression.quantization_aware_training_worker", WORKERS)


@pytest.fixture(params=WORKERS)
def found(request, evidence):
    return evidence[request.param]


def rounded(kernel, bits):
    """Symmetric, with a scale for each output: the kernel on its grid, in float64."""
    most = 2 ** (bits - 1) - 1
    scale = np.abs(kernel).max((0, 1, 2)) / most
    return scale * np.clip(np.round(kernel / scale), -most, most)


# What is computed -----------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [2, 4, 5, 8])
def test_outputs_are_those_of_a_kernel_and_an_input_on_their_grids(found, bits):
    """NumPy does the same; TensorFlow rounds the output to 8 bits, too."""
    kernel, x = (np.array(found["oracle"][name]) for name in ("kernel", "x"))
    steps = STEPS[found.name]
    wanted = np.round(x * steps) / steps @ rounded(kernel, bits)[0, 0]
    ours = np.array(found["oracle"][str(bits)])
    half_a_step = 0.0
    if found.name != "pt":
        half_a_step = (max(wanted.max(), 0) - min(wanted.min(), 0)) / 255 / 2
    bound = 1.02 * half_a_step + 1e-5 * np.abs(wanted).max()
    assert np.abs(ours - wanted).max() < bound
    assert np.abs(ours - x @ kernel[0, 0]).max() > bound  # or rounding would not show


@pytest.mark.parametrize("bits", [4, 5])
def test_widths_between_reach_the_file(found, bits):
    """The file's kernel has as many different integers as NumPy's."""
    kernel = rounded(np.array(found["oracle"]["kernel"]), bits)
    step = np.abs(kernel).max((0, 1, 2)) / (2 ** (bits - 1) - 1)
    assert found["oracle"][f"levels {bits}"] == [len(np.unique(np.round(kernel / step)))]


@pytest.mark.parametrize("keras", KERAS)
def test_tf_three_bits_are_refused(evidence, keras):
    """LiteRT would put their 7 values on a grid of 15, on which they do not lie."""
    refused = evidence[keras]["oracle"]["3"]
    assert refused == ("NotImplementedError: LiteRT would put 3 bits on the grid of 4: take 2 or 4")


def test_eight_bits_are_close_to_float32_in_outputs_and_gradients(found):
    neutral = found["losses"]["neutral"]
    assert neutral["rounded"]
    assert neutral["outputs"] < 0.03
    for name, apart in neutral["gradients"].items():
        assert apart < 0.2, name


@pytest.mark.parametrize("keras", KERAS)
def test_twins_lose_alike(evidence, keras):
    """The closer, the finer the grid of weights: activations have 8 bits in all."""
    for bits, bar in (("8", 0.01), ("2", 0.1)):
        ours, theirs = (np.array(evidence[name]["losses"][bits]) for name in ("pt", keras))
        assert np.abs(ours / theirs - 1).max() < bar
        assert ours[-1] < ours[0]


# Whether it is worth it -----------------------------------------------------------------------


def test_two_bits_need_training_and_eight_do_not(found):
    worth = found["worth"]
    assert worth["float"] > 0.8
    assert worth["ptq 8"] > worth["float"] - 0.02
    assert worth["ptq 2"] < worth["float"] - 0.15
    assert worth["qat 2"] > (worth["float"] + worth["ptq 2"]) / 2


# Files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", ["8", "2"])
def test_a_file_predicts_what_was_trained(found, bits):
    file = found["files"][bits]
    assert file["apart"] < 0.03
    assert file["same class"] > 0.95
    assert all(apart < 0.03 for apart in file["other batches"])


def test_a_float_file_predicts_what_the_model_does(found):
    assert found["files"]["float"]["apart"] < 1e-5
    assert found["files"]["float"]["operators"] == {}


@pytest.mark.parametrize("bits", ["8", "2"])
def test_kernels_in_a_file_are_integers_of_so_many_bits(found, bits):
    levels = found["files"][bits]["levels"]
    assert len(levels) == 3
    assert max(levels) <= 2 ** int(bits) - 1
    assert min(levels) > (20 if bits == "8" else 1)


def test_files_run_on_integers_and_are_smaller(found):
    files = found["files"]
    for bits in ("8", "2"):
        assert sum(files[bits]["operators"].values()) == 3, files[bits]
    assert files["8"]["bytes"] < files["float"]["bytes"]


def test_files_that_are_not_whole_are_refused(found):
    damaged = dict(found["damaged"])
    assert damaged.pop("missing").startswith("FileNotFoundError: ")
    assert damaged.pop("executed") is False
    assert {"cut", "cut short", "text", "empty"} <= damaged.keys()
    for name, said in damaged.items():
        assert said is not None, name
        assert said.startswith("ValueError: "), (name, said)
        assert "/damaged is no whole " in said


def test_pt_a_file_executes_nothing(evidence):
    damaged = evidence["pt"]["damaged"]
    assert "os.system is no operator" in damaged["another library"]
    assert "aten.from_file.default is no operator" in damaged["a file is opened"]
    assert "it holds other things" in damaged["code"]
    assert not damaged["executed"]


def test_a_file_that_differs_from_the_model_is_not_written(found):
    drifted = found["drifted"]
    assert drifted["raised"].startswith("RuntimeError: outputs of the converted model are ")
    assert not drifted["written"]


def test_tf_rounding_that_the_model_amplifies_is_not_blamed_on_the_converter(evidence):
    said = evidence["tf"]["amplified"]["raised"]
    assert said.startswith("RuntimeError: outputs of the converted model are ")
    assert said.endswith("so that no file is near it")


# Models ---------------------------------------------------------------------------------------


def test_models_are_left_as_they_were(found):
    """By preparing, training and exporting; and what was exported trains on."""
    assert all(found["losses"]["kept"])
    assert found["files"]["8"]["kept"]
    assert found["files"]["2"]["kept"]
    assert found["goes_on"]


def test_pt_a_model_of_two_inputs(evidence):
    foreign = evidence["pt"]["foreign"]
    assert foreign["losses"][-1] < 0.7 * foreign["losses"][0]
    assert foreign["names"]
    assert foreign["source kept"]
    assert foreign["modes kept"]
    training, evaluation = foreign["dropout"]
    assert training > 0.2
    assert evaluation < 0.02  # not 0: ranges move a little with every pass
    assert foreign["dropout of a copy"] < 0.02
    assert foreign["statistics moved in evaluation"] == []
    assert foreign["apart"] < 0.05


def test_pt_training_goes_on_after_a_prediction(evidence):
    """Whoever predicts sets `training` of each module back, without `train()`."""
    foreign = evidence["pt"]["foreign"]
    assert foreign["dropout after a prediction"] > 0.2
    assert len(foreign["statistics moved after a prediction"]) == 2


def test_pt_unequal_ranges_side_by_side_stay_their_own(evidence):
    found = evidence["pt"]["side_by_side"]["apart"]
    assert found["start"]["joined"] < 0.03
    assert found["later"]["joined"] < 0.03


@pytest.mark.parametrize("bias", ["no bias", "bias"])
def test_pt_norms_keep_their_epsilon_and_momentum(evidence, bias):
    found = evidence["pt"]["side_by_side"]
    most = 0.02 * 255 / STEPS["pt"]
    assert found["apart"]["start"][bias] < most
    assert found["apart"]["file"][bias] < most
    assert len(found["variances"]) == 2
    assert max(found["variances"]) < 0.02


def test_pt_operators_that_name_a_gpu_name_the_cpu_in_what_is_exported(evidence):
    assert evidence["pt"]["named_devices"] == [2.0, 2.0]


@pytest.mark.parametrize("kind", ["no weights", "no statistics", "transposed"])
def test_pt_norms_that_cannot_be_folded_stay_as_they_are(evidence, kind):
    found, most = evidence["pt"]["norms_apart"][kind], 0.03 * 255 / STEPS["pt"]
    assert 1e-5 < found["model"] < most
    assert found["file"] < most
    assert len(found["statistics"]) == (0 if kind == "no statistics" else 2)
    assert all(apart < 0.02 for apart in found["statistics"])


@pytest.mark.parametrize("place", ["residual", "constant", "convolution plus 1"])
def test_pt_normalised_sums_are_exported(evidence, place):
    """BatchNorm stays after what the model adds."""
    found = evidence["pt"]["side_by_side"]
    assert found["apart"]["file"][place] < 0.03
    assert found["kernels"] == 9  # all there are


@pytest.mark.parametrize("keras", KERAS)
def test_tf_more_than_ten_inputs_keep_their_order(evidence, keras):
    many = evidence[keras]["many"]
    assert many["qat"] < 0.05
    assert many["float"] < 1e-5


PRODUCTS = {  # that run over integers in the file
    "pt": {"attention": 4, "structured": 3, "recurrent": 1},
    "tf": {
        "structured": 5,
        "attention": 6,
        "recurrent": 1,
        "concatenated": 2,
        "subclassed": 2,
        "pooled": 3,
        "shared": 3,
        "activated": 2,  # by layers
    },
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_models_of_other_construction(evidence, name):
    """Residual, depthwise, grouped, attention, LSTM, several inputs and outputs, `.logits`."""
    cases = evidence[name]["constructions"]
    rare = () if workers.campaign() else ("recurrent", "pooled")
    assert cases.keys() == PRODUCTS[name].keys() - set(rare)
    for case, found in cases.items():
        assert 1e-5 < found["rounded"] < 0.05, case
        assert found["same again"] == 0.0, case  # no dropout, and no range that moves
        assert found["file"] < 0.02, case
        assert found["products"] >= PRODUCTS[name][case], case
        assert found["losses"][-1] < 0.9 * found["losses"][0], case


@pytest.mark.parametrize("keras", KERAS)
@pytest.mark.parametrize("kind", ["functional", "sequential"])
def test_tf_models_that_are_not_ours(evidence, keras, kind):
    foreign = evidence[keras]["foreign"][kind]
    assert foreign["losses"][-1] < 0.7 * foreign["losses"][0]
    assert foreign["names"]
    assert foreign["source kept"]
    assert foreign["apart"] < 0.05


# Bad input ------------------------------------------------------------------------------------


def test_bad_input_gets_one_clear_line_and_changes_nothing(found):
    refusals = found["refusals"]
    for bits in ("1", "9", "0", "2.5", "'8'", "None"):
        said = f"ValueError: weight_bits must be 2 to 8, not {bits}"
        assert refusals[f"bits {bits}"] == said
    assert refusals["nothing"].startswith("ValueError: the model has no ")
    assert refusals["unprepared"].startswith("ValueError: the model has no fake quantization")
    assert not refusals["written"]
    assert refusals["unchanged"]


@pytest.mark.parametrize("name", ["pt", "tf"])
def test_what_cannot_be_exported_is_not_trained(evidence, name):
    said = evidence[name]["refusals"]["file"]
    assert said.startswith("RuntimeError: outputs of the converted model are ")


BAD = {
    "empty": "ValueError: inputs must have samples, as many in each tensor, not [0]",
    "no tensor": "ValueError: inputs must be tensors with samples along an axis, not int",
    "infinite": "ValueError: inputs hold values that are not finite",
    "shape": "ValueError: the model takes no samples of float32 ",
    "dtype": "ValueError: the model takes no samples of float64 ",
}


@pytest.mark.parametrize("case", BAD)
def test_inputs_that_set_no_range_get_one_clear_line(found, case):
    assert found["refusals"][case].startswith(BAD[case])


def test_pt_what_cannot_be_captured_is_refused(evidence):
    refusals = evidence["pt"]["refusals"]
    assert refusals["branches"].startswith("NotImplementedError: torch.export cannot capture it: ")
    said = "ValueError: example_inputs must be tensors of at least two samples"
    assert refusals["one sample"] == said
    for case, dtype in (("half", "torch.float16"), ("double", "torch.float64")):
        assert f"is {dtype}: torchao rounds models of float32" in refusals[case]


def test_keras_3_a_model_of_another_precision_is_refused(evidence):
    for case, dtype in (("half", "bfloat16"), ("double", "float64")):
        said = evidence["tf"]["refusals"][case]
        assert said.startswith(f"NotImplementedError: 'own' computes in {dtype}: models of float32")


def test_tf_what_tfmot_cannot_follow_is_refused(evidence):
    assert evidence["tf"]["refusals"]["unbuilt"].startswith(
        "ValueError: the model has no variables"
    )
    refusals = evidence["tf_keras"]["refusals"]
    assert "functional and Sequential models, not subclassed" in refusals["subclassed"]
    assert refusals["unbuilt"].startswith("ValueError: the model has no variables yet")
    assert "Model inside another" in refusals["within"]
    assert "LayerNormalization" in refusals["unknown layer"]
    for name in ("subclassed", "within", "unknown layer"):
        assert refusals[name].startswith("NotImplementedError: tfmot "), refusals[name]


# The benchmark --------------------------------------------------------------------------------


def test_the_benchmark_proves_that_it_rounds(found):
    proof = found["evidence"]
    for row in ("train fp32", "train qat_8", "predict fp32", "predict qat_8"):
        assert proof[row][1] is None, proof[row]
    assert sum(proof["train qat_8"][0]["fake_quantizers"].values()) >= 6
    assert sum(proof["predict qat_8"][0]["operators"].values()) == 3


def test_the_benchmark_sees_what_does_not_round(found):
    proof = found["evidence"]
    assert proof["train feigned"][1] == "the step has no fake quantization"
    assert proof["predict feigned"][1] == "0 of 3 products ran on integers"
