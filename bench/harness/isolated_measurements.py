"""What is measured in new processes: cold starts, memory, probes, training, the machine."""

from __future__ import annotations

import copy
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

from msgspec import Struct, structs

from bench.harness import machine, memory
from bench.harness.answers import ColdStart, Described, Probed, Proof, TrainedSeed
from bench.harness.matches import RESERVE, configure, configured, files_of, parent_key
from bench.harness.plan import FRAMEWORKS, Case
from bench.harness.processes import (
    Failed,
    ParentFailed,
    ParentKey,
    Processes,
    Unsupported,
    Worker,
)
from bench.harness.turns import Turns
from bench.record import Artifact, Metric, Number

PEAK_DTYPES = ("float32", "bfloat16", "int8")
SIDE_BY_SIDE = 4  # processes at most that import their framework at once


@dataclass
class Measurement:
    """The result of a case's cold start or probe, or why there is none.

    `imports`: for a cold start, the modules that the case's code imports.
    """

    answer: ColdStart | Probed | None = None
    seconds: float = 0.0
    imports: list[str] | None = None
    status: str = "OK"
    reason: str | None = None


class Trained(Struct, kw_only=True):
    """A case's metric for each seed, in the order of seeds; and why there are none, or fewer.

    `artifacts`: the size of each deployed file, if there is one. `metrics`: figures seen during
    each training. `evidence`: the proof that the technique took effect, if nothing else of the case
    is measured. `epochs`: how many epochs were trained, including those trained for another row.
    """

    per_seed: list[Number | None] = []
    artifacts: list[Artifact] = []
    metrics: list[dict[str, Metric]] = []
    evidence: dict | None = None
    epochs: int = 0
    seconds: float = 0.0
    status: str = "OK"
    reason: str | None = None

    @property
    def is_over(self) -> bool:
        """Whether no more seeds are trained: it failed, or its time is over."""
        return self.status != "OK" or bool(self.reason)

    def add(self, seed: TrainedSeed) -> None:
        """Add the result of a seed."""
        self.per_seed.append(seed.value)
        self.artifacts += [seed.artifact] if seed.artifact else []
        self.metrics += [seed.metrics] if seed.metrics else []
        self.epochs += seed.epochs


def describe(
    processes: Processes, framework: str, threads: int, dtypes: tuple[str, ...] = PEAK_DTYPES
) -> Described:
    """A framework's versions, device and best products; `Failed` if it can't be imported.

    It runs in a newly executed process, with the interpreter that the run will use.
    """
    try:
        return _describe(processes, framework, threads, dtypes)
    # A product in bfloat16 aborts where oneDNN is kept from its instructions; others refuse it.
    except (Failed, Unsupported):
        return _describe(processes, framework, threads, dtypes[:1])


def _describe(
    processes: Processes, framework: str, threads: int, dtypes: tuple[str, ...]
) -> Described:
    worker = asked(processes, framework, threads)
    try:
        return worker.ask(processes.limits.request, "describe", dtypes=list(dtypes))
    finally:
        worker.stop(kill=True)


def asked(processes: Processes, framework: str, threads: int) -> Worker:
    """A newly executed worker that can describe the machine."""
    key = ParentKey(framework, FRAMEWORKS[framework].flavours[0], "tuned", "main", threads)
    worker = processes.execute(key, f"describe-{framework}")
    try:
        configure(worker, processes.limits, seed=0)
    except BaseException:
        worker.stop(kill=True)
        raise
    return worker


# Cold starts and probes ---------------------------------------------------------------------------


def first_compile(processes: Processes, key: ParentKey) -> Path:
    """The folder of a compiler's cache on disk; `Failed` if it can't compile.

    A program of one operator fills it, once per run. So no row's first call pays what only the
    first program on a machine pays. The time is in the processes' `first_compile_s`.
    """
    folder = processes.scratch / f"first-compile-{key.framework}"
    if key.framework not in processes.first_compile_s:
        started = processes.execute(key, f"first-compile-{key.framework}")
        with configured(started, processes.limits) as worker:
            compiled = worker.ask(processes.limits.request, "first_compile", cache=str(folder))
        processes.first_compile_s[key.framework] = compiled.seconds
    return folder


