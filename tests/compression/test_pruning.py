"""The smallest weights become zero, on schedule, and stay so, alike in both frameworks.

Each framework runs in a process of its own (`pruning_worker.py`): PyTorch, Keras 3 and tf_keras.
"""

from __future__ import annotations

import re

import numpy as np
import pytest

from tests import workers

WORKERS = ("pt", "tf_keras", "tf")
FLAVOURS = ("tf", "tf_keras")
BARS = {"cnn": 1e-5, "gpt": 1e-4}  # the parity of the tasks with such models
FINAL, BEGIN, END, FREQUENCY = 0.8, 2, 14, 4  # the worker's schedule
UPDATES = (2, 6, 10, 14)


@pytest.fixture(scope="module")
def evidence():
    """What each worker found: {"pt": {scenario: ...}, ...}."""
    return workers.run("compression.pruning_worker", WORKERS)


@pytest.fixture(params=WORKERS)
def found(request, evidence):
    return evidence[request.param]


def arrays(values):
    return {name: np.array(value) for name, value in values.items()}


def relative(ours, theirs):
    return max(abs(a / b - 1) for a, b in zip(ours, theirs, strict=True))


def kept(size, share):
    """How many of `size` weights stay, in float32 and rounded half to even."""
    return max(int(np.round(np.float32(size) * (np.float32(1) - np.float32(share)))), 1)


def cubic(step):
    left = np.float32(1) - np.float32(step - BEGIN) / np.float32(END - BEGIN)
    return np.float32(FINAL) - np.float32(FINAL) * left * left * left


# Schedule and masks ---------------------------------------------------------------------------


def test_zeros_follow_the_cubic_schedule_and_are_the_smallest_weights(found):
    distinct = found["schedule"]["distinct"]
    weights = arrays(distinct["weights"])
    assert set(weights) == {"conv0.kernel", "conv1.kernel", "head.kernel"}
    for step, masks in enumerate(distinct["masks"], 1):
        share = cubic(max((update for update in UPDATES if update <= step), default=BEGIN))
        assert set(masks) == set(weights)
        for name, mask in arrays(masks).items():
            size = np.abs(weights[name])
            assert int(mask.sum()) == kept(mask.size, share), (step, name)
            if not mask.all():
                assert size[mask == 0].max() < size[mask == 1].min()


def test_small_layers_stay_dense_where_that_is_asked_for(found):
    small = found["small_layers"]
    zeros = small["zeros"]
    assert zeros["conv0.kernel"] == zeros["head.kernel"] == 0.0
    assert zeros["conv1.kernel"] == pytest.approx(0.8, abs=0.005)
    said = "ValueError: the model has no dense or convolution layer of 217 weights or more to prune"
    assert small["none"] == said
    assert small["just"] is None


def test_the_schedule_ends_at_the_final_sparsity_and_begins_at_none(found):
    masks = found["schedule"]["distinct"]["masks"]
    shares = [1 - np.mean(np.concatenate([np.ravel(m) for m in now.values()])) for now in masks]
    assert shares[:5] == [0.0] * 5  # also at begin_step, where the schedule gives zero
    assert shares[9] == pytest.approx(0.8 * (1 - (1 / 3) ** 3), abs=0.005)
    assert shares[-1] == pytest.approx(0.8, abs=0.005)
    assert shares[13] == shares[-1] > shares[12] == shares[9] > shares[8] == shares[5] > 0.4


def test_the_schedule_goes_by_steps_whatever_the_forward_passes_of_a_step(found):
    passes, masks = found["several_passes"], found["schedule"]["distinct"]["masks"]
    assert passes["two"] == masks
    assert passes["none"] == masks[0]  # without an update there is no mask
    assert passes["late"] == masks[13]  # a run goes on at any step


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("weights", ["distinct", "ties"])
def test_twins_mask_the_same_weights_at_every_step(evidence, weights, flavour):
    pt, tf = (evidence[name]["schedule"][weights] for name in ("pt", flavour))
    assert pt["weights"] == tf["weights"]
    assert pt["masks"] == tf["masks"]


