"""Observes a training: when it reaches its target, and how much its loss fluctuates.

Rows that change what is learned are compared by this. Trainings run in parallel on one thread each,
so time is CPU time, which does not depend on the others.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from itertools import pairwise
from statistics import mean

EVERY = 40  # steps between evaluations, which cost as much as 20 of digits-cnn


class Watch:
    """Wraps `step`, and evaluates on the test split every `EVERY` steps.

    `evaluate() -> float` is not timed. `target`: the metric to reach (higher is better if
    `rising`), or None. `unit`: of the loss.
    """

    def __init__(
        self,
        step: Callable,
        evaluate: Callable[[], float],
        *,
        target: float | None,
        rising: bool,
        unit: str = "nats",
    ) -> None:
        self.step, self.evaluate, self.unit = step, evaluate, unit
        self.target, self.sign = target, 1 if rising else -1
        self.losses: list = []
        self.seconds = 0.0
        self.reached: tuple[int, float] | None = None

    def __call__(self, x, y):
        """A step."""
        start = time.process_time()
        loss = self.step(x, y)
        self.losses.append(loss)
        looks = self.target is not None and len(self.losses) % EVERY == 0
        if looks:
            float(loss)  # waits for the device
        self.seconds += time.process_time() - start
        if looks:
            self._look()
        return loss

    def _look(self) -> None:
        if self.reached is None and self.sign * (self.evaluate() - self.target) >= 0:
            self.reached = len(self.losses), self.seconds

    def metrics(self) -> dict[str, dict]:
        """The figures by name: {"value": float or None, "unit": str}. None: not reached.

        The fluctuation is computed from differences between consecutive losses in the last quarter:
        the standard deviation that losses without a trend would have.
        """
        steps, seconds = self.reached or (None, None)
        losses = list(map(float, self.losses))
        end = losses[len(losses) * 3 // 4 :]
        jumps = [(after - before) ** 2 / 2 for before, after in pairwise(end)]
        measured = {"loss_fluctuation": {"value": math.sqrt(mean(jumps)), "unit": self.unit}}
        if self.target is None:
            return measured
        return {
            "steps_to_target": {"value": steps, "unit": "steps"},
            "cpu_time_to_target": {"value": seconds, "unit": "s"},
        } | measured
