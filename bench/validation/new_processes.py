"""Repeats a measurement in many new processes of each framework."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from bench.harness.processes import answer_of
from bench.validation.pace import paced


def answers(
    module: str, frameworks: list[str], processes: int, *arguments: str, allocator: str
) -> Iterator[tuple[str, Any]]:
    """(framework, what `python -m module framework threads number *arguments` printed as JSON)."""
    todo = [(framework, number) for framework in frameworks for number in range(processes)]
    for framework, number in paced(todo, lambda one: f"{one[0]}: process {one[1] + 1}"):
        text = answer_of(module, framework, [str(number), *arguments], allocator=allocator)
        yield framework, json.loads(text)
