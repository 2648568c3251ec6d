"""Puts the NumPy kit in the place of both frameworks: by `install`, or as `pytest -p`."""

import math
from dataclasses import replace

from bench.harness import matches, plan, schedule
from bench.harness.plan import Effort
from tests.harness import faulty

FAKES = {
    name: replace(
        framework, package="tests.harness.fake_impl", module="numpy", flavours=(None,), preload=()
    )
    for name, framework in plan.FRAMEWORKS.items()
}
EFFORT = {
    "quick": Effort(blocks=1, rounds=5, repetitions=1, first_pass_alone=True),
    "default": Effort(blocks=2, rounds=5, seeds=2),
    "ordinary": Effort(blocks=2, rounds=5, seeds=2),
    "full": Effort(blocks=3, rounds=5, seeds=2),
}
# A block has all its rounds, however slow its steps are on a busy machine, and once.
ALL_ROUNDS = {"SAMPLED_S": math.inf, "SAMPLING_S": math.inf, "MOST_TRIES": 1}


def install() -> None:
    """Replace the frameworks, the efforts and the techniques of this process."""
    for name, value in ALL_ROUNDS.items():
        setattr(matches, name, value)
    plan.FRAMEWORKS.update(FAKES)
    plan.EFFORT.update(EFFORT)
    schedule.techniques = lambda: {faulty.SMALL.name: faulty.SMALL}


def pytest_addoption() -> None:
    """Called before `bench/conftest.py` is imported."""
    install()
