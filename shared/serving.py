"""Instances of a model that serve side by side, and how fast they serve how many callers.

An instance is a process, since a framework makes its pools once in a process. It answers some
requests at once, each from a thread. How many of either, and how large their pools are, is a
`Setting`; `search` tries some and measures them.

    with Server(load, Setting(processes=4, threads=1, bind=True), example) as server:
        output = server(x)  # from as many threads as there are callers

`load(setting) -> predict` is a function that can be sent to a process (importable, or a partial of
one): it sizes the pools by the setting, and makes `predict(x)` of arrays.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

import psutil

from shared.cgroups import processors, usable_threads

WORKED = 0.05  # of the CPU time of the busiest thread: from there on a thread did work
CONFIRMED = 2  # settings of a search that are measured again


@dataclass(frozen=True)
class Setting:
    """How a model is served: `processes`, requests `at_once` in each, and its pools' `threads`.

    threads: 0 leaves the pools as they are installed. bind: each process has its own processors.
    """

    processes: int = 1
    at_once: int = 1
    threads: int = 0
    bind: bool = False

    def __str__(self) -> str:
        threads = f"{self.threads} threads" if self.threads else "threads as installed"
        bound = ", bound" if self.bind else ""
        return f"{self.processes} processes, {self.at_once} at once, {threads}{bound}"


@dataclass(frozen=True)
class Load:
    """What callers saw: answers a second, and seconds that each of them waited.

    `cores`: CPU seconds of all instances a second. `threads`: of an instance, that did work.
    """

    rate: float
    latencies: list[float]
    cores: float
    threads: list[int]

    @property
    def median(self) -> float:
        """Seconds that half of the answers took at most."""
        return median(self.latencies)

    @property
    def p95(self) -> float:
        """Seconds that 95% of the answers took at most."""
        return quantiles(self.latencies, n=20)[-1] if len(self.latencies) > 1 else self.median


@dataclass(frozen=True)
class Tried:
    """A setting that a search measured: seconds for one caller, answers a second for many."""

    setting: Setting
    latency: float
    rate: float


class Server:
    """The processes of a setting. `server(x)` gives what one of them predicts, when one is free.

    `started`: for each process what `predict.pools` says of its pools, and its processors.
    Raises RuntimeError where a process ends, with the reason where it is known.
    """

    def __init__(self, load: Callable, setting: Setting, example: Any) -> None:
        self.setting, self.started = setting, []
        self._processes: list = []
        self._free: queue.SimpleQueue = queue.SimpleQueue()
        try:
            pipes = [self._start(load, example, part) for part in range(setting.processes)]
            for some in pipes:
                self.started.append(_answer(some[0].recv))
                for pipe in some:
                    self._free.put(pipe)
        except BaseException:
            self.close()
            raise

    def _start(self, load: Callable, example: Any, part: int) -> list:
        context = multiprocessing.get_context("spawn")
        pairs = [context.Pipe() for _ in range(self.setting.at_once)]
        arguments = (load, self.setting, example, [theirs for _, theirs in pairs])
        process = context.Process(target=_instance, args=arguments, daemon=True)
        with _on_processors(share_of(part, self.setting)):
            process.start()
        self._processes.append(process)
        for _, theirs in pairs:
            theirs.close()  # so that the end of the process is the end of the pipe
        return [ours for ours, _ in pairs]

    def __call__(self, x: Any) -> Any:
        """What an instance predicts of x, an array."""
        pipe = self._free.get()

        def ask() -> tuple:
            pipe.send(x)
            return pipe.recv()

        try:
            return _answer(ask)
        finally:
            self._free.put(pipe)

    def cpu_seconds(self) -> list[dict[int, float]]:
        """Of each process: the CPU seconds of its threads."""
        return [
            {thread.id: thread.user_time + thread.system_time for thread in one.threads()}
            for one in (psutil.Process(process.pid) for process in self._processes)
        ]

    def memory(self) -> int:
        """Bytes that only these processes hold (USS), all together."""
        return sum(psutil.Process(one.pid).memory_full_info().uss for one in self._processes)

    def close(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.kill()
            process.join()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _answer(ask: Callable[[], tuple]) -> Any:
    """What an instance answers; RuntimeError for its error, and where it has ended."""
    try:
        error, answer = ask()
    except (EOFError, OSError):
        raise RuntimeError("an instance ended: its output says why") from None
    if error:
        raise RuntimeError(f"an instance failed: {error}")
    return answer


def _instance(load: Callable, setting: Setting, example: Any, pipes: list) -> None:
    """A process of a server: ready once it has predicted, from each of its threads in turn."""
    try:
        predict = load(setting)
        for _ in range(2):  # the first calls lay out or trace
            predict(example)
    except Exception as error:
        pipes[0].send((f"{type(error).__name__}: {error}", None))
        return
    started = {"pools": getattr(predict, "pools", {}), "processors": sorted(processors())}
    pipes[0].send((None, started))
    threads = [threading.Thread(target=_serve, args=(predict, pipe)) for pipe in pipes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _serve(predict: Callable, pipe) -> None:
    while True:
        try:
            x = pipe.recv()
        except (EOFError, OSError):
            return  # the server has ended
        try:
            answer = None, predict(x)
        except Exception as error:
            answer = f"{type(error).__name__}: {error}", None
        pipe.send(answer)


def share_of(part: int, setting: Setting) -> set[int]:
    """The processors of a process: its own where the setting binds, else all that are usable."""
    usable = sorted(processors())
    if not setting.bind or len(usable) < setting.processes:
        return set(usable)
    each = len(usable) // setting.processes
    return set(usable[part * each : (part + 1) * each])


@contextmanager
def _on_processors(wanted: set[int]) -> Iterator[None]:
    """What begins within runs on these processors: pools are sized by them when it imports."""
    before = processors()
    if wanted == before:
        yield
        return
    os.sched_setaffinity(0, wanted)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


# Measured ---------------------------------------------------------------------------------------


def measure(server: Server, samples: Sequence, *, callers: int, seconds: float) -> Load:
    """Let callers ask for so many seconds, each again once it has its answer."""
    before, latencies, errors = server.cpu_seconds(), [], []
    start = time.perf_counter()

    def call(number: int) -> None:
        try:
            while time.perf_counter() - start < seconds:
                begin = time.perf_counter()
                server(samples[number % len(samples)])
                latencies.append(time.perf_counter() - begin)
                number += callers
        except RuntimeError as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(callers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    passed = time.perf_counter() - start
    spent = [
        [after - first.get(thread, 0.0) for thread, after in last.items()]
        for first, last in zip(before, server.cpu_seconds(), strict=True)
    ]
    busy = [sum(one > WORKED * max(some) for one in some) for some in spent]
    return Load(len(latencies) / passed, latencies, sum(map(sum, spent)) / passed, busy)


def candidates(cores: int, *, shared: bool = True) -> list[Setting]:
    """Settings that fill the cores: few large instances, many small ones, and some in between.

    shared: also requests at once in one process, which share its model and its memory.
    """
    counts = sorted({1, *(4**n for n in range(1, 5) if 4**n < cores), cores})
    made = [Setting(one, 1, max(1, cores // one), bind=one > 1) for one in counts]
    if shared and cores > 1:
        made += [Setting(1, cores, 1), Setting(1, cores, cores)]
    return made


def search(
    load: Callable,
    samples: Sequence,
    *,
    callers: int,
    seconds: float = 1.0,
    cores: int = 0,
    shared: bool = True,
) -> list[Tried]:
    """Measure `candidates` and return them, the most answers a second first.

    The best two are started and measured again, twice as long, and only that counts of them: the
    best of several short measurements is partly the luckiest. cores: 0 is all that are usable.
    """
    tried = []
    for setting in candidates(cores or usable_threads(), shared=shared):
        tried.append(_try(load, setting, samples, callers, seconds))
    tried.sort(key=lambda one: -one.rate)
    again = [_try(load, t.setting, samples, callers, 2 * seconds) for t in tried[:CONFIRMED]]
    return sorted(again, key=lambda one: -one.rate) + tried[CONFIRMED:]


def _try(load: Callable, setting: Setting, samples: Sequence, callers: int, s: float) -> Tried:
    with Server(load, setting, samples[0]) as server:
        one = measure(server, samples, callers=1, seconds=s / 2)
        many = measure(server, samples, callers=callers, seconds=s)
    return Tried(setting, one.median, many.rate)


def pools_of(load: Callable, setting: Setting) -> Callable:
    """`load` of a runtime (`shared/runtimes.py`) for a server: pools of the setting's threads."""
    predict = load(threads=setting.threads)

    def run(x: Any) -> Any:
        return predict(x)

    run.pools = {"intra_op": predict.threads}
    return run
