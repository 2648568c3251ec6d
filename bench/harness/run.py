"""A run: it measures what is planned, and keeps the record at every step.

The scheduler decides, the executor measures, the recorder keeps. A run that ends early leaves a
valid record.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from bench.harness import conditions, machine, remaining
from bench.harness import state as states
from bench.harness.executor import Executor
from bench.harness.plan import EFFORT, Effort
from bench.harness.processes import Processes, TimeLimits
from bench.harness.recorder import Recorder, Show
from bench.harness.run_plan import Plan
from bench.harness.scheduler import WRITING_S, Scheduler, take_up
from bench.harness.state import Asked, RunState
from bench.record import Record
from shared import datasets
from shared.specs import TASKS

# Ends a run in time: a shell starts what runs in its background with Ctrl-C's signal ignored.
ALARM = getattr(signal, "SIGALRM", signal.SIGINT)


@dataclass(frozen=True)
class Settings:
    """The choices of a run, all fixed before it starts.

    `minutes`: when it ends. `model`: name and checksum of a user's file. `asked`: the command-line
    options, kept for `--resume`.
    """

    effort: str = "default"
    blocks: int | None = None
    minutes: float | None = None
    results: Path = Path("results")
    memory_budget: int | None = None
    command: str = ""
    interpreters: dict[str, str] = field(default_factory=dict)
    model: dict[str, str] | None = None
    limits: TimeLimits = field(default_factory=TimeLimits)
    asked: Asked = field(default_factory=Asked)

    @property
    def amount(self) -> Effort:
        """How much is measured; a given number of blocks holds for every match."""
        usual = EFFORT[self.effort]
        return replace(usual, blocks=self.blocks, looks=(), seed_looks=()) if self.blocks else usual

    @property
    def seconds(self) -> float | None:
        """The limit of the run in seconds, or None."""
        return self.minutes and 60 * self.minutes


class Run:
    """Measures a plan into a record, or what an interrupted run has left of it.

    `taken_up`: the state of an interrupted run. `show`: see `Recorder`.
    """

    def __init__(
        self,
        plan: Plan,
        settings: Settings,
        folder: Path,
        say: Callable[[str], None],
        taken_up: RunState | None = None,
        show: Show = lambda record, reached: None,
    ) -> None:
        self.plan, self.settings, self.folder = plan, settings, folder
        self.is_taken_up = taken_up is not None
        self.threads = machine.usable_threads()
        self.machine = conditions.of_machine(self.threads, settings.model)
        if taken_up:
            take_up(plan, taken_up)
        self.state = taken_up or states.new(
            plan.every,
            asked=settings.asked,
            code=states.code(),
            command=settings.command,
            effort=settings.effort,
            environment=self.machine,
        )
        most = settings.seconds
        self.deadline = time.monotonic() + most if most else float("inf")
        self.scheduler = Scheduler(
            plan, self.state, deadline=self.deadline, of_user=settings.model is not None
        )
        self.recorder = Recorder(folder, plan, self.state, say=say, show=show, most=most)

    def describe(self) -> str:
        """The plan, and what is left of it, in a few lines."""
        left = remaining.seconds_left(self.plan, self.state)
        return remaining.describe(self.plan, left, self.is_taken_up, self.settings.seconds)

    def table(self) -> str:
        """What is left of the plan, part by part."""
        return remaining.table(self.plan, self.state)

    def measure(self) -> Record:
        """Measure everything. On an interruption the record keeps what is finished.

        Raises OtherConditions, and leaves the record unchanged, if a resumed run began under
        others.
        """
        with self._alarm():
            try:
                self._measure()
            except KeyboardInterrupt:
                if time.monotonic() < self.deadline - WRITING_S:
                    self.state.ended = "interrupted"
                    raise
                self.scheduler.cut = True
        self.state.finished = not self.scheduler.cut
        self.state.ended = "minutes" if self.scheduler.cut else None
        return self.recorder.write()

    @contextmanager
    def _alarm(self) -> Iterator[None]:
        """Interrupt the main thread, as Ctrl-C does, when there is just time to write the end."""
        left = self.deadline - WRITING_S - time.monotonic()
        if left == float("inf"):
            yield
            return
        before = signal.signal(ALARM, signal.default_int_handler)
        alarm = threading.Timer(min(max(0.0, left), threading.TIMEOUT_MAX), _interrupt)
        alarm.start()
        try:
            yield
        finally:
            with suppress(KeyboardInterrupt):  # it may come just now
                alarm.cancel()
                alarm.join()
            signal.signal(ALARM, before)

    def _measure(self) -> None:
        recorder, resumed = self.recorder, self.state.resumed
        if not self.is_taken_up:
            recorder.save()
        with recorder.part("data"):
            data = self._materialise()
        logs = self.folder / (f"logs-{len(resumed) + 2}" if self.is_taken_up else "logs")
        interpreters, limits = self.settings.interpreters, self.settings.limits
        with Processes(logs, interpreters=interpreters, limits=limits) as processes:
            recorder.say("start", "machine")
            with recorder.part("describe"):
                found = conditions.describe(processes, self.plan, self.machine)
            environment, missing = found
            if self.is_taken_up:
                conditions.check_same(self.state, environment)
                resumed.append(datetime.now(UTC).isoformat(timespec="seconds"))
            conditions.note(self.plan, self.state, environment, missing)
            self.plan.durations.follow(environment)
            recorder.save()
            executor = Executor(
                processes,
                self.scheduler,
                recorder,
                data=data,
                threads=self.threads,
                memory_budget=self.settings.memory_budget,
                device=conditions.device(processes, environment),
            )
            for step in self.scheduler.steps():
                executor.carry_out(step)
            if self.plan.amount.blocks > 1 and not self.scheduler.cut:
                recorder.say("end", "machine")
                with recorder.part("describe"):
                    self.state.environment = conditions.at_end(processes, self.state.environment)

    def _materialise(self) -> dict[str, str]:
        """Write each task's data once; both frameworks read those files."""
        return {
            name: str(datasets.materialise(TASKS[name].dataset, self.settings.results / "data"))
            for name in sorted({case.workload.task for case in self.plan.every})
        }


def _interrupt() -> None:
    """As Ctrl-C, by a thread."""
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(threading.main_thread().ident, ALARM)
    else:
        signal.raise_signal(ALARM)
