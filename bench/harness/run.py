"""A run: what it will measure, then measuring it, with progress, and the record at every step."""

from __future__ import annotations

import importlib
import os
import shlex
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from itertools import groupby, product
from pathlib import Path

from bench.harness import machine, probes, state
from bench.harness.matches import Match, parent_key
from bench.harness.plan import (
    EFFORT,
    FRAMEWORKS,
    Case,
    Effort,
    Technique,
    matches,
)
from bench.harness.processes import (
    ROOT,
    Failed,
    Limits,
    ParentDied,
    ParentFailed,
    Processes,
    Unsupported,
)
from bench.harness.results import Entry, Record
from bench.harness.worker import on_cpu
from shared import datasets
from shared.specs import TASKS

SEED = 2026

# Seconds that parts of a run take on two cores: what the plan announces before anything ran.
EXPECTED_S = {
    "describe": 10,
    "parents": 13,
    "contender": 1.4,
    "sample": 0.03,
    "cold start": 5.5,
    "probe": 25,
    "train": 1.3,
}


def techniques() -> dict[str, Technique]:
    """The techniques of every `bench/<family>/bench_*.py`, by name."""
    found = {}
    for path in sorted((ROOT / "bench").glob("*/bench_*.py")):
        technique = importlib.import_module(f"bench.{path.parent.name}.{path.stem}").TECHNIQUE
        found[technique.name] = technique
    return found


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
    limits: Limits = field(default_factory=Limits)
    asked: dict = field(default_factory=dict)

    @property
    def amount(self) -> Effort:
        """Blocks, rounds and seeds."""
        usual = EFFORT[self.effort]
        return replace(usual, blocks=self.blocks or usual.blocks)


@dataclass(frozen=True)
class Round:
    """One block of a technique: its matches and their numbers."""

    block: int
    technique: str
    matches: list[tuple[int, list[Case]]]


@dataclass(frozen=True)
class Parts:
    """What is measured, by technique but for the rounds, which alternate between techniques."""

    amount: Effort
    rounds: list[Round]
    apart: dict[str, list[tuple[Case, str]]]
    training: dict[str, list[Case]]

    @property
    def steps(self) -> list[tuple[str, float]]:
        """What is measured, in order, and the seconds that it is expected to take."""
        found, blocks = [("machine", EXPECTED_S["describe"])], set()
        for each in self.rounds:
            contenders = sum(len(match) for _, match in each.matches)
            sampling = self.amount.rounds * contenders * EXPECTED_S["sample"]
            seconds = EXPECTED_S["contender"] * contenders + sampling
            if each.block not in blocks:  # the techniques of a block share its parents
                seconds += EXPECTED_S["parents"]
            blocks.add(each.block)
            name = f"block {each.block + 1} of {self.amount.blocks}: {each.technique}"
            found.append((name, seconds))
        for name, apart in self.apart.items():
            found += [(f"{name}: {what}", EXPECTED_S[what]) for _, what in apart]
            each = min(EXPECTED_S["train"] * self.amount.seeds, self.amount.train_s or 1e9)
            for case in self.training[name]:
                found.append((f"{name}: accuracy", each * case.workload.training))
        return found

    @property
    def seconds(self) -> float:
        """Expected duration."""
        return sum(seconds for _, seconds in self.steps)


