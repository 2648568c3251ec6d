"""How fast the machine is, without any framework: memory, cores, and a sentinel.

It computes in threads of this process; NumPy releases the lock while it computes. The best of
several rounds counts, because other programs only make a round slower.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np

from bench.harness import machine
from bench.record import Speed

COPIED = 128 << 20  # bytes at least, and four times the largest cache,
MOST_COPIED = 512 << 20  # but no more than these, nor than an eighth of what is free
COPIES, CHAINS = 5, 8  # rounds, with one thread and with all in turns
# Calls last half a millisecond and more: NumPy begins each in Python's turn.
CHAIN, CHAIN_CALLS = 1 << 17, 10  # numbers, which caches hold, and calls
SENTINEL_S = 0.2  # how long it lasts
# Of a sentinel's products: small ones, which BLAS leaves to the thread; calls make some 10 ms.
SIDE, STACK, CALLS = 48, 400, 8
MOST_SENTINELS = 16  # threads: more wait for each other's turns in Python
FASTEST = 3  # one of so many rounds counts, as of the samples of a block

Work = Callable[[], object]


def bandwidth(threads: int, cache: float = 0) -> Speed:
    """Bytes per second that are read and written when arrays are copied.

    `cache`: bytes of the largest cache.
    """
    free = machine.free_memory() // 8
    whole = int(min(max(COPIED, 4 * cache), MOST_COPIED, free)) // 8 // threads * threads
    source, target = np.ones(whole), np.ones(whole)

    def copies(count: int) -> list[Work]:
        parts = zip(np.split(target, count), np.split(source, count), strict=True)
        return [lambda to=to, of=of: np.copyto(to, of) for to, of in parts]

    return _speed(copies, threads, COPIES, lambda count: 2 * source.nbytes)


def chain(threads: int) -> Speed:
    """Additions per second that each depend on the one before, as in running sums.

    Two threads of one core do twice as many as one, because each waits while the other adds. Matrix
    products keep the core's units busy, so two threads of one core compute them no faster than one.
    """

    def sums(count: int) -> list[Work]:
        return [_running_sum() for _ in range(count)]

    return _speed(sums, threads, CHAINS, lambda count: count * CHAIN * CHAIN_CALLS)


def _running_sum() -> Work:
    values, sums = np.ones(CHAIN), np.empty(CHAIN)

    def work() -> None:
        for _ in range(CHAIN_CALLS):
            np.add.accumulate(values, out=sums)

    return work


def sentinel(threads: int) -> float:
    """FLOP/s of small products on all threads together, from the fastest third of rounds."""
    count = min(threads, MOST_SENTINELS)
    work = [_products() for _ in range(count)]
    rounds, deadline = [], time.monotonic() + SENTINEL_S
    while len(rounds) < FASTEST or time.monotonic() < deadline:
        rounds.append(_seconds(work))
    fastest = sorted(rounds)[: len(rounds) // FASTEST]
    return count * CALLS * STACK * 2 * SIDE**3 * len(fastest) / sum(fastest)


def _products() -> Work:
    a, b = (np.ones((SIDE, SIDE), np.float32) for _ in range(2))
    many, out = np.broadcast_to(a, (STACK, SIDE, SIDE)), np.empty((STACK, SIDE, SIDE), np.float32)

    def work() -> None:
        for _ in range(CALLS):
            np.matmul(many, b, out=out)

    return work


def _speed(
    work: Callable[[int], list[Work]], threads: int, rounds: int, amount: Callable[[int], float]
) -> Speed:
    """What one thread and all do a second of `amount`, the best of rounds that take turns."""
    counts = {"one": 1, "all": threads}
    works = {name: work(count) for name, count in counts.items()}
    best = dict.fromkeys(counts, float("inf"))
    for _ in range(rounds):
        for name, parts in works.items():
            best[name] = min(best[name], _seconds(parts))
    return Speed(**{name: amount(counts[name]) / best[name] for name in counts})


def _seconds(parts: list[Work]) -> float:
    """From when the first of the parts begins, in a thread each, until the last one has ended."""
    barrier = threading.Barrier(len(parts))
    began, ended = [], []

    def run(part: Work) -> None:
        barrier.wait()
        began.append(time.perf_counter())
        part()
        ended.append(time.perf_counter())

    running = [threading.Thread(target=run, args=(part,)) for part in parts]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return max(ended) - min(began)
