"""A match: its contenders are all alive and warm, and are sampled in random order, round by round.

One call of `play` is one block, in which every contender has a new process. Intervals are over
blocks. If other programs used the cores during a block, its rounds are repeated once with the same
processes, before any sample is looked at.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from types import MappingProxyType

from msgspec import Struct, structs

from bench.analysis.values import MOST_OTHERS, MOST_STOLEN
from bench.harness import machine
from bench.harness.answers import Built, Configured, Losses, Sample
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
from bench.record import Attempt, Block, Conditions

MOST_LATE = 0.05  # share of a sample that may pass between its end and its result
MOST_WAITING_CPU = 0.10  # cores that a waiting worker may use
MESSAGE_CPU_S = 1e-3  # and what it may use to answer and to be asked, however short its wait
SAMPLED_S = 0.375  # a block's rounds end when each contender was sampled for so long,
SAMPLING_S = 12.0  # or after this, where they are many and slow,
FEWEST_ROUNDS = 3  # but never before so many: blocks of slow steps differ by more than their rounds
RESERVE = 512 << 20  # bytes that stay free whoever starts
MOST_TRIES = 2  # of a block's rounds; the least disturbed one counts


class Played(Struct, kw_only=True):
    """What a block of a match measured of one case.

    `samples`: seconds per step, one for each round; `energy_j`: joules per step of each, if there
    is a counter. `shortest_s`: the length of the shortest sample. `seconds`: of each part.
    `modules`: imported since the worker was configured. `peak_bytes`: of the worker.
    """

    match: int = 0
    block: int = 0
    samples: list[float] = []
    first_call_s: float | None = None
    losses: Losses = []
    weights_sha256: str | None = None
    empty_s: float | None = None
    steps: int | None = None
    shortest_s: float | None = None
    seconds: dict[str, float] = {}
    settings: Configured | None = None
    evidence: dict | None = None
    modules: list[str] | None = None
    peak_bytes: float | None = None
    energy_j: list[float] | None = None
    status: str = "OK"
    reason: str | None = None

    def as_record(self) -> Block:
        """The part of it that the record keeps beside the samples."""
        return Block(**{name: getattr(self, name) for name in Block.__struct_fields__})


def start_order(cases: list[Case], match: int, block: int) -> list[Case]:
    """The order in which a block's contenders start: a row of a balanced Latin square.

    A contender that starts one place later was seen to be 0.3% faster. Over as many blocks as
    contenders (twice as many if that is odd), each has every place, and follows every other,
    equally often. Which contender has which letter of the square is random for each match.
    """
    count = len(cases)
    letters = random.Random(f"start {match}").sample(cases, count)
    first = [(place + 1) // 2 * (-1) ** (place + 1) for place in range(count)]  # 0, 1, -1, 2, -2
    row = [letters[(letter + block) % count] for letter in first]
    return row[::-1] if count % 2 and block // count % 2 else row


def parent_key(case: Case, threads: int) -> ParentKey:
    """The parent that a case's worker is forked from; a control has another than its baseline."""
    arm = "control" if case.variant.role == "control" else "main"
    variant = case.variant
    environment = tuple(sorted(variant.environment.items()))
    place = case.framework, case.flavour, variant.allocator or "tuned"
    return ParentKey(*place, arm, threads, environment)


def files_of(processes: Processes, case: Case, seed: int) -> str:
    """The folder for the file of a case's predictions in this run, shared by all its workers.

    A control reads the file of the row that it repeats.
    """
    row = Path(case.id).with_name(case.variant.stands_for or case.variant.name)
    return str(processes.scratch / "files" / row / str(seed))


def configure(worker: Worker, limits, seed: int) -> Configured:
    """Set a new worker's threads and seeds, and return the values it reads back.

    Modules that a framework imports late are imported now, so that they don't count as a
    technique's memory.
    """
    framework = FRAMEWORKS[worker.key.framework]
    return worker.ask(
        limits.request,
        "configure",
        package=framework.package,
        threads=worker.key.threads,
        seed=seed,
        imports=list(framework.preload),
    )


@contextlib.contextmanager
def configured(worker: Worker, limits, seed: int = 0) -> Iterator[Worker]:
    """A new configured worker, which is ended when the context ends."""
    try:
        configure(worker, limits, seed)
        yield worker
    finally:
        worker.stop(kill=True)


