"""One update of BatchNorm's statistics a step: pooled over the parts, and nothing else changes.

Each framework runs in a process of its own (`accumulated_statistics_worker.py`), tf_keras in a
third.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests import workers
from tests.train_step.accumulated import apart, of_parts, relative, tensors

WORKERS = ("pt", *workers.keras())
MOMENTUM = 0.25
PLACES = {"conv0": 64, "conv1": 16}  # pixels that a BatchNorm sees of a sample
BAR = 1e-5  # the parity of the CNNs


@pytest.fixture(scope="module")
def evidence():
    """What each worker found: {"pt": {scenario: ...}, ...}."""
    return workers.run("train_step.accumulated_statistics_worker", WORKERS)


@pytest.fixture(params=["pt", "tf"])
def found(request, evidence):
    return evidence[request.param]


@pytest.fixture(params=WORKERS)
def every(request, evidence):
    return evidence[request.param]


def test_ten_steps(every):
    losses = every["losses"]
    # Nothing in training reads the running statistics.
    assert losses["once"] == losses["each"]


@pytest.mark.parametrize("other", workers.keras())
def test_twins_agree(evidence, other):
    pt, tf = evidence["pt"], evidence[other]
    assert relative(pt["losses"]["once"], tf["losses"]["once"]) < BAR


def test_a_batch_that_cannot_be_cut_changes_nothing(found):
    refusals = found["refusals"]
    assert "3 samples do not fill 4 micro-batches: drop this batch" in refusals["few"]
    assert "need one first axis, the samples: got" in refusals["disagree"]
    assert refusals["unchanged"]
    assert refusals["goes on"]


def test_statistics_once_pool_the_parts(every):
    """Mean and variance of all values together, each framework with its own kind of variance."""
    cnn = every["gradients"]
    before, seen = of_parts(cnn, MOMENTUM)
    sizes, expected = [3, 3, 4], {}
    for layer, places in PLACES.items():
        counts = np.array(sizes)[:, None] * places
        shares, total = counts / counts.sum(), counts.sum()
        means = np.array([part[f"{layer}.bn.mean"] for part in seen])
        variances = np.array([part[f"{layer}.bn.variance"] for part in seen])
        mean = (shares * means).sum(0)
        if every.framework == "pt":
            variances = variances * (counts - 1) / counts
        variance = (shares * (variances + (means - mean) ** 2)).sum(0)
        if every.framework == "pt":
            variance = variance * total / (total - 1)
        for name, value in (("mean", mean), ("variance", variance)):
            old = before[f"{layer}.bn.{name}"]
            expected[f"{layer}.bn.{name}"] = (1 - MOMENTUM) * old + MOMENTUM * value
    assert apart(tensors(cnn["once 3"], statistics=True), expected) < 1e-5


def test_statistics_once_equal_one_large_batch_in_the_first_layer_alone(every):
    cnn = every["gradients"]
    ours, whole = (tensors(cnn[name], statistics=True) for name in ("once 3", "baseline"))
    each = tensors(cnn["3"], statistics=True)
    # tf_keras pools unbiased variances, too large by 1/n for the n values of a part.
    bar = {"conv0.bn.mean": 1e-5, "conv0.bn.variance": 1e-5}
    if every.name == "tf_keras":
        bar["conv0.bn.variance"] = 1 / (3 * PLACES["conv0"])
    for name, limit in bar.items():
        assert apart({name: ours[name]}, {name: whole[name]}) < limit
        assert apart({name: each[name]}, {name: whole[name]}) > 10 * limit
    assert apart(ours, whole) > 1e-3


def test_statistics_once_with_one_part_are_those_of_the_baseline(every):
    cnn = every["gradients"]
    ours, whole = (tensors(cnn[name], statistics=True) for name in ("once 1", "baseline"))
    assert apart(ours, whole) < 1e-6


def test_statistics_once_change_no_gradient(every):
    cnn = every["gradients"]
    assert apart(tensors(cnn["once 3"]), tensors(cnn["3"])) == 0.0


def pooled_twice(found, momentum, ddof):
    """Running statistics of new layers after two updates from all of the data."""
    data, kept = np.array(found["data"]), (1 - momentum) ** 2
    variance = kept + (1 - kept) * data.var(0, ddof=ddof)
    return {"mean": (1 - kept) * data.mean(0), "variance": variance}


def test_pt_batchnorm_over_few_values(evidence):
    """Parts of two and three rows, where the bias of a variance is large."""
    found = evidence["pt"]["norms"]
    ours = {name: np.array(found[name]) for name in ("mean", "variance")}
    assert apart(ours, pooled_twice(found, 0.1, ddof=1)) < 1e-6
    assert found["updates"] == [2, 2, 0]
    # Its input has a variance of 1 in each part: unbiased over nine rows that is 9/8.
    assert found["cumulative"] == pytest.approx([9 / 8] * 4, rel=1e-2)
    assert found["frozen"]


def test_pt_what_a_recomputed_block_sees_again_is_not_pooled_twice(evidence):
    plain, recomputed = evidence["pt"]["recomputed"]
    assert recomputed == plain


def test_pt_what_a_layer_does_not_track_is_not_pooled(evidence):
    without, with_others = evidence["pt"]["untracked"]
    assert with_others == without


def test_pt_the_model_is_left_as_it_was(evidence):
    found = evidence["pt"]["norms"]
    assert found["momenta"] == found["momenta afterwards"] == [0.1, None, 0.1]
    assert found["hooks"] == 0
    assert found["fails"].startswith("RuntimeError")
    assert found["kept"]


def test_pt_layers_that_exchange_are_refused(evidence):
    refused = evidence["pt"]["synchronised"]
    said = "NotImplementedError: accumulated statistics: SyncBatchNorm does not say how many"
    assert refused["once"].startswith(said)
    assert refused["plain"] is None


def test_tf_batchnorm_within_a_layer(evidence):
    found = evidence["tf"]["norms"]
    ours = {name: np.array(found[name]) for name in ("mean", "variance")}
    assert apart(ours, pooled_twice(found, 0.1, ddof=0)) < 1e-6
    assert found["frozen"]
    assert found["momenta"] == [0.9, 0.99]
    assert found["renorm"].startswith("NotImplementedError: accumulated statistics: batch renorm")
    assert found["renorm plain"] is None


@pytest.mark.parametrize("kind", ["traced before", "traced in the step"])
def test_tf_a_call_that_is_a_graph_of_its_own_knows_the_momentum(evidence, kind):
    """That of a part in the step, and again its own in a plain call afterwards."""
    found = evidence["tf"]["decorated"]
    for mean in found[kind]:
        np.testing.assert_allclose(mean, 0.1 * np.array(found["mean"]), rtol=1e-5, atol=1e-7)
