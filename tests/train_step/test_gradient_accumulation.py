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
from tests.train_step.accumulated import apart, of_parts, relative, tensors, weighted

WORKERS = ("pt", *workers.keras())
BARS = {"cnn": 1e-5, "gpt": 1e-4}  # the parity of the tasks with such models
SHARES = [0.3, 0.3, 0.4]
MOMENTUM = 0.25


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
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("other", workers.keras())
def test_twins_agree(evidence, other):
    pt, tf = evidence["pt"], evidence[other]
    assert relative(pt["losses"], tf["losses"]) < BARS["cnn"]
    ours, theirs = (tensors(side["gradients"]["gpt"]["3"]) for side in (pt, tf))
    assert apart(ours, theirs) < BARS["gpt"]


# Running statistics ---------------------------------------------------------------------------


def test_statistics_get_one_update_a_part(every):
    cnn = every["gradients"]["cnn"]
    expected, seen = of_parts(cnn, MOMENTUM)
    for part in seen:
        expected = {n: (1 - MOMENTUM) * v + MOMENTUM * part[n] for n, v in expected.items()}
    assert apart(tensors(cnn["3"], statistics=True), expected) < 1e-5


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
