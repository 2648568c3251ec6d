"""What people are told while a run measures."""

from __future__ import annotations

import time
from collections.abc import Callable


def clock(seconds: float) -> str:
    """1 h 52 min, 12 min 5 s, 40 s."""
    minutes, left = divmod(int(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min {left} s" if minutes else f"{left} s"


class Progress:
    """Says what is measured now, how many of how many, elapsed and expected remaining."""

    def __init__(self, steps: list[tuple[str, float]], say: Callable[[str], None]) -> None:
        self._steps, self._say = steps, say
        self._done, self._start = 0, time.monotonic()

    def next(self, what: str | None = None) -> None:
        """The next part begins."""
        name, _ = self._steps[min(self._done, len(self._steps) - 1)]
        elapsed = time.monotonic() - self._start
        self._say(
            f"[{self._done + 1}/{len(self._steps)}] {what or name}"
            f" · {clock(elapsed)} elapsed, about {clock(self._left(elapsed))} left"
        )
        self._done += 1

    def _left(self, elapsed: float) -> float:
        """What the rest takes, at the pace of what is done."""
        done = sum(seconds for _, seconds in self._steps[: self._done])
        rest = sum(seconds for _, seconds in self._steps[self._done :])
        return rest * (elapsed / done if done else 1.0)
