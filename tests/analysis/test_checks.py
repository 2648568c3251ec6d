"""What a row keeps that was not trained to its metric: verdicts, words, and who is advised."""

from __future__ import annotations

from math import inf

import pytest

from bench.analysis import accuracy, checks
from bench.analysis.analyse import analyse, raw
from bench.analysis.ranking import GOALS, Limits, rank, works
from bench.analysis.reading import view
from bench.analysis.table import Table, table
from bench.record import KEPT, LOST, UNTOLD, Fidelity, LossCheck
from bench.report.answer import accuracy_of, lines
from bench.report.technique_tables import tables
from shared.specs import LOSS_MARGIN
from tests import records
from tests.records import TASKS, planted

PLAIN = [1.50, 1.62, 1.44]
FIRST = [2.3, 2.3, 2.3]
FASTER = (0.5, 0.48, 0.52)
BF16 = {"technique": "mixed_precision", "variant": "bf16", "time": FASTER, "changes_math": True}


def loss(*per_seed, first=FIRST):
    return LossCheck(
        steps=32,
        batch_size=8,
        learning_rate=1e-3,
        samples=256,
        first=list(first),
        per_seed=list(per_seed),
    )


def row(**fields):
    return records.case(changes_math=True, **fields)


def told(check, plain):
    judged = checks.of_loss(row(loss_check=check), records.case("base", loss_check=plain))
    return judged.verdict


def more(*differences):
    return [plain + each for plain, each in zip(PLAIN, differences, strict=True)]


def predictions(lost, gained, *, samples=2_000, flipped=0, loss_more=0.0, loss_sd=0.01):
    right = int(0.9 * samples)
    flipped = max(flipped, lost + gained)
    return Fidelity(
        samples=samples,
        right=right,
        lost=lost,
        gained=gained,
        flipped=flipped,
        loss_more=loss_more,
        loss_sd=loss_sd,
    )


# The loss of a short training ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        (more(0.002, -0.001, 0.001), KEPT),
        (more(0.20, 0.22, 0.21), LOST),
        (more(-0.20, -0.22, -0.21), KEPT),  # for the better
        (more(0.2, -0.2, 0.05), UNTOLD),  # seeds disagree by more than the margin
        (more(0.002, -0.001, 0.001)[:2], UNTOLD),  # two seeds have no interval
        ([None, *PLAIN[1:]], LOST),  # it diverged
    ],
)
def test_a_loss_is_kept_lost_or_not_told_by_the_differences_of_seeds(values, verdict):
    assert told(loss(*values), loss(*PLAIN)) == verdict


def test_a_difference_is_held_to_the_margin_by_two_one_sided_tests():
    just = 0.9 * LOSS_MARGIN
    assert told(loss(*more(just, just + 1e-5, just - 1e-5)), loss(*PLAIN)) == KEPT
    beyond = 1.1 * LOSS_MARGIN
    assert told(loss(*more(beyond, beyond + 1e-5, beyond - 1e-5)), loss(*PLAIN)) == LOST


def test_a_baseline_that_learned_nothing_tells_nothing():
    still = loss(*PLAIN, first=[value + 0.1 for value in PLAIN])
    assert told(loss(*PLAIN), still) == UNTOLD
    assert told(loss(*PLAIN), loss(None, *PLAIN[1:])) == UNTOLD


# Predictions --------------------------------------------------------------------------------------


def test_newcombe_s_interval_is_the_published_one_of_a_small_study():
    """Fagerland, Lydersen and Laake (2014): 1, 1, 7 and 12 of 21 give -0.507 to -0.026."""
    found = Fidelity(samples=21, right=8, lost=7, gained=1, flipped=8)
    points, _ = checks.newcombe(found)
    assert points.mean == pytest.approx(-100 * 6 / 21)
    assert points.ci == pytest.approx((-50.7, -2.6), abs=0.05)


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (predictions(0, 0), KEPT),
        (predictions(4, 3), KEPT),
        (predictions(100, 10), LOST),
        (predictions(0, 0, loss_more=0.2, loss_sd=0.1), LOST),  # right, and much less sure
        (predictions(10, 100), KEPT),  # for the better
        (predictions(0, 0, loss_more=None, loss_sd=None), LOST),  # outputs are not finite
        (predictions(1, 1, samples=40), UNTOLD),  # few samples tell nothing
    ],
)
def test_predictions_are_kept_lost_or_not_told(found, verdict):
    assert checks.of_predictions(row(fidelity=found), TASKS).verdict == verdict


def test_a_record_that_counts_more_than_its_samples_is_refused_in_one_line():
    for found in (predictions(0, 0).but(right=2_001), predictions(5, 5).but(flipped=9)):
        with pytest.raises(ValueError, match="cases 0: fidelity: it counts more than its samples"):
            records.as_read(records.record([row(fidelity=found)]))


# What counts as keeping accuracy ------------------------------------------------------------------


def judged(*cases):
    """What was measured of these, analysed."""
    return analyse(records.record(cases))


def of(record, name="changed", allowed=None):
    found = records.find_case(record, name)
    return accuracy.of(found, record.cases, record.tasks, allowed)


