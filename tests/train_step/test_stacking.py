"""Each rung changes what it says and no result, and all of them together still train.

Each framework runs in a process of its own (`stacking_worker.py`), tf_keras in a third. In PyTorch
one step is compiled by inductor; the other compiled ones run the traced graphs on PyTorch's own
kernels ("aot_eager").
"""

from __future__ import annotations

import numpy as np
import pytest

from bench.harness.machine import compiler
from tests import workers
from tests.kit.parity import check

SIDES = ("pt", "tf", "tf_keras")
TWINS = ("pt", "tf")
BAR = 1e-5
U = 2.0**-8  # the largest relative error of rounding to bfloat16
needs_compiler = pytest.mark.skipif(not compiler(), reason="torch.compile needs a C++ compiler")
COMPILING = [pytest.param("pt", marks=needs_compiler), "tf"]


@pytest.fixture(scope="module")
def evidence(inductor):
    """What each worker found: {"pt": {scenario: ...}, ...}."""
    lacking = [] if compiler() else ["no-compiler"]
    return workers.run(
        "train_step.stacking_worker",
        SIDES,
        lambda name: lacking if name == "pt" else [],
        **inductor,
    )


def arrays(result):
    weights = {name: np.array(values) for name, values in result["weights"].items()}
    return weights | {"losses": np.array(result["losses"])}


# Rungs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", SIDES)
def test_the_neutral_step_is_the_baseline_to_the_last_bit(evidence, side):
    rungs = evidence[side]["rungs"]
    assert rungs["neutral"] == rungs["baseline"]


@pytest.mark.parametrize("rung", ["channels_last", "compiled"])
@pytest.mark.parametrize("side", SIDES)
def test_float32_rungs_train_as_the_baseline(evidence, side, rung):
    rungs = evidence[side]["rungs"]
    check(arrays(rungs[rung]), arrays(rungs["baseline"]), BAR)


@pytest.mark.parametrize("rung", ["baseline", "channels_last", "compiled", "micro_batches"])
@pytest.mark.parametrize("side", ["tf", "tf_keras"])
def test_twins_agree_on_every_float32_rung(evidence, side, rung):
    """Micro-batches too: BatchNorm normalises each by itself on both sides."""
    ours, theirs = (evidence[s]["rungs"][rung] for s in (side, "pt"))
    check(arrays(ours), arrays(theirs), BAR)


@pytest.mark.parametrize("side", SIDES)
def test_another_learning_rate_is_noticed(evidence, side):
    rungs = evidence[side]["rungs"]
    with pytest.raises(AssertionError, match="differ by more than"):
        check(arrays(rungs["planted"]), arrays(rungs["baseline"]), BAR)


@pytest.mark.parametrize("side", SIDES)
def test_micro_batches_with_batchnorm_are_another_computation(evidence, side):
    rungs = evidence[side]["rungs"]
    with pytest.raises(AssertionError, match="differ by more than"):
        check(arrays(rungs["micro_batches"]), arrays(rungs["baseline"]), BAR)


@pytest.mark.parametrize("side", TWINS)
def test_bfloat16_is_float32_but_for_its_rounding(evidence, side):
    """Three layers round their input, weight and output: nine roundings of u each at worst."""
    rungs = evidence[side]["rungs"]
    ours, theirs = (np.array(rungs[name]["losses"]) for name in ("bfloat16", "baseline"))
    difference = np.abs(ours / theirs - 1).max()
    assert U / 64 < difference < 9 * U


@pytest.mark.parametrize("side", TWINS)
def test_bfloat16_is_what_ran(evidence, side):
    found = evidence[side]["dtypes"]
    for kind in ("convolution", "matmul"):
        assert set(found["neutral"][kind]) == {"float32"}
        assert set(found["bfloat16"][kind]) == {"bfloat16"}


# All together ---------------------------------------------------------------------------------


@pytest.mark.parametrize("side", COMPILING)
def test_everything_together_trains(evidence, side):
    found = evidence[side]["everything"]
    losses = found["losses"]
    assert np.isfinite(losses).all()
    assert np.mean(losses[-6:]) < 0.5 * np.mean(losses[:6])
    assert found["retraced"] == 0


