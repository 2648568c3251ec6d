"""Pieces go into a user's own loop with a few lines, and cost nothing where they do nothing.

Each framework runs in a process of its own (`composition_worker.py`).
"""

from __future__ import annotations

import pytest

from tests import workers
from tests.test_layout import ROOT, SIDES, named_to_copy

# Lines that a plain loop gets or that change in it, the import apart.
ADDED = {
    "pt": {"clipped": 2, "half_width": 6, "in_parts": 6},
    "tf": {"clipped": 2, "half_width": 6, "in_parts": 6},
}


@pytest.fixture(scope="module")
def evidence():
    return workers.run("train_step.composition_worker", ADDED)


@pytest.mark.parametrize("side", ADDED)
def test_a_piece_adds_few_lines_to_a_plain_loop(evidence, side):
    found = evidence[side]["loops"]
    assert {name: loop["added"] for name, loop in found.items()} == {"plain": 0} | ADDED[side]


@pytest.mark.parametrize("side", ADDED)
def test_the_loop_trains_as_the_closed_step(evidence, side):
    for name, loop in evidence[side]["loops"].items():
        assert loop["from closed"] < 1e-6, name
        assert loop["moved"] > 1e-3, name
    assert evidence[side]["loops"]["clipped"]["from plain"] > 1e-3
    assert evidence[side]["loops"]["half_width"]["from plain"] > 1e-5
    assert evidence[side]["loops"]["in_parts"]["from plain"] < 1e-6


@pytest.mark.parametrize("side", ADDED)
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
