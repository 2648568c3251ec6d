"""What a run measures next, which cases leave it, and what fits into its time.

A run goes in passes. The first measures one block of everything, which gives a first table. Passes
until the first look give it intervals. Then come new processes for first calls, memory, probes and
training; then further passes, until everything is decided.

This starts no process and reads only the clock that it is given.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from bench.analysis.early_stopping import accuracy_decided, leaving
from bench.analysis.stacks import stacked
from bench.harness import checks, record
from bench.harness.plan import Case
from bench.harness.remaining import open_cases
from bench.harness.run_plan import Plan
from bench.harness.state import CaseState, RunState
from shared.specs import more_is_better

WRITING_S = 4.0  # what the end of a run takes: its record and its reports

PASS, COLD_STARTS, PROBES, TRAINING = "pass", "cold starts", "probes", "training"
DEPLOYED, CHECKS = "models for predictions", "checks"


@dataclass(frozen=True)
class Step:
    """A step of a run: a pass with the number of its block, training with so many seeds, ..."""

    kind: str
    number: int = 0


@dataclass(frozen=True)
class NumberedMatch:
    """A match of a pass. `alone`: its contenders start one by one."""

    number: int
    cases: list[Case]
    alone: bool = False


class Scheduler:
    """Decides what is measured and in which order, and notes in `state` which cases leave or fail.

    `deadline`: when the run has to end, in seconds of `clock`. `cut`: whether something was left
    out because it would not have ended in time. `of_user`: whether it is a run on a user's model.
    """

    def __init__(
        self,
        plan: Plan,
        state: RunState,
        *,
        deadline: float = float("inf"),
        clock: Callable[[], float] = time.monotonic,
        of_user: bool = False,
    ) -> None:
        self.plan, self.state, self.of_user = plan, state, of_user
        self.deadline, self.clock, self.cut = deadline, clock, False
        self._crowded: set[int] = set()  # matches of those who found no memory in another
        if not state.passes:
            self.add_pass(plan.matches())

    def steps(self) -> Iterator[Step]:
        """The steps of the run; each is decided after those before it."""
        amount, seeds = self.plan.amount, iter(self.plan.seeds)
        if checks.deployed(self.plan):
            yield Step(DEPLOYED)
        yield from self._passes(0, amount.first_look)
        whole = not self.cut  # what is stacked is decided by whole passes alone
        # Of a user's file, which has few minutes, accuracy comes before first calls.
        if not self.of_user:
            yield Step(COLD_STARTS)
        yield Step(PROBES)
        yield Step(CHECKS)
        yield Step(TRAINING, next(seeds))
        if whole:
            yield from self._stack()
        yield Step(COLD_STARTS)
        for step in self._passes(amount.first_look, amount.blocks):
            yield step
            if step.number + 1 in amount.looks:
                yield Step(TRAINING, next(seeds, 0))
                yield from self._stack()
        yield Step(COLD_STARTS)
        for number in seeds:
            yield Step(TRAINING, number)
        if not self.cut:
            yield from self._stack()

    def open(self, cases: list[Case] | None = None) -> list[Case]:
        """The cases that can still be measured, of these or of all."""
        return open_cases(self.plan, self.state, cases)

    # Passes and matches -------------------------------------------------------------------------

    def add_pass(self, matches: list[list[Case]]) -> None:
        """Add a pass over these matches; matches that were played before keep their numbers."""
        known = {frozenset(match): number for number, match in enumerate(self.state.matches)}
        numbers = []
        for match in matches:
            number = known.get(frozenset(case.id for case in match))
            numbers.append(self.state.add_match(match) if number is None else number)
        self.state.passes.append(numbers)

    def _passes(self, first: int, end: int) -> Iterator[Step]:
        return (Step(PASS, block) for block in range(first, end) if self._plans_pass(block))

    def _plans_pass(self, block: int) -> bool:
        """Whether there is a pass that plays this block; who leaves is decided when it begins."""
        passes, amount = self.state.passes, self.plan.amount
        if block < len(passes):
            return True
        if block >= amount.blocks or not passes[-1]:
            return False
        # What is cheap gets its intervals, though a large model's pass had no time.
        if self.cut and block >= amount.first_look:
            return False
        if block in amount.looks and (gone := self._gone(block)):
            self.add_pass(self.plan.matches(gone))
        else:
            passes.append(list(passes[-1]))
        return bool(passes[-1])

    def _gone(self, block: int) -> set[str]:
        """Who plays no more after this look, and who has failed."""
        measured = record.measured(self.plan, self.state)
        self.state.left |= leaving(measured) | self.plan.played_out(block)
        still = {case.id for case in self.open()}
        return self.state.left | {case.id for case in self.plan.every if case.id not in still}

    def lacking(self, block: int) -> list[NumberedMatch]:
        """The matches of a pass that lack this block, the cheapest first.

        Large models, which take minutes, come last. On a user's file the train step comes before
        predictions, so that a run with a time limit has it. None if none would end in time.
        """
        durations, played = self.plan.durations, self.state.played
        matches = [
            self._numbered(number, block)
            for number in self.state.passes[block]
            if (number, block) not in played
        ]
        matches = [match for match in matches if self.open(match.cases)]
        matches.sort(
            key=lambda match: (
                bool(match.cases[0].task.blocks),
                self.of_user and match.cases[0].workload.mode != "train",
                durations.of_match(match.cases),
            )
        )
        ends = any(self.in_time(durations.of_pass([match.cases])) for match in matches)
        return matches if ends else []

    def plays_again(self, matches: list[NumberedMatch]) -> bool:
        """Whether a pass is repeated because the machine's speed changed.

        A run of one block has no intervals to protect, and there must be time for all matches.
        """
        seconds = self.plan.durations.of_pass([match.cases for match in matches])
        several = self.plan.amount.blocks > 1
        return several and self.clock() + seconds <= self.deadline - WRITING_S

    def _numbered(self, number: int, block: int) -> NumberedMatch:
        """Those of the second block start one by one, for their first calls.

        Not those of the first one, which may have to fill a compiler's cache.
        """
        cases = [self.plan.by_id[name] for name in self.state.matches[number]]
        return NumberedMatch(number, cases, alone=block == 1 or number in self._crowded)

    def split(
        self, match: NumberedMatch, block: int, left_out: list[Case], free: float
    ) -> list[NumberedMatch]:
        """A new match for contenders that found no memory, with all baselines of the first.

        There they start one by one. A case that finds no memory beside only baselines fails.
        `free`: bytes.
        """
        others = {case.id for case in left_out}
        only_baselines = all(case.is_baseline or case.id in others for case in match.cases)
        if match.number in self._crowded and only_baselines:
            for case in left_out:
                needs = self.plan.durations.memory(case) / 1e9
                self.state.cases[case.id].fail(
                    "FAILED",
                    f"needs {needs:.1f} GB of memory in addition to its baseline, but "
                    f"{free / 1e9:.1f} GB are free",
                )
            return []
        stay = [case for case in match.cases if case.id not in others]
        if block == 0:
            self.state.matches[match.number] = [case.id for case in stay]
        number = self.state.add_match([case for case in stay if case.is_baseline] + left_out)
        self.state.passes[block].append(number)
        self._crowded.add(number)
        return [self._numbered(number, block)]

    # Rows that stack what was faster --------------------------------------------------------------

    def _stack(self) -> Iterator[Step]:
        """Settle the rows that stack what was faster, and play the blocks that others have."""
        later = [case for case in self.open() if not case.settled]
        if not later:
            return
        whole = record.whole(self.plan, self.state)
        rows = {row.id: row for row in whole.cases}
        for case in later:
            settings, reason = stacked(whole, rows[case.id])
            case.variant.settings.update(settings)
            if reason:
                self.state.cases[case.id].fail("UNSUPPORTED", reason)
            else:
                self.state.settled[case.id] = settings
        settled = {case.id for case in later if case.settled}
        others = {case.id for case in self.plan.every} - settled
        for match in self.plan.matches(others) if settled else ():
            if any(case.id in settled for case in match):
                self._play_from_the_first_block(match)
        yield from (Step(PASS, block) for block in range(len(self.state.passes)))
        yield Step(COLD_STARTS)
        yield Step(CHECKS)
        yield Step(TRAINING, self.plan.seeds[0])

    def _play_from_the_first_block(self, match: list[Case]) -> None:
        number = self.state.add_match(match)
        for numbers in self.state.passes:
            numbers.append(number)

    # Time -----------------------------------------------------------------------------------------

    def in_time(self, seconds: float) -> bool:
        """Whether something that takes so long would end in time."""
        fits = self.clock() + seconds <= self.deadline - WRITING_S
        self.cut |= not fits
        return fits

    def _that_end_in_time(self, prices: Iterable[tuple[float, Case]]) -> list[Case]:
        """The cheapest cases first, and of them those that end in time one after the other."""
        cases, whole = [], 0.0
        for price, case in sorted(prices, key=lambda pair: pair[0]):
            if self.in_time(whole + price):
                whole += price
                cases.append(case)
        return cases

    # What has separate processes ------------------------------------------------------------------

    def cold_starts(self) -> list[Case]:
        """The cases whose first call and memory are to be measured, repeated as often as needed."""
        price = self.plan.durations.of
        return self._that_end_in_time(
            (price("cold", case), case)
            for case in self.open()
            if case.settled
            for _ in range(self.plan.cold_starts(case) - len(self._of(case).cold_starts))
        )

    def probes(self) -> list[Case]:
        """The cases whose probe is still to be measured."""
        price = self.plan.durations.of
        return self._that_end_in_time(
            (price("probe", case), case)
            for case in self.open()
            if self.plan.probed(case) and not self._of(case).probed
        )

    def checks(self) -> list[Case]:
        """The cases whose loss or predictions are still to be checked."""
        price = self.plan.durations.of
        wanted = checks.wanted(self.plan, self.state)
        return self._that_end_in_time((price("check", case), case) for case in wanted)

    def imports(self, case: Case) -> list[str] | None:
        """The modules that the case's code was seen to import, on this task or another."""
        alike = [case, *(other for other in self.plan.every if _row(other) == _row(case))]
        seen = (self._of(one).imports for one in alike)
        return next((imports for imports in seen if imports is not None), None)

    def training(self, seeds: int) -> list[Case]:
        """The cases to train with so many seeds: those whose accuracy fewer seeds left open."""
        price = self.plan.durations.of
        return self._that_end_in_time(
            ((seeds - self._of(case).seeds) * price("training", case), case)
            for case in self._undecided()
            if self._of(case).seeds < seeds and not self._of(case).training_is_over
        )

    def _undecided(self) -> list[Case]:
        """Who is trained further: whose accuracy is open, with the baseline that it is held to."""
        cases = [case for case in self.open() if self.plan.trained(case)]
        if not self.plan.amount.seed_looks:
            return cases
        base = {(c.technique, c.work, c.side): c for c in cases if c.is_baseline}
        rest = [(c, base.get((c.technique, c.work, c.side))) for c in cases if not c.is_baseline]
        alone = {c.id for c in base.values()} - {b.id for _, b in rest if b}
        still_open = [pair for pair in rest if not pair[1] or not self._accuracy_stands(*pair)]
        wanted = alone | {case.id for pair in still_open for case in pair if case}
        return [case for case in cases if case.id in wanted]

    def _accuracy_stands(self, case: Case, base: Case) -> bool:
        ours, theirs = self._of(case), self._of(base)
        seeds = min(ours.seeds, theirs.seeds)
        if seeds not in self.plan.seeds:
            return False
        return accuracy_decided(
            ours.trained.per_seed[:seeds],
            theirs.trained.per_seed[:seeds],
            margin=case.task.margin,
            more_is_better=more_is_better(case.task.metric),
            looks=self.plan.amount.seed_looks,
        )

    def _of(self, case: Case) -> CaseState:
        return self.state.cases[case.id]


