"""Whether a row keeps its metric: by the bound of an interval, or by losses that are equal."""

from __future__ import annotations

import pytest

from bench.analysis import accuracy
from bench.analysis.accuracy import Accuracy, agree

TASKS = {
    "more": {"metric": "accuracy", "margin": 1.0, "parity": 1e-3},
    "less": {"metric": "bits_per_character", "margin": 0.05, "parity": 1e-3},
}
LOSSES = [2.0, 1.9]


def case(variant="changed", task="more", batch=64, **more):
    return {
        "id": f"{variant}/{task}/{batch}/{more.get('framework', 'pt')}",
        "technique": "made_up",
        "variant": variant,
        "role": "baseline" if variant == "base" else "variant",
        "framework": "pt",
        "flavour": None,
        "task": task,
        "batch_size": batch,
        "mode": "train",
        "status": "OK",
        "accuracy": None,
        "certificate": None,
    } | more


def trained(mean, ci):
    return {"difference": {"mean": mean, "ci": ci}}


def proof(*losses):
    return {"losses": list(losses)}


def base(**more):
    return case("base", certificate=proof(*LOSSES), **more)


# By an interval -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "ci", "kept"),
    [
        ("more", [-0.9, 0.1], True),
        ("more", [-1.0, 0.1], True),
        ("more", [-1.1, 9.0], False),
        ("more", [0.5, 9.0], True),
        ("less", [-0.5, 0.04], True),
        ("less", [-0.5, 0.05], True),
        ("less", [-0.5, 0.06], False),
        ("less", [-0.5, -0.4], True),
        ("more", None, None),
    ],
)
def test_a_loss_within_the_margin_is_kept_by_the_bound_of_its_interval(task, ci, kept):
    row = case(task=task, accuracy=trained(0.01, ci))
    metric = TASKS[task]["metric"]
    expected = Accuracy(kept, mean=0.01, ci=ci, metric=metric)
    assert accuracy.of(row, [row, base(task=task)], TASKS) == expected


@pytest.mark.parametrize(("allowed", "kept"), [(0.0, False), (1.5, False), (2.0, True)])
def test_points_that_are_allowed_take_the_margin_s_place(allowed, kept):
    row = case(accuracy=trained(-1.5, [-2.0, -1.0]))
    assert accuracy.of(row, [row, base()], TASKS, allowed).kept is kept


def test_another_batch_s_training_counts_but_no_other_task_s_framework_s_or_variant_s():
    row, lost = case(), trained(-5.0, [-6.0, -4.0])
    same = case(batch=4, accuracy=lost)
    assert accuracy.of(row, [row, same, base()], TASKS).kept is False
    for other in (
        same | {"task": "less"},
        same | {"framework": "tf"},
        same | {"variant": "another"},
        same | {"technique": "another"},
        same | {"status": "FAILED"},
    ):
        assert accuracy.of(row, [row, other, base()], TASKS) == Accuracy(None)


# By equal losses ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("off", "kept"), [(0.0, True), (0.9e-5, True), (1.1e-5, None), (-1.1e-5, None)]
)
def test_losses_that_differ_by_rounding_alone_are_exact(off, kept):
    row = case(certificate=proof(LOSSES[0], LOSSES[1] * (1 + off)))
    found = accuracy.of(row, [row, base()], TASKS)
    assert (found.kept, found.exact) == (kept, bool(kept))


@pytest.mark.parametrize("changed", ["changes_math", "changes_weights"])
def test_what_changes_the_mathematics_is_not_exact_however_close(changed):
    row = case(certificate=proof(*LOSSES)) | {changed: True}
    assert accuracy.of(row, [row, base()], TASKS) == Accuracy(None)


def test_a_task_has_the_rounding_that_it_says():
    row = case(certificate=proof(2.0, 1.9002))
    tasks = {"more": TASKS["more"] | {"rounding": 2e-4}}
    assert accuracy.of(row, [row, base()], TASKS).kept is None
    assert accuracy.of(row, [row, base()], tasks) == Accuracy(True, exact=True)