@pytest.mark.parametrize("side", COMPILING)
def test_everything_together_is_compiled_bfloat16_over_float32(evidence, side):
    found = evidence[side]["everything"]
    assert found["compiled"]
    assert found["kept"] == ["float32"]
    if side == "pt" or not found["device"].startswith("CPU"):
        assert set(found["dtypes"]["convolution"]) == {"bfloat16"}
    else:
        # What is compiled is bfloat16; XLA's CPU backend computes it in float32 where it has no
        # kernel, and the benchmark's row says so.
        assert found["traced"] == ["bf16"]


# Micro-batches --------------------------------------------------------------------------------


@pytest.mark.parametrize("side", SIDES)
def test_micro_batches_add_up_to_the_batch(evidence, side):
    """A model of two inputs, custom or subclassed, without BatchNorm."""
    found = evidence[side]["parts_of_one_size"]
    for parts in ("2", "4"):
        check(arrays(found[parts]), arrays(found["1"]), BAR)
    assert found["1"]["losses"][-1] < found["1"]["losses"][0]


@pytest.mark.parametrize("side", SIDES)
def test_a_batch_that_cannot_be_cut_is_refused(evidence, side):
    message = evidence[side]["parts_of_one_size"]["ragged"]
    assert message.startswith("ValueError: ")
    assert "a batch of 7 cannot be cut into 4 parts of equal size" in message


def test_tf_the_benchmark_tells_where_xla_runs_bfloat16_in_float32(evidence):
    found = evidence["tf"]["proof"]
    assert found["traced"] is None
    said = "NotImplementedError: XLA runs bfloat16 layers in float32 on this device"
    assert found["compiled"] in (None, said)


def test_tf_sparse_gradients_add_up(evidence):
    whole, parts = evidence["tf"]["embedding"]
    assert parts == pytest.approx(whole, rel=BAR)
    assert whole[-1] < whole[0]


def test_tf_micro_batches_run_one_after_the_other(evidence):
    """Side by side they would keep the activations of all at the same time."""
    found = evidence["tf"]["parts_in_order"]
    assert found == {"convolutions": 4, "waits": [False, True]}


# PyTorch's own rungs --------------------------------------------------------------------------


def test_pt_channels_last_holds_from_kernel_to_optimizer(evidence):
    """The kernel, its momentum, and what the convolution read and wrote in both parts."""
    assert evidence["pt"]["formats"] == [True] * 6


def test_pt_a_fused_optimizer_gives_the_same_weights(evidence):
    found = evidence["pt"]["fused"]
    check(arrays(found["True"]), arrays(found["False"]), 1e-6)
    assert (found["False kernel"], found["True kernel"]) == (False, True)


def test_pt_a_fused_update_is_not_compiled(evidence):
    assert evidence["pt"]["what_is_compiled"] == {"False": True, "True": False}


# Bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", TWINS)
def test_bad_settings_get_one_clear_line_and_change_nothing(evidence, side):
    found = dict(evidence[side]["refusals"])
    assert found.pop("unchanged")
    said = {
        "dtype": "unknown dtype 'float16': choose one of float32, bfloat16",
        "parts": "micro_batches must be at least 1, not 0",
        "rate": "learning_rate must be at least 0",
        "momentum": "momentum in [0, 1)",
    }
    for name, message in found.items():
        assert message.startswith("ValueError: ")
        assert said[name] in message


def test_pt_models_that_do_not_fit_are_refused(evidence):
    found = evidence["pt"]["own_refusals"]
    for name in ("flat", "deep"):
        assert found[name].startswith("ValueError: channels_last converts 4-D parameters")
    assert found["half"].startswith("ValueError: master weights are float32, but ")


def test_tf_models_that_do_not_fit_are_refused(evidence):
    for side in ("tf", "tf_keras"):
        found = evidence[side]["own_refusals"]
        assert found["format"].startswith("NotImplementedError: a built Keras layer keeps its")
        assert found["fused"].startswith("NotImplementedError: Keras has no fused optimizer")
        assert found["unbuilt"].startswith("ValueError: the model has no variables yet")
    assert evidence["tf"]["own_refusals"]["bfloat16"] is None
    assert "master weights are float32" in evidence["tf"]["own_refusals"]["half"]
    refused = evidence["tf_keras"]["own_refusals"]["bfloat16"]
    assert refused.startswith("NotImplementedError: tf_keras cannot switch a built model")