def cold_starts(
    processes: Processes,
    cases: list[Case],
    *,
    imports: dict[str, list[str] | None],
    data: dict[str, str],
    threads: int,
    seed: int,
    done: Callable[[Case, Measurement], None],
    needs: Callable[[Case], float] = lambda case: 0,
) -> None:
    """First call, memory by phase and file size of each case, as often as it is listed.

    It runs in lanes, as far as memory allows, but nothing runs beside a timed part.

    `imports`: by case, the modules that its match saw its code import. For a case without a match,
    a rehearsal finds them, writes a missing file of predictions, and compiles first if needed, see
    `first_compile`. It collects evidence if no match does.
    """
    failed: set[str] = set()
    seen, turns = dict(imports), Turns()
    failures = _start_parents(processes, cases, threads)

    def starting(case: Case) -> Worker:
        if failure := failures.get(case.id):
            raise failure
        with turns.beside():
            return begin(processes, case, what="cold start", threads=threads, seed=seed)

    def measure(case: Case, worker: Worker) -> Measurement:
        work = {"case": case.message(), "data": data[case.workload.task], "weights_seed": seed}
        work["files"] = files_of(processes, case, seed)
        start = partial(_cold_start, processes, case, turns, work, threads)
        answer, tried = start(worker, seen.get(case.id) or [])
        rehearsed = answer.wrote or tried
        if seen.get(case.id) is None:
            seen[case.id] = answer.modules
            rehearsed = rehearsed or bool(answer.modules)
        if rehearsed:
            worker.stop(kill=True)
            worker = starting(case)
        try:
            if rehearsed:
                answer, _ = start(worker, seen[case.id])
            if not case.timed:
                with turns.beside():
                    proof = _evidence(processes, case, work, worker)
                answer = structs.replace(answer, **structs.asdict(proof))
        finally:
            worker.stop(kill=True)
        return Measurement(answer, imports=seen[case.id])

    def measured(case: Case) -> Measurement | None:
        if case.id in failed:
            return None
        measurement = _measured("cold start", case, starting, measure)
        if measurement.status != "OK":
            failed.add(case.id)
        return measurement

    # The pool outlives its workers, which would end with the thread that started them.
    pool = ThreadPoolExecutor(_lanes(cases, threads, needs))
    try:
        for case, found in [(case, pool.submit(measured, case)) for case in cases]:
            if measurement := found.result():
                done(case, measurement)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        processes.stop_parents()


def _lanes(cases: list[Case], threads: int, needs: Callable[[Case], float]) -> int:
    """How many cases are measured beside each other: one, where there is no memory for more."""
    lanes = min(threads, SIDE_BY_SIDE)
    largest = sorted(map(needs, cases))[-lanes:]
    return lanes if sum(largest) + RESERVE <= machine.free_memory() else 1


def _cold_start(
    processes: Processes,
    case: Case,
    turns: Turns,
    work: dict,
    threads: int,
    worker: Worker,
    imports: list[str],
) -> tuple[ColdStart, bool]:
    """First call, memory by phase and the artifact's size, after the `imports` of its code.

    A compiler knows the machine, if one was seen at work in this run, and nothing of its program.
    Also whether it had to find that out.
    """
    cache, compiled = Path(processes.new_folder()), processes.compiled(case.framework)
    knows = case.framework in processes.first_compile_s or (
        compiled.exists() and any(compiled.iterdir())
    )
    if knows:
        with turns.undisturbed():
            known = first_compile(processes, _key(case, threads))
        shutil.copytree(known, cache, dirs_exist_ok=True)
    given = {"imports": imports, "cache": str(cache), "forked": _is_forked(processes, case)}
    with turns.beside():
        worker.ask(processes.limits.request, "cold_build", **work, **given)
    with turns.undisturbed():
        answer = worker.ask(processes.limits.request, "memory")
        tried = not knows and any(cache.iterdir())
        if tried:
            first_compile(processes, _key(case, threads))
    return answer, tried


def _evidence(processes: Processes, case: Case, work: dict, worker: Worker) -> Proof:
    """The proof that the technique happened, in a worker that has had its cold start."""
    limit = processes.limits.request
    if case.workload.mode == "predict":  # of which memory has forgotten what it does not need
        worker.ask(limit, "build", **work)
    return worker.ask(limit, "evidence")


def probes(
    processes: Processes,
    cases: list[Case],
    *,
    data: dict[str, str],
    threads: int,
    seed: int,
    memory_budget: int | None,
    repetitions: int,
    done: Callable[[Case, Measurement], None],
) -> None:
    """The results of each bench file's `probe`.

    In one process rows would disturb each other: threads are set once, caches stay filled, and
    memory is kept. So each case has a new process.
    """
    starting = partial(begin, processes, what="probe", threads=threads, seed=seed)
    given = {"memory_budget": memory_budget, "repetitions": repetitions}

    def measure(case: Case, worker: Worker) -> Measurement:
        return Measurement(_probe(processes, case, worker, data, seed, **given))

    for case, worker in _started(processes, cases, starting, threads):
        done(case, _measured("probe", case, lambda case, worker=worker: worker.result(), measure))


