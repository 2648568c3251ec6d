"""What belongs together: a case and its baseline, a case and the program whose figures it shows."""

from __future__ import annotations

import pytest

from bench.analysis.pairing import baseline, good, resolved

PLAYED = {"step_s": {"0": {"0": [0.1]}}}


def case(name, role="variant", **more):
    return {
        "id": name,
        "technique": "made_up",
        "role": role,
        "framework": "tf",
        "flavour": "keras3",
        "task": "digits-cnn",
        "batch_size": 4,
        "mode": "train",
        "status": "OK",
        "timing": PLAYED,
        "blocks": [name],
        "cold_starts": [name],
        "probed": {name: 1},
    } | more


@pytest.mark.parametrize("status", ["FAILED", "NOT_APPLIED", "UNSUPPORTED"])
def test_only_what_ran_and_was_timed_has_figures(status):
    assert good(case("a"))
    assert not good(case("a", status=status))
    assert not good(case("a", timing={"step_s": {}}))


OTHERS = {
    "technique": "another",
    "framework": "pt",
    "flavour": "tf_keras",
    "task": "text-gpt",
    "batch_size": 8,
    "mode": "predict",
    "role": "control",
}


@pytest.mark.parametrize("name", OTHERS)
def test_the_baseline_is_of_the_same_work_technique_and_side(name):
    own, base = case("a"), case("b", "baseline")
    other = base | {"id": "c", name: OTHERS[name]}
    assert baseline(own, [other, own, base]) is base
    assert baseline(own, [own, other]) is None
    assert baseline(base, [own, base]) is None


def test_a_case_shows_the_figures_of_its_program_but_not_its_probes():
    own, shown = case("a", program="b", status="OK"), case("b")
    (found, same) = resolved([own, shown])
    assert same is shown
    assert (found["id"], found["blocks"], found["cold_starts"]) == ("a", ["b"], ["b"])
    assert found["probed"] == {"a": 1}
    probe = shown | {"timed": False}
    assert resolved([own, probe])[0]["probed"] == {"b": 1}
    assert resolved([case("a", program="gone")])[0]["blocks"] == ["a"]


def test_what_fails_as_a_program_fails_in_all_that_show_it():
    broken = case("b", status="FAILED", reason="killed")
    found = resolved([case("a", program="b"), broken])[0]
    assert (found["status"], found["reason"]) == ("FAILED", "killed")
    own, shown = case("a", program="b", reason="no accuracy"), case("b", reason="of its training")
    assert [each["reason"] for each in resolved([own, shown])] == ["no accuracy", "of its training"]
    for status in ("NOT_APPLIED", "UNSUPPORTED"):
        own = case("a", program="b", status=status, reason="its own")
        found = resolved([own, broken])[0]
        assert (found["status"], found["reason"]) == (status, "its own")
