"""Weak channels are really gone, the rest computes as before, and alike in both frameworks.

Each framework runs in a process of its own (`structured_pruning_worker.py`), tf_keras in a third.
"""

from __future__ import annotations

import numpy as np
import pytest

from bench.compression.bench_structured_pruning import smaller
from shared.specs import TASKS, CNNSpec, parameter_count, parameter_shapes, state_shapes
from tests import workers

WORKERS = ("pt", *workers.keras())
BAR = 1e-5  # the parity of the tasks with CNNs
CNN = CNNSpec((8, 8, 2), ((8, 1), (10, 2)), num_classes=10)  # the worker's
KEPT = {0.0: (8, 10), 0.3: (6, 7), 0.5: (4, 5), 0.95: (1, 1)}


@pytest.fixture(scope="module")
def evidence():
    """What each worker found: {"pt": {scenario: ...}, ...}."""
    return workers.run("compression.structured_pruning_worker", WORKERS)


@pytest.fixture(params=WORKERS)
def found(request, evidence):
    return evidence[request.param]


def relative(ours, theirs):
    ours, theirs = np.array(ours), np.array(theirs)
    return np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)


def expected(weights, share):
    """The smaller network's weights, cut out of the full ones in NumPy."""
    found, inputs = {}, slice(None)
    for layer, count in zip(("conv0", "conv1"), KEPT[share], strict=True):
        kernel = weights[f"{layer}.kernel"]
        norms = np.abs(kernel).sum((0, 1, 2))
        stay = np.sort(np.argsort(norms)[len(norms) - count :])
        found[f"{layer}.kernel"] = kernel[:, :, inputs][..., stay]
        for kind in ("gamma", "beta", "mean", "variance"):
            found[f"{layer}.bn.{kind}"] = weights[f"{layer}.bn.{kind}"][stay]
        inputs = stay
    found["head.kernel"] = weights["head.kernel"][inputs]
    return found | {"head.bias": weights["head.bias"]}


@pytest.mark.parametrize("share", KEPT)
def test_the_strongest_channels_stay_and_nothing_else(found, share):
    every = {name: np.array(value) for name, value in found["smaller"]["weights"].items()}
    wanted, less = expected(every, share), found["smaller"][str(share)]["weights"]
    assert less.keys() == wanted.keys()
    for name, value in less.items():
        assert np.array_equal(np.array(value), wanted[name]), name


@pytest.mark.parametrize("share", KEPT)
def test_the_smaller_network_is_that_of_the_smaller_spec(found, share):
    spec = smaller(CNN, share)
    assert tuple(filters for filters, _ in spec.convolutions) == KEPT[share]
    less = found["smaller"][str(share)]["weights"]
    shapes = {name: np.array(value).shape for name, value in less.items()}
    assert shapes == parameter_shapes(spec) | state_shapes(spec)
    assert (parameter_count(spec) < parameter_count(CNN)) == (share > 0)


def test_removed_channels_are_those_that_give_nothing(found):
    """Removing the weaker half equals the full network in which that half is silent."""
    less, silent = found["smaller"]["0.5"]["predictions"], found["zeroed"]
    assert relative(less, silent) < BAR
    assert relative(found["smaller"]["predictions"], silent) > 0.1


def test_a_share_of_zero_is_the_baseline(found):
    none = found["smaller"]["0.0"]
    assert none["weights"] == found["smaller"]["weights"]
    assert relative(none["losses"], found["smaller"]["dense losses"]) < 1e-6
    assert found["smaller"]["source kept"]


@pytest.mark.parametrize("other", workers.keras())
def test_twins_agree(evidence, other):
    pt, tf = (evidence[name]["smaller"] for name in ("pt", other))
    for share in map(str, KEPT):
        assert pt[share]["weights"] == tf[share]["weights"], share
    for share in ("0.0", "0.5"):
        ours, theirs = pt[share]["losses"], tf[share]["losses"]
        assert max(abs(a / b - 1) for a, b in zip(ours, theirs, strict=True)) < BAR
        assert relative(pt[share]["predictions"], tf[share]["predictions"]) < BAR


def test_a_model_that_is_not_ours(found):
    """Biases, flattened images of several pixels, an input that joins after the chain."""
    foreign = found["foreign"]
    assert relative(foreign["smaller"], foreign["silenced"]) < BAR
    assert relative(foreign["full"], foreign["silenced"]) > 0.01
    if found.framework == "pt":
        assert foreign["shapes"]["second.weight"] == [2, 3, 3, 3]
        assert foreign["shapes"]["hidden.weight"] == [3, 8]
        assert foreign["channels"] == [3, 2]
        assert foreign["features"] == 8
        assert foreign["gradients"]
    else:
        assert foreign["shapes"]["second.kernel"] == [3, 3, 3, 2]
        assert foreign["shapes"]["hidden.kernel"] == [8, 3]
        assert foreign["summary kept"]
        assert foreign["shared"] == ["by_hand"]