def _row(case: Case) -> tuple:
    """The same on every task."""
    return case.technique, case.side, case.variant.name, case.workload.mode


# A run that is taken up ---------------------------------------------------------------------------


def take_up(plan: Plan, state: RunState) -> None:
    """Go on with an interrupted run: what is decided stays, and failed cases are measured again.

    A ratio needs samples that were taken in the same match. So each match passes its failed cases
    to a new one, with those that they are compared with: baseline, the other framework's row, and
    for a failed baseline all its rows. There they play all blocks. What the first match decided
    about the others stays.
    """
    state.finished, state.ended = False, None
    for case in plan.every:
        if case.variant.later:
            case.variant.settings.update(state.settled.get(case.id, {}))
    failed = {name for name, found in state.cases.items() if found.status == "FAILED"}
    for number, match in enumerate(list(state.matches)):
        again = [plan.by_id[name] for name in match if name in failed]
        rest = [plan.by_id[name] for name in match if name not in failed]
        state.matches[number] = [case.id for case in rest]
        if again and number in state.passes[0]:  # who plays, plays in one of those
            company = [c for c in rest if any(_compared(c, other) for other in again)]
            new = state.add_match(again + open_cases(plan, state, company))
            for numbers in state.passes:
                numbers.append(new)
    state.cases |= {name: CaseState() for name in failed}


def _compared(one: Case, other: Case) -> bool:
    """Whether the record holds a ratio of the two: to a baseline, to `against`, or to a twin."""
    if one.side == other.side:
        pairs = ((one, other), (other, one))
        return any(b.is_baseline or b.variant.name == a.variant.against for a, b in pairs)
    both = one.is_baseline and other.is_baseline
    twins = one.technique == other.technique and one.variant.name == other.variant.name
    return one.framework != other.framework and (twins or both)
