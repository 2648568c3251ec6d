"""Parts of a batch add up to the batch, one at a time, and alike in both frameworks.

Each framework runs in a process of its own (`gradient_accumulation_worker.py`), tf_keras in a
third. The optimizer of most tests puts the gradient in the weight's place, so that gradients are
compared and not what is left of them in a sum.
"""

from __future__ import annotations

import re
import sys

import numpy as np
import pytest

from tests import workers

WORKERS = ("pt", *workers.keras())
BARS = {"cnn": 1e-5, "gpt": 1e-4}  # the parity of the tasks with such models
SHARES = [0.3, 0.3, 0.4]
MOMENTUM = 0.25
PLACES = {"conv0": 64, "conv1": 16}  # pixels that a BatchNorm sees of a sample


@pytest.fixture(scope="module")
def evidence():
    """What each worker found: {"pt": {scenario: ...}, ...}."""
    return workers.run("train_step.gradient_accumulation_worker", WORKERS)


@pytest.fixture(params=["pt", "tf"])
def found(request, evidence):
    return evidence[request.param]


@pytest.fixture(params=WORKERS)
def every(request, evidence):
    return evidence[request.param]


def tensors(applied, statistics=False):
    """The gradients of a step, or the statistics after it, as float64 arrays."""
    return {
        name: np.array(value, dtype=np.float64)
        for name, value in applied.items()
        if name != "loss" and name.endswith((".bn.mean", ".bn.variance")) == statistics
    }


def apart(ours, theirs):
    """The largest relative L2 difference of a tensor."""
    assert ours.keys() == theirs.keys()
    norm = np.linalg.norm
    return max(norm(ours[name] - theirs[name]) / norm(theirs[name]) for name in theirs)


def relative(ours, theirs):
    return max(abs(a / b - 1) for a, b in zip(ours, theirs, strict=True))


def weighted(parts, shares, **kwargs):
    parts = [tensors(part, **kwargs) for part in parts]
    return {
        name: sum(share * part[name] for share, part in zip(shares, parts, strict=True))
        for name in parts[0]
    }


# Gradients ------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", ["1", "3"])
def test_parts_add_up_to_the_gradient_of_the_batch(every, parts):
    gpt = every["gradients"]["gpt"]
    assert apart(tensors(gpt[parts]), tensors(gpt["baseline"])) < BARS["gpt"]
    assert gpt[parts]["loss"] == pytest.approx(gpt["baseline"]["loss"], rel=1e-6)


def test_parts_count_by_their_samples(every):
    """The plain mean of the parts' gradients is far outside the bar."""
    gpt = every["gradients"]["gpt"]
    alone = gpt["alone"]
    plain = weighted(alone, [1 / 3] * 3)
    assert apart(weighted(alone, SHARES), tensors(gpt["baseline"])) < BARS["gpt"]
    assert apart(plain, tensors(gpt["baseline"])) > 100 * BARS["gpt"]


def test_batchnorm_normalises_each_part_by_itself(every):
    """The gradient is that of the parts alone, and by design not that of the batch."""
    cnn = every["gradients"]["cnn"]
    ours, alone = tensors(cnn["3"]), weighted(cnn["alone"], SHARES)
    assert apart(ours, alone) < BARS["cnn"]
    assert apart(ours, tensors(cnn["baseline"])) > 100 * BARS["cnn"]


def test_ten_steps(every):
    losses = every["losses"]
    assert losses["each"][-1] < losses["each"][0]
    # Nothing in training reads the running statistics.
    assert losses["once"] == losses["each"]


@pytest.mark.parametrize("other", workers.keras())
def test_twins_agree(evidence, other):
    pt, tf = evidence["pt"], evidence[other]
    assert relative(pt["losses"]["each"], tf["losses"]["each"]) < BARS["cnn"]
    ours, theirs = (tensors(side["gradients"]["gpt"]["3"]) for side in (pt, tf))
    assert apart(ours, theirs) < BARS["gpt"]


# Running statistics ---------------------------------------------------------------------------


def of_parts(cnn):
    """The statistics that each part alone has given, out of what an update made of them."""
    before = tensors(cnn["start"], statistics=True)
    return before, [
        {n: (v - (1 - MOMENTUM) * before[n]) / MOMENTUM for n, v in alone.items()}
        for alone in (tensors(part, statistics=True) for part in cnn["alone"])
    ]


def test_statistics_get_one_update_a_part(every):
    cnn = every["gradients"]["cnn"]
    expected, seen = of_parts(cnn)
    for part in seen:
        expected = {n: (1 - MOMENTUM) * v + MOMENTUM * part[n] for n, v in expected.items()}
    assert apart(tensors(cnn["3"], statistics=True), expected) < 1e-5


def test_statistics_once_pool_the_parts(every):
    """Mean and variance of all values together, each framework with its own kind of variance."""
    cnn = every["gradients"]["cnn"]
    before, seen = of_parts(cnn)
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
    cnn = every["gradients"]["cnn"]
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
    cnn = every["gradients"]["cnn"]
    ours, whole = (tensors(cnn[name], statistics=True) for name in ("once 1", "baseline"))
    assert apart(ours, whole) < 1e-6


def test_statistics_once_change_no_gradient(every):
    cnn = every["gradients"]["cnn"]
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


def test_tf_batchnorm_within_a_layer(evidence):
    found = evidence["tf"]["norms"]
    ours = {name: np.array(found[name]) for name in ("mean", "variance")}
    assert apart(ours, pooled_twice(found, 0.1, ddof=0)) < 1e-6
    assert found["frozen"]
    assert found["momenta"] == [0.9, 0.99]
    assert found["renorm"].startswith("NotImplementedError: statistics_once: batch renorm")
    assert found["renorm plain"] is None