def test_weights_that_tie_stay_together(found):
    ties = found["schedule"]["ties"]
    weights, masks = arrays(ties["weights"]), arrays(ties["masks"][-1])
    for name, mask in masks.items():
        size = np.abs(weights[name])
        assert size[mask == 0].max() < size[mask == 1].min()
        assert mask.sum() >= kept(mask.size, FINAL)
    assert any(m.sum() > kept(m.size, FINAL) for m in masks.values())


def test_counts_are_rounded_in_float32_on_both_sides(evidence):
    assert kept(45, 0.9) == 5
    assert round(45 * (1 - 0.9)) == 4  # what float64 would give
    assert [evidence[name]["rounding"] for name in WORKERS] == [40, 40, 40]


def test_of_more_weights_than_float32_counts_no_more_stay_than_there_are(evidence):
    assert float(np.float32(2**24 + 3)) > 2**24 + 3
    assert [evidence[name]["many_weights"] for name in WORKERS] == [[2**24 + 3, 10]] * len(WORKERS)


@pytest.mark.parametrize("side", ["pt", "tf"])
def test_global_magnitude_has_one_threshold(evidence, side):
    found = evidence[side]["together"]
    assert found["masks"] == evidence["pt"]["together"]["masks"]
    weights, masks = arrays(found["weights"]), arrays(found["masks"])
    size = np.concatenate([np.abs(weights[name]).ravel() for name in masks])
    mask = np.concatenate([masks[name].ravel() for name in masks])
    assert size[mask == 0].max() < size[mask == 1].min()
    assert mask.sum() == kept(mask.size, 0.8)
    shares = [m.mean() for m in masks.values()]
    assert max(shares) - min(shares) > 0.1  # not layer by layer


def test_tf_global_magnitude_spans_dtypes(evidence):
    kernel = [[0.0, 0.0], [3.0, 4.0]]
    assert evidence["tf"]["widths"] == [[kernel, "float16"], [kernel, "float32"]]


def test_tf_global_magnitude_is_refused_with_its_reason(evidence):
    refused = evidence["tf_keras"]["together"]["raised"]
    assert refused.startswith("NotImplementedError: tfmot prunes each layer by itself")


# Training -------------------------------------------------------------------------------------


def test_masks_hold_while_sgd_with_momentum_trains(found):
    training = found["training"]
    assert training["masks"] == training["masks later"]
    kernels, masks = arrays(training["kernels"]), arrays(training["masks"])
    assert kernels.keys() == masks.keys()
    for name, kernel in kernels.items():
        assert np.array_equal(kernel != 0, masks[name] == 1), name
        assert (kernel == 0).sum() == kernel.size - kept(kernel.size, 0.8)


def test_only_kernels_get_zeros(found):
    assert set(found["training"]["zeros elsewhere"].values()) <= {0} | set(range(-100, 0))


def test_finalizing_keeps_zeros_and_predictions(found):
    training = found["training"]
    masked, final, rebuilt = (np.array(training[n]) for n in ("masked", "final", "rebuilt"))
    assert np.abs(masked).max() > 0.1
    assert np.allclose(masked, final, rtol=1e-6, atol=1e-6)
    assert np.allclose(masked, rebuilt, rtol=1e-6, atol=1e-6)


def test_the_input_model_is_left_as_it_was(found):
    assert found["training"]["source kept"]
    assert found["training"]["source masks"] == 0


def test_a_final_model_has_no_masks_and_can_be_pruned_again(found):
    assert found["training"]["twice"].startswith("ValueError: the model has no masks")
    assert found["training"]["again"] is None


def test_a_sparsity_of_zero_is_the_baseline(found):
    for model, neutral in found["neutral"].items():
        assert relative(neutral["none"], neutral["dense"]) < 1e-6
        assert neutral["apart"] < BARS[model]
        if found.framework == "pt":
            assert neutral["none"] == neutral["dense"]


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("model", ["cnn", "gpt"])
def test_twins_lose_alike_while_they_prune(evidence, model, flavour):
    pt, tf = (evidence[name]["losses"][model] for name in ("pt", flavour))
    assert relative(pt, tf) < BARS[model]
    dense = evidence["pt"]["neutral"][model]["dense"]
    assert relative(pt[:3], dense[:3]) < 1e-6
    assert relative(pt[3:], dense[3:]) > 100 * BARS[model]


