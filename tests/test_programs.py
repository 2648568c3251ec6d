"""Rows that declare one program are one program: what is measured of one is shown of all."""

from itertools import groupby

import pytest

from tests import workers

SIDES = ("pt", *workers.keras())
WHAT = {"losses", "weights", "operators", "probe"}  # the last where nothing is timed
pytestmark = pytest.mark.timeout(workers.TIMEOUT_S)


@pytest.fixture(scope="module")
def found():
    return workers.run("programs_worker", SIDES)


@pytest.mark.parametrize("side", SIDES)
def test_rows_of_one_program_have_the_same_losses_weights_and_operators(found, side):
    rows = sorted((found[side][name]["program"], name) for name in found[side])
    assert rows
    for program, same in groupby(rows, key=lambda row: row[0]):
        (_, first), *others = list(same)
        assert others, program
        for _, other in others:
            for what in WHAT & found[side][first].keys():
                assert found[side][other][what] == found[side][first][what], (what, first, other)


def test_a_prediction_that_is_timed_is_of_a_model_in_evaluation_mode(found):
    """As where a user calls `eval()` once; to go through all modules in each call takes time."""
    modes = [row["in_training"] for row in found["pt"].values() if "in_training" in row]
    assert modes
    assert not any(map(any, modes))
