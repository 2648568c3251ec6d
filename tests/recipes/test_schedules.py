"""Each step is taken at the rate that the formula says, in both frameworks, resumed or not."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests import workers

STEPS, RATE = 20, 0.1
CASES = ("linear", "linear, warm", "cosine", "cosine, warm", "one cycle", "one cycle, early")
LOSSES = [1.0, 0.8, 0.795, 0.9, 0.9, 0.9, 0.9, 0.9, 0.7, 0.71, 0.72, 0.73, 0.74, 0.75] + [0.76] * 9


def expected(case: str) -> np.ndarray:
    """The rates by the formulas of the papers, in float64."""
    step = np.arange(STEPS)
    if case.startswith("one cycle"):
        share, low, end = (0.1, 0.5, 0.01) if case.endswith("early") else (0.3, 0.04, 4e-6)
        top = share * STEPS - 1
        up = 1 + (low - 1) * (1 + np.cos(np.pi * step / top)) / 2 if top else np.ones(STEPS)
        down = end + (1 - end) * (1 + np.cos(np.pi * (step - top) / (STEPS - 1 - top))) / 2
        return RATE * np.where(step <= top, up, down)
    warmup = 5 if case.endswith("warm") else 0
    final = {"linear, warm": 0.1, "cosine, warm": 0.01}.get(case, 0.0)
    progress = np.clip((step - warmup) / (STEPS - warmup), 0, 1)
    left = 1 - progress if case.startswith("linear") else (1 + np.cos(np.pi * progress)) / 2
    return RATE * np.minimum(1, (step + 1) / (warmup + 1)) * (final + (1 - final) * left)


@pytest.mark.parametrize("case", CASES)
def test_each_step_has_the_rate_of_the_formula(every, case):
    assert np.abs(np.array(every["schedules rates"]["used"][case]) - expected(case)).max() < 1e-9


@pytest.mark.parametrize("case", CASES)
def test_the_current_rate_is_that_of_the_next_step(every, case):
    assert np.abs(np.array(every["schedules rates"]["told"][case]) - expected(case)).max() < 1e-8


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_goes_on_where_it_was(every, case):
    assert np.abs(np.array(every["schedules resumed"][case]) - expected(case)).max() < 1e-9


@pytest.mark.parametrize("flavour", workers.keras())
@pytest.mark.parametrize("case", CASES)
def test_a_schedule_survives_its_optimizer_s_configuration(evidence, flavour, case):
    found = np.array(evidence[flavour]["schedules serialized"][case])
    assert np.abs(found - expected(case)).max() < 1e-9


def reduced(losses):
    """The rates that a plateau leaves, written out: patience 2, threshold 1%, cooldown 1."""
    best, bad, cooling, rate, rates = math.inf, 0, 0, RATE, []
    for loss in losses:
        bad = 0 if loss < best * 0.99 else bad + 1
        best = loss if bad == 0 else best
        if cooling:
            cooling, bad = cooling - 1, 0
        if bad > 2:
            rate, cooling, bad = max(rate * 0.5, 0.02), 1, 0
        rates.append(rate)
    return rates


def test_a_plateau_reduces_the_rate(every):
    wanted = reduced(LOSSES)
    assert len(set(wanted)) > 3
    assert wanted[-1] == 0.02
    for found in every["schedules plateau"].values():
        assert np.abs(np.array(found) - wanted).max() < 1e-8  # Keras keeps the rate in float32


def test_a_plateau_below_zero_reduces_the_rate(every):
    found = every["schedules below_zero"]
    wanted = {"flat": RATE / 2, "rising": RATE / 2, "falling": RATE}
    assert found == pytest.approx(wanted)


def test_bad_settings_are_refused_and_the_rate_stays(every):
    refusals = every["schedules refusals"]
    for case, reason in refusals.items():
        if case.endswith(": rate"):
            assert reason == pytest.approx(RATE)
        else:
            assert reason, f"{case} was not refused"


def test_an_optimizer_around_another_has_the_rate_of_that_one(every):
    found = every["schedules wrapped"]
    if every.framework == "pt":
        return
    assert found["before"] == pytest.approx(RATE)
    assert found["highest"] == pytest.approx(RATE)
    assert found["first"] == pytest.approx(1.0)
    assert "schedule already" in found["again"]


def test_the_current_rate_is_that_of_an_update_from_several_batches(evidence):
    found = evidence["tf"]["schedules in_parts"]
    assert found["told"] == pytest.approx(found["used"])
    assert found["used"] == pytest.approx([RATE * (1 - 1 / STEPS), RATE * (1 - 3 / STEPS)])


def test_a_second_schedule_starts_from_the_rate_that_the_optimizer_has_then(evidence):
    assert evidence["pt"]["schedules second"] == pytest.approx(14 * [RATE / 100])


def test_the_linear_rule(every):
    assert every["schedules scaled"] == pytest.approx(0.4)


# Rows -------------------------------------------------------------------------------------------


def test_a_row_begins_with_its_factor_and_with_the_linear_rule_where_that_is_asked_for(every):
    assert every["schedules first_rates"] == pytest.approx([0.02, 0.08, 0.02, 0.16])


def test_accumulated_batches_are_seen_in_parts_at_the_scaled_rate_and_update_once(every):
    found = every["schedules accumulated"]
    evidence = found["evidence"]
    assert not found["not_applied"]
    assert evidence["rate"] == pytest.approx(0.16)
    whole = evidence["first_loss_of_the_whole_batch"]
    assert 1e-4 < abs(evidence["first_loss"] / whole - 1) < 0.5
    assert evidence["updates"] == 3 * 128 // 64
    assert found["epochs"] == 3
    assert 0 <= found["value"] <= 100


def test_what_did_not_happen_is_said(every):
    said = every["schedules unproved"]
    assert said["rate"].startswith("the rate is 0.0")
    assert said["rate"].endswith("not 0.16")
    assert said["parts"] == "the batch was seen at once"
