"""A measurement that is repeated in many new processes of each framework."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from typing import Any

from bench.harness.processes import answer_of
from bench.harness.progress import clock


def answers(
    module: str, frameworks: list[str], processes: int, *arguments: str, allocator: str
) -> Iterator[tuple[str, Any]]:
    """(framework, what `python -m module framework threads number *arguments` printed as JSON).

    Says on standard error how long the rest takes.
    """
    for framework in frameworks:
        for number in range(processes):
            start = time.monotonic()
            text = answer_of(module, framework, [str(number), *arguments], allocator=allocator)
            yield framework, json.loads(text)
            left = clock((processes - number - 1) * (time.monotonic() - start))
            done = f"{framework}: {number + 1} of {processes} processes"
            print(f"{done}, about {left} left", file=sys.stderr)
