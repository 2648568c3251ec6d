"""The hand-written loops and fit do the kit's work: the same losses from the same weights.

Each framework runs in a process of its own (`baseline_worker.py`).
"""

import pytest

from tests import workers

SIDES = ("pt", "tf")


@pytest.fixture(scope="module")
def evidence():
    return workers.run("train_step.baseline_worker", SIDES)


@pytest.mark.parametrize("side", SIDES)
def test_hand_written_step_does_the_work_of_the_kit(evidence, side):
    losses = evidence[side]
    assert losses["hand_written"] == pytest.approx(losses["kit"], rel=1e-6)
    assert losses["kit"][0] != pytest.approx(losses["kit"][-1], rel=1e-3)  # it trains


def test_tf_fit_does_the_work_of_the_kit(evidence):
    losses = evidence["tf"]
    assert losses["fit"] == pytest.approx(sum(losses["kit"]) / 6, rel=1e-5)
    assert losses["fit_seconds"] > 0


def test_tf_hand_written_step_refuses_an_optimizer_that_expects_a_scaled_loss(evidence):
    assert evidence["tf"]["a scaled loss"].startswith("a scaled loss: this is the step in float32")
