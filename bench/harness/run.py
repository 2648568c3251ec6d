"""A run: measuring what is planned, with progress, and the record at every step.

It goes in passes. The first measures one block of everything, and a table is there; those until the
first look give it intervals. Then comes what is measured apart: first calls and memory, probes,
training; then further passes, until there is nothing left to decide. What ends a run before that
leaves a record that is valid.
"""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from bench.analysis.early_stopping import accuracy_decided, leaving
from bench.analysis.stacks import stacked
from bench.harness import isolated_measurements, machine, state
from bench.harness.matches import Match, parent_key, start_order
from bench.harness.plan import EFFORT, FRAMEWORKS, Case, Effort, Framework
from bench.harness.processes import (
    Failed,
    ParentDied,
    Processes,
    TimeLimits,
    Unsupported,
)
from bench.harness.progress import Progress, clock
from bench.harness.record import Record
from bench.harness.schedule import Plan
from bench.harness.worker import on_cpu
from shared import datasets
from shared.specs import TASKS, more_is_better

SEED = 2026
# Ends a run in time: a shell starts what runs in its background with Ctrl-C's signal ignored.
ALARM = getattr(signal, "SIGALRM", signal.SIGINT)
WRITING_S = 4.0  # what the end of a run takes: its record and its reports
LONG_S = 180.0  # to wait for the end of a run
# Of the time between blocks: what is derived for the record, which a run needs at its end.
SHARE_OF_WRITING = 0.0025


