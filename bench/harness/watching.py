"""What is seen of a training on its way: when it reaches its target, and how restless its loss is.

Rows that change what is learned are compared by it. A training runs beside others, each on one
thread, so that its time is that of the processor, which does not depend on them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from itertools import pairwise
from statistics import mean

EVERY = 40  # steps between evaluations, which cost as much as 20 of digits-cnn


class Watch:
    """Stands for `step`, and evaluates on the test split every `EVERY` steps.

    `evaluate() -> float` is not in the time. `target`: the metric that counts as reached, where
    more is better if `rising`; None: nothing is looked for. `unit`: of the loss.
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

        The fluctuation is that of the last quarter's losses from step to step: the standard
        deviation that losses without a trend would have.
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
