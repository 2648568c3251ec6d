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
from dataclasses import dataclass, field
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
EXPECTED_S = {"describe": 10, "parents": 7, "contender": 1.2, "cold": 6, "train": 1.5}


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
    command: str = ""
    interpreters: dict[str, str] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)

    @property
    def amount(self) -> Effort:
        """Blocks, rounds and seeds."""
        usual = EFFORT[self.effort]
        return Effort(self.blocks or usual.blocks, usual.rounds, usual.seeds)


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
        for name, cases in self.cases.items():
            block = EXPECTED_S["parents"]
            for match in matches(cases):
                sampling = self.amount.rounds * len(match) * 0.03
                block += EXPECTED_S["contender"] * len(match) + sampling
            found += [
                (f"{name}: block {b + 1} of {self.amount.blocks}", block)
                for b in range(self.amount.blocks)
            ]
            found += [(f"{name}: cold start and memory", EXPECTED_S["cold"]) for _ in cold(cases)]
            found += [
                (f"{name}: accuracy", EXPECTED_S["train"] * self.amount.seeds)
                for _ in trained(cases)
            ]
        return found

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


def cold(cases: list[Case]) -> list[Case]:
    """The cases whose cold start and memory are measured: every one but the controls."""
    return [case for case in cases if case.variant.role != "control"]


def trained(cases: list[Case]) -> list[Case]:
    """The cases that are trained for their accuracy."""
    return [case for case in cold(cases) if case.workload.accuracy]


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
            for cases in self.plan.cases.values():
                self._matches(processes, cases, data)
                self._cold(processes, cases, data)
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

    def _matches(self, processes: Processes, cases: list[Case], data: dict[str, str]) -> None:
        """All matches of a technique, block by block; a block's matches share its parents."""
        numbered = [(self.record.add_match(match), match) for match in matches(cases)]
        for block in range(self.plan.amount.blocks):
            self.progress.next()
            alive = self._open(cases)
            if not alive:
                continue
            keys = dict.fromkeys(parent_key(case, self.threads) for case in alive)
            failures = processes.start_parents(list(keys))
            for case in alive:
                failure = failures.get(parent_key(case, self.threads))
                if isinstance(failure, ParentDied):
                    self.record.entries[case.id].fail("FAILED", str(failure))
                elif failure:  # for example one Keras of two is not installed
                    self._refuse(case, str(failure))
            for number, match in numbered:
                found = Match(
                    processes,
                    self._open(match),
                    data=data,
                    threads=self.threads,
                    seed=SEED + block,
                    evidence=block == 0,
                ).play(self.plan.amount.rounds)
                self.record.add_block(number, block, found)
                self.record.write()
            processes.stop_parents()

    def _cold(self, processes: Processes, cases: list[Case], data: dict[str, str]) -> None:
        for case in cold(cases):
            self.progress.next()
            entry = self.record.entries[case.id]
            if entry.status != "OK":
                continue
            try:
                entry.cold = probes.cold_start(
                    processes,
                    case,
                    data=data[case.workload.task],
                    threads=self.threads,
                    seed=SEED,
                )
            except (Failed, ParentFailed) as error:
                entry.fail("FAILED", f"cold start: {error}")
            except Unsupported as error:
                entry.fail("UNSUPPORTED", str(error))
            self.record.write()

    def _accuracy(self, processes: Processes, cases: list[Case], data: dict[str, str]) -> None:
        if not trained(cases):
            return

        def done(case: Case, result: probes.Trained) -> None:
            self.progress.next()
            entry = self.record.entries[case.id]
            entry.trained = result
            if result.status != "OK":
                entry.fail(result.status, result.reason)

        probes.train_all(
            processes,
            self._open(trained(cases)),
            data=data,
            threads=self.threads,
            seeds=range(self.plan.amount.seeds),
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
    """The command line of this process, as a user would type it."""
    program = Path(sys.argv[0])
    name = f"python -m {program.parent.name}" if program.stem == "__main__" else program.name
    return shlex.join([*name.split(), *sys.argv[1:]])
