"""Weak channels are really gone, the rest computes as before, and alike in both frameworks.

Each framework runs in a process of its own (`structured_pruning_worker.py`), tf_keras in a third.
"""

from __future__ import annotations

import numpy as np
import pytest

from bench.compression.bench_structured_pruning import smaller
from shared.specs import CNNSpec, parameter_count, parameter_shapes, state_shapes
from tests import workers

WORKERS = ("pt", "tf", "tf_keras")
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


@pytest.mark.parametrize("other", ["tf", "tf_keras"])
@pytest.mark.parametrize("share", KEPT)
def test_twins_agree(evidence, other, share):
    pt, tf = (evidence[name]["smaller"][str(share)] for name in ("pt", other))
    assert pt["weights"] == tf["weights"]
    assert max(abs(a / b - 1) for a, b in zip(pt["losses"], tf["losses"], strict=True)) < BAR
    assert relative(pt["predictions"], tf["predictions"]) < BAR


def test_a_model_that_is_not_ours(found):
    """Biases, flattened images of several pixels, an input that joins after the chain."""
    foreign = found["foreign"]
    assert relative(foreign["smaller"], foreign["silenced"]) < BAR
    assert relative(foreign["full"], foreign["silenced"]) > 0.01
    if found.framework == "pt":
        assert foreign["shapes"]["second.weight"] == [2, 3, 3, 3]
        assert foreign["shapes"]["hidden.weight"] == [7, 8]
        assert foreign["channels"] == [3, 2]
        assert foreign["features"] == 8
        assert foreign["gradients"]
    else:
        assert foreign["shapes"]["second.kernel"] == [3, 3, 3, 2]
        assert foreign["shapes"]["hidden.kernel"] == [8, 7]
        assert foreign["summary kept"]
        assert foreign["shared"] == ["by_hand"]


def test_twins_agree_on_a_model_that_is_not_ours(evidence):
    pt, *others = (evidence[name]["foreign"]["smaller"] for name in WORKERS)
    assert all(relative(other, pt) < BAR for other in others)


def test_the_benchmark_takes_channels_from_a_trained_model(found):
    stages = found["stages"]
    assert stages["epochs"] == [None, 4]
    assert relative(stages["found"], stages["wanted"]) < BAR
    assert relative(stages["whole"], stages["wanted"]) > 0.01


def test_bad_input_gets_one_clear_line_and_changes_nothing(found):
    refusals = found["refusals"]
    for share in ("1.0", "-0.1", "nan"):
        said = f"ValueError: share must be at least 0 and below 1, not {share}"
        assert refusals[share] == said
    assert refusals["no convolution"] == (
        "ValueError: the model has no 2-D convolution to take channels from"
    )
    assert refusals["unchanged"]


def test_pt_pixels_are_taken_away_in_any_spelling(evidence):
    spellings = evidence["pt"]["spellings"]
    assert len(spellings) == 6
    assert all(after == before / 2 for before, after in spellings.values()), spellings


def test_pt_a_model_with_pruning_masks_is_refused(evidence):
    refusals = evidence["pt"]["refusals"]
    for name in ("masked", "masked, after a prediction"):
        assert refusals[name] == "ValueError: the model has pruning masks: finalize it first"


REASONS = {
    "pt": {
        "residual": "feeds 2 operators, not one",
        "grouped": "'0' is a grouped convolution",
        "unknown": "'1' can't be followed",
        "twice": "'0' runs more than once",
        "no head": "no nn.Linear follows",
        "mixes": "'softmax' can't be followed",
        "misnamed": "'relu' can't be followed",
        "over channels": "'mean' can't be followed",
        "flattens samples": "'flatten' can't be followed",
        "keeps axes": "'mean' can't be followed",
        "control flow": "torch.fx can't trace the model: symbolically traced variables",
    },
    "tf": {
        "residual": "feeds 2 layers, not one",
        "grouped": "'grouped' is a grouped convolution",
        "unknown": "'ln' can't be followed",
        "twice": "'shared' runs more than once",
        "mixes": "the activation of 'over' is none that is known to leave channels apart",
        "mixes inside": "the activation of 'inside' is none",
        "by a layer": "the activation of 'layer' is none",
        "misnamed": "the activation of 'misnamed' is none",
        "no head": "'end' is an output before any Dense layer",
        "two outputs": "'features' is an output before any Dense layer",
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