def test_a_row_without_losses_is_as_exact_as_all_of_its_kin():
    row, bases = case(), [base(), base(task="less")]
    same = case(task="less", certificate=proof(*LOSSES))
    other = case(batch=4, certificate=proof(2.0, 1.8))
    every = [row, same, *bases]
    assert accuracy.of(row, every, TASKS) == Accuracy(True, exact=True, proven_on="less")
    here = case(batch=4, certificate=proof(*LOSSES))
    found = accuracy.of(row, [row, here, base(), base(batch=4)], TASKS)
    assert found == Accuracy(True, exact=True)  # of the same task
    assert accuracy.of(row, [*every, other, base(batch=4)], TASKS) == Accuracy(None)
    apart = row | {"certificate": proof(2.0, 1.8)}  # its own losses decide, where it has some
    assert accuracy.of(apart, [apart, *every[1:]], TASKS) == Accuracy(None)


@pytest.mark.parametrize(
    ("ours", "theirs", "same"),
    [
        ([100.05], [100.0], True),
        ([100.2], [100.0], False),
        ([0.0100005], [0.01], True),
        ([0.01002], [0.01], False),
        ([99.95], [100.0], True),
        ([99.8], [100.0], False),
        ([2.0, 1.0], [2.0], True),  # of slow steps one may have fewer
        ([], [2.0], False),
        ([2.0], [], False),
        ([None], [2.0], False),
    ],
)
def test_losses_agree_within_the_parity_of_their_task(ours, theirs, same):
    assert agree(TASKS, "more", ours, theirs) is same
    assert not agree({"more": {}}, "more", ours, theirs)


def test_a_baseline_is_what_it_is():
    assert accuracy.of(base(), [base()], TASKS) == Accuracy(True, exact=True)


# Between two rows ---------------------------------------------------------------------------------


def test_only_the_seeds_of_both_are_compared():
    ours, theirs = ({"accuracy": {"per_seed": own}} for own in ([91.0, 93.0, 0.0], [90.0, 91.0]))
    found = accuracy.difference(case(**ours), case(**theirs), TASKS)
    assert found["mean"] == 1.5
    assert found == accuracy.difference(case(accuracy={"per_seed": [91.0, 93.0]}), case(**theirs),
                                        TASKS)  # fmt: skip
    for nothing in (None, case(), case(accuracy={"per_seed": []})):
        assert accuracy.difference(case(**ours), nothing, TASKS) is None


def test_looks_widen_the_interval():
    ours, theirs = (
        case(accuracy={"per_seed": own}) for own in ([91.0, 93.0, 95.5], [90.0, 91.0, 94.0])
    )
    plain, looked = (accuracy.difference(ours, theirs, TASKS, looks) for looks in (None, [3, 5]))
    assert looked["ci"][0] < plain["ci"][0] < plain["ci"][1] < looked["ci"][1]


@pytest.mark.parametrize(
    ("metric", "ci", "lost"),
    [
        ("accuracy", [-2.0, -0.1], True),
        ("accuracy", [-6.7, 31.6], False),  # not decided, and no loss
        ("bits_per_character", [0.1, 0.4], True),
        ("bits_per_character", [-0.3, 0.4], False),
        ("accuracy", None, False),
    ],
)
def test_what_is_not_decided_is_not_lost(metric, ci, lost):
    assert Accuracy(False, mean=-1.0, ci=ci, metric=metric).lost is lost


def test_losses_that_come_to_nothing_agree_by_the_largest():
    tasks = {"task": {"parity": 1e-3}}
    assert accuracy.agree(tasks, "task", [1.0, 0.0], [1.0, 1e-12])
    assert not accuracy.agree(tasks, "task", [1.0, 1e-3], [1.0, 0.0])