@dataclass(frozen=True)
class Plan:
    """The cases of a run by technique, and what they will take."""

    cases: dict[str, list[Case]]
    techniques: dict[str, Technique]
    amount: Effort

    @property
    def matches(self) -> list[list[Case]]:
        """The matches of all techniques, in the order of their numbers."""
        return [match for cases in self.cases.values() for match in matches(cases)]

    @property
    def parts(self) -> Parts:
        """Everything that the run measures."""
        cases = [case for cases in self.cases.values() for case in cases]
        return self.left({case.id: Entry(case) for case in cases}, self.matches)

    def left(self, entries: dict[str, Entry], numbered: list[list[Case]]) -> Parts:
        """What the run measures beyond `entries`; `numbered` are its matches.

        A block of a match that was interrupted is not in the entries of any of its cases.
        """
        rounds = []
        for block, name in product(range(self.amount.blocks), self.cases):
            lacking = [
                (number, match)
                for number, match in enumerate(numbered)
                if any(
                    case.technique == name and entries[case.id].lacks(number, block)
                    for case in match
                )
            ]
            if lacking:
                rounds.append(Round(block, name, lacking))
        apart, training = {}, {}
        for name, cases in self.cases.items():
            still = [case for case in cases if entries[case.id].status == "OK"]
            apart[name] = [(c, what) for c in still for what in self._left_apart(entries[c.id])]
            training[name] = [c for c in trained(still) if entries[c.id].trained is None]
        return Parts(self.amount, rounds, apart, training)

    def _left_apart(self, entry: Entry) -> list[str]:
        """What of `apart` was not found yet."""
        left = self.apart(entry.case)
        for done in ["cold start"] * len(entry.cold) + ["probe"] * bool(entry.probed):
            left.remove(done)
        return left

    def apart(self, case: Case) -> list[str]:
        """What is measured of a case in freshly executed processes, in order."""
        technique = self.techniques[case.technique]
        starts = technique.cold_starts if self.amount.blocks > 1 else 1
        found = ["cold start"] * (starts if case.variant.cold else 0)
        return found + ["probe"] * (technique.probes and case.variant.role != "control")

    def describe(self) -> str:
        """The plan in a few lines of at most 80 columns."""
        lines = []
        for name, cases in self.cases.items():
            tasks = dict.fromkeys(f"{c.workload.task} ({c.workload.batch_size})" for c in cases)
            variants = dict.fromkeys(c.variant.name for c in cases)
            lines.append(_hanging(f"{name}: {', '.join(variants)}"))
            lines.append(_hanging(f"    on {', '.join(tasks)}; {len(cases)} cases"))
        lines.append(
            f"{self.amount.blocks} blocks of {self.amount.rounds} rounds, "
            f"{self.amount.seeds} seeds where accuracy may change; "
            f"about {clock(self.parts.seconds)} min"
        )
        return "\n".join(lines)


def _hanging(text: str) -> str:
    return textwrap.fill(text, width=80, subsequent_indent="    ")


def trained(cases: list[Case]) -> list[Case]:
    """The cases that are trained for their accuracy."""
    wanted = [c for c in cases if c.workload.accuracy and c.variant.accuracy]
    return [c for c in wanted if c.variant.role != "control"]


