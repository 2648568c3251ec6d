"""Compiled steps and predictions do the baseline's work, and the evidence says what ran.

Each framework runs in a process of its own (`compilation_worker.py`).
PyTorch's kernels are compiled into an empty folder: one train step and one prediction of a tiny
CNN. What needs no C++ compiler runs with "aot_eager".
"""

from __future__ import annotations

import numpy as np
import pytest

from bench.harness.machine import compiler
from tests import workers
from tests.kit.parity import check

BAR = 1e-5  # of a CNN
BOOKKEEPING = {"clone", "copy_", "detach", "new_empty_strided", "ones_like"}

needs_compiler = pytest.mark.skipif(not compiler(), reason="torch.compile needs a C++ compiler")


@pytest.fixture(scope="module")
def evidence():
    """What each worker found: {"pt": {scenario: ...}, ...}."""
    return workers.run("train_step.compilation_worker", ("pt", "tf"), without_compiler)


def without_compiler(name):
    return ["no-compiler"] if name == "pt" and not compiler() else []


@pytest.fixture(params=["pt", "tf"])
def found(request, evidence):
    return evidence[request.param]


@pytest.fixture
def pt(evidence):
    return evidence["pt"]


@pytest.fixture
def tf(evidence):
    return evidence["tf"]


def arrays(step):
    """Losses and weights of a step, to be compared by the project's bars."""
    weights = {name: np.array(value) for name, value in step["weights"].items()}
    return weights | {"losses": np.array(step["losses"])}


# The same work --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("framework", "name"),
    [
        ("pt", "eager"),
        ("pt", "graph"),
        pytest.param("pt", "compiled", marks=needs_compiler),
        pytest.param("pt", "fullgraph", marks=needs_compiler),
        ("tf", "eager"),
        ("tf", "graph"),
        ("tf", "compiled"),
        ("tf", "compiled_model"),
    ],
)
def test_five_steps_equal_the_baselines_of_both_sides(evidence, framework, name):
    """Losses, weights and BatchNorm's statistics, against the own baseline and the twin's."""
    steps = evidence[framework]["steps"]
    twin = {"pt": "tf", "tf": "pt"}[framework]
    check(arrays(steps[name]), arrays(steps["baseline"]), BAR)
    theirs = arrays(evidence[twin]["steps"]["baseline"])
    ours = arrays(steps[name])
    variance = {n for n in ours if n.endswith(".variance")}  # Keras 3 keeps a biased one
    check(
        {n: v for n, v in ours.items() if n not in variance},
        {n: v for n, v in theirs.items() if n not in variance},
        BAR,
    )
    assert steps[name]["losses"][0] > steps[name]["losses"][-1]


def test_uncompiled_steps_are_the_baseline_to_the_last_bit(found):
    steps = found["steps"]
    same = "eager" if found.framework == "pt" else "graph"
    assert steps[same]["losses"] == steps["baseline"]["losses"]


def test_predictions_equal_the_kits_for_any_batch_size(found):
    predictions = dict(found["predictions"])
    assert predictions.pop("kept")
    assert predictions.keys() >= {"eager", "graph"}
    for name, prediction in predictions.items():
        assert max(prediction["errors"]) < 1e-5, name
    assert predictions["graph"]["errors"] == [0.0, 0.0]


# What ran -------------------------------------------------------------------------------------


def test_eager_steps_run_no_graph(found):
    steps = found["steps"]
    assert steps["eager"]["ran"]["graphs"] == 0
    assert steps["eager"]["traces"] == [None, None]


def test_captured_steps_run_graphs_and_compile_none(found):
    ran = found["steps"]["graph"]["ran"]
    # PyTorch: forward and loss, backward, update, and the loss that is detached.
    assert ran["graphs"] == {"pt": 4, "tf": 1}[found.framework]
    assert ran["compiled"] == 0
    forward, backward = {
        "pt": ("convolution", "convolution_backward"),
        "tf": ("Conv2D", "Conv2DBackpropFilter"),
    }[found.framework]
    assert ran["outside"][forward] == ran["outside"][backward] == 2
    predicted = found["predictions"]["graph"]["ran"]
    assert (predicted["graphs"], predicted["compiled"]) == (1, 0)
    assert predicted["outside"][forward] == 2


@needs_compiler
@pytest.mark.parametrize("name", ["compiled", "fullgraph"])
def test_pt_compiled_steps_leave_bookkeeping_alone_outside(pt, name):
    ran = pt["steps"][name]["ran"]
    assert ran["graphs"] == ran["compiled"] == 3  # forward and loss, backward, update
    assert ran["outside"].keys() <= BOOKKEEPING
    broken_at_backward = any("backward" in reason for reason in ran["breaks"])
    assert broken_at_backward == (name == "compiled")


@needs_compiler
def test_pt_compiled_predictions_are_one_graph(pt):
    ran = pt["predictions"]["compiled"]["ran"]
    assert (ran["graphs"], ran["compiled"], ran["outside"]) == (1, 1, {})


@needs_compiler
def test_pt_what_is_left_to_eager_is_named_and_no_fault(pt):
    found, reason = pt["in_part"]
    assert reason is None
    assert found["compiled"] > 0
    assert "lstm" in found["not_compiled"]


def test_tf_xla_takes_the_whole_step_or_the_model_alone(tf):
    steps = tf["steps"]
    whole, alone = steps["compiled"]["ran"], steps["compiled_model"]["ran"]
    assert (whole["graphs"], whole["compiled"], whole["outside"]) == (1, 1, {})
    assert (alone["graphs"], alone["compiled"]) == (3, 2)  # the step; forward and backward
    assert "SparseSoftmaxCrossEntropyWithLogits" in alone["outside"]
    assert not [name for name in alone["outside"] if "Conv" in name or "MatMul" in name]
    assert tf["predictions"]["compiled"]["ran"]["compiled"] == 1


