"""Techniques cost nothing where they do nothing, and need no file of the kit.

Each framework runs in a process of its own (`composition_worker.py`).
"""

from __future__ import annotations

import pytest

from tests import workers
from tests.test_layout import ROOT, SIDES, named_to_copy

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


@pytest.mark.parametrize("side", SIDES)
def test_a_technique_of_the_train_step_needs_no_file_of_the_kit(side):
    for path in sorted((ROOT / side / "train_step").glob("[!_]*.py")):
        assert not [name for name in named_to_copy(path) if "/kit/" in name], path.name
