"""Long work in steps: how long the rest takes, and an end in time."""

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
    """Each item; after it, its name and how long the rest takes, on standard error.

    minutes: none is begun that would end after them, if it took as long as the longest so far
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
