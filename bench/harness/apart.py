"""What is measured in processes of its own: cold start, memory, probes, training, the machine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from bench.harness.matches import configure, parent_key
from bench.harness.plan import FRAMEWORKS, Case
from bench.harness.processes import (
    Failed,
    ParentFailed,
    ParentKey,
    Processes,
    TimeLimits,
    Unsupported,
    Worker,
)

PEAK_DTYPES = ("float32", "bfloat16")


@dataclass
class Trained:
    """A case's metric for each seed, in order of the seeds; why it has none, or fewer.

    `artifacts`: the size of what would be deployed of each, where the case has such a thing.
    """

    per_seed: list[float] = field(default_factory=list)
    artifacts: list[dict] = field(default_factory=list)
    seconds: float = 0.0
    status: str = "OK"
    reason: str | None = None


def describe(processes: Processes, framework: str, threads: int) -> dict:
    """A framework's versions, device and best matrix product; `Failed` if it can't be imported.

    It runs freshly executed, under the interpreter that the run will use.
    """
    flavour = FRAMEWORKS[framework].flavours[0]
    key = ParentKey(framework, flavour, "tuned", "main", threads)
    worker = processes.execute(key, f"describe-{framework}")
    try:
        settings = configure(worker, processes.limits, seed=0)
        found = worker.ask(processes.limits.request, "describe", dtypes=list(PEAK_DTYPES))
        return settings | found
    finally:
        worker.stop(kill=True)


def begin(processes: Processes, case: Case, what: str, *, threads: int, seed: int) -> Worker:
    """A freshly executed worker that has imported its framework.

    The allocator is as installed, unless the row names another. torch.compile's cache on disk
    outlives processes, so the worker gets an empty one.
    """
    key = replace(parent_key(case, threads), allocator=case.variant.allocator or "as installed")
    label = f"{what}-{case.id}".replace("/", "-").replace(" ", "-")
    worker = processes.execute(key, label, TORCHINDUCTOR_CACHE_DIR=processes.new_folder())
    try:
        configure(worker, processes.limits, seed)
    except BaseException:
        worker.stop(kill=True)
        raise
    return worker


def cold_start(
    worker: Worker, limits: TimeLimits, case: Case, *, data: str, seed: int, imports: list[str]
) -> dict:
    """First call, memory by phase and the artifact's size, after the `imports` of the case's code.

    With evidence where no match asks for it, since the case is not timed.
    """
    work = {"case": case.message(), "data": data, "weights_seed": seed}
    answer = worker.ask(limits.request, "memory", **work, imports=imports)
    if not case.timed:
        worker.ask(limits.request, "build", **work)  # anew: memory forgets what it does not need
        answer |= worker.ask(limits.request, "evidence")
    return answer


def probe(
    worker: Worker,
    limits: TimeLimits,
    case: Case,
    *,
    data: str,
    seed: int,
    memory_budget: int | None,
) -> dict:
    """What the bench file's own `probe` finds: "metrics", and "evidence" or None."""
    return worker.ask(
        limits.train,
        "probe",
        case=case.message(),
        data=data,
        weights_seed=seed,
        memory_budget=memory_budget,
    )


def train_all(
    processes: Processes,
    cases: list[Case],
    *,
    data: dict[str, str],
    threads: int,
    seeds: range,
    budget: float | None,
    done: Callable[[Case, Trained], None],
) -> None:
    """Train each case with each seed, one thread a process, as many at once as there are threads.

    Nothing is timed here. A case's training ends after `budget` seconds, times its workload's
    `training`, whatever seeds are left: on a machine that emulates a dtype it would take hours.
    `done` is given each case's result as soon as it is there; on an interruption those that still
    train are ended and give none.
    """
    stopping = threading.Event()
    keys = {case.id: replace(parent_key(case, 1), arm="main") for case in cases}
    failures = processes.start_parents(list(dict.fromkeys(keys.values())))

    def train(case: Case) -> None:
        found, deadline, start = Trained(), float("inf"), time.monotonic()
        given = budget and budget * case.workload.training
        try:
            if keys[case.id] in failures:
                raise failures[keys[case.id]]
            worker = processes.fork(keys[case.id], "train-" + case.id.replace("/", "-"))
            try:
                configure(worker, processes.limits, seed=0)
                limit = processes.limits.train
                deadline = time.monotonic() + (given or limit * len(seeds))
                for seed in seeds:
                    answer = worker.ask(
                        max(0.0, min(limit, deadline - time.monotonic())),
                        "train",
                        case=case.message(),
                        data=data[case.workload.task],
                        seed=seed,
                    )
                    found.per_seed.append(answer["value"])
                    found.artifacts += filter(None, [answer["artifact"]])
            finally:
                worker.stop(kill=True)
        except (Failed, ParentFailed) as error:
            if given and time.monotonic() >= deadline:
                found.reason = (
                    f"accuracy: {len(found.per_seed)} of {len(seeds)} seeds trained in "
                    f"{given:g} s; --effort full trains all"
                )
            else:
                found.status, found.reason = "FAILED", f"training: {error}"
        except Unsupported as error:
            found.status, found.reason = "UNSUPPORTED", str(error)
        found.seconds = time.monotonic() - start
        if not stopping.is_set():
            done(case, found)

    pool = ThreadPoolExecutor(threads)
    try:
        for _ in pool.map(train, cases):
            pass
    finally:
        stopping.set()
        processes.stop_parents()  # and with them whatever still trains, so that no thread waits
        pool.shutdown(cancel_futures=True)
