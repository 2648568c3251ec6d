"""Packages and compiled predictions give what their models do; damaged ones are refused.

Each framework runs in a process of its own (`native_export_worker.py`), tf_keras in a third.
"""

from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np
import pytest

from bench.deployment.bench_native_export import ROUTES, TECHNIQUE, prepare
from tests import workers

WORKERS = ("pt", *workers.keras())
STATEFUL = (
    "NotImplementedError: kept would lose the state that it keeps from call to call: make the model"
    " with stateful=False"
)
ROUNDED = 1e-5  # outputs of a file and of its model, as a share of the largest


@pytest.fixture(scope="module")
def evidence(tmp_path_factory):
    """What each worker found: {"pt": {scenario: ...}, ...}."""
    folders = {name: tmp_path_factory.mktemp(name) for name in WORKERS}
    return workers.run("deployment.native_export_worker", WORKERS, lambda name: [folders[name]])


@pytest.fixture(params=WORKERS)
def found(request, evidence):
    return evidence[request.param]


def apart(ours, theirs):
    """The largest difference, as a share of the largest value."""
    ours, theirs = np.array(ours), np.array(theirs)
    assert ours.shape == theirs.shape
    return np.abs(ours - theirs).max() / np.abs(theirs).max()


def test_in_place_predictions_are_compiled_and_those_of_the_model(found):
    case = found["in_place"]
    assert apart(case["compiled"], case["own"]) < ROUNDED
    assert apart(case["three"][0], case["own"][0][:3]) < ROUNDED
    assert case["kept"]
    if found.framework == "tf":
        assert case["program"] is True
        return
    assert "training mode" in case["in training mode"]
    # Frozen: BatchNorm is part of convolutions whose kernels are packed for the CPU.
    assert {"mkldnn::_convolution_pointwise", "mkldnn::_linear_pointwise"} <= {*case["program"]}
    assert "aten::convolution" not in case["program"]


@pytest.mark.parametrize("size", [1, 3, 64])
def test_a_package_predicts_what_the_model_does_at_any_batch_size(found, size):
    case = found["package"]
    assert apart(case[str(size)][0], case["own"][0][:size]) < ROUNDED
    assert apart(case["another layout"], case["own"]) < ROUNDED


def test_a_package_takes_texts_of_any_length(found):
    """Attention looks to the left: the beginning of a text gives the beginning of its outputs."""
    text = found["package"]["text"]
    assert apart(text["whole"], text["own"]) < ROUNDED
    beginning = [sample[:3] for sample in text["own"][:2]]
    assert apart(text["shorter"], beginning) < ROUNDED


def test_a_package_says_what_it_is_and_leaves_the_model_alone(found):
    case = found["package"]
    assert case["says"] == [1, "float32", True]
    assert case["kept"]


def test_bfloat16_is_a_precision_of_its_own_or_refused(found):
    case = found["package"]["bfloat16"]
    if found.framework == "tf":
        assert case.startswith("NotImplementedError: a SavedModel computes as its model does")
        return
    difference = apart(case["out"], found["package"]["own"])
    assert 1e-4 < difference < 5e-2
    assert case["precision"] == "bfloat16"
    assert case["model"] == ["torch.float32"]


def test_models_that_are_not_ours(found):
    cases = dict(found["foreign"])
    cases.pop("names")
    if found.framework == "tf":
        assert cases.pop("unbuilt").startswith("ValueError: the model has no variables yet")
        lookup = cases.pop("lookup")
        assert lookup["apart"] == 0.0
        assert (lookup["stateful"] or STATEFUL) == STATEFUL  # in tf_keras its states are variables
    for case in cases.values():
        for kind in ("package", "torchscript") if found.framework == "pt" else ("package",):
            for size, given in case[kind].items():
                for ours, theirs in zip(given, case["own"], strict=True):
                    assert apart(ours, theirs[: int(size)]) < ROUNDED, (kind, size)
            assert case[f"{kind} metadata"] == {"a": "b"}
            said = case[f"{kind} shape"]
            assert said.endswith("takes float32 (any, 5), not float32 (64, 4)")
        assert case["kept"]
    if found.framework == "pt":  # Two, head, drop, norm (frozen)
        assert cases["two inputs"]["modes"] == [True, True, True, False]


