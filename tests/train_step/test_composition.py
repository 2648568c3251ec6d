"""Techniques cost nothing where they do nothing.

Each framework runs in a process of its own (`composition_worker.py`).
"""

from __future__ import annotations

import pytest

from tests import workers

FRAMEWORKS = ("pt", "tf")


@pytest.fixture(scope="module")
def evidence():
    return workers.run("train_step.composition_worker", FRAMEWORKS)


@pytest.mark.parametrize("side", FRAMEWORKS)
def test_a_neutral_step_runs_the_operators_of_a_plain_one_and_no_others(evidence, side):
    found = dict(evidence[side]["tax"])
    plain, clipped = found.pop("plain"), found.pop("clipped")
    assert {name: operators for name, operators in found.items() if operators != plain} == {}
    assert len(found) == 7
    assert sum(clipped.values()) > sum(plain.values())  # what is added would be seen
