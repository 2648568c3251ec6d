"""What a run measures, in which order, and how long that is expected to take."""

from __future__ import annotations

import importlib
import textwrap
from dataclasses import dataclass, field
from functools import cached_property

from bench.harness.durations import Durations
from bench.harness.plan import Case, Effort, Technique
from bench.harness.processes import ROOT
from bench.harness.progress import clock
from bench.harness.record import Record
from bench.harness.selection import matches, programs

# The share of a pass that is expected to be left after a look: of 180 published comparisons 27%
# were open after 3 blocks, 12% after 5. Baselines and controls play on beside these.
STAYING = {3: 0.35, 5: 0.2}
SEEDS_STAYING = 0.3  # after a look at the seeds
REPEATED_STARTS = 3  # of a baseline, where no technique asks for more than one


def techniques() -> dict[str, Technique]:
    """The techniques of every `bench/<family>/bench_*.py`, by name."""
    found = {}
    for path in sorted((ROOT / "bench").glob("*/bench_*.py")):
        technique = importlib.import_module(f"bench.{path.parent.name}.{path.stem}").TECHNIQUE
        found[technique.name] = technique
    return found


def remedying(bottleneck: str) -> list[Technique]:
    """The techniques that do something about a bottleneck, but the baseline itself."""
    every = techniques().values()
    return [one for one in every if bottleneck in one.remedies and one.name != "baseline"]


@dataclass(frozen=True)
class Part:
    """A part of a run: how many matches, starts or cases, and what it takes, in seconds."""

    name: str
    count: int
    expected: float
    most: float

    @classmethod
    def sure(cls, name: str, count: int, seconds: float) -> Part:
        """A part that is measured whatever is found."""
        return cls(name, count, seconds, seconds)


