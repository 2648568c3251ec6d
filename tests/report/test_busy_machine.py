"""Figures of one block that were taken beside other programs: marked, and nothing is advised."""

from __future__ import annotations

import pytest

from bench import user_answer
from bench.analysis.ranking import GOALS, rank, works
from bench.record import Conditions, Pass, Processor, Speed
from bench.report import tables
from bench.report.answer import PROVISIONAL, decision_table, text
from tests import records

BUSY, QUIET = 0.62, 0.01


def planted(technique: str, *ratio: float, effort: str = "quick"):
    """A record of a technique's row that takes so much of its baseline's time."""
    row = {"technique": technique, "variant": technique, "time": ratio}
    record = records.planted(row, effort=effort)
    timing = records.timed(0.01 * ratio[0])
    return records.with_case(record, f"/{technique}", timing=timing)


def beside(record, others: float):
    """The record with the share of the cores that others used in its block."""
    order = [case.id for case in record.cases]
    return record.but(blocks=[Conditions(match=0, block=0, order=order, others=others)])


def ranking_of(record):
    (work,) = works(record)
    return rank(work, GOALS["train-speed"])


@pytest.fixture
def quick():
    return planted("stacking", 1 / 6.98)


def test_a_gain_in_one_block_is_believed_on_a_quiet_machine_alone(quick):
    ranking = ranking_of(beside(quick, QUIET))
    assert ranking.aim.provisional
    assert ranking.best.case.variant == "stacking"
    ranking = ranking_of(beside(quick, BUSY))
    assert ranking.best.is_baseline
    assert ranking.gaining == []


def test_the_answer_and_the_tables_say_that_other_programs_ran(quick):
    marked = f"{PROVISIONAL}, beside other programs that used 62% of the cores"
    for others, is_marked in ((QUIET, False), (BUSY, True)):
        record = beside(quick, others)
        (work,) = works(record)
        answer = " ".join(" ".join(text([ranking_of(record)], 80)).split())
        terminal = " ".join(tables.answered(record, width=80).split())
        assert PROVISIONAL in answer
        assert (marked in answer) == is_marked
        assert (marked in decision_table(work).title) == is_marked
        assert ("BUSY MACHINE: in 1 of 1 blocks" in tables.detail(record, width=80)) == is_marked
        assert ("beside other programs on 62% of the cores" in terminal) == is_marked


@pytest.mark.parametrize("guard", ["finite_guard", "gradient_clipping"])
def test_what_only_adds_work_is_never_first_by_one_block(guard):
    assert ranking_of(beside(planted(guard, 0.9), QUIET)).best.is_baseline
    assert ranking_of(planted(guard, 0.9, 0.88, 0.92, effort="default")).gaining  # it was shown


# Of a user's model -----------------------------------------------------------------------------


def bottleneck(others: float | None):
    evidence = {
        "bottleneck": "overhead",
        "others": others,
        "said": ["of 3.2 ms a step: overhead 79%"],
        "step_s": 3.2e-3,
        "parts": dict.fromkeys(
            ("waiting", "transfer", "forward", "backward", "optimizer", "overhead", "idle"), 1 / 7
        ),
    }
    return records.case("plain", technique="bottleneck", evidence=evidence)


@pytest.mark.parametrize(("others", "told"), [(BUSY, False), (QUIET, True), (None, True)])
def test_try_does_not_tell_what_holds_a_step_back_beside_other_programs(others, told):
    said = " ".join(user_answer._breakdown(records.record([bottleneck(others)]), "pt"))
    said = " ".join(said.split())
    assert ("bottleneck: overhead" in said) == told
    assert ("techniques against it" in said) == told
    assert ("can't be told: other programs used 62% of the cores" in said) != told


@pytest.mark.parametrize(("ms", "told"), [(2.57, True), (3.2, True), (147.0, False), (0.95, False)])
def test_a_step_unlike_those_that_were_timed_tells_nothing(ms, told):
    """Its parts took 3.2 ms, a seventh of which it waited for its batch."""
    plain = records.case("base", technique="compilation", timing=records.timed(ms / 1e3))
    said = user_answer._breakdown(records.record([bottleneck(None), plain]), "pt")
    text = " ".join(" ".join(said).split())
    assert ("bottleneck: overhead" in text) == told
    assert ("without the profiler a step took" in text) != told


@pytest.mark.parametrize(("status", "named"), [("FAILED", False), ("OK", True), (None, True)])
def test_what_failed_is_not_worth_trying(status, named):
    """Nothing of it was asked for, where it has no status."""
    tried = [records.case("compiled", technique="compilation", status=status)] if status else []
    base = records.case("base", technique="compilation")
    said = user_answer._breakdown(records.record([bottleneck(None), base, *tried]), "pt")
    (line,) = [line for line in said if "techniques against it" in line]
    assert ("compilation" in " ".join(said)) == named
    assert "stacking" in line


def test_a_report_says_in_a_line_when_the_machine_changed(quick):
    fast, slow = 1e11, 4e10
    before = Pass(number=0, began="12:01", matches=[0], before=fast, after=fast)
    changed = Pass(number=1, began="12:05", matches=[0], before=slow, after=slow)
    steady = tables.detail(quick.but(passes=[before]), width=200)
    assert "MACHINE CHANGED" not in steady
    lines = tables.detail(quick.but(passes=[before, changed]), width=200).splitlines()
    line = next(line for line in lines if "MACHINE CHANGED" in line)
    assert "in pass 2, which began at 12:05; its speed was between 40% and 100%" in line
    assert "Pass 2 was left out." in line


def test_the_machine_and_its_speeds_stand_under_machine_and_noise(quick):
    processor = Processor(vendor="AuthenticAMD", family=25, model=17, architecture="Zen 4")
    environment = quick.environment.but(
        processor=processor.but(caches={"L2": 1 << 20}),
        hypervisor="KVM",
        products={"tf": {"int8": Speed(one=2e11, all=3e11)}},
        bandwidth=Speed(one=1e10, all=1.5e10),
        chain=None,
    )
    shown = " ".join(tables.detail(quick.but(environment=environment), width=200).split())
    for words in (
        "Zen 4",
        "family 25, model 17, hypervisor KVM; L2 1,024 KiB",
        "Products, TensorFlow GFLOP/s on one thread and on all: int8 200 and 300",
        "GB/s on one thread and on all: 10.0 and 15.0",
    ):
        assert words in shown
