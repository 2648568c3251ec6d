"""Files with weights in 8 or 4 bits predict what rounded weights do, are small, and hold no code.

Each framework runs in a process of its own (`weight_quantization_worker.py`).
"""

from __future__ import annotations

import numpy as np
import pytest

from tests import workers

WORKERS = ("pt", "tf")
GROUP = 32


@pytest.fixture(scope="module")
def evidence():
    """What each worker found: {"pt": {scenario: ...}, ...}."""
    return workers.run("compression.weight_quantization_worker", WORKERS)


@pytest.fixture(params=WORKERS)
def found(request, evidence):
    return evidence[request.param]


def apart(ours, theirs):
    """Relative L2."""
    ours, theirs = np.array(ours), np.array(theirs)
    assert ours.shape == theirs.shape
    return np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)


def test_int8_rounds_each_output_to_its_own_scale(found):
    """As a NumPy oracle does; Keras's largest level is 127, torchao's half a step above.

    There the largest weight of an output lies half-way between two levels, and may go to either.
    """
    kernel, rounded = (np.array(found["kernels"][name]) for name in ("float32", "int8"))
    step = np.abs(kernel).max(0) / (127.5 if found.framework == "pt" else 127)
    oracle = np.clip(np.round(kernel / step), -128, 127) * step
    other = np.abs(rounded - oracle) > 1e-5
    assert np.all(np.abs(kernel)[other] == np.broadcast_to(np.abs(kernel).max(0), (64, 48))[other])
    assert np.all(np.abs(rounded - kernel) <= 0.501 * step)
    assert np.sum(other) <= 48
    assert apart(oracle, kernel) > 1e-3


def test_int4_has_sixteen_levels_in_each_group_of_inputs(found):
    kernel, rounded = (np.array(found["kernels"][name]) for name in ("float32", "int4"))
    for start in range(0, len(kernel), GROUP):
        group, whole = rounded[start : start + GROUP], kernel[start : start + GROUP]
        levels = [len(np.unique(np.round(column, 4))) for column in group.T]
        assert max(levels) <= 16
        step = (whole.max(0) - whole.min(0)) / 15
        assert np.all(np.abs(group - whole) <= 1.05 * step)
    assert 0.02 < apart(rounded, kernel) < 0.15


def test_files_predict_what_the_model_does_as_far_as_their_bits_go(found):
    case = found["transformer"]
    differences = [
        apart(case[kind]["logits"], case["model"]) for kind in ("float32", "int8", "int4")
    ]
    assert differences[0] < 1e-5 < differences[1] < 0.02 < differences[2] < 0.3


@pytest.mark.parametrize(("kind", "bits"), [("int8", 8), ("int4", 4)])
def test_files_shrink_and_hold_the_kernels_as_integers(found, kind, bits):
    """Weights of the kernels; scales and zero points come on top."""
    whole, case = (found["transformer"][name] for name in ("float32", kind))
    weights = sum((64 * 192, 64 * 64, 64 * 256, 256 * 64, 64 * 64))
    held = case["held"].get("int8", 0) + case["held"].get("uint8", 0)
    assert weights * bits // 8 <= held < 1.15 * weights * bits // 8
    assert whole["held"]["float32"] - case["held"]["float32"] > 0.7 * 4 * weights
    assert case["bytes"] < 0.55 * whole["bytes"]
    assert not {"int8", "uint8"} & whole["held"].keys()


def test_pytorch_multiplies_4_bit_weights_with_a_kernel_for_them(evidence):
    ran = evidence["pt"]["transformer"]["int4"]["operators"]
    assert sum(ran.values()) == 5
    assert all("int4pack" in name for name in ran)


@pytest.mark.parametrize(("kind", "bits"), [("int8", 8), ("int4", 4)])
def test_a_call_reads_integers_and_not_floats_that_were_made_of_them(found, kind, bits):
    """A compiler that folds the conversion of a constant has float weights when it predicts."""
    weights = 256 * 256 * bits // 8
    for read in found["read"][f"{kind} 256"]:
        assert weights <= sum(read.values()) < 1.1 * weights
    assert found["read"]["float32 256"] == [{}, {}]


