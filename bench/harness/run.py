"""A run: measuring what is planned, with progress, and the record at every step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from itertools import groupby
from pathlib import Path

from bench.harness import apart, machine, state
from bench.harness.matches import Match, parent_key, start_order
from bench.harness.plan import EFFORT, FRAMEWORKS, Case, Effort
from bench.harness.processes import (
    Failed,
    ParentDied,
    ParentFailed,
    Processes,
    TimeLimits,
    Unsupported,
    Worker,
)
from bench.harness.progress import Progress, clock
from bench.harness.record import Record
from bench.harness.schedule import Plan
from bench.harness.worker import on_cpu
from shared import datasets
from shared.specs import TASKS

SEED = 2026


@dataclass(frozen=True)
class Settings:
    """The choices of a run, all of them fixed before it starts.

    `asked`: what the command line asked for, which the run's state keeps for `--resume`.
    """

    effort: str = "default"
    blocks: int | None = None
    results: Path = Path("results")
    memory_budget: int | None = None
    command: str = ""
    interpreters: dict[str, str] = field(default_factory=dict)
    limits: TimeLimits = field(default_factory=TimeLimits)
    asked: dict = field(default_factory=dict)

    @property
    def amount(self) -> Effort:
        """Blocks, rounds and seeds."""
        usual = EFFORT[self.effort]
        return replace(usual, blocks=self.blocks or usual.blocks)


class OtherConditions(Exception):
    """What is measured now would not be comparable with what was measured before."""


class Run:
    """Measures a plan into a record, or what an interrupted run, by its `state`, has left of it."""

    def __init__(
        self,
        plan: Plan,
        settings: Settings,
        folder: Path,
        say: Callable[[str], None],
        taken_up: state.State | None = None,
    ) -> None:
        self.plan, self.settings, self.folder, self.taken_up = plan, settings, folder, taken_up
        self.threads = machine.usable_threads()
        self.record = Record(
            folder,
            command=settings.command,
            effort=settings.effort,
            environment=self._machine(),
        )
        for name, cases in plan.cases.items():
            self.record.add(plan.techniques[name], cases)
        self.code = taken_up["code"] if taken_up else state.code()
        if taken_up:
            state.restore(self.record, taken_up)
            state.reopen_failed(self.record)
            self.record.top["finished"] = False
        else:
            for match in plan.matches:
                self.record.add_match(match)
        self.parts = plan.left(self.record.entries, self.record.matches)
        self.progress = Progress(self.parts.steps, say)
        self._clock = time.monotonic()

    def describe(self) -> str:
        """The plan, and what is left of it, in a few lines."""
        if not self.taken_up:
            return self.plan.describe()
        left = f"taken up where it ended: about {clock(self.parts.seconds)} are left"
        return f"{self.plan.describe()}\n{left}"

    def measure(self) -> dict:
        """Measure everything; on an interruption the record keeps what is finished.

        Raises OtherConditions where a run that is taken up began under others; its record is then
        left as it was.
        """
        if not self.taken_up:
            self.save()
        self._clock = time.monotonic()
        data = self._materialise()
        times = self.record.top["resumed"]
        logs = self.folder / (f"logs-{len(times) + 2}" if self.taken_up else "logs")
        with Processes(
            logs, interpreters=self.settings.interpreters, limits=self.settings.limits
        ) as processes:
            self.progress.next()
            with self._part("describe"):
                environment, missing = self._describe(processes)
            if self.taken_up:
                self._check_conditions(environment)
                times.append(datetime.now(UTC).isoformat(timespec="seconds"))
            self._note(environment, missing)
            self._blocks(processes, data)
            for name in self.plan.cases:
                self._apart(processes, self.parts.apart[name], data)
                self._accuracy(processes, self.parts.training[name], data)
        self.record.top["finished"] = True
        return self.save()

    @contextmanager
    def _part(self, name: str) -> Iterator[None]:
        """Note what a part of the run takes."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.record.spend(name, time.monotonic() - start)

    def save(self) -> dict:
        """Write the state and the record, and return what stands in the record."""
        now = time.monotonic()
        self.record.spend("total", now - self._clock)
        self._clock = now
        state.save(self.record, asked=self.settings.asked, code=self.code)
        return self.record.write()

    def _materialise(self) -> dict[str, str]:
        """Write each task's data once; both frameworks read those files."""
        wanted = {case.workload.task for case in self._cases()}
        return {
            name: str(datasets.materialise(TASKS[name].dataset, self.settings.results / "data"))
            for name in sorted(wanted)
        }

    def _machine(self) -> dict:
        """The environment as far as no framework is asked."""
        return machine.describe(self.threads) | {
            "seeds": [SEED],
            "order": "starts: balanced Latin square; rounds: random; another for each match",
            "gpu": None,
        }

    def _describe(self, processes: Processes) -> tuple[dict, dict[str, str]]:
        """The environment, for which each framework is asked; why one can't be imported."""
        environment, missing = self._machine(), {}
        environment["peak_flops"] = peaks = {}
        environment["allocator"] = {"settings": machine.TUNED_ALLOCATOR}
        for name in {case.framework: None for case in self._cases()}:
            try:
                found = apart.describe(processes, name, self.threads)
            except Failed as error:
                missing[name] = str(error)
                continue
            environment["packages"][name] = found["versions"] | {"python": found["python"]}
            environment.setdefault("devices", {})[name] = found["device"]
            environment["allocator"][name] = found["keeps_freed_memory"]
            if not on_cpu(found["device"]):
                environment["gpu"] = found["device_info"]
            for dtype, flops in found["matmul_flops"].items():
                peaks[dtype] = max(peaks.get(dtype, 0.0), flops)
        return environment, missing

    def _check_conditions(self, environment: dict) -> None:
        """What is measured now belongs into one table with what was measured before."""
        before = self.record.top["environment"]
        if "peak_flops" not in before:  # it ended before it had measured anything
            self.code = state.code()
            return
        now = {"code": state.code(), **environment}
        if found := state.differences({"code": self.code, **before}, now):
            raise OtherConditions(f"begun under other conditions: {'; '.join(found)}")

    def _note(self, environment: dict, missing: dict[str, str]) -> None:
        """Keep the environment; a framework that is missing makes its cases UNSUPPORTED."""
        top = self.record.top
        if "peak_flops" not in top["environment"]:
            top["environment"] = environment
        for case in self._cases():
            if case.framework in missing:
                self._refuse(case, missing[case.framework])
        self._check_requirements()
        self.save()

    def _refuse(self, case: Case, reason: str) -> None:
        """What a case needs can't be imported."""
        side = FRAMEWORKS[case.framework]
        self.record.entries[case.id].fail(
            "UNSUPPORTED",
            f"{side.title} could not be started ({reason}); install it with: {side.install}",
        )

    def _check_requirements(self) -> None:
        """A case whose compiler or GPU is not here says so instead of failing."""
        devices = self.record.top["environment"].get("devices", {})
        for entry in self.record.entries.values():
            needs = entry.case.variant.requires
            if needs == "compiler" and not machine.compiler():
                entry.fail("UNSUPPORTED", "needs a C++ compiler; install one (for example g++)")
            elif needs == "cuda" and on_cpu(devices.get(entry.case.framework, "cpu")):
                entry.fail("UNSUPPORTED", "needs a CUDA GPU; none was found")

    def _cases(self) -> list[Case]:
        return [case for cases in self.plan.cases.values() for case in cases]

    def _open(self, cases: list[Case]) -> list[Case]:
        """The cases that can still be measured."""
        return [case for case in cases if self.record.entries[case.id].status == "OK"]

    def _blocks(self, processes: Processes, data: dict[str, str]) -> None:
        """Every match of every technique, block by block; a block's matches share its parents."""
        for block, rounds in groupby(self.parts.rounds, key=lambda found: found.block):
            rounds = list(rounds)
            # One block's contenders start one by one, for their first calls: not the first block's,
            # which may have to fill a compiler's cache. A worker that is executed, not forked,
            # would end with the thread that started it (PR_SET_PDEATHSIG).
            alone = block == min(1, self.plan.amount.blocks - 1) or not processes.forks
            timed = [case for found in rounds for _, match in found.matches for case in match]
            with self._part("parents"):
                self._start_parents(processes, self._open(timed))
            for found in rounds:
                self.progress.next()
                for number, match in found.matches:
                    self._play(processes, number, match, block, data, alone)
            processes.stop_parents()
            self._note_first_table()

    def _play(
        self,
        processes: Processes,
        number: int,
        match: list[Case],
        block: int,
        data: dict[str, str],
        alone: bool,
    ) -> None:
        """One block of one match."""
        playing = Match(
            processes,
            self._open(start_order(match, number, block)),
            data=data,
            threads=self.threads,
            seed=SEED + block,
            evidence=block == 0,
            number=number,
            side_by_side=1 if alone else min(self.threads, 4),
        )
        played = playing.play(self.plan.amount.rounds)
        self.record.add_block(number, block, played, playing.conditions())
        for part, seconds in playing.seconds.items():
            self.record.spend(part, seconds)
        self.save()

    def _note_first_table(self) -> None:
        """Every match has a block: the first table could be shown."""
        seconds = self.record.top["seconds"]
        if seconds["first_table"] is None:
            self.save()
            seconds["first_table"] = seconds["total"]

    def _start_parents(self, processes: Processes, cases: list[Case]) -> None:
        """Start a block's parents; the cases of one that can't be started fail."""
        keys = {case.id: parent_key(case, self.threads) for case in cases}
        failures = processes.start_parents(list(dict.fromkeys(keys.values())))
        for case in cases:
            failure = failures.get(keys[case.id])
            if isinstance(failure, ParentDied):
                self.record.entries[case.id].fail("FAILED", str(failure))
            elif failure:  # for example one Keras of two is not installed
                self._refuse(case, str(failure))

    def _apart(
        self, processes: Processes, jobs: list[tuple[Case, str]], data: dict[str, str]
    ) -> None:
        """What is measured of each case in freshly executed processes, one after the other.

        A few import their framework side by side, which takes most of the time and is not
        measured, and then wait for their turn.
        """
        side_by_side = min(self.threads, 4)
        # The pool outlives its workers, which would end with the thread that started them.
        pool = ThreadPoolExecutor(side_by_side)
        begin = partial(apart.begin, processes, threads=self.threads, seed=SEED)
        try:
            for first in range(0, len(jobs), side_by_side):
                some = [
                    (case, what, pool.submit(begin, case, what) if self._open([case]) else None)
                    for case, what in jobs[first : first + side_by_side]
                ]
                wait(filter(None, (starting for _, _, starting in some)))
                for case, what, starting in some:
                    self.progress.next()
                    if starting:
                        self._measure_apart(what, case, starting, processes, data)
                        self.save()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _measure_apart(
        self, what: str, case: Case, starting: Future, processes: Processes, data: dict[str, str]
    ) -> None:
        """Measure in a worker that has started; note why where it did not or fails."""
        entry = self.record.entries[case.id]
        part = {"cold start": "cold"}.get(what, what)
        try:
            worker = starting.result()
            if entry.status != "OK":  # since it was begun
                worker.stop(kill=True)
                return
            with entry.clocked(part), self._part(part):
                if what == "probe":
                    self._probe(worker, case, processes.limits, data)
                else:
                    self._cold_start(worker, case, processes, data)
        except (Failed, ParentFailed) as error:
            entry.fail("FAILED", f"{what}: {error}")
        except Unsupported as error:
            entry.fail("UNSUPPORTED", str(error))

    def _probe(self, worker: Worker, case: Case, limits: TimeLimits, data: dict[str, str]) -> None:
        entry = self.record.entries[case.id]
        try:
            found = apart.probe(
                worker,
                limits,
                case,
                data=data[case.workload.task],
                seed=SEED,
                memory_budget=self.settings.memory_budget,
            )
        finally:
            worker.stop(kill=True)
        entry.probed, entry.evidence = found["metrics"], found["evidence"]

    def _cold_start(
        self, worker: Worker, case: Case, processes: Processes, data: dict[str, str]
    ) -> None:
        """A cold start, after the imports of the case's own code.

        Its match has seen them. Where it played none, a rehearsal shows whether there are any.
        """
        entry = self.record.entries[case.id]
        given = {"data": data[case.workload.task], "seed": SEED}

        def measure(worker: Worker) -> dict:
            try:
                imports = entry.imports or []
                return apart.cold_start(worker, processes.limits, case, imports=imports, **given)
            finally:
                worker.stop(kill=True)

        found = measure(worker)
        if entry.imports is None:
            entry.imports = found["modules"]
            if entry.imports:
                again = apart.begin(processes, case, "cold start", threads=self.threads, seed=SEED)
                found = measure(again)
        entry.cold.append(found)
        if reason := found.get("not_applied"):
            entry.fail("NOT_APPLIED", reason)

    def _accuracy(self, processes: Processes, cases: list[Case], data: dict[str, str]) -> None:
        if not cases:
            return

        def done(case: Case, result: apart.Trained) -> None:
            self.progress.next()
            entry = self.record.entries[case.id]
            entry.trained, entry.seconds["training"] = result, result.seconds
            if result.status != "OK":
                entry.fail(result.status, result.reason)
            elif entry.status == "OK":
                entry.reason = result.reason

        with self._part("training"):
            apart.train_all(
                processes,
                self._open(cases),
                data=data,
                threads=self.threads,
                seeds=range(self.plan.amount.seeds),
                budget=self.plan.amount.train_s,
                done=done,
            )
        self.save()