def probes_in_turns(
    processes: Processes,
    cases: list[Case],
    *,
    data: dict[str, str],
    threads: int,
    seed: int,
    done: Callable[[Case, Measurement], None],
) -> None:
    """The results of `probe`s that are generators: all run to their next pause, in turns.

    They go one after the other, and in reverse after each pause, so that changes of the machine
    affect all alike. All are alive at once.
    """
    starting = partial(begin, processes, what="probe", threads=threads, seed=seed)
    measurements = {case.id: Measurement() for case in cases}

    def turn(case: Case, starting: Future, first: bool) -> bool:
        """Whether it has paused; it has ended, or failed, where it has not."""
        measurement, paused = measurements[case.id], False
        with noted("probe", measurement):
            worker = starting.result()
            if first:
                given = {"memory_budget": None, "repetitions": 1}
                answer = _probe(processes, case, worker, data, seed, **given)
            else:
                answer = worker.ask(processes.limits.train, "turn")
            paused = answer.paused
            if not paused:
                measurement.answer = answer
                worker.stop(kill=True)
        return paused

    with closing(_started(processes, cases, starting, threads)) as started:
        playing, first = list(islice(started, len(cases))), True
        while playing:
            going_on = []
            for case, worker in playing:
                if turn(case, worker, first):
                    going_on.append((case, worker))
                else:
                    done(case, measurements[case.id])
            playing, first = going_on[::-1], False


def _probe(
    processes: Processes, case: Case, worker: Worker, data: dict[str, str], seed: int, **given
) -> Probed:
    where = {"case": case.message(), "data": data[case.workload.task], "weights_seed": seed}
    where |= {"forked": _is_forked(processes, case), "files": files_of(processes, case, seed)}
    return worker.ask(processes.limits.train, "probe", **where, **given)


def begin(processes: Processes, case: Case, *, what: str, threads: int, seed: int) -> Worker:
    """A worker that has imported its framework and nothing else, see `_is_forked`.

    The allocator is as installed, unless the row names another.
    """
    label = f"{what}-{case.id}".replace("/", "-").replace(" ", "-")
    start = processes.fork if _is_forked(processes, case) else processes.execute
    worker = start(_key(case, threads), label)
    try:
        configure(worker, processes.limits, seed)
    except BaseException:
        worker.stop(kill=True)
        raise
    return worker


def _key(case: Case, threads: int) -> ParentKey:
    allocator = case.variant.allocator or "as installed"
    return replace(parent_key(case, threads), allocator=allocator, arm="main")


def _is_forked(processes: Processes, case: Case) -> bool:
    """Whether the case's worker is forked from a parent that has imported its framework.

    Its memory and first call are then those of a freshly executed one, as far as the kernel lets
    a fork begin with its parent's pages. A compiler's first call needs a separate process.
    """
    compiled = case.variant.requires == "compiler"
    return processes.forks and not compiled and memory.adopts_pages()


def _started(
    processes: Processes,
    cases: list[Case],
    starting: Callable[[Case], Worker],
    threads: int,
) -> Iterator[tuple[Case, Future]]:
    """Each case with its worker, one after the other: nothing starts while one is measured.

    A few import their framework side by side, which takes most of the time where they are executed
    and is not measured, and then wait for their turn.
    """
    failures = _start_parents(processes, cases, threads)

    def start(case: Case) -> Worker:
        if failure := failures.get(case.id):
            raise failure
        return starting(case)

    side_by_side = min(threads, SIDE_BY_SIDE)
    # The pool outlives its workers, which would end with the thread that started them.
    pool = ThreadPoolExecutor(side_by_side)
    try:
        for first in range(0, len(cases), side_by_side):
            some = [(c, pool.submit(start, c)) for c in cases[first : first + side_by_side]]
            wait([worker for _, worker in some])
            yield from some
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        processes.stop_parents()


def _start_parents(
    processes: Processes, cases: list[Case], threads: int
) -> dict[str, ParentFailed]:
    """Start the parents of those whose workers are forked; by case why its parent failed."""
    keys = {case.id: _key(case, threads) for case in cases if _is_forked(processes, case)}
    failures = processes.start_parents(keys.values())
    return {name: failures[key] for name, key in keys.items() if key in failures}