def test_twins_agree_on_a_model_that_is_not_ours(evidence):
    pt, *others = (evidence[name]["foreign"]["smaller"] for name in WORKERS)
    assert all(relative(other, pt) < BAR for other in others)


def test_the_benchmark_takes_channels_from_a_trained_model(found):
    stages = found["stages"]
    assert stages["epochs"] == [TASKS["digits-cnn"].recipe.epochs, 4]
    assert relative(stages["found"], stages["wanted"]) < BAR
    assert relative(stages["whole"], stages["wanted"]) > 0.01


def test_bad_input_gets_one_clear_line_and_changes_nothing(found):
    refusals, dense = found["refusals"], "linear" if found.framework == "pt" else "dense"
    for share in ("1.0", "-0.1", "nan"):
        said = f"ValueError: share must be at least 0 and below 1, not {share}"
        assert refusals[share] == said
    assert refusals["no layer"] == (
        f"ValueError: the model has no convolution or {dense} layer to take channels from"
    )
    assert refusals["unchanged"]


def test_pt_pixels_are_taken_away_in_any_spelling(evidence):
    spellings = evidence["pt"]["spellings"]
    assert len(spellings) == 7
    assert all(after == before / 2 for before, after in spellings.values()), spellings


def test_a_model_with_pruning_masks_is_refused(found):
    names = ["masked", *(["masked, after a prediction"] if found.framework == "pt" else [])]
    for name in names:
        said = found["refusals"][name]
        assert said == "ValueError: the model has pruning masks: finalize it first"


REASONS = {
    "pt": {
        "outputs": "can lose channels: all of them are its outputs",
        "unknown": "'0': the smaller model computes something else",
        "no head": "all of them are its outputs",
        "shuffles": "can't trace the model: its code shuffles channels",
        "mixes": "'conv': the smaller model computes something else",
        "misnamed": "'conv': the smaller model computes something else",
        "over channels": "'conv': the smaller model computes something else",
        "flattens samples": "'conv': the model's code needs the channels it has: ",
        "splits": "'conv': the model's code needs the channels it has: ",
        "tied": "Linear shares its weight with another module",
        "transposed groups": "ConvTranspose2d groups them with other channels",
        "branch": "'trunk': 'b.weight', which the example does not run, may read them",
        "no copy": "Python cannot copy the model: Only Tensors",
    },
    "tf": {
        "outputs": "can lose channels: all of them are its outputs",
        "unknown": "the smaller model computes something else",
        "mixes": "the smaller model computes something else",
        "mixes inside": "'inside': the smaller model computes something else",
        "by a layer": "'layer': the smaller model computes something else",
        "misnamed": "'misnamed': the smaller model computes something else",
        "no head": "all of them are its outputs",
        "two outputs": "all of them are its outputs",
        "subclassed": "a subclassed model has no graph",
    },
}


def test_what_can_not_be_followed_is_refused_with_its_place(found):
    reasons = REASONS[found.framework]
    for name, reason in reasons.items():
        refused = found["refusals"][name]
        assert refused is not None, name
        assert refused.startswith("NotImplementedError: "), (name, refused)
        assert reason in refused, (name, refused)


# Models of foreign construction ---------------------------------------------------------------

# Half of all channels, and of each group's: kernels as PyTorch has them.
WIDTHS = {
    "stem": [4, 3, 3, 3],
    "left": [4, 4, 3, 3],
    "deep": [4, 1, 3, 3],
    "grouped": [6, 2, 1, 1],
    "point": [3, 4, 1, 1],
    "hidden": [5, 9],
    "head": [4, 5],
    "more": [2, 5],
}


def test_channels_are_followed_through_branches(found):
    """Sum, product, depthwise and grouped convolution, concatenation, two inputs and outputs."""
    branches = found["branches"]
    for ours, silent, full in zip(
        *(branches[name] for name in ("smaller", "silenced", "full")), strict=True
    ):
        assert relative(ours, silent) < BAR
        assert relative(full, silent) > 0.1
    assert branches["widths"] == WIDTHS


def test_twins_agree_on_branches_and_on_a_residual_network(evidence):
    pt, *others = (evidence[name] for name in WORKERS)
    for other in others:
        outputs = (other["branches"]["smaller"], pt["branches"]["smaller"])
        for ours, theirs in zip(*outputs, strict=True):
            assert relative(ours, theirs) < BAR
        assert other["residual"]["counts"] == pt["residual"]["counts"]
        assert relative(other["residual"]["predictions"], pt["residual"]["predictions"]) < BAR
    before, after = pt["residual"]["counts"]
    assert after < 0.3 * before