@dataclass(frozen=True)
class Plan:
    """The cases of a run by technique, and what they will take.

    `durations`: what is known of that. `room`: bytes that a match's contenders may hold together.
    `left_out`: techniques that would take a quick run minutes each.
    """

    cases: dict[str, list[Case]]
    techniques: dict[str, Technique]
    amount: Effort
    durations: Durations = field(default_factory=Durations)
    room: float = float("inf")
    left_out: tuple[str, ...] = ()

    @cached_property
    def every(self) -> list[Case]:
        """The cases of all techniques."""
        return [case for cases in self.cases.values() for case in cases]

    @cached_property
    def shown(self) -> dict[str, str]:
        """Case -> the case whose measurements it shows."""
        return programs(self.every, self.techniques)

    def matches(self, without: set[str] = frozenset()) -> list[list[Case]]:
        """Who plays with whom, once those `without` anything left to decide have left."""
        return matches(self.every, self.shown, self.fits, without)

    def played_out(self, blocks: int) -> set[str]:
        """The cases whose task asks for no more than so many blocks, whatever they show."""
        return {c.id for c in self.every if c.task.blocks and c.task.blocks <= blocks}

    def fits(self, cases: list[Case]) -> bool:
        """Whether contenders fit into memory together."""
        return sum(map(self.durations.memory, cases)) <= self.room

    # What is measured apart ---------------------------------------------------------------------

    def cold_starts(self, case: Case) -> int:
        """How many cold starts of a case are measured: the most that those who show it need."""
        return self._starts.get(case.id, 0)

    @cached_property
    def _starts(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for case in self.every:
            name = self.shown[case.id]
            found[name] = max(found.get(name, 0), self._cold_starts(case))
        # Nothing else would tell how memory scatters between processes.
        if self.amount.blocks > 1 and max(found.values(), default=0) == 1:
            starting = [c for c in self.every if c.is_baseline and found[self.shown[c.id]]]
            first = [self.shown[c.id] for c in starting if c.work == starting[0].work]
            found |= dict.fromkeys(first, REPEATED_STARTS)
        return found

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
        """Whether a case's probe is measured: in a quick run where it is all that there is."""
        own = self.techniques[case.technique].probes and case.variant.role != "control"
        if not case.workload.timed:  # its program is its probe
            return own and self.shown[case.id] == case.id
        return own and not self.amount.first_pass_alone

    def trained(self, case: Case) -> bool:
        """Whether a case is trained for its accuracy."""
        wanted = case.workload.accuracy and case.variant.measured.accuracy
        wanted = wanted and case.settled
        return wanted and case.variant.role != "control" and not self.amount.first_pass_alone

    @property
    def seeds(self) -> list[int]:
        """The numbers of seeds at which it is decided who is trained further."""
        return list(self.amount.seed_looks) or [self.amount.seeds]

    # What it takes ------------------------------------------------------------------------------

    def left(self, record: Record) -> tuple[float, float]:
        """Seconds that what `record` lacks is expected to take, and that it takes at most."""
        parts = self.parts(record)
        return sum(part.expected for part in parts), sum(part.most for part in parts)

    def parts(self, record: Record) -> list[Part]:
        """What `record` lacks, in the order in which it is usually measured."""
        of = self.durations.of
        cold, probes = [], []
        for case in filter(record.ok, self.every):
            if not case.settled:
                continue
            entry = record.entries[case.id]
            starts = self.cold_starts(case) - len(entry.cold)
            cold += [of("cold", case)] * starts
            probes += [of("probe", case)] * (self.probed(case) and not entry.probed)
        apart = [
            Part.sure(name, count, bool(count) * self.durations.parents_s + sum(prices))
            for name, prices in (("first calls and memory", cold), ("probes", probes))
            for count in [len(prices)]
        ]
        seeds, passes, first = self._training(record), self._passes(record), self.amount.first_look
        return [*passes[:first], *apart, *seeds[:1], *passes[first:], *seeds[1:]]

    def _passes(self, record: Record) -> list[Part]:
        """The passes: who leaves after a look is not known before."""
        of_pass, share, found = self.durations.of_pass, 1.0, []
        last = [record.matches[number] for number in record.passes[-1]]
        for block in range(self.amount.blocks):
            share = STAYING.get(block, share) if block in self.amount.looks else share
            if block < len(record.passes):
                numbers = [n for n in record.passes[block] if (n, block) not in record.conditions]
                lacking = [record.matches[number] for number in numbers]
                found.append(Part.sure(f"pass {block + 1}", len(lacking), of_pass(lacking)))
            else:
                most = of_pass(last)
                found.append(Part(f"pass {block + 1}", len(last), share * most, most))
        return found

    def _training(self, record: Record) -> list[Part]:
        """The training of each look at the seeds: who is trained further is not known before."""
        cases = [case for case in self.every if self.trained(case) and record.ok(case)]
        share, before, found = 1.0, 0, []
        for seeds in self.seeds:
            most = count = 0
            for case in cases:
                trained = record.entries[case.id].trained
                lacking = seeds - max(before, len(trained.per_seed) if trained else 0)
                if lacking > 0 and not (trained and (trained.status != "OK" or trained.reason)):
                    most += lacking * self.durations.of("training", case)
                    count += 1
            most += bool(count) * self.durations.parents_s
            found.append(Part(f"training, {seeds} seeds", count, share * most, most))
            share, before = SEEDS_STAYING, seeds
        return found

    def describe(self, left: tuple[float, float], taken_up: bool = False) -> str:
        """The plan, and what is left of it, in a few lines of at most 80 columns."""
        lines = []
        for name, cases in self.cases.items():
            tasks = dict.fromkeys(f"{c.workload.task} ({c.workload.batch_size})" for c in cases)
            variants = dict.fromkeys(c.variant.name for c in cases)
            lines.append(_hanging(f"{name}: {', '.join(variants)}"))
            lines.append(_hanging(f"    on {', '.join(tasks)}; {_count(len(cases), 'case')}"))
        if self.left_out:
            names = ", ".join(self.left_out)
            lines.append(_hanging(f"take minutes each, with --technique or -k: {names}"))
        return "\n".join([*lines, _hanging(self._summary(left, taken_up))])

    def table(self, record: Record) -> str:
        """What `record` lacks, part by part."""
        begin = Part.sure("start", 1, self.durations.describe_s)
        parts = [part for part in (begin, *self.parts(record)) if part.count]
        whole = [sum(getattr(part, name) for part in parts) for name in ("expected", "most")]
        lines = [f"{'':<26}{'count':>6}{'about':>14}{'at most':>14}"]
        for part in parts:
            lines.append(_row(part.name, str(part.count), part.expected, part.most))
        return "\n".join([*lines, _row("together", "", *whole)])

    def _summary(self, left: tuple[float, float], taken_up: bool) -> str:
        played = self.matches()
        parts = [_count(len(self.every), "case"), _count(len(set(self.shown.values())), "program")]
        parts += [_count(len(played), "match", "matches")] * bool(played)
        repeated = [self._blocks()] * bool(played)
        if any(map(self.trained, self.every)):
            more = f" to {self.seeds[-1]}" * (len(self.seeds) > 1)
            repeated.append(f"{self.seeds[0]} seeds{more}")
        expected, most = (seconds + self.durations.describe_s for seconds in left)
        whole = f"about {clock(expected)}"
        whole += f", {clock(most)} at most" * (most > 1.05 * expected)
        time = ", ".join([*self._looked_at(played, expected), f"all after {whole}"])
        if taken_up:
            time = f"taken up where it ended: {whole} left"
        return "; ".join(filter(None, [", ".join(parts), ", ".join(repeated), time]))

    def _blocks(self) -> str:
        """How often each match is played, and how long."""
        amount = self.amount
        blocks = _count(amount.blocks, "block")
        if amount.looks:
            blocks = f"{amount.looks[0]} to {blocks}"
        return f"{blocks} of {amount.rounds} rounds"

    def _looked_at(self, played: list[list[Case]], end: float) -> list[str]:
        """When there is something to see of what is timed, before the end."""
        if not played:
            return []
        begin, of_pass = self.durations.describe_s, self.durations.of_pass
        small = [match for match in played if not match[0].task.blocks] or played
        found = [f"first table after about {clock(begin + of_pass(small))}"]
        timed, first_look = begin + self.amount.first_look * of_pass(played), self.amount.first_look
        if 1 < first_look <= self.amount.blocks and timed < end:
            found.append(f"times with intervals after {clock(timed)}")
        return found


def _row(name: str, count: str, expected: float, most: float) -> str:
    return f"{name:<26}{count:>6}{clock(expected):>14}{clock(most):>14}"


def _count(number: int, one: str, more: str = "") -> str:
    return f"{number} {one if number == 1 else more or one + 's'}"


def _hanging(text: str) -> str:
    return textwrap.fill(text, width=80, subsequent_indent="    ")
