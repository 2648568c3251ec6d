"""What belongs together: a case and its baseline, a case and the program whose figures it shows."""

from __future__ import annotations

import pytest

from bench.analysis.pairing import baseline, resolved
from bench.record import Block, Metric, Timing
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
