"""Carries out the scheduler's steps: starts parents, plays matches, measures in processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import log

from bench.analysis import machine_class, passes
from bench.harness import checks, isolated_measurements, machine, speed
from bench.harness.conditions import Device, refuse
from bench.harness.isolated_measurements import Measurement, Trained
from bench.harness.matches import Match, parent_key, start_order
from bench.harness.plan import SEED, Case
from bench.harness.processes import ParentDied, Processes
from bench.harness.recorder import Recorder
from bench.harness.scheduler import (
    CHECKS,
    COLD_STARTS,
    DEPLOYED,
    PASS,
    PROBES,
    TRAINING,
    NumberedMatch,
    Scheduler,
    Step,
)
from bench.record import Pass

SIDE_BY_SIDE = 4  # contenders at most that start at once
TRIES, PAUSE_S = 3, 1.0  # of a sentinel, before the machine counts as changed


class Executor:
    """Measures with `processes`, and passes results to the `recorder`.

    `data`: the folder of each task's data. `memory_budget`: bytes, for the batch-size finder.
    `device`: a GPU whose speed is checked, too.
    """

    def __init__(
        self,
        processes: Processes,
        scheduler: Scheduler,
        recorder: Recorder,
        *,
        data: dict[str, str],
        threads: int,
        memory_budget: int | None = None,
        device: Device | None = None,
    ) -> None:
        self.processes, self.scheduler, self.recorder = processes, scheduler, recorder
        self.plan, self.state = scheduler.plan, scheduler.state
        self.data, self.threads, self.memory_budget = data, threads, memory_budget
        self.device = device

    def carry_out(self, step: Step) -> None:
        """Carry out a step."""
        of_kind = {PASS: self.play_pass, TRAINING: self.train}
        of_kind |= {COLD_STARTS: self.cold_starts, PROBES: self.probes}
        of_kind |= {DEPLOYED: self.train_deployed, CHECKS: self.check}
        of_kind[step.kind](*[step.number] * (step.kind in (PASS, TRAINING)))

    # Passes -------------------------------------------------------------------------------------

    def play_pass(self, block: int) -> None:
        """Play a block of every match that lacks it, again if the machine's speed changed."""
        matches = self.scheduler.lacking(block)
        if not matches:
            return
        played = self._watched_pass(block, list(matches))
        if passes.changed(played) and self.scheduler.plays_again(matches):
            self.recorder.say(f"pass {block + 1}", "again, as the machine's speed changed")
            self.state.drop_pass()
            self._watched_pass(block, self.scheduler.lacking(block), again=True)
        is_first_look = block + 1 == self.plan.amount.first_look
        reached = "intervals" if is_first_look else "first_table"
        self.recorder.show_table(reached, cut=self.scheduler.cut)

    def _watched_pass(self, block: int, matches: list[NumberedMatch], again: bool = False) -> Pass:
        """Play a pass between two looks at how fast the machine is."""
        last = next((p for p in reversed(self.state.watched) if p.after), None)
        before = self._speeds((last.after, last.device_after) if last else (None, None))
        self.state.begin_pass(block, *before, again=again)
        self._play_matches(block, matches)
        return self.state.end_pass(*self._speeds(before))

    def _speeds(self, before: tuple[float | None, float | None]) -> tuple[float, float | None]:
        """The speeds of the machine and of its device, which a CPU is not."""
        with self.recorder.part("sentinel"):
            device = None
            if self.device:
                device = _nearest(before[1], lambda: self.device.float32_product())
            return _nearest(before[0], lambda: speed.sentinel(self.threads)), device

    def _play_matches(self, block: int, matches: list[NumberedMatch]) -> None:
        """One block of each of these matches; they share their parents."""
        scheduler = self.scheduler
        self._start_parents(block, matches)
        done = 0
        while matches:
            match = matches.pop(0)
            large = match.cases[0].task.blocks
            if large and done and self.state.seconds["first_table"] is None:
                self.recorder.show_table("first_table", cut=scheduler.cut)
            done += 1
            if scheduler.in_time(self.plan.durations.of_match(match.cases)):
                of = f"{done} of {done + len(matches)}"
                self.recorder.say(f"pass {block + 1} · {of}", _words(match.cases))
                if left_out := self.play(match, block):
                    free = machine.free_memory()
                    matches += scheduler.split(match, block, left_out, free)
        self.processes.stop_parents()

    def _start_parents(self, block: int, matches: list[NumberedMatch]) -> None:
        """Start the parents of a pass; the cases of one that can't be started fail."""
        self.recorder.say(f"pass {block + 1}", "parents")
        every = {case.id: case for match in matches for case in self.scheduler.open(match.cases)}
        begun = time.monotonic()
        with self.recorder.part("parents"):
            keys = {name: parent_key(case, self.threads) for name, case in every.items()}
            failures = self.processes.start_parents(keys.values())
        for name, case in every.items():
            failure = failures.get(keys[name])
            if isinstance(failure, ParentDied):
                self.state.cases[name].fail("FAILED", str(failure))
            elif failure:  # for example one Keras of two is not installed
                refuse(self.state, case, str(failure))
        self.plan.durations.parents_s = time.monotonic() - begun

    def play(self, match: NumberedMatch, block: int) -> list[Case]:
        """Play one block of one match; returns the contenders that found no memory."""
        # A worker that is executed, not forked, would end with the thread that started it
        # (PR_SET_PDEATHSIG).
        alone = match.alone or not self.processes.forks
        # A block has weights and batches of its own. What a prediction takes does not depend on
        # them: it has the same in all blocks, so that a file is written once for all of them.
        predicts = match.cases[0].workload.mode == "predict"
        playing = Match(
            self.processes,
            self.scheduler.open(start_order(match.cases, match.number, block)),
            data=self.data,
            threads=self.threads,
            seed=SEED if predicts else SEED + block,
            evidence=block == 0,
            number=match.number,
            block=block,
            side_by_side=1 if alone else min(self.threads, SIDE_BY_SIDE),
            first_calls=block > 0,
            needs=self.plan.durations.memory,
            steps={
                case.id: blocks[-1].steps
                for case in match.cases
                if (blocks := self.state.cases[case.id].blocks)
            },
        )
        begun = time.monotonic()
        played = playing.play(self.plan.amount.rounds)
        durations = self.plan.durations
        if played:
            took = [case for case in match.cases if case.id in played]
            durations.note_match(took, time.monotonic() - begun)
        for name, result in played.items():
            durations.note_bytes(name, result.peak_bytes)
        self.state.add_block(played, playing.conditions())
        for part, seconds in playing.seconds.items():
            self.state.spend(part, seconds)
        self.recorder.save(block=True)
        return playing.left_out

    # Processes of their own -----------------------------------------------------------------------

    def cold_starts(self) -> None:
        """Measure first calls and memory."""
        cases = self.scheduler.cold_starts()
        if not cases:
            return
        self.recorder.say("first calls and memory", f"{len(cases)} starts")

        def keep(case: Case, measurement: Measurement) -> None:
            of_case = self.state.cases[case.id]
            of_case.cold_starts.append(measurement.answer)
            of_case.imports = measurement.imports
            if reason := measurement.answer.not_applied:
                of_case.fail("NOT_APPLIED", reason)

        with self.recorder.part("cold"):
            isolated_measurements.cold_starts(
                self.processes,
                cases,
                imports={case.id: self.scheduler.imports(case) for case in cases},
                data=self.data,
                threads=self.threads,
                seed=SEED,
                done=self._noting("cold", "first calls and memory", len(cases), keep),
                needs=self.plan.durations.memory,
            )
        if compiled := self.processes.first_compile_s:
            before = self.state.environment.first_compile_s or {}
            environment = self.state.environment.but(first_compile_s=compiled | before)
            self.state.environment = environment
            self.recorder.save()

    def probes(self) -> None:
        """Run the probes of bench files."""
        cases = self.scheduler.probes()
        if not cases:
            return
        self.recorder.say("probes", f"{len(cases)} cases")

        def keep(case: Case, measurement: Measurement) -> None:
            found = self.state.cases[case.id]
            found.probed, found.evidence = measurement.answer.metrics, measurement.answer.evidence

        with self.recorder.part("probe"):
            isolated_measurements.probes(
                self.processes,
                cases,
                data=self.data,
                threads=self.threads,
                seed=SEED,
                memory_budget=self.memory_budget,
                repetitions=self.plan.amount.repetitions,
                done=self._noting("probe", "probes", len(cases), keep),
            )

    def _noting(
        self, part: str, words: str, count: int, keep: Callable[[Case, Measurement], None]
    ) -> Callable[[Case, Measurement], None]:
        """Notes each of `count` measurements: what it took, and what to `keep` or why it failed."""
        done = []

        def note(case: Case, measurement: Measurement) -> None:
            self.state.cases[case.id].spend(part, measurement.seconds)
            if measurement.status == "OK":
                keep(case, measurement)
            else:
                self.state.cases[case.id].fail(measurement.status, measurement.reason)
            done.append(case)
            self.recorder.say(f"{words} · {len(done)} of {count}", case.id)
            self.recorder.save()

        return note

    def train_deployed(self) -> None:
        """Train the model of each task that has predictions, before these are timed.

        If that fails, predictions use initial weights, and are not checked.
        """
        which = [case for case in checks.deployed(self.plan) if self._lacks_model(case)]
        if not which:
            return
        self.recorder.say("models for predictions", ", ".join(c.workload.task for c in which))
        with self.recorder.part("deployed"):
            failed = checks.train_deployed(
                self.processes, which, data=self.data, threads=self.threads
            )
        for task, why in failed.items():
            self.recorder.say("models for predictions", f"{task}: {why}")

    def _lacks_model(self, case: Case) -> bool:
        return not (self.processes.trained / f"{case.workload.task}.npz").exists()

    def check(self) -> None:
        """Check what rows keep that are not trained to their metric: a loss, or predictions."""
        cases, done = self.scheduler.checks(), []
        if not cases:
            return
        self.recorder.say("checks", f"{len(cases)} cases")

        def note(case: Case, checked: checks.Checked) -> None:
            of_case = self.state.cases[case.id]
            of_case.spend("check", checked.seconds)
            of_case.loss_check, of_case.fidelity = checked.loss, checked.predictions
            if checked.status != "OK" and not of_case.reason:
                of_case.reason = checked.reason
            done.append(case)
            self.recorder.say(f"checks · {len(done)} of {len(cases)}", case.id)
            self.recorder.save()

        with self.recorder.part("check"):
            checks.check(self.processes, cases, data=self.data, threads=self.threads, done=note)

    def train(self, seeds: int) -> None:
        """Train the cases with so many seeds whose accuracy fewer seeds did not decide."""
        cases, done = self.scheduler.training(seeds), []
        if not cases:
            return
        words = f"training, {seeds} seeds"
        self.recorder.say(words, f"{len(cases)} cases")

        def note(case: Case, trained: Trained) -> None:
            of_case = self.state.cases[case.id]
            of_case.trained, of_case.seconds["training"] = trained, trained.seconds
            if trained.status != "OK":
                of_case.fail(trained.status, trained.reason)
            elif of_case.status == "OK":
                of_case.reason = trained.reason
            done.append(case)
            self.recorder.say(f"{words} · {len(done)} of {len(cases)}", case.id)
            self.recorder.save()

        with self.recorder.part("training"):
            isolated_measurements.train(
                self.processes,
                cases,
                trained={case.id: self.state.cases[case.id].trained for case in cases},
                seeds=seeds,
                data=self.data,
                threads=self.threads,
                budget=self.plan.amount.train_s,
                done=note,
            )


def _nearest(before: float | None, measure: Callable[[], float | None]) -> float | None:
    """A speed; where it is not as before, the nearest to that of three tries."""
    tries = [measure()]
    while before and tries[-1] and len(tries) < TRIES:
        if machine_class.same_speed(before, tries[-1]):
            break
        time.sleep(PAUSE_S)
        tries.append(measure())
    known = [speed for speed in tries if speed]
    return min(known, key=lambda one: abs(log(one / (before or one))), default=None)


def _words(cases: list[Case]) -> str:
    task, size, mode = cases[0].work
    return f"{task} ({size}){' predictions' * (mode == 'predict')}, {len(cases)} contenders"