class Match:
    """One block of one match, whose contenders start in the order of `cases`.

    `number`: of the match; `block`: of the block. `side_by_side`: how many contenders start at
    once; if more than one, their first calls disturb each other and are not kept. `first_calls`:
    whether they are kept otherwise. `needs`: expected bytes of a contender. `steps`: how many steps
    make a sample of each contender, from an earlier block. `seconds`: of each part. `tries`: what
    disturbed each try at the rounds. `left_out`: contenders that did not fit into memory.
    """

    def __init__(
        self,
        processes: Processes,
        cases: list[Case],
        *,
        data: dict[str, str],
        threads: int,
        seed: int,
        evidence: bool,
        number: int = 0,
        block: int = 0,
        side_by_side: int = 1,
        first_calls: bool = True,
        needs: Callable[[Case], float] = lambda case: 0,
        steps: Mapping[str, int | None] = MappingProxyType({}),
    ) -> None:
        self.processes, self.cases, self.data = processes, list(cases), data
        self.threads, self.seed, self.evidence = threads, seed, evidence
        self.number, self.block, self.needs = number, block, needs
        self.steps = steps
        self.side_by_side, self.first_calls = side_by_side, first_calls
        self.left_out: list[Case] = []
        self._turns, self._stopped = Turns(), False
        self.played = {case.id: Played(match=number, block=block) for case in cases}
        self.workers: dict[str, Worker] = {}
        self.seconds: dict[str, float] = {}
        self.tries: list[Attempt] = []
        self.load: float | None = None

    def play(self, rounds: int) -> dict[str, Played]:
        """Play the block. A case that fails leaves it, and the others go on."""
        self.load = machine.load()
        try:
            start = time.monotonic()
            self._begin()
            self._share(time.monotonic() - start)
            with self._part("warm"):
                for case in self._alive():
                    self._guard(case, self._warm)
            with self._part("rounds"):
                self._rounds(rounds)
                for case in self._alive():
                    self._guard(case, self._finish)
        finally:
            for worker in self.workers.values():
                worker.stop(kill=True)
        for case in self.left_out:
            del self.played[case.id]
        return self.played

    def conditions(self) -> Conditions:
        """The conditions of the block: order, duration, and disturbances."""
        best = min(self.tries, key=_disturbance, default=Attempt())
        return Conditions(
            match=self.number,
            block=self.block,
            order=[case.id for case in self.cases if case.id in self.played],
            load=self.load,
            stolen=best.stolen,
            others=best.others,
            tries=self.tries,
            seconds=self.seconds,
        )

    @contextlib.contextmanager
    def _part(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - start

    def _share(self, seconds: float) -> None:
        """Share out the time in which contenders began, side by side, to what they did in it."""
        took = dict.fromkeys(("start", "build", "first_call", "first_steps"), 0.0)
        for played in self.played.values():
            for part in took:
                took[part] += played.seconds.get(part, 0.0)
        whole = sum(took.values()) or 1.0
        self.seconds |= {part: seconds * share / whole for part, share in took.items()}

    def _begin(self) -> None:
        """Start every contender and let it take its first steps."""

        def begin(case: Case) -> None:
            if not case.is_baseline and not self._room(case):  # whom the others need, comes in
                self.left_out.append(case)
                return
            self._guard(case, self._start)
            if case.id in self.workers:
                self._guard(case, self._first_steps)

        if self.side_by_side == 1:
            for case in self.cases:
                begin(case)
            return
        pool = ThreadPoolExecutor(self.side_by_side)
        try:
            for _ in pool.map(begin, self.cases):
                pass
        except BaseException:
            self._stopped = True
            for worker in list(self.workers.values()):
                worker.stop(kill=True)  # so that no thread waits for its answer
            raise
        finally:
            pool.shutdown(cancel_futures=True)

    def _room(self, case: Case) -> bool:
        """Whether a contender fits into the memory that is free, and those that start with it."""
        return machine.free_memory() >= RESERVE + self.side_by_side * self.needs(case)

    def _alive(self) -> list[Case]:
        return [case for case in self.cases if case.id in self.workers]

    def _guard(self, case: Case, stage: Callable[[Case], None]) -> None:
        """Run a stage for a case; on a failure note the reason and leave the case out."""
        try:
            stage(case)
        except (Failed, ParentFailed) as error:
            self._drop(case, "FAILED", str(error))
        except Unsupported as error:
            self._drop(case, "UNSUPPORTED", str(error))

    def _drop(self, case: Case, status: str, reason: str) -> None:
        played = self.played[case.id]
        played.status, played.reason, played.samples = status, reason, []
        worker = self.workers.pop(case.id, None)
        if worker:
            worker.stop(kill=True)

    def _start(self, case: Case) -> None:
        played = self.played[case.id]
        with self._turns.beside(), _clocked(played, "start"):
            played.settings = self._fork(case)
        with self._turns.beside(), _clocked(played, "build"):
            built = self._build(case)
            if built.wrote:  # what a converter leaves behind is not to be timed along
                self.workers.pop(case.id).stop(kill=True)
                self._fork(case)
                built = self._build(case)
        played.weights_sha256 = built.weights_sha256

    def _fork(self, case: Case) -> Configured:
        label = case.id.replace("/", "-")
        worker = self.processes.fork(parent_key(case, self.threads), label)
        self.workers[case.id] = worker
        if self._stopped:  # while it was forked
            worker.stop(kill=True)
        return configure(worker, self.processes.limits, self.seed)

    def _build(self, case: Case) -> Built:
        return self.workers[case.id].ask(
            self.processes.limits.request,
            "build",
            case=case.message(),
            data=self.data[case.workload.task],
            weights_seed=self.seed,
            files=files_of(self.processes, case, self.seed),
        )

    def _first_steps(self, case: Case) -> None:
        """The first call, beside others if it makes a program of the step, and nine steps."""
        played, worker = self.played[case.id], self.workers[case.id]
        limit = self.processes.limits.request
        turn = self._turns.beside() if _traces(case) else self._turns.undisturbed()
        with turn, _clocked(played, "first_call"):
            first = worker.ask(limit, "first_call")
        with self._turns.undisturbed(), _clocked(played, "first_steps"):
            played.losses = [first.loss, *worker.ask(limit, "next_steps").losses]
        if self.side_by_side == 1 and self.first_calls:
            played.first_call_s = first.seconds

    def _warm(self, case: Case) -> None:
        played = self.played[case.id]
        with _clocked(played, "warm"):
            limit, steps = self.processes.limits.request, self.steps.get(case.id)
            warmed = self.workers[case.id].ask(limit, "warm", steps=steps)
        played.steps, played.empty_s = warmed.steps, warmed.empty_s

    def _rounds(self, rounds: int) -> None:
        """The rounds, and once more where others used the cores; the least disturbed ones count."""
        kept: dict[str, list[Sample]] = {}
        for number in range(MOST_TRIES):
            watch = machine.Watch()
            samples = self._sample(rounds, number)
            self.tries.append(watch.stop())
            if min(self.tries, key=_disturbance) is self.tries[-1]:
                kept = samples
            if _disturbance(self.tries[-1]) <= 1:
                break
        for case in self._alive():
            self._keep(case, kept[case.id])

    def _sample(self, rounds: int, number: int) -> dict[str, list[Sample]]:
        """Every contender once a round, in an order drawn anew for each."""
        order = random.Random(f"{self.seed} {self.number} {number}")
        samples: dict[str, list[Sample]] = {case.id: [] for case in self.cases}

        def sample(case: Case) -> None:
            asked = time.monotonic()
            answer = self.workers[case.id].ask(self.processes.limits.sample, "sample")
            took_s = time.monotonic() - asked
            samples[case.id].append(structs.replace(answer, took_s=took_s))

        start = time.monotonic()
        for done in range(rounds):
            contenders = self._alive()
            sampled = min((_sampled(samples[case.id]) for case in contenders), default=0.0)
            if done >= FEWEST_ROUNDS and (
                sampled >= SAMPLED_S or time.monotonic() - start > SAMPLING_S
            ):
                break
            order.shuffle(contenders)
            for case in contenders:
                self._guard(case, sample)
        return samples

    def _keep(self, case: Case, samples: list[Sample]) -> None:
        """Keep a contender's samples, unless something was wrong with them."""
        played = self.played[case.id]
        played.samples = [sample.seconds for sample in samples]
        joules = [sample.energy_j for sample in samples]
        played.energy_j = None if None in joules else joules
        played.steps = samples[-1].steps
        played.shortest_s = min(sample.seconds * sample.steps for sample in samples)
        played.seconds["rounds"] = sum(sample.took_s for sample in samples)
        if reason := _fault(samples):
            self._drop(case, "FAILED", reason)

    def _finish(self, case: Case) -> None:
        played = self.played[case.id]
        end = self.workers[case.id].ask(
            self.processes.limits.request, "finish", evidence=self.evidence
        )
        played.peak_bytes = end.peak_bytes
        if end.traces != end.traces_before:
            graphs = f"{end.traces_before} graphs after warm-up, {end.traces} at the end"
            self._drop(case, "FAILED", f"traced again in steady state: {graphs}")
            return
        played.evidence, played.modules = end.evidence, end.modules
        if end.not_applied:
            self._drop(case, "NOT_APPLIED", end.not_applied)


def _traces(case: Case) -> bool:
    """Whether a first call makes a program of the step, which takes longer than the step."""
    return case.framework == "tf" or case.variant.requires == "compiler"


@contextlib.contextmanager
def _clocked(played: Played, part: str) -> Iterator[None]:
    start = time.monotonic()
    try:
        yield
    finally:
        played.seconds[part] = time.monotonic() - start


def _fault(samples: list[Sample]) -> str | None:
    """What is wrong with a contender's samples."""
    late = median(sample.late_s / sample.seconds for sample in samples)
    busy = [
        max(0.0, sample.waiting_cpu_s - MESSAGE_CPU_S) / max(sample.waited_s, 1e-9)
        for sample in samples[1:]
    ]
    used = median(busy or [0.0])
    if late > MOST_LATE:
        return (
            f"not synchronised: its result came {late:.0%} of a sample after the sample's end; "
            "a busy machine does that, too"
        )
    if used > MOST_WAITING_CPU:
        return f"a waiting worker used {used:.0%} of a core and disturbed the others"
    return None


def _sampled(samples: list[Sample]) -> float:
    return sum(sample.seconds * sample.steps for sample in samples)


def _disturbance(attempt: Attempt) -> float:
    """How much was taken from the cores, in what a block may lose; 0 where unknown."""
    return max((attempt.stolen or 0) / MOST_STOLEN, (attempt.others or 0) / MOST_OTHERS)
