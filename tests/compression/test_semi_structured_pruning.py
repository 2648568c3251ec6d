"""Two of each four weights are zero, the smaller two, and stay so, alike in both frameworks.

Each framework runs in a process of its own (`semi_structured_pruning_worker.py`): PyTorch,
Keras 3 and tf_keras.
"""

from __future__ import annotations

import numpy as np
import pytest

from bench.compression.bench_semi_structured_pruning import most_of_four
from shared.specs import TASKS
from tests import workers

WORKERS = ("pt", "tf_keras", "tf")
BAR = 1e-5  # the parity of the tasks with CNNs
# Of three inputs two stay; of six, four and two make 2 + 2; of eight half.
ZEROS = {"conv0.kernel": 1 / 3, "conv1.kernel": 1 / 3, "head.kernel": 1 / 2}


@pytest.fixture(scope="module")
def evidence():
    """What each worker found: {"pt": {scenario: ...}, ...}."""
    return workers.run("compression.semi_structured_pruning_worker", WORKERS)


@pytest.fixture(params=WORKERS)
def found(request, evidence):
    return evidence[request.param]


def by_hand(kernel):
    """The kernel with the smaller two of each four inputs zero, group by group."""
    less = kernel.copy()
    rows = np.moveaxis(less, -2, -1)  # a view
    for place in np.ndindex(rows.shape[:-1]):
        for first in range(0, rows.shape[-1], 4):
            group = rows[place][first : first + 4]
            for index in sorted(range(len(group)), key=lambda i: (-abs(group[i]), i))[2:]:
                group[index] = 0.0
    return less


@pytest.mark.parametrize("weights", ["distinct", "ties"])
def test_the_smaller_two_of_four_are_zero(found, weights):
    case = found["at_once"][weights]
    assert case["before"].keys() == ZEROS.keys()
    for name, before in case["before"].items():
        assert np.array_equal(np.array(case["after"][name]), by_hand(np.array(before))), name
    assert case["kept"]


def test_shares_of_zeros(found):
    after = found["at_once"]["distinct"]["after"]
    for name, share in ZEROS.items():
        assert np.mean(np.array(after[name]) == 0) == pytest.approx(share)
    dense = found["at_once"]["distinct"]["before"]["head.kernel"]
    assert [most_of_four(np.array(kernel)) for kernel in (after["head.kernel"], dense)] == [2, 4]


def test_masks_hold_while_sgd_with_momentum_trains(found):
    trained, first = found["training"]["kernels"], found["at_once"]["distinct"]["after"]
    for name, kernel in trained.items():
        assert np.array_equal(np.array(kernel) == 0, np.array(first[name]) == 0), name
        assert not np.allclose(kernel, first[name])


def test_finalizing_keeps_predictions(found):
    training = found["training"]
    assert np.allclose(training["masked"], training["final"], rtol=1e-6, atol=1e-6)
    assert np.abs(training["final"]).max() > 0.1


@pytest.mark.parametrize("flavour", ["tf", "tf_keras"])
def test_twins_agree(evidence, flavour):
    pt, tf = (evidence[name]["training"] for name in ("pt", flavour))
    pairs = zip(pt["losses"], tf["losses"], strict=True)
    assert max(abs(a / b - 1) for a, b in pairs) < BAR
    assert pt["losses"][-1] < pt["losses"][0]
    zeros = [{n: np.array(k) == 0 for n, k in side["kernels"].items()} for side in (pt, tf)]
    assert all(np.array_equal(zeros[0][name], zeros[1][name]) for name in zeros[0])


def test_the_benchmark_masks_a_trained_model(found):
    stages = found["stages"]
    assert stages["epochs"] == [TASKS["digits-cnn"].recipe.epochs, 4, 4]
    assert np.allclose(stages["found"]["dense"], stages["trained"], rtol=1e-5, atol=1e-5)
    assert np.allclose(stages["found"]["masked"], stages["after"], rtol=1e-5, atol=1e-5)
    assert not np.allclose(stages["after"], stages["trained"], atol=0.01)


def test_a_model_that_is_not_ours(found):
    zeros = found["foreign"]
    assert zeros["conv.weight"] == zeros["head.weight"] == 0.5
    assert zeros["grouped.weight"] == zeros["table.weight"] == 0.0


def test_bad_input_gets_one_clear_line(found):
    training, refusals = found["training"], found["refusals"]
    assert training["again"].startswith("ValueError: the model has pruning masks already")
    for name in ("twice", "dense"):
        assert training[name].startswith("ValueError: the model has no masks")
    assert refusals["nothing"].startswith("ValueError: the model has no ")


def test_pt_a_kernel_of_two_modules_is_refused(evidence):
    refusals = evidence["pt"]["refusals"]
    said = "masks one module's tensor, but 0.weight has two owners"
    assert refusals["tied"] == f"NotImplementedError: torch.nn.utils.prune {said}"
    assert refusals["kept"]
    assert evidence["pt"]["repeated"] == [True, False, True]


def test_pt_an_embedding_stays_dense_where_it_is_the_head_too(evidence):
    assert evidence["pt"]["tied"] == [[0.0, 0.5, 0.0], True]
    alone = evidence["pt"]["refusals"]["embedding alone"]
    assert alone == "ValueError: the model has no nn.Linear or nn.Conv2d to prune"


def test_pt_kernels_that_are_computed_stay_dense(evidence):
    masks, fresh = evidence["pt"]["computed"]
    assert masks == [False, False, True]
    assert fresh.startswith("NotImplementedError: Python cannot copy the model: Only Tensors")


def test_pt_kernels_have_the_pattern_that_gpus_leave_zeros_out_of(evidence):
    """PyTorch's own conversion, which drops what is not in the pattern, keeps all of it."""
    found = evidence["pt"]["compressed"]
    assert found["packed"] == [[32, 32], True]
    assert found["CPU"].startswith("NotImplementedError: 0 is on cpu: only Nvidia GPUs from Ampere")
    assert found["dense"].startswith("ValueError: the model has no nn.Linear with the pattern")
    assert found["masked"].startswith("ValueError: the model has pruning masks")
    assert found["kept"]


def test_tf_what_tfmot_cannot_follow_is_refused_with_the_reason(evidence):
    refused = evidence["tf_keras"]["refusals"]
    assert "NotImplementedError: tfmot prunes functional" in refused["subclassed"]
    assert "'shared' runs more than once" in refused["twice"]
    assert "'deep' is within another layer" in refused["nested"]
    assert refused["unbuilt"].startswith("ValueError: the model has no variables yet")


def test_keras_3_refuses_a_subclassed_model_alone(evidence):
    refused = evidence["tf"]["refusals"]
    assert "NotImplementedError: a subclassed model says nothing" in refused["subclassed"]
    assert refused["twice"] is None
    assert refused["nested"] is None
    assert refused["unbuilt"].startswith("ValueError: the model has no variables yet")