def test_small_kernels_are_folded_by_tensorflow_alone(found):
    for size in (48, 64):
        wanted = {"int8": size * size} if found.framework == "pt" else {}
        assert found["read"][f"int8 {size}"] == [wanted, wanted]


def test_the_benchmark_sees_weights_that_were_folded(found):
    evidence, reason = found["proof"]["as it is"]
    assert reason is None
    assert evidence["integer_bytes_read"]["int8"] > 0
    assert found["proof"]["folded"][1].startswith("a call reads {} bytes of integers, not ")


def test_models_of_other_construction(found):
    """Attention, tied weights, Normalization, LSTM; several inputs, structures of outputs."""
    cases = found["constructions"]
    every = 3 if found.framework == "pt" else 2
    assert len(cases) == (every if workers.campaign() else 1)
    for name, case in cases.items():
        whole, narrow, narrower = (case[kind] for kind in ("float32", "int8", "int4"))
        assert whole < 1e-5 < narrow < 0.03, name
        assert narrow < narrower < 0.3, name
        assert case["in memory"] < 1e-5  # `apply_int8` returns the model that was written


def test_pt_only_layers_that_are_called_are_rounded(evidence):
    """Multi-head attention reads the weight of its last layer, 32 x 32, without calling it."""
    held = evidence["pt"]["constructions"]["attention"]["bytes of int8"]
    zero_points = 32 + 64
    assert held == 2 * 32 * 64 + zero_points


def test_pt_weights_that_are_computed_are_not_rounded(evidence):
    assert evidence["pt"]["computed"] == [False, True]


def test_tf_layers_that_time_distributed_wraps_stay_float32_and_are_named(evidence):
    found = evidence["tf"]["distributed"]
    alone = "NotImplementedError: the model has no dense layer outside of TimeDistributed"
    assert found["alone"]["raised"] == alone
    beside, within = found["beside"], found["model"]
    assert beside["said"][0].startswith("left in float32: wrapped: TimeDistributed")
    assert len(beside["said"]) == 1
    assert beside["integers"] == ["called"]
    assert within["integers"] == ["inside"]  # a model calls its layers
    assert within["said"] == []
    assert 0 < beside["apart"] < 0.02
    assert 0 < within["apart"] < 0.02


def test_the_model_is_left_as_it_was(found):
    assert found["transformer"]["kept"]


@pytest.mark.parametrize(("kind", "bar"), [("float32", 1e-4), ("int8", 0.02)])
def test_twins_agree(evidence, kind, bar):
    pt, tf = (evidence[name]["transformer"][kind]["logits"] for name in WORKERS)
    assert apart(pt, tf) < bar


def test_bad_input_gets_one_clear_line(found):
    said = dict(found["refusals"])
    assert said.pop("files") == []
    assert said["empty"].startswith("ValueError: inputs must have samples")
    assert said["shape"].startswith("ValueError: the model takes no samples of float32 [7]: ")
    assert said["no layer"].startswith("NotImplementedError: the model has no ")
    if found.framework == "pt":
        assert said["multiples"].endswith(
            "no linear layer with multiples of 32 inputs and 16 outputs"
        )
        assert said["double"].startswith(
            "NotImplementedError: torchao rounds no weights of float64"
        )
    else:
        assert said["subclassed"].startswith("NotImplementedError: Keras cannot rebuild the model")
    assert not any("\n" in line for line in said.values())


def test_a_file_takes_the_sizes_of_its_example_and_any_number_of_samples(found):
    *taken, refused = found["other_sizes"]
    assert taken == [None, None]
    assert refused == (
        "ValueError: inputs must be float32 [any, 3, 64], as those of the example,"
        " not float32 [2, 4, 64]"
    )


def test_damaged_and_foreign_files_get_one_clear_line_and_run_nothing(found):
    said = dict(found["files"]["said"])
    assert said.pop("missing").startswith("FileNotFoundError: ")
    assert "flipped" in said  # a bit inside of the weights
    for name, line in said.items():
        assert line is not None, name
        assert line.startswith("ValueError: "), name
        assert "/damaged is no whole file of a program: " in line
        assert "\n" not in line
    assert not found["files"]["burst"]
