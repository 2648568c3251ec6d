"""Progress lines of a run."""

from __future__ import annotations

import time
from collections.abc import Callable

TRUST = 0.2  # share of the plan whose end makes its times and those that passed count alike


def clock(seconds: float) -> str:
    """1 h 52 min, 12 min 5 s, 40 s."""
    minutes, left = divmod(int(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min {left} s" if minutes else f"{left} s"


class Progress:
    """Reports what is measured, the time elapsed, and the time expected to remain.

    `most`: seconds after which the run ends, if it has a limit.
    """

    def __init__(self, say: Callable[[str], None], most: float | None = None) -> None:
        self._say, self._most = say, most
        self._start, self._before = time.monotonic(), None

    def at(self, part: str, what: str, expected: float, whole: float) -> None:
        """Report that a part of the run is at `what`.

        By the current plan, `expected` of `whole` seconds remain. The plan is corrected by the
        times of blocks, both done and to come, so the pace does not count them twice.
        """
        elapsed = time.monotonic() - self._start
        done = max(0.0, whole - expected)
        if self._before is None:  # of a run that is taken up
            self._before = done
        left = expected * self._pace(elapsed, max(0.0, done - self._before), TRUST * whole)
        if self._most is not None:
            left = min(left, max(0.0, self._most - elapsed))
        times = f"{clock(elapsed)} elapsed, about {clock(left)} left"
        self._say(f"[{part}] {what} · {times}")

    @staticmethod
    def _pace(elapsed: float, done: float, believed: float) -> float:
        """How much slower than planned the run is; of a run that has hardly begun, hardly at all.

        The plan may be right in all and wrong in what comes first.
        """
        return (elapsed + believed) / (done + believed) if believed else 1.0
