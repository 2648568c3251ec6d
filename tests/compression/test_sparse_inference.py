"""Sparse kernels predict what dense ones do, hold what is not zero, and do so in both frameworks.

Each framework runs in a process of its own (`sparse_inference_worker.py`), tf_keras in a third.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from bench.compression.bench_sparse_inference import narrower, prepare, pruned
from shared.specs import TASKS, parameter_shapes
from tests import workers

WORKERS = ("pt", *workers.keras())
BAR = 1e-4  # the parity of the tasks with transformers


@pytest.fixture(scope="module")
def evidence():
    """What each worker found: {"pt": {scenario: ...}, ...}."""
    return workers.run("compression.sparse_inference_worker", WORKERS)


@pytest.fixture(params=WORKERS)
def found(request, evidence):
    return evidence[request.param]


def relative(ours, theirs):
    ours, theirs = np.array(ours), np.array(theirs)
    assert ours.shape == theirs.shape
    return np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)


@pytest.mark.parametrize("sparsity", ["0.5", "0.9"])
def test_sparse_kernels_predict_what_dense_ones_do(found, sparsity):
    case = found["transformer"][sparsity]
    assert np.abs(case["dense"]).max() > 0.1
    assert relative(case["sparse"], case["dense"]) < 1e-5
    assert relative(case["sparse later"], case["dense later"]) < 1e-5  # another batch size
    assert case["of none"] == [0, *np.shape(case["sparse"])[1:]]
    assert case["kept"]


@pytest.mark.parametrize("sparsity", ["0.5", "0.9"])
def test_sparse_kernels_hold_what_is_not_zero(found, sparsity):
    """4 bytes for a value, 4 for its column, 4 for each row and one more."""
    case = found["transformer"][sparsity]
    rows = {"qkv": 48, "projection": 16, "up": 64, "down": 16, "head": 11}
    assert case["layers"].keys() == case["sizes"].keys()
    for name, (dense, sparse) in case["layers"].items():
        size, values = case["sizes"][name]
        assert dense == size
        assert sparse == 8 * values + 4 * (rows[name.rpartition(".")[2]] + 1)


def test_twins_agree(evidence):
    pt, *others = (evidence[name]["transformer"]["0.9"]["sparse"] for name in WORKERS)
    assert all(relative(other, pt) < BAR for other in others)


@pytest.mark.parametrize("worker", workers.keras())
def test_tf_a_sparse_file_is_smaller_and_predicts_the_same(evidence, worker):
    files = evidence[worker]["files"]
    for kind in ("sparse", "dense"):
        assert relative(files[kind]["all"], files["wanted"]) < 1e-5
        assert relative(files[kind]["two"], files["wanted"][:2]) < 1e-5  # another batch size
    assert (files["sparse"]["tensors"], files["dense"]["tensors"]) == (5, 0)  # all kernels
    # 4 bytes each of 3,248 kernel weights, of which a tenth stays with its place.
    assert files["dense"]["bytes"] - files["sparse"]["bytes"] > 0.5 * 4 * 3_248
    assert files["kept"]


@pytest.mark.parametrize("worker", workers.keras())
def test_tf_what_is_no_sparse_file_is_refused(evidence, worker):
    files = evidence[worker]["files"]
    said = "ValueError: no kernel of the model has zeros enough to be stored sparsely: prune it"
    assert files["no zeros"] == said
    assert not files["written"]
    assert files["cut"].startswith("ValueError: ")
    assert "cut is no whole LiteRT file" in files["cut"]
    assert files["missing"].startswith("FileNotFoundError: ")


@pytest.mark.parametrize("worker", workers.keras())
def test_tf_a_sparse_file_gives_all_outputs_of_its_model_or_is_not_there(evidence, worker):
    files = evidence[worker]["files"]
    *found, first, second = files["two outputs"]
    assert [relative(*pair) < 1e-5 for pair in zip(found, (first, second), strict=True)] == [
        True
    ] * 2
    assert files["another"].startswith("RuntimeError: LiteRT computes something else with it: 100.")
    assert files["left"] == []


def test_pt_sparse_files_are_refused_before_anything_is_made():
    framework = SimpleNamespace(__name__="pt_impl")
    work = SimpleNamespace(settings={"sparsity": 0.9, "file": "sparse"})
    with pytest.raises(NotImplementedError, match="PyTorch has no file with sparse kernels"):
        prepare(framework, work)


def test_sparse_kernels_are_copies(found):
    """Which shows that the predictions come from them."""
    before, after, dense = found["copies"]
    assert relative(after, before) < 1e-6
    assert relative(dense, before) > 0.1


def test_models_that_are_not_ours(found):
    foreign = found["foreign"]
    name = "inside.wide" if found.framework == "pt" else "wide"
    layers = {"two inputs": [name], "a layer alone": [""], "functional": [name]}
    for kind, (sparse, dense, names) in (
        (kind, case) for kind, case in foreign.items() if kind in layers
    ):
        assert relative(sparse, dense) < 1e-6, kind
        assert names == layers[kind]  # not the head, which has no zeros
    assert foreign.get("trains", True)


@pytest.mark.parametrize(("kind", "layers"), [("layer", 2), ("encoder", 4), ("padded", 4)])
def test_pt_its_own_encoders(evidence, kind, layers):
    sparse, dense, count = evidence["pt"]["foreign"]["encoders"][kind]
    assert relative(sparse, dense) < 1e-6
    assert count == layers


def test_pt_a_layer_of_several_names_is_sparse_in_all_places(evidence):
    ran, names = evidence["pt"]["foreign"]["two names"]
    assert (ran.count("_SparseLinear"), ran.count("Linear")) == (3, 0)
    assert names == ["0"]


def test_pt_a_model_may_ask_a_sparse_layer_what_it_asks_a_dense_one(evidence):
    """As T5 does, which casts to the dtype of the weight that comes next."""
    sparse, dense = evidence["pt"]["foreign"]["asked"]
    assert relative(sparse, dense) < 1e-6


def test_pt_hooks_of_a_sparse_layer_stay(evidence):
    """And what a hook makes the weight of in each call stays dense."""
    sparse, dense, names = evidence["pt"]["foreign"]["hooked"]
    assert relative(sparse, dense) < 1e-6
    assert names == ["0"]


@pytest.mark.parametrize("worker", workers.keras())
def test_tf_an_activation_may_be_over_any_axis(evidence, worker):
    sparse, dense = evidence[worker]["foreign"]["other axis"]
    assert relative(sparse, dense) < 1e-6


def test_twins_agree_on_a_model_that_is_not_ours(evidence):
    pt, *others = (evidence[name]["foreign"]["two inputs"][0] for name in WORKERS)
    assert all(relative(other, pt) < 1e-5 for other in others)


def test_bad_input_gets_one_clear_line(found):
    refusals = found["refusals"]
    for share in ("0.0", "1.1", "nan"):
        said = f"ValueError: min_sparsity must be above 0 and at most 1, not {share}"
        assert refusals[share] == said
    kind = "linear" if found.framework == "pt" else "dense"
    said = f"ValueError: no {kind} layer of the model has 70% of zeros: prune it"
    assert refusals["no zeros"] == said
    assert refusals["half"].startswith("NotImplementedError: ")
    assert "bfloat16" in refusals["half"]


def test_a_model_with_pruning_masks_is_refused(found):
    said = "ValueError: the model has pruning masks: finalize it first"
    assert found["refusals"]["masked"] == [said] * 2


def test_pt_a_model_that_python_cannot_copy_is_refused(evidence):
    said = evidence["pt"]["foreign"]["no copy"]
    assert said.startswith("NotImplementedError: Python cannot copy the model: Only Tensors")


@pytest.mark.parametrize("worker", workers.keras())
def test_tf_layers_of_the_same_name_are_all_listed(evidence, worker):
    """Kernels of 4 by 2, 2 by 3 and 3 by 5 zeros: no values, and a row for each unit and one."""
    layers = evidence[worker]["foreign"]["same names"]
    assert layers == {"up": [32, 12], "up_1": [24, 16], "up_1_1": [60, 24]}


@pytest.mark.parametrize("worker", workers.keras())
def test_tf_a_model_without_variables_is_refused(evidence, worker):
    unbuilt = evidence[worker]["foreign"]["unbuilt"]
    assert unbuilt.startswith("ValueError: the model has no variables yet: call it once")


def test_the_benchmark_prunes_the_smallest_weights_of_kernels_alone():
    kernel = np.array([[0.3, -0.1], [0.2, -0.4]], np.float32)
    assert pruned("up.kernel", kernel, 0.5).tolist() == [[kernel[0, 0], 0], [0, kernel[1, 1]]]
    assert kernel[0, 1] != 0
    assert pruned("up.bias", kernel, 0.5) is kernel
    assert pruned("up.kernel", kernel, 0.0) is kernel


@pytest.mark.parametrize("share", [0.5, 0.8, 0.9, 0.95])
def test_the_benchmarks_narrower_transformer_has_the_weights_that_are_left(share):
    spec = TASKS["text-gpt-wide"].model
    small, whole = (
        sum(int(np.prod(shape)) for name, shape in parameter_shapes(s).items() if "kernel" in name)
        for s in (narrower(spec, share), spec)
    )
    assert small / whole == pytest.approx(1 - share, abs=0.01)
