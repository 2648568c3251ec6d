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
from functools import partial
from pathlib import Path

from bench.harness import machine, probes
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
from bench.harness.results import Record
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
    """The techniques of every `bench/bench_*.py`, by name."""
    found = {}
    for path in sorted((ROOT / "bench").glob("bench_*.py")):
        technique = importlib.import_module(f"bench.{path.stem}").TECHNIQUE
        found[technique.name] = technique
    return found


@dataclass(frozen=True)
class Settings:
    """The choices of a run, all of them fixed before it starts."""

    effort: str = "default"
    blocks: int | None = None
    results: Path = Path("results")
    memory_budget: int | None = None
    command: str = ""
    interpreters: dict[str, str] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)

    @property
    def amount(self) -> Effort:
        """Blocks, rounds and seeds."""
        usual = EFFORT[self.effort]
        return replace(usual, blocks=self.blocks or usual.blocks)


@dataclass(frozen=True)
class Plan:
    """The cases of a run by technique, and what they will take."""

    cases: dict[str, list[Case]]
    techniques: dict[str, Technique]
    amount: Effort

    @property
    def steps(self) -> list[tuple[str, float]]:
        """The parts of the run in order: what is measured, expected seconds."""
        found = [("machine", EXPECTED_S["describe"])]
        for block in range(self.amount.blocks):
            parents = EXPECTED_S["parents"]
            for name, cases in self.timed.items():
                contenders = sum(map(len, matches(cases)))
                sampling = self.amount.rounds * contenders * EXPECTED_S["sample"]
                seconds = parents + EXPECTED_S["contender"] * contenders + sampling
                found.append((f"block {block + 1} of {self.amount.blocks}: {name}", seconds))
                parents = 0
        for name, cases in self.cases.items():
            for case in cases:
                found += [(f"{name}: {what}", EXPECTED_S[what]) for what in self.apart(case)]
            training = min(EXPECTED_S["train"] * self.amount.seeds, self.amount.train_s or 1e9)
            found += [(f"{name}: accuracy", training) for _ in trained(cases)]
        return found

    @property
    def timed(self) -> dict[str, list[Case]]:
        """The techniques that play matches, with all of their cases."""
        return {name: cases for name, cases in self.cases.items() if matches(cases)}

    def apart(self, case: Case) -> list[str]:
        """What is measured of a case in freshly executed processes, in order."""
        technique = self.techniques[case.technique]
        starts = technique.cold_starts if self.amount.blocks > 1 else 1
        found = ["cold start"] * (starts if case.variant.cold else 0)
        return found + ["probe"] * (technique.probes and case.variant.role != "control")

    @property
    def seconds(self) -> float:
        """Expected duration."""
        return sum(seconds for _, seconds in self.steps)

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
            f"about {clock(self.seconds)} min"
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

    def __init__(self, plan: Plan, say: Callable[[str], None]) -> None:
        self._steps, self._say = plan.steps, say
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


class Run:
    """Measures a plan into a record."""

    def __init__(
        self, plan: Plan, settings: Settings, folder: Path, say: Callable[[str], None]
    ) -> None:
        self.plan, self.settings, self.folder = plan, settings, folder
        self.threads = machine.usable_threads()
        self.progress = Progress(plan, say)
        self.record = Record(
            folder,
            command=settings.command,
            effort=settings.effort,
            environment=machine.describe(self.threads)
            | {"seeds": [SEED], "order": "random within each round, seeded by block", "gpu": None},
        )
        for name, cases in plan.cases.items():
            self.record.add(plan.techniques[name], cases)

    def measure(self) -> dict:
        """Measure everything; on an interruption the record keeps what is finished."""
        self.record.write()
        data = self._materialise()
        with Processes(
            self.folder / "logs",
            interpreters=self.settings.interpreters,
            limits=self.settings.limits,
        ) as processes:
            self.progress.next()
            self._describe(processes)
            self._blocks(processes, data)
            for cases in self.plan.cases.values():
                self._apart(processes, cases, data)
                self._accuracy(processes, cases, data)
        self.record.top["finished"] = True
        return self.record.write()

    def _materialise(self) -> dict[str, str]:
        """Write each task's data once; both frameworks read those files."""
        wanted = {case.workload.task for case in self._cases()}
        return {
            name: str(datasets.materialise(TASKS[name].dataset, self.settings.results / "data"))
            for name in sorted(wanted)
        }

    def _describe(self, processes: Processes) -> None:
        """Ask each framework what it is; one that can't be imported makes its cases UNSUPPORTED."""
        environment = self.record.top["environment"]
        environment["peak_flops"] = peaks = {}
        environment["allocator"] = {"settings": machine.TUNED_ALLOCATOR}
        for name in {case.framework: None for case in self._cases()}:
            try:
                found = probes.describe(processes, name, self.threads)
            except Failed as error:
                for case in self._cases():
                    if case.framework == name:
                        self._refuse(case, str(error))
                continue
            environment["packages"][name] = found["versions"] | {"python": found["python"]}
            environment.setdefault("devices", {})[name] = found["device"]
            environment["allocator"][name] = found["keeps_freed_memory"]
            if not on_cpu(found["device"]):
                environment["gpu"] = found["device_info"]
            for dtype, flops in found["matmul_flops"].items():
                peaks[dtype] = max(peaks.get(dtype, 0.0), flops)
        self._check_requirements()
        self.record.write()

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
        numbered = {
            name: [(self.record.add_match(match), match) for match in matches(cases)]
            for name, cases in self.plan.timed.items()
        }
        for block in range(self.plan.amount.blocks):
            # One block's contenders start one by one, for their first calls: not the first block's,
            # which may have to fill a compiler's cache. A worker that is executed, not forked,
            # would end with the thread that started it (PR_SET_PDEATHSIG).
            alone = block == min(1, self.plan.amount.blocks - 1) or not processes.forks
            timed = [case for found in numbered.values() for _, match in found for case in match]
            self._start_parents(processes, self._open(timed))
            for found in numbered.values():
                self.progress.next()
                for number, match in found:
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
                    self.record.write()
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

    def _apart(self, processes: Processes, cases: list[Case], data: dict[str, str]) -> None:
        """What is measured of each case in freshly executed processes, one after the other.

        A few import their framework side by side, which takes most of the time and is not
        measured, and then wait for their turn.
        """
        jobs = [(case, what) for case in cases for what in self.plan.apart(case)]
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
                        self.record.write()
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
        if not trained(cases):
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
            self._open(trained(cases)),
            data=data,
            threads=self.threads,
            seeds=range(self.plan.amount.seeds),
            budget=self.plan.amount.train_s,
            done=done,
        )
        self.record.write()


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