def test_names_are_kept(found):
    case = found["foreign"]["names"]
    assert set(case["inputs"]) == {"left", "right"}
    assert max(case["apart"], case["compiled"]) < 1e-6  # the sum is in another order in NumPy
    loss = [64] if found.framework == "pt" else [64, 5]
    assert case["outputs"] == {"logits": [64, 5], "loss": loss}


def test_what_a_file_gives_is_compared_with_the_model(found):
    said = found["foreign"]["names"]["random"]
    assert said.startswith("NotImplementedError: the file does not give what the model gives")
    assert "from the model's" in said
    assert found["foreign"]["names"]["left over"] is False


def test_a_torchscript_trace_that_fits_its_example_alone_is_refused(evidence):
    case = evidence["pt"]["foreign"]["names"]["loop"]
    assert case["open"].startswith("NotImplementedError: the file does not give what the model")
    assert case["fixed"] is None
    assert case["branch"] == [None, ""]  # torch.export, which refuses it, prints its graph
    said = "NotImplementedError: the model branches on a size that is open: a file gives something"
    for kind in ("package", "torchscript"):
        assert case[f"window {kind}"] == f"{said} else at (64, 9)"


def test_what_does_not_fit_gets_one_clear_line(found):
    case = found["package"]
    takes = {"pt": "(any, 1, 32, 32)", "tf": "(any, 32, 32, 1)"}[found.framework]
    assert f"takes float32 {takes}, not float32 (64, " in case["shape"]
    assert f"takes float32 {takes}, not float64 (64, " in case["dtype"]
    name = {"pt": "x", "tf": "images"}[found.framework]
    assert case["number"].startswith(f"ValueError: the model takes 1 inputs ({name})")
    assert case["unknown"] == "ValueError: unknown precision 'int8': float32 or bfloat16"
    assert case["gone"].startswith("FileNotFoundError: no f")


def test_damaged_and_foreign_files_get_one_clear_line(found):
    damaged = found["package"]["damaged"]
    kinds = {
        "pt": {"half", "text", "other", "flipped"},
        "tf": {"graph", "weights", "metadata", "empty"},
    }
    assert damaged.keys() == kinds[found.framework]
    said = list(damaged.values())
    if found.framework == "pt":
        refusals = found["refusals"]
        said += [refusals["torchscript"], refusals["torchscript of a package"]]
        flipped = [damaged["flipped"], refusals["torchscript flipped"]]
        # A sum that is wrong, or data that zlib can't decompress: members may be either kind.
        assert all(re.search("in it is damaged$|while decompressing", line) for line in flipped), (
            flipped
        )
        said += flipped
    for line in said:
        assert line is not None, damaged
        assert line.startswith("ValueError: can't load ")
        assert "\n" not in line


def test_what_a_framework_or_machine_lacks_is_said(found):
    refusals = found["refusals"]
    if found.framework == "pt":
        assert refusals["tensorrt"].startswith(
            "NotImplementedError: Torch-TensorRT needs an NVIDIA"
        )
        assert refusals["branch"].startswith("NotImplementedError: AOTInductor can't take this")
        assert "data-dependent" in refusals["branch"]
        assert refusals["torch-tensorrt"] == (
            "NotImplementedError: torch-tensorrt is not installed: pip install torch-tensorrt"
        )
        assert refusals["compiler"].startswith("NotImplementedError: AOTInductor can't take this")
        assert "\n" not in refusals["compiler"]
        return
    assert refusals["window"].startswith(
        "NotImplementedError: the file does not give what the model"
    )
    assert refusals["threads"] == "RuntimeError: TensorFlow runs already with 1 threads"


@pytest.mark.parametrize(
    ("route", "words"),
    [
        ("torchscript", "TorchScript is PyTorch's"),
        ("tensorrt", "TF-TRT is gone.*load_tensorrt"),
    ],
)
def test_what_tensorflow_lacks_is_said_before_anything_is_made(route, words):
    framework = SimpleNamespace(__name__="tf_impl")
    work = SimpleNamespace(settings={"route": route})
    with pytest.raises(NotImplementedError, match=words):
        prepare(framework, work)


def test_every_row_has_a_route():
    assert all(variant.settings["route"] in ROUTES for variant in TECHNIQUE.variants)