def _measured(
    what: str,
    case: Case,
    starting: Callable[[Case], Worker],
    measure: Callable[[Case, Worker], Measurement],
) -> Measurement:
    """Measure in a worker that is started, and end it; note why where that fails."""
    measurement = Measurement()
    with noted(what, measurement):
        worker = starting(case)
        try:
            found = measure(case, worker)
            measurement.answer, measurement.imports = found.answer, found.imports
        finally:
            worker.stop(kill=True)
    return measurement


@contextmanager
def noted(what: str, result: Measurement | Trained) -> Iterator[None]:
    """Note the seconds of the block, and why it failed."""
    start = time.monotonic()
    try:
        yield
    except (Failed, ParentFailed) as error:
        result.status, result.reason = "FAILED", f"{what}: {error}"
    except Unsupported as error:
        result.status, result.reason = "UNSUPPORTED", str(error)
    finally:
        result.seconds += time.monotonic() - start


# Training -----------------------------------------------------------------------------------------


def train(
    processes: Processes,
    cases: list[Case],
    *,
    trained: dict[str, Trained | None],
    seeds: int,
    data: dict[str, str],
    threads: int,
    budget: float | None,
    done: Callable[[Case, Trained], None],
) -> None:
    """Train each case with those of the first `seeds` seeds that `trained` lacks.

    Nothing is timed here: each process has one thread, and as many run as there are threads. Cases
    of one task, framework and flavour share stages of training, so they take turns. A case's
    training ends after `budget` seconds times its workload's `training`, whatever seeds are left:
    on a machine that emulates a dtype it would take hours. `done` is called with each result when
    it is ready, in this thread, and writes the record. On an interruption, unfinished trainings are
    ended without a result.
    """
    lanes: dict[tuple, list[Case]] = {}
    for case in cases:
        lanes.setdefault((case.workload.task, case.framework, case.flavour), []).append(case)
    keys = {case.id: replace(parent_key(case, 1), arm="main") for case in cases}
    failures = processes.start_parents(keys.values())

    def trained_now(case: Case) -> Trained:
        result = copy.deepcopy(trained.get(case.id)) or Trained()
        if failure := failures.get(keys[case.id]):
            result.status, result.reason = "FAILED", f"training: {failure}"
        elif not result.is_over:
            folder = data[case.workload.task]
            _train(processes, keys[case.id], case, result, seeds, folder, budget)
        return result

    pool = ThreadPoolExecutor(threads)
    try:
        running = {pool.submit(trained_now, lane[0]): lane for lane in lanes.values()}
        while running:
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                case, *rest = running.pop(future)
                if rest:
                    running[pool.submit(trained_now, rest[0])] = rest
                done(case, future.result())
    finally:
        processes.stop_parents()  # and with them whatever still trains, so that no thread waits
        pool.shutdown(cancel_futures=True)


def _train(
    processes: Processes,
    key: ParentKey,
    case: Case,
    result: Trained,
    seeds: int,
    data: str,
    budget: float | None,
) -> None:
    """Train the seeds that `result` lacks and note in it what they gave, or why they did not."""
    limit, given = processes.limits.train, budget and budget * case.workload.training
    deadline = time.monotonic() + (given - result.seconds if given else limit * seeds)
    stages = processes.scratch / "stages" / "-".join(filter(None, (key.framework, key.flavour)))
    with noted("training", result):
        started = processes.fork(key, "train-" + case.id.replace("/", "-"))
        with configured(started, processes.limits) as worker:
            for seed in range(len(result.per_seed), seeds):
                answer = worker.ask(
                    max(0.0, min(limit, deadline - time.monotonic())),
                    "train",
                    case=case.message(),
                    data=data,
                    seed=seed,
                    stages=str(stages),
                    prove=seed == 0 and case.proved_in_training,
                )
                result.evidence = result.evidence or answer.evidence
                if answer.not_applied:
                    result.status, result.reason = "NOT_APPLIED", answer.not_applied
                    break
                if answer.no_figure:
                    result.reason = f"accuracy not measured: {answer.no_figure}"
                    break
                result.add(answer)
    if result.status == "FAILED" and given and time.monotonic() >= deadline:
        result.status, result.reason = (
            "OK",
            f"accuracy: {len(result.per_seed)} of {seeds} seeds trained in "
            f"{given:g} s; --effort full trains all",
        )
