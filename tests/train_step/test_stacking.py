"""Each rung changes what it says and no result, and all of them together still train.

Each framework runs in a process of its own (`stacking_worker.py`), tf_keras in a third. PyTorch's
compiled steps run the traced graphs on its own kernels ("aot_eager").
"""

from __future__ import annotations

import numpy as np
import pytest

from tests import workers
from tests.kit.parity import check

SIDES = ("pt", *workers.keras())
TWINS = ("pt", "tf")
BAR = 1e-5
U = 2.0**-8  # the largest relative error of rounding to bfloat16
# Rounding of the same work in another order: of float32, and of each layer's half-width results.
BOUNDS = {"float32": BAR, "bfloat16": 2 * U, "float16": U / 4}


@pytest.fixture(scope="module")
def evidence():
    """What each worker found: {"pt": {scenario: ...}, ...}."""
    return workers.run("train_step.stacking_worker", SIDES)


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
@pytest.mark.parametrize("side", workers.keras())
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


@pytest.mark.parametrize("side", TWINS)
def test_everything_together_trains(evidence, side):
    found = evidence[side]["everything"]
    losses = found["losses"]
    assert np.isfinite(losses).all()
    assert np.mean(losses[-6:]) < 0.5 * np.mean(losses[:6])
    assert found["retraced"] == 0


@pytest.mark.parametrize("side", TWINS)
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


# Random sets of techniques --------------------------------------------------------------------


@pytest.mark.parametrize("side", SIDES)
def test_any_set_of_techniques_is_plain_training(evidence, side):
    """Losses and updates of three steps of a model whose layers do not mix samples."""
    found = evidence[side]["random_sets"]["sets"]
    assert len(found) >= (10 if workers.campaign() else 6)
    for name in ("memory_format", "micro_batches", "max_norm", "compiled"):
        assert len({one["set"][name] for one in found}) > 1
    for one in found:
        losses, updates = one["apart"]
        bound = BOUNDS[one["set"]["dtype"]]
        assert losses < bound, one
        assert updates < 10 * bound, one


@pytest.mark.parametrize("side", SIDES)
def test_a_rate_that_is_off_by_a_hundredth_would_be_seen(evidence, side):
    _, updates = evidence[side]["random_sets"]["planted"]
    assert updates > 100 * BOUNDS["float32"]


@pytest.mark.parametrize("side", SIDES)
def test_a_ragged_batch_is_cut_by_its_samples(evidence, side):
    found = evidence[side]["ragged"]
    for parts, whole in zip(found["4"], found["1"], strict=True):
        assert np.linalg.norm(np.subtract(parts, whole)) < BAR * np.linalg.norm(whole)
    assert "3 samples do not fill 4 micro-batches" in found["few"]


def test_tf_a_batch_in_float64_is_cut_too(evidence):
    whole, parts = evidence["tf"]["double"]
    assert np.allclose(parts, whole, rtol=1e-6)  # shares are float32


def test_tf_the_benchmark_tells_where_xla_runs_bfloat16_in_float32(evidence):
    found = evidence["tf"]["proof"]
    assert found["traced"] is None
    said = "NotImplementedError: XLA runs bfloat16 layers in float32 on this device"
    assert found["compiled"] in (None, said)


# PyTorch's own rungs --------------------------------------------------------------------------


def test_pt_channels_last_holds_from_kernel_to_optimizer(evidence):
    """The kernel, its momentum, and what the convolution read and wrote in both parts."""
    assert evidence["pt"]["formats"] == [True] * 6


def test_pt_what_the_optimizer_holds_is_clipped_by_its_own_norm(evidence):
    """Other layers' gradients add up, and stay scaled."""
    assert evidence["pt"]["partly"] == pytest.approx(1e-3, rel=1e-2)


def test_pt_a_fused_update_is_not_compiled(evidence):
    assert evidence["pt"]["what_is_compiled"] == {"False": True, "True": False}


# Bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", TWINS)
def test_bad_settings_get_one_clear_line_and_change_nothing(evidence, side):
    found = dict(evidence[side]["refusals"])
    assert found.pop("unchanged")
    said = {
        "dtype": "unknown dtype 'half': choose one of bfloat16, float16, float32",
        "parts": "micro_batches must be an integer of at least 1, not 0",
        "norm": "max_norm must be above 0 (inf does not clip), not 0.0",
        "format": "unknown memory format 'NHWC'",
        "blocks": "the model has no block 'blok'",
    }
    for name, message in found.items():
        assert message.startswith("ValueError: ")
        assert said[name] in message
        assert "\n" not in message


def test_pt_models_that_do_not_fit_are_refused(evidence):
    found = evidence["pt"]["own_refusals"]
    assert found["deep"].startswith("NotImplementedError: torch has no channels_last for 5-D")


def test_tf_models_that_do_not_fit_are_refused(evidence):
    for side in workers.keras():
        found = evidence[side]["own_refusals"]
        assert found["unbuilt"].startswith("ValueError: the model has no variables yet")
    found = evidence["tf"]["own_refusals"]
    assert (found["bfloat16"], found["recomputed"]) == (None, None)
    assert "master weights are float32" in found["half"]
    assert found["factor"].startswith("ValueError: pass the optimizer itself, without")


@pytest.mark.campaign
def test_tf_keras_refuses_what_it_cannot_stack(evidence):
    found = evidence["tf_keras"]["own_refusals"]
    assert found["bfloat16"].startswith("NotImplementedError: tf_keras cannot switch a built model")
    assert found["recomputed"].startswith("NotImplementedError: tf_keras would draw other")