def test_evidence_traces_nothing_and_steady_steps_neither(found):
    for name, step in found["steps"].items():
        if name not in ("baseline", "eager"):
            before, after = step["traces"][:2]
            assert before == after > 0, name


def test_another_shape_shows_in_the_trace_count(found):
    _, steady, other = found["steps"]["graph"]["traces"]
    assert steady < other


def test_pt_a_graph_break_in_the_model_shows_and_fullgraph_refuses_it(pt):
    broken = pt["broken"]
    assert broken["graph"]["graphs"] > pt["steps"]["graph"]["ran"]["graphs"]
    assert "Data-dependent branching" in broken["graph"]["breaks"]
    assert "Data-dependent branching" not in pt["steps"]["graph"]["ran"]["breaks"]
    assert broken["fullgraph"].startswith("Unsupported: Data-dependent branching")
    assert all(broken["gradients"])  # it stopped before the backward pass


def test_tf_what_xla_cannot_compile_raises_before_the_update(tf):
    tried = tf["not_compilable"]
    assert tried["graph"] == {"error": None, "moved": True}
    assert "Detected unsupported operations" in tried["compiled"]["error"]
    assert not tried["compiled"]["moved"]


# The benchmark's verdict ----------------------------------------------------------------------


def test_variants_take_effect_or_say_why_not(found):
    evidence = found["evidence"]
    ran = {k: v for k, v in evidence.items() if " was not" not in k and v[0] != "UNSUPPORTED"}
    assert {name: reason for name, (_, reason) in ran.items() if reason} == {}
    refused = {name: v[1] for name, v in evidence.items() if v[0] == "UNSUPPORTED"}
    if found.framework == "pt":
        assert {"baseline/train", "torchscript_trace/train", "torchscript_trace/predict"} <= set(
            ran
        )
        assert ran["torchscript_trace/train"][0]["torchscript"] == "TopLevelTracedModule"
        assert set(refused) == {"torchscript_script/train", "torchscript_script/predict"}
        for reason in refused.values():
            assert reason.startswith("TorchScript refuses the model: ")
    else:
        trained = {f"{name}/train" for name in ("baseline", "eager", "compiled")}
        assert trained | {"fit/train", "fit_steps_per_execution/train"} <= set(ran)
        assert set(refused) == {"fit/predict", "fit_steps_per_execution/predict"}
        assert ran["fit_steps_per_execution/train"][0]["calls"] == 2
        assert ran["fit_steps_per_execution/train"][0]["steps"] == 20


def test_what_did_not_happen_is_not_applied(found):
    planted = {k: v for k, v in found["evidence"].items() if " was not" in k}
    assert len(planted) == 6
    for name, reason in planted.items():
        assert "was asked for, but a call ran" in reason, name


# Models that are not ours ---------------------------------------------------------------------


def test_pt_torchscript_does_the_same_and_leaves_no_mark(pt):
    found = pt["torchscript"]
    plain = found.pop("plain")
    types = {"traced": "TopLevelTracedModule", "scripted": "RecursiveScriptModule"}
    for name, kind in types.items():
        assert found[name]["type"] == kind
        assert found[name]["marks"] == plain["marks"]
        for what in ("losses", "mean", "weight"):
            assert found[name][what] == pytest.approx(plain[what], rel=1e-5, abs=1e-7)


def test_pt_tracing_leaves_a_buffer_that_the_model_replaces(pt):
    assert pt["replacing"] == 0.0


# fit ------------------------------------------------------------------------------------------


def test_tf_fit_trains_on_each_batch_once(tf):
    fit = tf["fit"]
    for size, calls, steps in (("1", 6, 6), ("4", 3, 12)):
        assert fit[size]["losses"] == pytest.approx(fit["baseline"], rel=1e-6)
        assert (fit[size]["calls"], fit[size]["steps"]) == (calls, steps)
        assert fit[size]["single_seconds"] == 0.0
        assert 0 < fit[size]["seconds"] < 60
        assert fit[size]["jit_compile"] is False  # what "auto" is on a CPU
    assert fit["none"].startswith("ValueError: steps_per_execution must be at least 1")
    assert fit["one of two"].startswith("NotImplementedError: `fit` of Keras 3 has a loss for each")


# Bad input ------------------------------------------------------------------------------------


def test_pt_bad_modes_get_one_clear_line_and_change_nothing(pt):
    refusals = pt["refusals"]
    for name in ("compiled_train_step", "compiled_model_train_step", "compiled_predict"):
        assert refusals[name].startswith("ValueError: unknown mode 'fastest': choose one of def")
        assert "\n" not in refusals[name]
    assert refusals["modes"] == [None] * 4
    assert refusals["unchanged"]


def test_pt_torchscript_refuses_what_it_cannot_read(pt):
    refusals = pt["refusals"]
    # Our own CNN looks its layers up by name.
    refusal = "TorchScript refuses the model: getattr's second argument must be a string literal"
    assert refusals["scripted"] == f"NotImplementedError: {refusal}"
    assert refusals["traced"] is None


def test_tf_a_model_that_was_compiled_is_so_in_any_step(tf):
    plain, compiled = (tf["applied"][name] for name in ("plain", "compiled"))
    assert (plain["programs"], compiled["programs"]) == (0, 2)  # forward and backward
    assert compiled["losses"] == pytest.approx(plain["losses"], rel=BAR)


def test_tf_a_model_without_variables_is_refused(tf):
    for name, message in tf["unbuilt"].items():
        assert message.startswith("ValueError: the model has no variables yet"), name
