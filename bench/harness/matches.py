"""A match: all contenders alive and warm at once, sampled in random order, round by round.

One call of `play` is one block: every contender in a fresh worker. The blocks are what intervals
are made of.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from statistics import median

from bench.harness.plan import FRAMEWORKS, Case
from bench.harness.processes import (
    Failed,
    ParentFailed,
    ParentKey,
    Processes,
    Unsupported,
    Worker,
)

MOST_LATE = 0.05  # share of a sample that may pass between its end and its result
MOST_WAITING_CPU = 0.10  # cores that a waiting worker may use
MESSAGE_CPU_S = 1e-3  # and what it may use to answer and to be asked, however short its wait
SAMPLING_S = 8.0  # a block of slow contenders ends its rounds after this,
FEWEST_ROUNDS = 10  # but never before so many


@dataclass
class Block:
    """What one block found of one case. `samples`: seconds a step, one for each round."""

    samples: list[float] = field(default_factory=list)
    first_call_s: float | None = None
    losses: list[float] | None = None
    weights_sha256: str | None = None
    empty_s: float | None = None
    steps: int | None = None
    settings: dict | None = None
    evidence: dict | None = None
    status: str = "OK"
    reason: str | None = None


def parent_key(case: Case, threads: int) -> ParentKey:
    """The parent whose child a case's worker is; a control has one of its own."""
    arm = "control" if case.variant.role == "control" else "main"
    return ParentKey(case.framework, case.flavour, case.variant.allocator or "tuned", arm, threads)


def configure(worker: Worker, limits, seed: int) -> dict:
    """Set a new worker's threads and seeds and return what it read back.

    What a framework imports late is imported first: it is no part of a technique's memory.
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


class Match:
    """One block of one match.

    `side_by_side`: contenders that start at once; where it is more than one, their first calls
    disturb each other and are not kept.
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
        side_by_side: int = 1,
    ) -> None:
        self.processes, self.data = processes, data
        # Who started first was seen to run about 1% slower from then on, so nobody always does.
        self.cases = random.Random(seed).sample(cases, len(cases))
        self.threads, self.seed, self.evidence = threads, seed, evidence
        self.side_by_side = side_by_side
        self.blocks = {case.id: Block() for case in cases}
        self.workers: dict[str, Worker] = {}

    def play(self, rounds: int) -> dict[str, Block]:
        """Play the block; a case that fails leaves it, and the others go on."""
        try:
            self._begin()
            for case in self._alive():
                self._guard(case, self._warm)
            self._sample(rounds)
            for case in self._alive():
                self._guard(case, self._finish)
        finally:
            for worker in self.workers.values():
                worker.stop(kill=True)
        return self.blocks

    def _begin(self) -> None:
        """Start every contender and let it take its first steps."""

        def begin(case: Case) -> None:
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
            for worker in list(self.workers.values()):
                worker.stop(kill=True)  # so that no thread waits for its answer
            raise
        finally:
            pool.shutdown(cancel_futures=True)

    def _alive(self) -> list[Case]:
        return [case for case in self.cases if case.id in self.workers]

    def _guard(self, case: Case, stage: Callable[[Case], None]) -> None:
        """Run a stage for a case; on a failure note the reason and leave the case out."""
        try:
            stage(case)
            return
        except (Failed, ParentFailed) as error:
            self._drop(case, "FAILED", str(error))
        except Unsupported as error:
            self._drop(case, "UNSUPPORTED", str(error))

    def _drop(self, case: Case, status: str, reason: str) -> None:
        block = self.blocks[case.id]
        block.status, block.reason, block.samples = status, reason, []
        worker = self.workers.pop(case.id, None)
        if worker:
            worker.stop(kill=True)

    def _start(self, case: Case) -> None:
        limits = self.processes.limits
        label = case.id.replace("/", "-")
        worker = self.processes.fork(parent_key(case, self.threads), label)
        self.workers[case.id] = worker
        block = self.blocks[case.id]
        block.settings = configure(worker, limits, self.seed)
        answer = worker.ask(
            limits.request,
            "build",
            case=case.message(),
            data=self.data[case.workload.task],
            weights_seed=self.seed,
        )
        block.weights_sha256 = answer["weights_sha256"]

    def _first_steps(self, case: Case) -> None:
        answer = self.workers[case.id].ask(self.processes.limits.request, "first_steps")
        block = self.blocks[case.id]
        block.losses = answer["losses"]
        if self.side_by_side == 1:
            block.first_call_s = answer["first_call_s"]

    def _warm(self, case: Case) -> None:
        answer = self.workers[case.id].ask(self.processes.limits.request, "warm")
        block = self.blocks[case.id]
        block.steps, block.empty_s = answer["steps"], answer["empty_s"]

    def _sample(self, rounds: int) -> None:
        """The rounds: every contender once, in an order drawn anew for each."""
        order = random.Random(self.seed)
        late: dict[str, list[float]] = {case.id: [] for case in self.cases}
        busy: dict[str, list[float]] = {case.id: [] for case in self.cases}

        def sample(case: Case) -> None:
            answer = self.workers[case.id].ask(self.processes.limits.sample, "sample")
            self.blocks[case.id].samples.append(answer["seconds"])
            late[case.id].append(answer["late_s"] / answer["seconds"])
            used = max(0.0, answer["waiting_cpu_s"] - MESSAGE_CPU_S)
            busy[case.id].append(used / max(answer["waited_s"], 1e-9))

        start = time.monotonic()
        for number in range(rounds):
            if number >= FEWEST_ROUNDS and time.monotonic() - start > SAMPLING_S:
                break
            contenders = self._alive()
            order.shuffle(contenders)
            for case in contenders:
                self._guard(case, sample)
        for case in self._alive():
            self._judge(case, median(late[case.id]), median(busy[case.id][1:] or [0.0]))

    def _judge(self, case: Case, late: float, busy: float) -> None:
        if late > MOST_LATE:
            self._drop(
                case,
                "FAILED",
                f"not synchronised: its result came {late:.0%} of a sample after the sample's end",
            )
        elif busy > MOST_WAITING_CPU:
            self._drop(
                case,
                "FAILED",
                f"a waiting worker used {busy:.0%} of a core and disturbed the others",
            )

    def _finish(self, case: Case) -> None:
        answer = self.workers[case.id].ask(
            self.processes.limits.request, "finish", evidence=self.evidence
        )
        if answer["traces"] != answer["traces_before"]:
            self._drop(
                case,
                "FAILED",
                f"traced again in steady state: {answer['traces_before']} graphs after warm-up, "
                f"{answer['traces']} at the end",
            )
        elif answer.get("not_applied"):
            self.blocks[case.id].evidence = answer["evidence"]
            self._drop(case, "NOT_APPLIED", answer["not_applied"])
        else:
            self.blocks[case.id].evidence = answer.get("evidence")
