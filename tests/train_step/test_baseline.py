"""The hand-written loops and fit do the kit's work: the same losses from the same weights."""

import pytest

from tests.frameworks import apart
from tests.train_step import steps
from tests.train_step.steps import CNN

FRAMEWORKS = ("pt", "tf")
MODELS = "steps"


@pytest.fixture(scope="module")
def built(kit):
    def built():
        prepared = steps.prepare(kit, CNN)
        return prepared.model, prepared.optimizer

    return built


def test_the_hand_written_step_and_fit_do_the_work_of_the_kit(kit, framework, technique, built):
    stream, prepared = steps.batches(kit, CNN, 6), steps.prepare(kit, CNN)
    losses = steps.losses_of(kit, prepared, stream)
    assert losses[0] != pytest.approx(losses[-1], rel=1e-3)  # it trains
    prepared.step = technique.make_hand_written_step(*built())
    assert apart(steps.losses_of(kit, prepared, stream), losses) < 1e-6
    if framework == "tf":
        seconds, mean = technique.make_fit_loop(*built())(stream)
        assert mean == pytest.approx(sum(losses) / 6, rel=1e-5)
        assert seconds > 0


@pytest.mark.only("tf")
def test_the_hand_written_step_refuses_an_optimizer_that_expects_a_scaled_loss(
    technique, models, built
):
    with pytest.raises(NotImplementedError, match="a scaled loss: this is the step in float32"):
        technique.make_hand_written_step(built()[0], models.scaling()[0])