# One part at a time ---------------------------------------------------------------------------


def test_each_part_goes_forward_and_backward_before_the_next(found):
    rows = [2, 2, 2, 3]
    assert found["order"] == [f"{what} {n}" for n in rows for what in ("forward", "backward")]


@pytest.mark.skipif(sys.platform != "linux", reason="resident peaks of the Linux kernel")
def test_parts_save_the_activations(found):
    """12 activations of 16 MiB in one part, a sixteenth of that in sixteen."""
    peaks = found["peaks"]
    # Some of it may fit into what the process held before.
    assert peaks["1"] > 8 * 2**24
    assert peaks["16"] < peaks["1"] / 3


def test_ragged_batches(found):
    ragged = found["ragged"]
    assert relative(ragged["parts"], ragged["baseline"]) < 1e-5
    assert ragged["traces"] == (None if found.framework == "pt" else 2)  # one for each size


def test_tf_a_graph_that_does_not_know_the_batch(evidence):
    dynamic = evidence["tf"]["dynamic"]
    assert relative(dynamic["parts"], dynamic["baseline"]) < 1e-5
    assert dynamic["traces"] == 1
    assert dynamic["few"].startswith("InvalidArgumentError")
    assert "samples do not fill 4 micro-batches" in dynamic["few"]
    assert dynamic["unchanged"]


# Models that are not ours ---------------------------------------------------------------------


def test_tf_a_double_precision_model(evidence):
    """`fit` does not tell its graph how many samples there are: their shares are float32 then."""
    double = evidence["tf"]["double"]
    np.testing.assert_allclose(double["step"], double["plain"], rtol=1e-14)
    np.testing.assert_allclose(double["fit"], double["plain"], rtol=1e-14)
    np.testing.assert_allclose(double["fit in parts"], double["fit"], rtol=1e-7)


def test_tf_functional_model_with_a_list_of_inputs(evidence):
    functional = evidence["tf"]["functional"]
    assert relative(functional["3"], functional["None"]) < 1e-6
    assert functional["rows"][-1] == 3  # parts of equal size have a static shape


# Bad input ------------------------------------------------------------------------------------


def test_bad_input_gets_one_clear_line_and_changes_nothing(found):
    refusals = found["refusals"]
    for parts in ("0", "-2", "2.0", "4"):
        start = "ValueError: micro_batches must be an integer of at least 1, not "
        assert refusals[parts].startswith(start)
    assert "3 samples do not fill 4 micro-batches: drop this batch" in refusals["few"]
    assert re.search("need one first axis, the samples: got (10, 9|9, 10)", refusals["disagree"])
    assert "need one first axis, the samples: got" in refusals["scalar"]
    assert "a scalar" in refusals["scalar"]
    assert refusals["frozen"].startswith("ValueError: the model has no trainable")
    for name in ("few", "disagree", "scalar"):
        assert refusals[name].startswith("ValueError: ")
    assert refusals["unchanged"]
    assert refusals["goes on"]


def test_pt_what_cannot_be_cut_is_refused_before_gradients_are_dropped(evidence):
    uncut = evidence["pt"]["uncut"]
    for name, kind in {"sparse": "sparse_coo", "nested": "nested"}.items():
        said, kept = uncut[name]
        assert said == f"ValueError: x and y hold a {kind} tensor, which cannot be cut into parts"
        assert kept


def test_tf_a_model_without_variables_is_refused(evidence):
    unbuilt = evidence["tf"]["functional"]["unbuilt"]
    assert unbuilt.startswith("ValueError: the model has no variables yet: call it once")
    assert "a SparseTensor is not cut into parts" in evidence["tf"]["functional"]["sparse"]


# Replicas and shards --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def replicas(tmp_path_factory):
    """What two processes found that train together."""
    store = tmp_path_factory.mktemp("replicas") / "store"
    worker, loopback = "train_step.pt_replicas", {"GLOO_SOCKET_IFNAME": "lo"}
    return workers.run(worker, ("pt",), lambda name: [store], **loopback)["pt"]


@pytest.mark.skipif(sys.platform != "linux", reason="the loopback interface is named lo on Linux")
@pytest.mark.parametrize("kind", ["ddp", "shards"])
def test_pt_replicas_exchange_once_a_step(replicas, kind):
    """As often as PyTorch's own step, whatever the parts, and again in a plain step afterwards."""
    own = replicas[kind]["None"]["sent"]
    assert own[0] == own[1] == {"ddp": 1, "shards": 2}[kind]  # buckets; a root and a block
    for parts in ("1", "3"):
        assert replicas[kind][parts]["sent"] == own


@pytest.mark.skipif(sys.platform != "linux", reason="the loopback interface is named lo on Linux")
@pytest.mark.parametrize("kind", ["ddp", "shards"])
def test_pt_replicas_have_the_gradient_of_the_whole_batch(replicas, kind):
    for parts in ("None", "1", "3"):
        for ours, plain in zip(replicas[kind][parts]["gradients"], replicas["plain"], strict=True):
            np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-7)


@pytest.mark.skipif(sys.platform != "linux", reason="the loopback interface is named lo on Linux")
def test_pt_shards_are_clipped_by_the_norm_of_all(replicas):
    shards, plain = replicas["clipped"]["shards"], replicas["clipped"]["plain"]
    assert shards["norm"] == pytest.approx(plain["norm"], rel=1e-5)
    for ours, theirs in zip(shards["weights"], plain["weights"], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