def test_attention_loses_what_is_apart(found):
    attention = found["others"]["attention"]
    assert attention["finite"]
    shapes = attention["shapes"]
    if found.framework == "pt":  # by plain linear layers: the residual stream goes with the rest
        assert shapes["tokens.weight"] == [4, 5]
        assert shapes["place"] == [1, 6, 4]
        assert shapes["norm.weight"] == [4]
        assert shapes["up.weight"] == [6, 4]
        assert shapes["query.weight"] == [8, 4]
        assert "'query': the smaller model computes something else" in attention["warning"][0]
    else:
        assert shapes["tokens.0"] == [5, 4]
        assert shapes["attention.0"] == [4, 2, 3]
        assert shapes["attention.6"] == [2, 3, 4]
        assert shapes["up.0"] == [4, 6]
        assert attention["warning"] == []


def test_what_recurrent_layers_read_stays_and_a_warning_says_so(found):
    lstm = found["others"]["lstm"]
    name, kernel = ("weight", [8, 5]) if found.framework == "pt" else ("0", [5, 8])
    assert lstm["shapes"][f"up.{name}"] == kernel
    assert sorted(lstm["shapes"][f"hidden.{name}"]) == [4, 6]
    assert any("'up'" in line for line in lstm["warning"])
    assert lstm["finite"]


def test_norms_over_groups_and_transposed_convolutions_follow(found):
    norms = found["others"]["norms"]
    assert norms["warning"] == []
    assert norms["finite"]
    shapes = norms["shapes"]
    if found.framework == "pt":
        assert shapes["0.weight"] == [4, 6, 3]
        assert shapes["1.weight"] == [4]
        assert shapes["3.weight"] == [4, 2, 2]
        assert shapes["6.weight"] == [3, 2 * 5 - 2]
    else:
        assert shapes["conv.0"] == [3, 5, 4]
        assert shapes["groups.0"] == [4]
        assert shapes["transposed.0"] == [2, 2, 4]


def test_pt_frozen_layers_stay_frozen(evidence):
    frozen = evidence["pt"]["others"]["frozen"]
    assert frozen["shapes"]["0.weight"] == [4, 5]
    assert frozen["grad"] == [False] * 4
    assert all(frozen["modes"])


def test_pt_attention_of_one_width_stays_whole(evidence):
    encoder = evidence["pt"]["others"]["encoder"]
    assert encoder["shapes"]["encoder.linear1.weight"] == [6, 8]
    assert encoder["shapes"]["up.weight"] == [8, 5]
    assert any("'up'" in line for line in encoder["warning"])


def test_pt_rotary_positions_stay_whole_and_the_rest_is_cut(evidence):
    """`torch_pruning` alone would follow their channels without end."""
    rotary = evidence["pt"]["others"]["rotary"]
    assert rotary["shapes"]["turned.weight"] == [8, 5]
    assert rotary["shapes"]["up.weight"] == [3, 8]
    assert len(rotary["warning"]) == 1
    assert "'turned': torch_pruning loses count of them" in rotary["warning"][0]


def test_pt_heads_that_run_in_training_alone_read_what_is_left(evidence):
    auxiliary = evidence["pt"]["others"]["auxiliary"]
    assert auxiliary["shapes"]["up.weight"] == [4, 5]
    assert auxiliary["shapes"]["aside.weight"] == [3, 4]
    assert auxiliary["warning"] == []
    assert auxiliary["finite"]


def test_pt_what_root_mean_squares_are_taken_of_stays_whole(evidence):
    squares = evidence["pt"]["others"]["squares"]
    assert squares["shapes"]["0.weight"] == [8, 5]
    assert squares["shapes"]["2.weight"] == [3, 8]
    assert "'0': the model's code needs the channels it has" in squares["warning"][0]


def test_pt_a_warning_says_that_nothing_goes(evidence):
    alone = evidence["pt"]["others"]["alone"]
    assert alone["shapes"]["0.weight"] == [8, 6, 3]
    assert "'0': its groups of 1 channels lose none at this share" in alone["warning"][0]


def test_pt_half_precision_may_round_otherwise(evidence):
    others = evidence["pt"]["others"]
    assert others["half"]["shapes"]["up.weight"] == [4, 5]
    assert others["half"]["finite"]
    assert "the smaller model computes something else" in others["single"]


@pytest.mark.parametrize("flavour", workers.keras())
def test_tf_a_share_of_zero_keeps_all_state(evidence, flavour):
    """Normalization computes with its adapted state, which weights alone do not bring along."""
    for name, case in evidence[flavour]["others"].items():
        whole, none = case["same"]
        assert relative(none, whole) < 1e-6, name


@pytest.mark.parametrize("flavour", workers.keras())
def test_tf_a_layer_that_runs_twice_reads_what_it_makes(evidence, flavour):
    twice = evidence[flavour]["others"]["twice"]
    assert twice["shapes"]["twice.0"] == [4, 4]
    assert twice["shapes"]["first.0"] == [5, 4]