def test_a_check_tells_what_is_kept_where_nothing_was_trained():
    base = records.case("base", loss_check=loss(*PLAIN))
    run = judged(base, row(loss_check=loss(*more(0.001, 0.0, 0.002))))
    kept = of(run)
    assert (kept.kept, kept.what, kept.trained, kept.lost) == (True, "loss", False, False)
    assert kept.mean == pytest.approx(0.001)
    lost = of(judged(base, row(loss_check=loss(*more(0.3, 0.31, 0.29)))))
    assert (lost.kept, lost.lost) == (False, True)
    files = of(judged(base, row(mode="predict", fidelity=predictions(2, 3))))
    assert (files.kept, files.what) == (True, "predictions")


def test_who_allows_so_many_points_is_not_answered_by_a_check():
    base = records.case("base", loss_check=loss(*PLAIN))
    run = judged(base, row(loss_check=loss(*PLAIN)))
    assert of(run).kept
    assert of(run, allowed=0.0).kept is None


def test_a_training_to_the_metric_counts_before_a_check():
    trained = records.accuracy(-3.0, -4.0, -2.0)
    case = row(loss_check=loss(*PLAIN).but(verdict=KEPT), accuracy=trained)
    found = accuracy.of(case, [case, records.case("base")], TASKS)
    assert (found.kept, found.trained) == (False, True)


def test_what_is_derived_of_a_check_is_derived_again():
    base = records.case("base", loss_check=loss(*PLAIN))
    run = judged(
        base, row(loss_check=loss(*PLAIN)), row(variant="file", fidelity=predictions(0, 0))
    )
    measured = raw(run)
    assert all(case.loss_check.verdict is None for case in measured.cases if case.loss_check)
    again = {case.id: case for case in analyse(records.as_read(measured)).cases}
    assert again[run.cases[1].id].loss_check.verdict == KEPT
    assert again[run.cases[2].id].fidelity.verdict == KEPT


# Views --------------------------------------------------------------------------------------------


def answer(check):
    """The ranking of the work of bfloat16 in half the time, with this verdict of its check."""
    run = records.with_case(planted(BF16 | check), "bf16", timing={"median_s": 0.005})
    (work,) = [work for work in works(run) if work.kind == "train"]
    return rank(work, GOALS["train-speed"]), run


def of_loss(verdict, mean=0.001):
    difference = records.AccuracyDifference(mean=mean, ci=(mean - 0.002, mean + 0.002))
    return {"loss_check": loss(*PLAIN).but(verdict=verdict, difference=difference)}


def test_a_row_whose_loss_is_kept_is_advised_and_says_which_of_the_two_it_is():
    ranking, run = answer(of_loss(KEPT))
    assert ranking.best.case.variant == "bf16"
    words = accuracy_of(ranking.best.accuracy)
    assert words == "loss kept over 32 steps (+0.0010 ± 0.0020 nats)"
    said = " ".join(text for _, text in lines(ranking))
    assert "loss kept over 32 steps" in said
    assert "accuracy" not in said
    kept = {line["variant"]: line["accuracy"] for line in table(run)}
    assert kept == {"base": "yes", "bf16": "loss kept"}


@pytest.mark.parametrize(
    ("verdict", "reason"),
    [(LOST, "ends with a higher loss"), (UNTOLD, "was not shown to keep its loss")],
)
def test_a_row_whose_loss_is_not_kept_is_refused_with_the_reason(verdict, reason):
    ranking, run = answer(of_loss(verdict, mean=0.3))
    assert ranking.best.is_baseline
    (other,) = [each for each in ranking.others if each.row.case.variant == "bf16"]
    assert (other.place, other.reason) == ("refused", reason)
    assert not ranking.placed("unknown")
    assert [row.case.variant for row in ranking.tempting] == ["bf16"]
    words = accuracy_of(other.row.accuracy)
    assert ("can't be told" in words) == (verdict == UNTOLD)
    assert "not measured" not in words
    assert not any(row.gains("time") for row in Table(run).rows)


def test_without_a_check_it_is_unknown_as_before():
    ranking, _ = answer({})
    assert [row.case.variant for row in ranking.placed("unknown")] == ["bf16"]
    assert rank(ranking.work, GOALS["train-speed"], Limits(accuracy_drop=inf)).best.is_baseline


def test_predictions_say_how_many_flip_and_never_that_accuracy_is_kept():
    found = checks.of_predictions(row(fidelity=predictions(2, 3, flipped=9)), TASKS)
    words = accuracy_of(accuracy.Accuracy(True, check=found))
    assert words.startswith("predictions kept (0.4% of 2,000 flip, right +0.05 points, ")
    assert "accuracy" not in words


def test_the_tables_of_a_technique_have_a_check_once():
    base = records.case("base", loss_check=loss(*PLAIN))
    trained = row(loss_check=loss(*more(0.3, 0.31, 0.29)))
    served = [row(variant="file", mode="predict", fidelity=predictions(2, 3, flipped=9))]
    run = judged(base, trained, records.case("base", mode="predict", id="x"), *served)
    for title, column, words in (
        ("digits-cnn", "loss", ["1.52", "baseline", "1.82", "+0.300 ± 0.025\nlost"]),
        ("digits-cnn, inference", "flipped\n[%]", ["0.450", "+0.05 (-0.23 to +0.34)\nkept"]),
    ):
        made = tables(view(run, "made_up", title), TASKS["digits-cnn"])
        (shown,) = [table for table in made if table.name.startswith("kept")]
        assert column in [each.head for each in shown.columns]
        cells = [cell for line in shown.rows for cell in line]
        assert set(words) <= set(cells), cells
        assert not [table for table in made if table.title == "Measured apart"]
