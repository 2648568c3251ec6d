"""Zeros stay zero while what is left trains on, with rounding too, and reach the file.

Each framework runs in a process of its own (`combinations_worker.py`): PyTorch, Keras 3, and
tf_keras, with which the benchmark's rows train.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests import workers

WORKERS = ("pt", "tf", "tf_keras")
KERAS = ("tf", "tf_keras")
BAR = 1e-5  # the parity of digits-cnn
SHARE = 0.75  # the worker's
# Each row trains for 4, 4 and 2 epochs, in this order, less what a row before it has.
STAGES = {
    "0_fp32": [4, 4, 2],
    "2_pruned_int8": [4, 2],  # after the first 4 of 0_fp32
    "2_distilled_int8": [4, 4, 2],
    "1_pruned": [2],
    "1_distilled": [],
}


@pytest.fixture(scope="module")
def evidence():
    """What each worker found: {"pt": {scenario: ...}, ...}."""
    return workers.run("compression.combinations_worker", WORKERS)


@pytest.fixture(params=WORKERS)
def found(request, evidence):
    return evidence[request.param]


@pytest.fixture(params=["pt", "tf_keras"])
def rows(request, evidence):
    """What the benchmark's rows did: those of TensorFlow train with tf_keras."""
    return evidence[request.param]["benchmark"]


def arrays(values):
    return {name: np.array(value) for name, value in values.items()}


# The step -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["sgd", "adamw", "rmsprop"])
def test_zeros_of_kernels_stay_and_all_else_trains(found, rule):
    before, after = arrays(found["steps"]["before"]), arrays(found["steps"][rule]["after"])
    assert before.keys() == after.keys() == {"conv0.kernel", "conv1.kernel", "head.kernel"}
    for name, kernel in after.items():
        zero = before[name] == 0
        assert np.mean(zero) == pytest.approx(SHARE, abs=0.01)
        assert np.array_equal(kernel == 0, zero), name
        assert np.mean(kernel[~zero] != before[name][~zero]) > 0.9
    assert found["steps"][rule]["beta moved"]  # it starts at zero, and is no kernel


def test_what_is_not_zero_moves_as_in_a_plain_step(found):
    ours, plain = (arrays(found["one_step"][f"make_{n}train_step"]) for n in ("sparse_", ""))
    for name, change in ours.items():
        moved = change != 0
        assert np.allclose(change[moved], plain[name][moved], rtol=1e-4, atol=1e-7)
        assert np.mean(plain[name] != 0) > np.mean(moved) + 0.5  # which wakes the zeros


def test_what_the_loss_does_not_read_stays_as_it_is(found):
    before, after = (np.array(found["two_heads"][when]) for when in ("before", "after"))
    assert np.array_equal(before[1], after[1])
    assert np.array_equal(before[0] == 0, after[0] == 0)
    assert np.all((before[0] != after[0])[before[0] != 0])


@pytest.mark.parametrize("keras", KERAS)
def test_two_heads_alike(evidence, keras):
    pt, tf = (np.array(evidence[name]["two_heads"]["after"]) for name in ("pt", keras))
    assert np.allclose(pt, tf, rtol=BAR, atol=1e-6)


@pytest.mark.parametrize("keras", KERAS)
def test_twins_lose_alike(evidence, keras):
    pt, tf = (np.array(evidence[name]["steps"]["sgd"]["losses"]) for name in ("pt", keras))
    assert np.max(np.abs(pt / tf - 1)) < BAR
    assert pt[-1] < pt[0]


# Files --------------------------------------------------------------------------------------------


def test_zeros_reach_the_file_through_training_with_rounding(found):
    files = found["files"]
    assert files["float"] == pytest.approx([SHARE] * 3, abs=0.01)
    assert min(files["sparse"]) >= SHARE - 0.01
    assert files["bytes"][1] < files["bytes"][0]


def test_a_plain_step_would_lose_them(found):
    assert max(found["files"]["plain"]) < SHARE / 2


def test_bad_input_gets_one_clear_line(found):
    refusals = found["refusals"]
    said = "ValueError: no kernel of the model has a zero to keep: prune it first"
    assert refusals["dense"] == said
    assert refusals["missing"].startswith("FileNotFoundError: ")
    assert refusals["text"].startswith("ValueError: ")
    assert "text is no whole " in refusals["text"]


@pytest.mark.parametrize("keras", KERAS)
def test_tf_a_file_that_can_not_run_gets_one_clear_line(evidence, keras):
    refused = evidence[keras]["refusals"]["operator"]
    assert refused.startswith("ValueError: ")
    assert "inverse is no whole LiteRT file: Encountered unresolved custom op" in refused


# The benchmark ------------------------------------------------------------------------------------


def test_no_stage_is_trained_twice(rows):
    assert rows["trained"].keys() >= {"0_fp32", "2_pruned_int8"}
    for name, row in rows["trained"].items():
        assert row["epochs"] == STAGES[name], name


def test_every_row_trains_in_pytorch(evidence):
    assert evidence["pt"]["benchmark"]["trained"].keys() == STAGES.keys()


def test_rows_stack_zeros_and_integers(rows):
    rows = rows["rows"]
    assert rows.keys() >= {"0_fp32", "2_pruned_int8"}
    for name, row in rows.items():
        if "pruned" in name:  # three convolutions; the first and the head are small
            assert sum(zeros > 0.81 for zeros in row["zeros"]) == 3, name
        else:
            assert max(row["zeros"]) < 0.2, name
        smaller = row["bytes"] < 0.5 * rows["0_fp32"]["bytes"]
        assert smaller == ("int8" in name), name


def test_distilled_rows_learn_from_the_teacher(rows):
    trained = rows["trained"]
    targets = {name: row["targets"] for name, row in trained.items()}
    taught = [[120], [120, 10]]
    assert targets == {name: taught if "distilled" in name else None for name in trained}


def test_the_benchmark_proves_zeros_and_integers(rows):
    proofs = rows["proofs"]
    plain, reason = proofs["0_fp32"]
    assert (reason, plain["operators"]) == (None, {})
    stacked, reason = proofs["2_pruned_int8"]
    assert reason is None
    assert sum(stacked["operators"].values()) == 5
    assert sum(zeros > 0.81 for zeros in stacked["zeros_after_steps"].values()) == 3
    assert proofs["pruned"][1] == "zeros_in_file: 0 kernels have 82%"
    assert proofs["rounded"][1] == "0 products ran on integers"
