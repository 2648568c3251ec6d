"""A case, what it is compared with, and the program whose figures it shows."""

from __future__ import annotations

import pytest

from bench.analysis.analyse import analyse, raw
from bench.analysis.declared import complete
from bench.analysis.pairing import baseline, compared_with, resolved
from bench.analysis.ranking import GOALS, rank, works
from bench.analysis.reading import view
from bench.analysis.table import GAINED, TIME, Table, table
from bench.harness.plan import EFFORTS
from bench.harness.run_plan import techniques
from bench.record import Accuracy, Block, Metric, Price, Timing, encode
from bench.report import answer, technique_tables
from tests import records

TIMED = Timing(step_s={"0": {"0": [0.1]}})


def case(name, role="variant", **fields):
    measured = {
        "timing": TIMED,
        "blocks": [Block(match=0, block=0, weights_sha256=name)],
        "probed": {name: Metric(value=1.0)},
    }
    return records.case(name, **measured | {"id": name, "role": role} | fields)


def measured_in(case):
    return case.blocks[0].weights_sha256


@pytest.mark.parametrize("status", ["FAILED", "NOT_APPLIED", "UNSUPPORTED"])
def test_only_what_ran_and_was_timed_has_times(status):
    assert case("a").has_times
    assert not case("a", status=status).has_times
    assert not case("a", timing=Timing()).has_times


OTHERS = {
    "technique": "another",
    "framework": "tf",
    "flavour": "tf_keras",
    "task": "text-gpt",
    "batch_size": 8,
    "mode": "predict",
    "role": "control",
}


@pytest.mark.parametrize("name", OTHERS)
def test_the_baseline_is_of_the_same_work_technique_and_side(name):
    row, base = case("a"), case("b", "baseline")
    other = base.but(id="c", **{name: OTHERS[name]})
    assert baseline(row, [other, row, base]) is base
    assert baseline(row, [row, other]) is None
    assert baseline(base, [row, base]) is None


# A row that is compared with another than the baseline --------------------------------------------

VARIANTS = ("plain", "runtime", "int8")  # float32, float32 in another runtime, int8 there
SECONDS = {("pt", "runtime"): 0.5, ("pt", "int8"): 0.4}
POINTS = {"plain": 90.0, "int8": 84.0}  # the runtime computes the same, and is not trained


def measured(without=()):
    """A run as it is measured: int8 is compared with the runtime."""
    run = records.played_run(SECONDS, techniques={"made_up": VARIANTS}, blocks=5)
    cases = [
        case.but(
            against="runtime" if case.variant == "int8" else None,
            accuracy=Accuracy(
                metric="accuracy", per_seed=[POINTS[case.variant] + n / 10 for n in range(8)]
            )
            if case.variant in POINTS
            else None,
            changes_math=case.variant == "int8",
        )
        for case in run.cases
        if case.variant not in without
    ]
    return run.but(cases=cases)


def row_of(run, variant="int8"):
    (row,) = [r for r in Table(run).rows if r.case.id.endswith(f"pt/{variant}")]
    return row


def test_a_row_is_compared_with_the_variant_that_it_names_and_its_accuracy_with_the_baseline():
    row, base, named = case("a", against="c"), case("b", "baseline"), case("c")
    every = [base, row, named]
    assert compared_with(row, every) is named
    assert baseline(row, every) is compared_with(row.but(against=None), every) is base
    others = [{name: OTHERS[name]} for name in OTHERS if name != "role"]
    for other in ({"status": "FAILED"}, *others):
        assert compared_with(row, [base, row, named.but(**other)]) is None


def test_the_change_of_runtime_is_not_counted_as_the_row_s():
    run = records.as_read(analyse(measured()))
    assert encode(analyse(raw(run))) == encode(run)
    assert row_of(run, "runtime").ratios[TIME].value == pytest.approx(0.5, rel=0.01)
    row = row_of(run)
    assert row.ratios[TIME].value == pytest.approx(0.8, rel=0.01)
    assert row.ratios[GAINED].value == row.accuracy.mean == pytest.approx(-6.0)
    assert row.verdict == "faster, less accurate"  # than the baseline: the runtime was not trained
    (cells,) = [line for line in technique_tables.ratios(view(run, "made_up", "digits-cnn")).rows
                if line[0] == "int8"]  # fmt: skip
    assert "against runtime" in cells[1]
    assert {line["against"] for line in table(run) if line["variant"] == "int8"} == {"runtime"}


def test_a_row_whose_variant_was_not_measured_has_no_ratio_and_says_so():
    run = analyse(measured(without=("runtime",)))
    row = row_of(run)
    assert (row.lacks, set(row.ratios)) == ("runtime", {GAINED})
    (work,) = works(run)
    assert rank(work, GOALS["train-speed"], framework="pt").best.case.variant == "plain"
    cells = [line[1] for line in answer.decision_table(work).rows if "int8" in line[0]]
    assert "runtime not measured" in cells
    lines = technique_tables.ratios(view(run, "made_up", "digits-cnn")).rows
    assert ["runtime not measured"] * 2 in [line[1:3] for line in lines]


def test_an_older_record_s_row_is_compared_with_what_it_names_today():
    older = records.case("onnxruntime_int8", technique="post_training_quantization",
                         price=Price(), remedies=[])  # fmt: skip
    assert complete(older).against == "onnxruntime_fp32"
    assert complete(older.but(against="other")).against == "other"


def test_what_a_row_names_is_measured_wherever_the_row_is():
    named = [
        (one, {v.name: v for v in technique.variants}[one.against])
        for technique in techniques().values()
        for one in technique.variants
        if one.against
    ]
    assert len(named) > 5
    for row, other in named:
        assert set(row.frameworks) <= set(other.frameworks), row.name
        assert set(row.measured.modes) <= set(other.measured.modes), row.name
        assert EFFORTS.index(row.effort) >= EFFORTS.index(other.effort), row.name
        assert row.measured.time <= other.measured.time, row.name
        assert row.measured.cold <= other.measured.cold, row.name


# A program that several rows share ----------------------------------------------------------------


def test_a_case_shows_the_figures_of_its_program_but_not_its_probes():
    row, program = case("a", program="b"), case("b")
    shown, same = resolved([row, program])
    assert same is program
    assert (shown.id, measured_in(shown)) == ("a", "b")
    assert shown.probed.keys() == {"a"}
    assert resolved([row, program.but(timed=False)])[0].probed.keys() == {"b"}
    assert measured_in(resolved([case("a", program="gone")])[0]) == "a"


def test_what_fails_as_a_program_fails_in_all_that_show_it():
    broken = case("b", status="FAILED", reason="killed")
    shown = resolved([case("a", program="b"), broken])[0]
    assert (shown.status, shown.reason) == ("FAILED", "killed")
    row, program = case("a", program="b", reason="no accuracy"), case("b", reason="of its training")
    assert [each.reason for each in resolved([row, program])] == ["no accuracy", "of its training"]
    for status in ("NOT_APPLIED", "UNSUPPORTED"):
        row = case("a", program="b", status=status, reason="its own")
        shown = resolved([row, broken])[0]
        assert (shown.status, shown.reason) == (status, "its own")
