"""Long work in steps, with the time that is left and a time limit."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from bench.harness.progress import clock

Item = TypeVar("Item")


def paced(
    items: Sequence[Item], name: Callable[[Item], str], minutes: float | None = None
) -> Iterator[Item]:
    """Each item; prints its name and the time left after it, on standard error.

    minutes: no item starts that would end after them, if it took as long as the longest so far.
    """
    start, longest = time.monotonic(), 0.0
    for done, item in enumerate(items, 1):
        begun = time.monotonic()
        if minutes and begun - start + longest > 60 * minutes:
            return
        yield item
        now = time.monotonic()
        longest = max(longest, now - begun)
        left = clock((now - start) / done * (len(items) - done))
        print(f"{name(item)}, about {left} left", file=sys.stderr, flush=True)