def test_pruned_weights_return_under_tfmot_alone(evidence):
    """Which is the difference that the docstrings name."""
    assert evidence["pt"]["regrowth"] == evidence["tf"]["regrowth"] == 0
    assert evidence["tf_keras"]["regrowth"] > 0


# The benchmark --------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["pt", "tf_keras"])
def test_the_benchmark_prunes_a_trained_model_while_it_trains_on(evidence, side):
    stages = evidence[side]["stages"]
    first, dense, pruned = (arrays(stages[name]) for name in ("start", "dense", "pruned"))
    assert stages["epochs"][:2] == [4, 4]  # the recipe's, then more
    straight = arrays(stages["straight"])
    for name in straight:
        assert np.allclose(dense[name], straight[name], rtol=1e-5, atol=1e-6), name
    for name in ("conv0.kernel", "conv1.kernel", "head.kernel"):
        stays = (
            np.abs(dense[name])
            >= np.sort(np.abs(dense[name]), axis=None)[::-1][kept(dense[name].size, 0.8) - 1]
        )
        assert not np.allclose(dense[name], first[name]), name  # it was trained before,
        assert np.array_equal(pruned[name] != 0, stays), name  # the smallest of that are gone,
        assert not np.allclose(pruned[name][stays], dense[name][stays]), name  # the rest goes on
    assert np.allclose(stages["predicted"], stages["rebuilt"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("side", ["pt", "tf_keras"])
def test_a_stage_is_trained_by_the_first_row_that_needs_it(evidence, side):
    """Two rows without settings have the first stage of a pruned one; another seed has its own."""
    stages = evidence[side]["stages"]
    assert stages["epochs"][2:] == [4, 4, 4]
    assert stages["kept"] == [f"digits-cnn-seed{seed}-plain-4" for seed in (0, 0, 1, 1)]


# Models that are not ours ---------------------------------------------------------------------


def test_pt_a_model_of_two_inputs(evidence):
    foreign = evidence["pt"]["foreign"]
    zeros = foreign["zeros"]
    assert zeros.pop("conv.weight") == zeros.pop("inside.head.weight") == 0.5
    # The attention's biases start at zero.
    assert not any(share for name, share in zeros.items() if not name.startswith("attention."))
    assert zeros["attention.in_proj_weight"] == zeros["attention.out_proj.weight"] == 0.0
    assert foreign["losses"][-1] < foreign["losses"][0]
    assert foreign["names"]
    assert foreign["source kept"]
    assert foreign["copy of a masked model"].startswith("RuntimeError: Only Tensors created expl")


def test_pt_shared_tensors(evidence):
    shared = evidence["pt"]["shared"]
    assert shared["tied"].startswith("NotImplementedError: torch.nn.utils.prune masks one module's")
    assert "0.weight has two owners" in shared["tied"]
    masked, linear, head = shared["embedding"]
    assert (masked, head) == (0.0, 0.0)  # embeddings stay dense, as those of Keras do
    assert linear > 0.0
    assert shared["still tied"]
    assert shared["embedding alone"].startswith("ValueError: the model has no dense or convolution")
    assert shared["twice"] == [True, False, True]  # one module that runs twice has one mask


def test_pt_kernels_that_are_computed_stay_dense(evidence):
    computed = evidence["pt"]["computed"]
    assert computed["zeros"] == [0.0, 0.0, 0.0, 0.5]
    assert computed["fresh"].startswith("NotImplementedError: Python cannot copy the model: Only T")


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("kind", ["functional", "sequential", "nested", "built late"])
def test_tf_models_that_are_not_ours(evidence, kind, flavour):
    foreign = evidence[flavour]["foreign"][kind]
    for name, share in foreign["zeros"].items():
        if "kernel" in name:
            assert share == 0.5, name
        elif not re.search("bias|beta", name):
            assert share == 0.0, name
    assert foreign["losses"][-1] < foreign["losses"][0]
    assert foreign["names"]
    assert foreign["source kept"]
    assert foreign["shared"] == []


def test_tf_what_tfmot_cannot_follow_is_refused_with_the_reason(evidence):
    refused = evidence["tf_keras"]["unsupported"]
    assert all(reason.startswith("NotImplementedError: tfmot ") for reason in refused.values())
    assert "functional and Sequential models, not subclassed" in refused["subclassed"]
    assert "'deep' is within another layer" in refused["nested"]
    assert "'shared' runs more than once" in refused["twice"]
    assert "does not know Conv1DTranspose, as 'up' is" in refused["transposed"]


def test_tf_latency_pruning_takes_pointwise_convolutions_alone(evidence):
    found = evidence["tf_keras"]["latency"]
    dense = {"first": 0, "wide": 0, "depthwise": 0, "narrow": 0, "head": 0}
    assert found["zeros"] == dense | {"wide": 0.5, "narrow": 0.5}
    assert found["given"] == dense


def test_tf_latency_pruning_refuses_what_xnnpack_runs_densely(evidence):
    found = evidence["tf_keras"]["latency"]
    said = "NotImplementedError: XNNPACK has no sparse kernels for it: "
    assert found["pooled"].startswith(f"{said}Layer MaxPooling2D is not supported")
    assert found["other"].startswith(f"{said}Could not find")
    assert found["sparsity"].startswith("ValueError: frequency must be at least 1")
    assert evidence["tf"]["latency"]["refused"].startswith("tfmot's pruning_policy takes models of")


def test_keras_3_refuses_a_subclassed_model_alone(evidence):
    refused = evidence["tf"]["unsupported"]
    said = refused.pop("subclassed")
    assert said.startswith("NotImplementedError: a subclassed model says nothing of its inputs")
    assert refused == {"nested": None, "twice": None, "transposed": None}


def test_keras_3_prunes_in_fit(evidence):
    fit = evidence["tf"]["fit"]
    assert fit["loss"][-1] < fit["loss"][0]
    # Four epochs of three steps; new masks at steps 2 and 4, half of the cubic way and all of it.
    assert fit["zeros"] == [0.0, *[7 / 16] * 2, *[0.5] * 9]
    assert fit["same"] == 0.0  # the copy of an adapted Normalization, before any mask
    assert fit["final"] < 1e-6
    assert len(fit["kernels"]) == 3
    assert set(fit["kernels"].values()) == {0.5}


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_tf_a_regularizer_of_outputs_counts_as_without_masks(evidence, flavour):
    plain, pruned = evidence[flavour]["regularized"]
    assert plain > 0.0
    assert abs(pruned / plain - 1) < 1e-6


# Bad input ------------------------------------------------------------------------------------


def test_bad_input_gets_one_clear_line_and_changes_nothing(found):
    refusals = found["refusals"]
    for value in ("1.0", "-0.1", "nan"):
        start = "ValueError: final_sparsity must be at least 0 and below 1, not"
        assert refusals[f"{{'final_sparsity': {value}}}"] == f"{start} {value}"
    for value in (4, -1):
        said = f"begin_step must be at least 0 and below end_step, not {value} and 4"
        assert refusals[f"{{'begin_step': {value}}}"] == f"ValueError: {said}"
    assert refusals["{'frequency': 0}"] == "ValueError: frequency must be at least 1, not 0"
    assert "4 - 0 must be a multiple of the frequency, 3" in refusals["{'frequency': 3}"]
    assert refusals["step 0"] == "ValueError: steps are counted from 1, not from 0"
    assert refusals["masked"].startswith("ValueError: the model has pruning masks already")
    assert refusals["dense"].startswith("ValueError: the model has no masks")
    assert "no dense or convolution layer" in refusals["nothing to prune"]
    assert refusals["unchanged"]


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_tf_a_model_without_variables_is_refused(evidence, flavour):
    unbuilt = evidence[flavour]["foreign"]["unbuilt"]
    assert unbuilt.startswith("ValueError: the model has no variables yet: call it once")
