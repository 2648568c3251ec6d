"""Puts the NumPy kit in the place of both frameworks: by `install`, or as `pytest -p`."""

import math
import os
import time
from collections.abc import Callable
from dataclasses import replace

from bench.harness import matches, plan, run_plan, speed
from bench.harness.plan import Effort
from bench.record import Speed
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
# On a busy machine, too, a block has all its rounds, once, and its results do not come too late.
ALL_ROUNDS = {"SAMPLED_S": math.inf, "SAMPLING_S": math.inf, "MOST_TRIES": 1, "MOST_LATE": 0.5}
# What the machine does a second, whatever else it does.
STEADY = {
    "sentinel": lambda threads: 1e11,
    "bandwidth": lambda threads, cache=0: Speed(one=1e10, all=1.5e10),
    "chain": lambda threads: Speed(one=2.5e8, all=threads * 2.5e8),
}
HOLD = "HOLD_FROM_BLOCK"  # a variable: the run waits when it is to play a block of this number


def install() -> None:
    """Replace the frameworks, the efforts and the techniques of this process."""
    for name, value in ALL_ROUNDS.items():
        setattr(matches, name, value)
    for name, measured in STEADY.items():
        setattr(speed, name, measured)
    if block := os.environ.get(HOLD):
        matches.Match.play = _held(matches.Match.play, int(block))
    plan.FRAMEWORKS.update(FAKES)
    plan.EFFORT.update(EFFORT)
    run_plan.techniques = lambda: {faulty.SMALL.name: faulty.SMALL}


def _held(play: Callable, block: int) -> Callable:
    def held(match, rounds):
        if match.block >= block:
            time.sleep(3600)
        return play(match, rounds)

    return held


def pytest_addoption() -> None:
    """Called before `bench/conftest.py` is imported."""
    install()
