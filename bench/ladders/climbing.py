"""Climbs a ladder: its runs one after another, into a record that is complete after each.

`ladder.json` has every run as it was measured, and is rewritten after each. What is kept and what
it says follows from it by `rule.py`. An interrupted climb goes on with the run that it had begun,
and tries failed ones again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean

from msgspec import convert, to_builtins

from bench.analysis.values import finite
from bench.harness import isolated_measurements, machine, state
from bench.harness.durations import USUAL_BYTES
from bench.harness.folders import alone, replace_file
from bench.harness.plan import FRAMEWORKS, Case
from bench.harness.processes import Processes, TimeLimits
from bench.harness.progress import clock
from bench.harness.worker import on_cpu
from bench.ladders import rule
from bench.ladders.ladder import Ladder
from bench.ladders.record import FILE, Climbed, Conditions, Evidence, Run, Rungs
from bench.ladders.rule import PARTS
from bench.record import encode

SEED = 2026
SHARE_OF_MEMORY = 0.8  # of what is free, that programs which take turns may hold together
HELD = ("memory", "host_memory", "whole_memory")  # beyond what a program has imported
Wanted = tuple[str, int, list[tuple[str, Rungs]]]  # stage, block, (framework, rungs) in order


def new_record(ladder: Ladder, *, frameworks: list[str], blocks: int, command: str) -> Climbed:
    """The record of a climb before it begins."""
    return Climbed(
        ladder=ladder.name,
        command=command,
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        resumed=[],
        finished=False,
        frameworks=frameworks,
        blocks=blocks,
        task=ladder.task,
        environment=Conditions(),
        runs=[],
    )


class Climb:
    """Measures what a record lacks. `folder`: of the record; `data`: where data sets are made."""

    def __init__(
        self,
        ladder: Ladder,
        record: Climbed,
        folder: Path,
        data: Path,
        *,
        say: Callable[[str], None],
        minutes: float | None = None,
        interpreters: dict[str, str] | None = None,
        limits: TimeLimits | None = None,
    ) -> None:
        self.ladder, self.record, self.folder, self.data = ladder, record, folder, data
        self.say, self.interpreters, self.limits = say, interpreters, limits
        self.threads = machine.usable_threads()
        self.end = None if minutes is None else time.monotonic() + 60 * minutes
        self.begun = time.monotonic()

    def measure(self) -> bool:
        """Measure to the top or until time is over; returns whether everything is measured.

        Raises ValueError if earlier runs had other conditions or another process measures it, and
        Failed if a framework can't be imported.
        """
        with alone(self.folder):
            return self._measure()

    def _measure(self) -> bool:
        if not self.record.environment.devices:
            self.save()  # so that there is something to go on with, whenever it ends
        settings = {"interpreters": self.interpreters, "limits": self.limits}
        with Processes(self.folder / "logs", **settings) as processes:
            self._conditions(processes)
            arrays, settings = self.ladder.materialise(self.data, self.ladder.task)
            self._drop_halves()  # before what failed, which would be next in their place
            if self.record.resumed:
                self._drop_failed()
            while wanted := self._next():
                if self.end is not None and time.monotonic() >= self.end:
                    return False
                self._run(processes, wanted, str(arrays), settings)
        self.record.finished = True
        self.save()
        return True

    def left_s(self) -> float:
        """Expected seconds left if every technique is kept, by earlier runs or the plan."""
        runs, rungs = self.record.runs, self.ladder.rungs
        programs = 0  # of a block: two a rung, and those that show what the parts promise
        for framework in self.record.frameworks:
            changing = [rung for rung in rungs if framework not in rung.nothing]
            parts = [rung for rung in changing if rung.judged in rule.MULTIPLIED]
            programs += 2 * len(changing) + len(parts) + 3
        each = fmean(run.seconds for run in runs) if runs else self.ladder.seconds
        return max(0, programs * self.record.blocks - len(runs)) * each

    def save(self) -> None:
        """Rewrite the record."""
        replace_file(self.folder / FILE, encode(self.record).decode())

    def _conditions(self, processes: Processes) -> None:
        """Note the environment, or compare it with that of the runs before."""
        described = machine.describe(self.threads)
        packages, devices, gpu = dict(described.packages), {}, described.gpu
        for framework in self.record.frameworks:
            answer = isolated_measurements.describe(processes, framework, self.threads)
            packages[framework] = answer.versions | {"python": answer.python}
            devices[framework] = answer.device
            if not on_cpu(answer.device):
                gpu = answer.device_info
        on_gpus = not any(map(on_cpu, devices.values()))
        task = (on_gpus and self.ladder.gpu_task) or self.ladder.task
        self.ladder = at_task(self.ladder, task)
        now = convert(to_builtins(described), Conditions).but(
            packages=packages, devices=devices, gpu=gpu, code=state.code("bench/ladders"), task=task
        )
        before = self.record.environment
        differing = state.differences(to_builtins(before), to_builtins(now))
        if before.devices and differing:
            raise ValueError(f"this changed since the run began: {'; '.join(differing)}")
        self.record.environment, self.record.task = now, task
        self.save()

    def _next(self) -> Wanted | None:
        """The runs that are next to each other next: a pair of each framework; None at the end."""
        climbs = rule.climbs_of(self.ladder, self.record)
        for rung in self.ladder.rungs:
            open_steps = {
                framework: step
                for framework, steps in climbs.items()
                for step in steps
                if step.rung is rung and step.state == "open"
            }
            pairs = {f: [step.below, step.rungs] for f, step in open_steps.items()}
            if wanted := self._missing(rung.name, pairs):
                return wanted
        return self._missing(PARTS, {f: rule.parts_of(steps) for f, steps in climbs.items()})

    def _drop_failed(self) -> None:
        """Forget what failed, and what ran beside it: it is tried once more."""
        self._drop({run.pair for run in self.record.runs if run.status == "FAILED"})

    def _drop_halves(self) -> None:
        """Forget the runs whose neighbours an interruption has cut off: they are made together."""
        if wanted := self._next():
            stage, block, programs = wanted
            self._drop({(stage, block, framework) for framework, _ in programs})

    def _drop(self, pairs: set[tuple[str, int, str]]) -> None:
        self.record.runs = [run for run in self.record.runs if run.pair not in pairs]

    def _missing(self, stage: str, programs: dict[str, list[Rungs]]) -> Wanted | None:
        """The runs of the first block of a stage that lacks some, in the order of that block."""
        done = {(*run.pair, run.rungs) for run in self.record.runs}
        for block in range(self.record.blocks):
            turned = slice(None, None, -1 if block % 2 else 1)
            wanted = [
                (framework, rungs)
                for framework in [*programs][turned]
                for rungs in programs[framework][turned]
                if (stage, block, framework, rungs) not in done
            ]
            if wanted:
                return stage, block, wanted
        return None

    def _run(self, processes: Processes, wanted: Wanted, arrays: str, settings: dict) -> None:
        """Train each of these programs in a separate process, and keep what each gives.

        Those of a framework take turns, epoch by epoch, as many as fit into memory together.
        """
        stage, block, programs = wanted
        cases = {
            case.id: (framework, rungs, case)
            for framework, rungs in programs
            for case in [self.ladder.case(rungs, framework, settings | {"seed": block})]
        }
        spent, left = clock(time.monotonic() - self.begun), clock(self.left_s())
        self.say(
            f"[{stage}] pair {block + 1} of {self.record.blocks} · {spent} elapsed, "
            f"about {left} left"
        )

        def done(case: Case, measurement: isolated_measurements.Measurement) -> None:
            framework, rungs, _ = cases[case.id]
            metrics, evidence = (
                (answer.metrics, answer.evidence) if (answer := measurement.answer) else ({}, None)
            )
            run = Run(
                stage=stage,
                block=block,
                framework=framework,
                rungs=rungs,
                status=measurement.status,
                reason=measurement.reason,
                metrics=finite(metrics),
                evidence=None if evidence is None else convert(finite(evidence), Evidence),
                together=len(alive),
                seconds=measurement.seconds,
            )
            self.record.runs.append(run)
            self.save()
            step_s = run.value("iteration")
            took = f"{1000 * step_s:.1f} ms an iteration" if step_s else "measured"
            self.say(f"  {FRAMEWORKS[framework].title} {run.program}: {run.reason or took}")

        for framework in dict.fromkeys(each for each, _, _ in cases.values()):
            for alive in self._together(framework, list(cases.values())):
                isolated_measurements.probes_in_turns(
                    processes,
                    alive,
                    data={self.ladder.task: arrays},
                    threads=self.threads,
                    seed=SEED + block,
                    done=done,
                )

    def _together(
        self, framework: str, programs: list[tuple[str, Rungs, Case]]
    ) -> Iterator[list[Case]]:
        """The programs of a framework, as many at a time as fit into memory."""
        room, alive, held = SHARE_OF_MEMORY * machine.free_memory(), [], 0.0
        environment, device = self.record.environment, 0.0
        if not on_cpu(environment.devices[framework]):
            device = float((environment.gpu or {}).get("memory_bytes") or 0)
        on_device = 0.0
        for side, rungs, case in programs:
            if side != framework:
                continue
            size = USUAL_BYTES + self._most(framework, rungs, HELD)
            # Its allocator keeps what it had for a while.
            share = 2 * self._most(framework, rungs, ("memory",)) if device else 0.0
            full = held + size > room or on_device + share > SHARE_OF_MEMORY * device > 0
            if alive and full:
                yield alive
                alive, held, on_device = [], 0.0, 0.0
            alive, held, on_device = [*alive, case], held + size, on_device + share
        yield alive

    def _most(self, framework: str, rungs: Rungs, figures: Sequence[str]) -> float:
        """The most that these figures were for a program; for any, where it has not run yet."""
        runs = self.record.of(framework)
        same = [run for run in runs if run.rungs == rungs] or runs
        return max((run.value(name) or 0.0 for run in same for name in figures), default=0.0)


def at_task(ladder: Ladder, task: str) -> Ladder:
    """The ladder on its task or on that of a GPU; ValueError for another."""
    if task not in (ladder.task, ladder.gpu_task):
        raise ValueError(f"{ladder.name} has no task {task!r}")
    on_gpu = task == ladder.gpu_task
    return replace(ladder, task=task, batch_size=None if on_gpu else ladder.batch_size)
