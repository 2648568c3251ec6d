"""The plan of a run: its cases, which are timed together, and what is measured of each."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from functools import cached_property

from bench.harness.devices import Gpu
from bench.harness.durations import Durations
from bench.harness.plan import Case, Effort, Technique
from bench.harness.processes import ROOT
from bench.harness.selection import matches, programs
from bench.record import Environment

REPEATED_STARTS = 3  # of a baseline, where no technique asks for more than one


def techniques() -> dict[str, Technique]:
    """The techniques of every `bench/<family>/bench_*.py`, by name."""
    every = {}
    for path in sorted((ROOT / "bench").glob("*/bench_*.py")):
        technique = importlib.import_module(f"bench.{path.parent.name}.{path.stem}").TECHNIQUE
        every[technique.name] = technique
    return every


def remedying(bottleneck: str) -> list[Technique]:
    """The techniques that address a bottleneck, without the baseline."""
    every = techniques().values()
    return [one for one in every if bottleneck in one.remedies and one.name != "baseline"]


@dataclass(frozen=True)
class Plan:
    """The cases of a run by technique, and how much is measured of them.

    `durations`: what is known of their times. `room`: memory for the contenders of a match, in
    bytes. `left_out`: techniques that this run would include only by name. `gpu`: the GPU that is
    used.
    """

    cases: dict[str, list[Case]]
    techniques: dict[str, Technique]
    amount: Effort
    durations: Durations = field(default_factory=Durations)
    room: float = float("inf")
    left_out: tuple[str, ...] = ()
    gpu: Gpu | None = None

    @cached_property
    def every(self) -> list[Case]:
        """The cases of all techniques."""
        return [case for cases in self.cases.values() for case in cases]

    @cached_property
    def by_id(self) -> dict[str, Case]:
        """The cases by their ids."""
        return {case.id: case for case in self.every}

    @cached_property
    def shown(self) -> dict[str, str]:
        """Case -> the case that is measured for it."""
        return programs(self.every, self.techniques)

    @property
    def lender(self) -> Environment | None:
        """The other machine whose times the plan uses; None if this class was measured."""
        known = {name.partition("/")[0] for name in self.durations.lent}
        return self.durations.lender if known & self.cases.keys() else None

    def matches(self, without: set[str] = frozenset()) -> list[list[Case]]:
        """The matches, without the decided cases in `without`."""
        return matches(self.every, self.shown, self.fits, without)

    def played_out(self, blocks: int) -> set[str]:
        """The cases whose task needs no more than so many blocks."""
        return {c.id for c in self.every if c.task.blocks and c.task.blocks <= blocks}

    def fits(self, cases: list[Case]) -> bool:
        """Whether contenders fit into memory together."""
        if self.gpu and not self.gpu.holds(cases):
            return False
        return sum(map(self.durations.memory, cases)) <= self.room

    # What is measured in separate processes -------------------------------------------------------

    def cold_starts(self, case: Case) -> int:
        """How many cold starts of a case are measured: the most that a case showing it needs."""
        return self._starts.get(case.id, 0)

    @cached_property
    def _starts(self) -> dict[str, int]:
        starts: dict[str, int] = {}
        for case in self.every:
            name = self.shown[case.id]
            starts[name] = max(starts.get(name, 0), self._cold_starts(case))
        # Nothing else would tell how memory scatters between processes.
        if self.amount.blocks > 1 and max(starts.values(), default=0) == 1:
            starting = [c for c in self.every if c.is_baseline and starts[self.shown[c.id]]]
            first = [self.shown[c.id] for c in starting if c.work == starting[0].work]
            starts |= dict.fromkeys(first, REPEATED_STARTS)
        return starts

    def _cold_starts(self, case: Case) -> int:
        if not case.variant.measured.cold:
            return 0
        if self.amount.first_pass_alone:  # the first of what is neither timed nor probed
            return int(not case.workload.timed and not self.techniques[case.technique].probes)
        technique = self.techniques[case.technique]
        workload = technique.workloads[0]
        first = (workload.task, workload.batch_size, workload.mode)
        often = self.amount.blocks > 1 and case.work == first
        return technique.cold_starts if often else 1

    def probed(self, case: Case) -> bool:
        """Whether a case's probe is measured; in a quick run only if it is all there is."""
        has_probe = self.techniques[case.technique].probes and case.variant.role != "control"
        if not case.workload.timed:  # its program is its probe
            return has_probe and self.shown[case.id] == case.id
        return has_probe and not self.amount.first_pass_alone

    def trained(self, case: Case) -> bool:
        """Whether a case is trained for its accuracy."""
        wanted = case.workload.accuracy and case.variant.measured.accuracy
        wanted = wanted and case.settled
        return wanted and case.variant.role != "control" and not self.amount.first_pass_alone

    @property
    def seeds(self) -> list[int]:
        """The numbers of seeds at which accuracy is looked at."""
        return list(self.amount.seed_looks) or [self.amount.seeds]