@dataclass(frozen=True)
class Settings:
    """The choices of a run, all of them fixed before it starts.

    `minutes`: after which it ends. `model`: name and checksum of a user's file that it is about.
    `asked`: what the command line asked for, which the run's state
    keeps for `--resume`.
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
    asked: dict = field(default_factory=dict)

    @property
    def amount(self) -> Effort:
        """How much is measured; a number of blocks that was asked for is that for every match."""
        usual = EFFORT[self.effort]
        return replace(usual, blocks=self.blocks, looks=(), seed_looks=()) if self.blocks else usual


class OtherConditions(Exception):
    """What is measured now would not be comparable with what was measured before."""


class Run:
    """Measures a plan into a record, or what an interrupted run, by its `state`, has left of it.

    `show` is given the record when the first pass is over, and after each further one, and what the
    run has just reached, if anything: its "first_table", or "intervals" of all times.
    """

    def __init__(
        self,
        plan: Plan,
        settings: Settings,
        folder: Path,
        say: Callable[[str], None],
        taken_up: state.State | None = None,
        show: Callable[[dict, str | None], None] = lambda record, reached: None,
    ) -> None:
        self.plan, self.settings, self.folder, self.taken_up = plan, settings, folder, taken_up
        self.show = show
        self.threads = machine.usable_threads()
        self.record = Record(
            folder,
            command=settings.command,
            effort=settings.effort,
            amount=plan.amount,
            environment=self._machine(),
        )
        for name, cases in plan.cases.items():
            self.record.add(plan.techniques[name], cases)
        self.record.shown = plan.shown
        self.code = taken_up["code"] if taken_up else state.code()
        if taken_up:
            state.restore(self.record, taken_up)
            self._restore_stacks()
            state.reopen_failed(self.record)
            self.record.top |= {"finished": False, "ended": None}
        else:
            self._add_pass(plan.matches())
        self._clock = self._start = time.monotonic()
        self._within = 0.0  # seconds of the parts within the one that is measured
        self._next_record = 0.0
        most = settings.minutes and 60 * settings.minutes
        self._end = self._start + most if most else float("inf")
        self._crowded: set[int] = set()  # matches of those who found no memory in another
        self._cut = False  # whether something was left out, since it would not end in time
        self.progress = Progress(say, most)

    def describe(self) -> str:
        """The plan, and what is left of it, in a few lines."""
        lines = [self.plan.describe(self.plan.left(self.record), bool(self.taken_up))]
        if self.settings.minutes:
            lines.append(f"it ends after {clock(60 * self.settings.minutes)}, with what it has")
        return "\n".join(lines)

    def table(self) -> str:
        """What is left of the plan, part by part."""
        return self.plan.table(self.record)

    def measure(self) -> dict:
        """Measure everything; on an interruption the record keeps what is finished.

        Raises OtherConditions where a run that is taken up began under others; its record is then
        left as it was.
        """
        with self._alarm():
            try:
                self._measure()
            except KeyboardInterrupt:
                if time.monotonic() < self._end - WRITING_S:
                    self.record.top["ended"] = "interrupted"
                    raise
                self._cut = True
        self.record.top["finished"] = not self._cut
        self.record.top["ended"] = "minutes" if self._cut else None
        return self.show_record()

    @contextmanager
    def _alarm(self) -> Iterator[None]:
        """Interrupt the main thread, as Ctrl-C does, when there is just time to write the end."""
        left = self._end - WRITING_S - time.monotonic()
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
        if not self.taken_up:
            self.save()
        with self._part("data"):
            data = self._materialise()
        times = self.record.top["resumed"]
        logs = self.folder / (f"logs-{len(times) + 2}" if self.taken_up else "logs")
        with Processes(
            logs, interpreters=self.settings.interpreters, limits=self.settings.limits
        ) as processes:
            self._say("start", "machine")
            with self._part("describe"):
                environment, missing = self._describe(processes)
            if self.taken_up:
                self._check_conditions(environment)
                times.append(datetime.now(UTC).isoformat(timespec="seconds"))
            self._note(environment, missing)
            amount = self.plan.amount
            for block in filter(self._plans_pass, range(amount.first_look)):
                self._play_pass(processes, data, block)
            judged = not self._cut  # what is stacked is decided by whole passes alone
            # Of a user's file, which has few minutes, accuracy comes before first calls.
            if not self.settings.model:
                self._cold_starts(processes, data)
            self._probes(processes, data)
            seeds = iter(self.plan.seeds)
            self._train(processes, data, next(seeds))
            if judged:
                self._stack(processes, data)
            self._cold_starts(processes, data)
            for block in filter(self._plans_pass, range(amount.first_look, amount.blocks)):
                self._play_pass(processes, data, block)
                if block + 1 in amount.looks:
                    self._train(processes, data, next(seeds, 0))
                    self._stack(processes, data)
            self._cold_starts(processes, data)
            for number in seeds:
                self._train(processes, data, number)
            if not self._cut:
                self._stack(processes, data)

    # Passes -------------------------------------------------------------------------------------

    def _add_pass(self, played: list[list[Case]]) -> None:
        """Another pass over these matches; those that were played before keep their numbers."""
        known = {frozenset(c.id for c in m): n for n, m in enumerate(self.record.matches)}
        numbers = []
        for match in played:
            number = known.get(frozenset(case.id for case in match))
            numbers.append(self.record.add_match(match) if number is None else number)
        self.record.passes.append(numbers)

    def _plans_pass(self, block: int) -> bool:
        """Whether there is a pass that plays this block; who leaves is decided when it begins."""
        record, amount = self.record, self.plan.amount
        if block < len(record.passes):
            return True
        if block >= amount.blocks or not record.passes[-1]:
            return False
        # What is cheap gets its intervals, though a large model's pass had no time.
        if self._cut and block >= amount.first_look:
            return False
        if block not in amount.looks:
            record.passes.append(list(record.passes[-1]))
            return True
        record.left |= leaving(record.measured()) | self.plan.played_out(block)
        failed = {case.id for case in self.plan.every if not record.ok(case)}
        if record.left or failed:
            self._add_pass(self.plan.matches(record.left | failed))
        else:
            record.passes.append(list(record.passes[-1]))
        return bool(record.passes[-1])

    def _stack(self, processes: Processes, data: dict[str, str]) -> None:
        """Settle the rows that stack what was faster, and play the blocks that others have."""
        later = [c for c in self._open(self.plan.every) if c.variant.later and not c.settled]
        if not later:
            return
        record = self.record.as_dict()
        cases = {case["id"]: case for case in record["cases"]}
        settled = self.record.top.setdefault("settled", {})
        for case in later:
            settings, reason = stacked(record, cases[case.id])
            case.variant.settings.update(settings)
            if reason:
                self.record.entries[case.id].fail("UNSUPPORTED", reason)
            else:
                settled[case.id] = settings
        new = {case.id for case in later if case.settled}
        for match in self.plan.matches({case.id for case in self.plan.every} - new) if new else ():
            if any(case.id in new for case in match):
                number = self.record.add_match(match)
                for numbers in self.record.passes:
                    numbers.append(number)
        for block in range(len(self.record.passes)):
            self._play_pass(processes, data, block)
        self._cold_starts(processes, data)
        self._train(processes, data, self.plan.seeds[0])

    def _restore_stacks(self) -> None:
        """What was settled before the run was interrupted."""
        for case in self.plan.every:
            if case.variant.later:
                case.variant.settings.update(self.record.top.get("settled", {}).get(case.id, {}))

    def _play_pass(self, processes: Processes, data: dict[str, str], block: int) -> None:
        """A block of every match that lacks it, cheap ones first; they share their parents."""
        record, durations, seconds = self.record, self.plan.durations, self.record.top["seconds"]
        matches = [(n, record.matches[n]) for n in record.passes[block]]
        lacking = [(n, match) for n, match in matches if (n, block) not in record.conditions]
        lacking = [(n, match) for n, match in lacking if self._open(match)]
        # Cheap matches first; those of large models, which take minutes, follow the first table. Of
        # a user's file the train step comes before predictions: a run that ends in time has it.
        lacking.sort(
            key=lambda found: (
                bool(found[1][0].task.blocks),
                bool(self.settings.model) and found[1][0].workload.mode != "train",
                durations.of_match(found[1]),
            )
        )
        if not any(self._in_time(durations.of_pass([match])) for _, match in lacking):
            return
        # One block's contenders start one by one, for their first calls: not the first block's,
        # which may have to fill a compiler's cache. A worker that is executed, not forked,
        # would end with the thread that started it (PR_SET_PDEATHSIG).
        alone = block == 1 or not processes.forks
        self._say(f"pass {block + 1}", "parents")
        with self._part("parents"):
            cases = {case.id: case for _, match in lacking for case in self._open(match)}
            begun = time.monotonic()
            self._start_parents(processes, list(cases.values()))
            durations.parents_s = time.monotonic() - begun
        done = 0
        while lacking:
            number, match = lacking.pop(0)
            if match[0].task.blocks and done and seconds["first_table"] is None:
                self._show_table("first_table")
            done += 1
            if self._in_time(durations.of_match(match)):
                of = f"{done} of {done + len(lacking)}"
                self._say(f"pass {block + 1} · {of}", _words(match))
                one_by_one = alone or number in self._crowded
                if left_out := self._play(processes, number, match, block, data, one_by_one):
                    lacking += self._split(number, match, block, left_out)
        processes.stop_parents()
        is_first_look = block + 1 == self.plan.amount.first_look
        self._show_table("intervals" if is_first_look else "first_table")

    def _play(
        self,
        processes: Processes,
        number: int,
        match: list[Case],
        block: int,
        data: dict[str, str],
        alone: bool,
    ) -> list[Case]:
        """One block of one match; those for whom there was no memory."""
        # A block has weights and batches of its own. What a prediction takes does not depend on
        # them: it has the same in all blocks, so that a file is written once for all of them.
        seed = SEED if match[0].workload.mode == "predict" else SEED + block
        playing = Match(
            processes,
            self._open(start_order(match, number, block)),
            data=data,
            threads=self.threads,
            seed=seed,
            evidence=block == 0,
            number=number,
            side_by_side=1 if alone else min(self.threads, 4),
            first_calls=block > 0,
            needs=self.plan.durations.memory,
        )
        begun = time.monotonic()
        played = playing.play(self.plan.amount.rounds)
        if played:
            took = [case for case in match if case.id in played]
            self.plan.durations.note_match(took, time.monotonic() - begun)
        for case_id, found in played.items():
            self.plan.durations.note_bytes(case_id, found.peak_bytes)
        self.record.add_block(number, block, played, playing.conditions())
        for part, seconds in playing.seconds.items():
            self.record.spend(part, seconds)
        self.save(block=True)
        return playing.left_out

    def _split(
        self, number: int, match: list[Case], block: int, left_out: list[Case]
    ) -> list[tuple[int, list[Case]]]:
        """A match of their own for those who found no memory, with all baselines of the first.

        There they begin one by one. Who finds none even then, beside baselines alone, fails.
        """
        others = {case.id for case in left_out}
        if number in self._crowded and all(c.is_baseline or c.id in others for c in match):
            free = f"{machine.free_memory() / 1e9:.1f} GB are free"
            for case in left_out:
                needs = f"it needs {self.plan.durations.memory(case) / 1e9:.1f} GB of memory"
                self.record.entries[case.id].fail("FAILED", f"{needs} beside its baseline, {free}")
            return []
        bases = [case for case in match if case.is_baseline and case.id not in others]
        new = bases + left_out
        if block == 0:
            match[:] = [case for case in match if case.id not in others]
        found = self.record.add_match(new)
        self.record.passes[block].append(found)
        self._crowded.add(found)
        return [(found, new)]

    def _show_table(self, reached: str) -> None:
        """Show what there is, and note when the run has `reached` it.

        Its first table is there when every match of small models has a block, intervals are when
        all matches have those of the first look: they are shown where the end is not near.
        """
        seconds = self.record.top["seconds"]
        new = seconds[reached] is None and not self._cut
        if new:
            seconds[reached] = seconds["total"] + time.monotonic() - self._clock
        told = new and (reached == "first_table" or self.plan.left(self.record)[0] > LONG_S)
        with self._part("writing"):
            self.show(self.show_record(), reached if told else None)

    def _start_parents(self, processes: Processes, cases: list[Case]) -> None:
        """Start a block's parents; the cases of one that can't be started fail."""
        keys = {case.id: parent_key(case, self.threads) for case in cases}
        failures = processes.start_parents(keys.values())
        for case in cases:
            failure = failures.get(keys[case.id])
            if isinstance(failure, ParentDied):
                self.record.entries[case.id].fail("FAILED", str(failure))
            elif failure:  # for example one Keras of two is not installed
                self._refuse(case, str(failure))

    # Time ---------------------------------------------------------------------------------------

    def _in_time(self, seconds: float) -> bool:
        """Whether something that takes so long would end in time."""
        fits = time.monotonic() + seconds <= self._end - WRITING_S
        self._cut |= not fits
        return fits

    def _that_end_in_time(self, prices: list[tuple[float, Case]]) -> list[Case]:
        """The cheapest cases first, and of them those that end in time one after the other."""
        found, whole = [], 0.0
        for price, case in sorted(prices, key=lambda each: each[0]):
            if self._in_time(whole + price):
                whole += price
                found.append(case)
        return found

    def _say(self, part: str, what: str) -> None:
        self.progress.at(part, what, self.plan.left(self.record)[0])

    @contextmanager
    def _part(self, name: str) -> Iterator[None]:
        """Note what a part of the run takes; what a part within it takes is that one's alone."""
        start, outer, self._within = time.monotonic(), self._within, 0.0
        try:
            yield
        finally:
            took = time.monotonic() - start
            self.record.spend(name, took - self._within)
            self._within = outer + took

    def save(self, block: bool = False) -> None:
        """Write the state, and the record: after a `block`, and else now and then."""
        with self._part("writing"):
            self._save_state()
            if block or time.monotonic() >= self._next_record:
                self._write_record()

    def show_record(self) -> dict:
        """Write the state and the record, and return what stands in it."""
        self._save_state()
        return self._write_record()

    def _save_state(self) -> None:
        now = time.monotonic()
        self.record.spend("total", now - self._clock)
        self._clock = now
        state.save(self.record, asked=self.settings.asked, code=self.code)

    def _write_record(self) -> dict:
        start = time.monotonic()
        found = self.record.write()
        now = time.monotonic()
        self._next_record = now + (now - start) / SHARE_OF_WRITING
        return found

    def _materialise(self) -> dict[str, str]:
        """Write each task's data once; both frameworks read those files."""
        wanted = {case.workload.task for case in self.plan.every}
        return {
            name: str(datasets.materialise(TASKS[name].dataset, self.settings.results / "data"))
            for name in sorted(wanted)
        }

    def _machine(self) -> dict:
        """The environment as far as no framework is asked."""
        return (
            machine.describe(self.threads)
            | {
                "seeds": [SEED],
                "order": "starts: balanced Latin square; rounds: random; another for each match",
                "gpu": None,
            }
            | ({"model": self.settings.model} if self.settings.model else {})
        )

    def _describe(self, processes: Processes) -> tuple[dict, dict[str, str]]:
        """The environment, for which each framework is asked; why one can't be imported."""
        environment, missing = self._machine(), {}
        environment["peak_flops"] = peaks = {}
        environment["allocator"] = {"settings": machine.TUNED_ALLOCATOR}
        for name in {case.framework: None for case in self.plan.every}:
            try:
                found = isolated_measurements.describe(processes, name, self.threads)
            except (Failed, Unsupported) as error:
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
        for case in self.plan.every:
            if case.framework in missing:
                self._refuse(case, missing[case.framework])
        self._check_requirements()
        self.save()

    def _refuse(self, case: Case, reason: str) -> None:
        """The case's framework can't be started."""
        said = not_started(FRAMEWORKS[case.framework], reason)
        self.record.entries[case.id].fail("UNSUPPORTED", said)

    def _check_requirements(self) -> None:
        """A case whose compiler or GPU is not here says so instead of failing."""
        devices = self.record.top["environment"].get("devices", {})
        for entry in self.record.entries.values():
            needs = entry.case.variant.requires
            if needs == "compiler" and not machine.compiler():
                entry.fail("UNSUPPORTED", "needs a C++ compiler; install one (for example g++)")
            elif needs == "cuda" and on_cpu(devices.get(entry.case.framework, "cpu")):
                entry.fail("UNSUPPORTED", "needs a CUDA GPU; none was found")

    def _open(self, cases: list[Case]) -> list[Case]:
        """The cases that can still be measured."""
        return [case for case in cases if self.record.ok(case)]

    # Apart --------------------------------------------------------------------------------------

    def _cold_starts(self, processes: Processes, data: dict[str, str]) -> None:
        """First calls and memory, in processes of their own."""
        price = self.plan.durations.of
        lacking = [
            (price("cold", case), case)
            for case in self._open(self.plan.every)
            if case.settled
            for _ in range(self.plan.cold_starts(case) - len(self.record.entries[case.id].cold))
        ]
        jobs, done = self._that_end_in_time(lacking), []

        def note(case: Case, found: isolated_measurements.Apart) -> None:
            entry = self.record.entries[case.id]
            entry.spend("cold", found.seconds)
            if found.status != "OK":
                entry.fail(found.status, found.reason)
            else:
                entry.cold.append(found.found)
                entry.imports = found.imports
                if reason := found.found.get("not_applied"):
                    entry.fail("NOT_APPLIED", reason)
            done.append(case)
            self._say(f"first calls and memory · {len(done)} of {len(jobs)}", case.id)
            self.save()

        if jobs:
            self._say("first calls and memory", f"{len(jobs)} starts")
            with self._part("cold"):
                imports = {case.id: self._imports(case) for case in jobs}
                isolated_measurements.cold_starts(
                    processes,
                    jobs,
                    imports=imports,
                    data=data,
                    threads=self.threads,
                    seed=SEED,
                    done=note,
                )
            if processes.first_compile_s:
                environment = self.record.top["environment"]
                before = environment.get("first_compile_s", {})
                environment["first_compile_s"] = processes.first_compile_s | before
                self.save()

    def _imports(self, case: Case) -> list[str] | None:
        """What the case's code was seen to import, on its own task or on another."""
        found = [self.record.entries[case.id]]
        found += [e for e in self.record.entries.values() if _row(e.case) == _row(case)]
        return next((entry.imports for entry in found if entry.imports is not None), None)

    def _probes(self, processes: Processes, data: dict[str, str]) -> None:
        """What bench files measure themselves."""
        lacking = [
            (self.plan.durations.of("probe", case), case)
            for case in self._open(self.plan.every)
            if self.plan.probed(case) and not self.record.entries[case.id].probed
        ]
        jobs, done = self._that_end_in_time(lacking), []

        def note(case: Case, found: isolated_measurements.Apart) -> None:
            entry = self.record.entries[case.id]
            entry.spend("probe", found.seconds)
            if found.status != "OK":
                entry.fail(found.status, found.reason)
            else:
                entry.probed, entry.evidence = found.found["metrics"], found.found["evidence"]
            done.append(case)
            self._say(f"probes · {len(done)} of {len(jobs)}", case.id)
            self.save()

        if jobs:
            self._say("probes", f"{len(jobs)} cases")
            with self._part("probe"):
                isolated_measurements.probes(
                    processes,
                    jobs,
                    data=data,
                    threads=self.threads,
                    seed=SEED,
                    memory_budget=self.settings.memory_budget,
                    repetitions=self.plan.amount.repetitions,
                    done=note,
                )

    def _train(self, processes: Processes, data: dict[str, str], seeds: int) -> None:
        """Train with so many seeds those whose accuracy is not decided by those that they have."""
        entries, of = self.record.entries, self.plan.durations.of
        prices = []
        for case in self._undecided():
            trained = entries[case.id].trained
            has = len(trained.per_seed) if trained else 0
            whole = trained and (trained.status != "OK" or trained.reason)
            if has < seeds and not whole:
                price = (seeds - has) * of("training", case)
                prices.append((price, case))
        jobs, done = self._that_end_in_time(prices), []

        def note(case: Case, found: isolated_measurements.Trained) -> None:
            entry = entries[case.id]
            entry.trained, entry.seconds["training"] = found, found.seconds
            if found.status != "OK":
                entry.fail(found.status, found.reason)
            elif entry.status == "OK":
                entry.reason = found.reason
            done.append(case)
            self._say(f"training, {seeds} seeds · {len(done)} of {len(jobs)}", case.id)
            self.save()

        if jobs:
            self._say(f"training, {seeds} seeds", f"{len(jobs)} cases")
            with self._part("training"):
                isolated_measurements.train(
                    processes,
                    jobs,
                    trained={case.id: entries[case.id].trained for case in jobs},
                    seeds=seeds,
                    data=data,
                    threads=self.threads,
                    budget=self.plan.amount.train_s,
                    done=note,
                )

    def _undecided(self) -> list[Case]:
        """Who is trained further: whose accuracy is open, with the baseline that it is held to."""
        cases = [case for case in self._open(self.plan.every) if self.plan.trained(case)]
        if not self.plan.amount.seed_looks:
            return cases
        base = {(c.technique, c.work, c.side): c for c in cases if c.is_baseline}
        rest = [(c, base.get((c.technique, c.work, c.side))) for c in cases if not c.is_baseline]
        alone = {c.id for c in base.values()} - {b.id for _, b in rest if b}
        open_ = [pair for pair in rest if not pair[1] or not self._accuracy_stands(*pair)]
        wanted = alone | {case.id for pair in open_ for case in pair if case}
        return [case for case in cases if case.id in wanted]

    def _accuracy_stands(self, case: Case, base: Case) -> bool:
        ours, theirs = (self.record.entries[c.id].trained for c in (case, base))
        seeds = min(len(t.per_seed) if t else 0 for t in (ours, theirs))
        if seeds not in self.plan.seeds:
            return False
        return accuracy_decided(
            ours.per_seed[:seeds],
            theirs.per_seed[:seeds],
            margin=case.task.margin,
            more_is_better=more_is_better(case.task.metric),
            looks=self.plan.amount.seed_looks,
        )


def not_started(side: Framework, reason: str) -> str:
    """Why a framework can't be started, with how to install it unless it failed by itself."""
    said = f"{side.title} could not be started ({reason})"
    if re.match(r"(?!ModuleNotFoundError|ImportError)\w+Error: ", reason):
        return said
    return f"{said}; install it with: {side.install}"


def _row(case: Case) -> tuple:
    """The same on every task."""
    return case.technique, case.side, case.variant.name, case.workload.mode


def _words(match: list[Case]) -> str:
    task, size, mode = match[0].work
    return f"{task} ({size}){' predictions' * (mode == 'predict')}, {len(match)} contenders"


def _interrupt() -> None:
    """As Ctrl-C, by a thread."""
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(threading.main_thread().ident, ALARM)
    else:
        signal.raise_signal(ALARM)
