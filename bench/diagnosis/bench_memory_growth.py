"""Memory growth: whether a planted leak is found, and what watching takes."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from bench.harness.helpers import once, plain
from bench.harness.plan import Prepared, Technique, Work, Workload, warm

ROUNDS = 50

TECHNIQUE = Technique(
    family="diagnosis",
    name="memory_growth",
    effort="ordinary",
    title="Memory growth",
    user_model="it watches a loop for hours, not a step: see docs/diagnosis.md",
    variants=(
        warm("plain", "a plain step", role="baseline"),
        warm("leak", "1 MB kept a round", leak=1.0),
        warm("cache", "2 MB kept in 15 rounds", "ordinary", cache=2.0),
    ),
    workloads=(Workload("digits-cnn", "small", timed=False),),
    notes=(f"{ROUNDS} rounds of a step. Growth is per round, over the second half of them.",),
    probes=True,
)


def prepare(impl, work: Work) -> Prepared:
    """The plain step, with what keeps memory around it."""
    row, kept = plain(impl, work), []
    usual = row.step

    def step(x, y):
        if "leak" in work.settings or ("cache" in work.settings and len(kept) < 15):
            kept.append(np.ones(int(sum(work.settings.values()) * 1e6), np.uint8))
        return usual(x, y)

    return replace(row, step=step)


def probe(impl, work: Work, batches) -> dict[str, dict]:
    """Growth a round, and the seconds that finding it takes.

    Raises ValueError where the verdict is not that of what was planted.
    """
    step, batches = prepare(impl, work).step, impl.kit.data.resident_batches(batches)
    start = time.perf_counter()
    growth = impl.diagnosis.memory_growth.watch_memory(step, batches, rounds=ROUNDS)
    seconds = time.perf_counter() - start
    wanted = next(iter(work.settings), "steady")
    if growth.verdict != wanted:
        raise ValueError(f"not called {wanted}: {growth}")
    return {
        "growth": once("bytes", growth.per_round),
        "watching": once("s", seconds),
        "evidence": {"verdict": growth.verdict, "sizes": growth.sizes},
    }
