"""Whether a row keeps its metric: by the bound of an interval, or by losses that are equal."""

from __future__ import annotations

import pytest

from bench.analysis import accuracy
from bench.analysis.accuracy import Accuracy as Effect
from bench.analysis.accuracy import agree
from bench.record import Accuracy, Certificate, TaskFacts
from tests import records

TASKS = {
    "more": TaskFacts(metric="accuracy", margin=1.0, parity=1e-3),
    "less": TaskFacts(metric="bits_per_character", margin=0.05, parity=1e-3),
}
LOSSES = [2.0, 1.9]


def case(variant="changed", task="more", batch=64, **fields):
    return records.case(variant, task=task, batch_size=batch, **fields)


def trained(mean, ci):
    return records.accuracy(mean, *(ci or ()))


def seeds(*values):
    return Accuracy(per_seed=list(values))


def proof(*losses):
    return Certificate(losses=list(losses))


def base(**fields):
    return case("base", certificate=proof(*LOSSES), **fields)


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
    expected = Effect(kept, mean=0.01, ci=ci and tuple(ci), metric=TASKS[task].metric)
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
        same.but(task="less"),
        same.but(framework="tf"),
        same.but(variant="another"),
        same.but(technique="another"),
        same.but(status="FAILED"),
    ):
        assert accuracy.of(row, [row, other, base()], TASKS) == Effect(None)


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
    row = case(certificate=proof(*LOSSES), **{changed: True})
    assert accuracy.of(row, [row, base()], TASKS) == Effect(None)


def test_a_task_has_the_rounding_that_it_says():
    row = case(certificate=proof(2.0, 1.9002))
    tasks = {"more": TASKS["more"].but(rounding=2e-4)}
    assert accuracy.of(row, [row, base()], TASKS).kept is None
    assert accuracy.of(row, [row, base()], tasks) == Effect(True, exact=True)


def test_a_row_without_losses_is_as_exact_as_all_of_its_kin():
    row, bases = case(), [base(), base(task="less")]
    same = case(task="less", certificate=proof(*LOSSES))
    other = case(batch=4, certificate=proof(2.0, 1.8))
    every = [row, same, *bases]
    assert accuracy.of(row, every, TASKS) == Effect(True, exact=True, proven_on="less")
    here = case(batch=4, certificate=proof(*LOSSES))
    found = accuracy.of(row, [row, here, base(), base(batch=4)], TASKS)
    assert found == Effect(True, exact=True)  # of the same task
    assert accuracy.of(row, [*every, other, base(batch=4)], TASKS) == Effect(None)
    differing = row.but(certificate=proof(2.0, 1.8))  # its own losses decide, where it has some
    assert accuracy.of(differing, [differing, *every[1:]], TASKS) == Effect(None)


@pytest.mark.parametrize(
    ("losses", "others", "same"),
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
def test_losses_agree_within_the_parity_of_their_task(losses, others, same):
    assert agree(TASKS["more"], losses, others) is same
    assert not agree(TaskFacts(), losses, others)


def test_a_baseline_is_what_it_is():
    assert accuracy.of(base(), [base()], TASKS) == Effect(True, exact=True)


# Between two rows ---------------------------------------------------------------------------------


def test_only_the_seeds_of_both_are_compared():
    row, other = case(accuracy=seeds(91.0, 93.0, 0.0)), case(accuracy=seeds(90.0, 91.0))
    assert accuracy.difference(row, other, TASKS).mean == 1.5
    fewer = row.but(accuracy=seeds(91.0, 93.0))
    assert accuracy.difference(fewer, other, TASKS).mean == 1.5
    for nothing in (None, case(), case(accuracy=seeds())):
        assert accuracy.difference(row, nothing, TASKS) is None


def test_looks_widen_the_interval():
    row, other = (
        case(accuracy=seeds(*values)) for values in ([91.0, 93.0, 95.5], [90.0, 91.0, 94.0])
    )
    plain, looked = (accuracy.difference(row, other, TASKS, looks) for looks in ((), (3, 5)))
    assert looked.ci[0] < plain.ci[0] < plain.ci[1] < looked.ci[1]


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
    assert Effect(False, mean=-1.0, ci=ci, metric=metric).lost is lost


def test_losses_that_come_to_nothing_agree_by_the_largest():
    assert agree(TASKS["more"], [1.0, 0.0], [1.0, 1e-12])
    assert not agree(TASKS["more"], [1.0, 1e-3], [1.0, 0.0])