def clock(seconds: float) -> str:
    """Minutes and seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class Progress:
    """Says what is measured now, how many of how many, elapsed and expected remaining."""

    def __init__(self, steps: list[tuple[str, float]], say: Callable[[str], None]) -> None:
        self._steps, self._say = steps, say
        self._done, self._start = 0, time.monotonic()

    def next(self, what: str | None = None) -> None:
        """The next part begins."""
        name, _ = self._steps[min(self._done, len(self._steps) - 1)]
        elapsed = time.monotonic() - self._start
        self._say(
            f"[{self._done + 1}/{len(self._steps)}] {what or name}"
            f" · {clock(elapsed)} elapsed, about {clock(self._left(elapsed))} left"
        )
        self._done += 1

    def _left(self, elapsed: float) -> float:
        """What the rest takes, at the pace of what is done."""
        done = sum(seconds for _, seconds in self._steps[: self._done])
        rest = sum(seconds for _, seconds in self._steps[self._done :])
        return rest * (elapsed / done if done else 1.0)


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

    def describe(self) -> str:
        """The plan, and what is left of it, in a few lines."""
        if not self.taken_up:
            return self.plan.describe()
        left = f"taken up where it ended: about {clock(self.parts.seconds)} min are left"
        return f"{self.plan.describe()}\n{left}"

    def measure(self) -> dict:
        """Measure everything; on an interruption the record keeps what is finished.

        Raises OtherConditions where a run that is taken up began under others; its record is then
        left as it was.
        """
        if not self.taken_up:
            self.save()
        data = self._materialise()
        times = self.record.top["resumed"]
        logs = self.folder / (f"logs-{len(times) + 2}" if self.taken_up else "logs")
        with Processes(
            logs, interpreters=self.settings.interpreters, limits=self.settings.limits
        ) as processes:
            self.progress.next()
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

    def save(self) -> dict:
        """Write the state and the record, and return what stands in the record."""
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
            "order": "random within each round, seeded by block",
            "gpu": None,
        }

    def _describe(self, processes: Processes) -> tuple[dict, dict[str, str]]:
        """The environment, for which each framework is asked; why one can't be imported."""
        environment, missing = self._machine(), {}
        environment["peak_flops"] = peaks = {}
        environment["allocator"] = {"settings": machine.TUNED_ALLOCATOR}
        for name in {case.framework: None for case in self._cases()}:
            try:
                found = probes.describe(processes, name, self.threads)
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
            self._start_parents(processes, self._open(timed))
            for found in rounds:
                self.progress.next()
                for number, match in found.matches:
                    played = Match(
                        processes,
                        self._open(match),
                        data=data,
                        threads=self.threads,
                        seed=SEED + block,
                        evidence=block == 0,
                        side_by_side=1 if alone else min(self.threads, 4),
                    ).play(self.plan.amount.rounds)
                    self.record.add_block(number, block, played)
                    self.save()
            processes.stop_parents()

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
        begin = partial(probes.begin, processes, threads=self.threads, seed=SEED)
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
                        self._measure_apart(what, case, starting, processes.limits, data)
                        self.save()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _measure_apart(
        self, what: str, case: Case, starting: Future, limits: Limits, data: dict[str, str]
    ) -> None:
        """Measure in a worker that has started; note why where it did not or fails."""
        entry = self.record.entries[case.id]
        given = {"data": data[case.workload.task], "seed": SEED}
        try:
            worker = starting.result()
            try:
                if entry.status != "OK":  # since it was begun
                    return
                if what == "probe":
                    budget = self.settings.memory_budget
                    entry.probed = probes.probe(worker, limits, case, memory_budget=budget, **given)
                else:
                    entry.cold.append(probes.cold_start(worker, limits, case, **given))
                    if reason := entry.cold[-1].get("not_applied"):
                        entry.fail("NOT_APPLIED", reason)
            finally:
                worker.stop(kill=True)
        except (Failed, ParentFailed) as error:
            entry.fail("FAILED", f"{what}: {error}")
        except Unsupported as error:
            entry.fail("UNSUPPORTED", str(error))

    def _accuracy(self, processes: Processes, cases: list[Case], data: dict[str, str]) -> None:
        if not cases:
            return

        def done(case: Case, result: probes.Trained) -> None:
            self.progress.next()
            entry = self.record.entries[case.id]
            entry.trained = result
            if result.status != "OK":
                entry.fail(result.status, result.reason)
            elif entry.status == "OK":
                entry.reason = result.reason

        probes.train_all(
            processes,
            self._open(cases),
            data=data,
            threads=self.threads,
            seeds=range(self.plan.amount.seeds),
            budget=self.plan.amount.train_s,
            done=done,
        )
        self.save()


def find_interpreter(given: str) -> str | None:
    """The absolute path of a Python interpreter named by its path or command; None if it is none.

    It must answer as Python does: plenty of programs end well whatever they are given.
    """
    path = shutil.which(given)
    if path is None:
        return None
    question = "import sys; print('Python', sys.version_info >= (3, 11))"
    try:
        answer = subprocess.run([path, "-c", question], capture_output=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return os.path.abspath(path) if answer.stdout.strip() == b"Python True" else None


def this_command() -> str:
    """The command line of this process, as a user would type it.

    Of absolute paths the last part: records are published, and folders tell who made them.
    """
    program = Path(sys.argv[0])
    name = f"python -m {program.parent.name}" if program.stem == "__main__" else program.name
    return without_folders(shlex.join([*name.split(), *sys.argv[1:]]))


def without_folders(command: str) -> str:
    """A command line whose absolute paths are cut to ".../" and their last part."""
    words = []
    for word in shlex.split(command):
        option, equals, value = word.rpartition("=")
        is_path = Path(value).is_absolute()
        words.append(f"{option}{equals}.../{Path(value).name}" if is_path else word)
    return shlex.join(words)
