"""What a run measures, in which order, and how long that is expected to take."""

from __future__ import annotations

import importlib
import textwrap
from dataclasses import dataclass
from itertools import product

from bench.harness.plan import Case, Effort, Technique, matches
from bench.harness.processes import ROOT
from bench.harness.progress import clock
from bench.harness.record import Entry

# Seconds that parts of a run take on two cores: what the plan announces before anything ran.
EXPECTED_S = {
    "describe": 10,
    "parents": 13,
    "contender": 1.4,
    "sample": 0.03,
    "cold start": 5.5,
    "probe": 25,
    "train": 1.3,
}


def techniques() -> dict[str, Technique]:
    """The techniques of every `bench/<family>/bench_*.py`, by name."""
    found = {}
    for path in sorted((ROOT / "bench").glob("*/bench_*.py")):
        technique = importlib.import_module(f"bench.{path.parent.name}.{path.stem}").TECHNIQUE
        found[technique.name] = technique
    return found


@dataclass(frozen=True)
class Round:
    """One block of a technique: its matches and their numbers."""

    block: int
    technique: str
    matches: list[tuple[int, list[Case]]]


@dataclass(frozen=True)
class Parts:
    """What is measured, by technique but for the rounds, which alternate between techniques."""

    amount: Effort
    rounds: list[Round]
    apart: dict[str, list[tuple[Case, str]]]
    training: dict[str, list[Case]]

    @property
    def steps(self) -> list[tuple[str, float]]:
        """What is measured, in order, and the seconds that it is expected to take."""
        found, blocks = [("machine", EXPECTED_S["describe"])], set()
        for each in self.rounds:
            contenders = sum(len(match) for _, match in each.matches)
            sampling = self.amount.rounds * contenders * EXPECTED_S["sample"]
            seconds = EXPECTED_S["contender"] * contenders + sampling
            if each.block not in blocks:  # the techniques of a block share its parents
                seconds += EXPECTED_S["parents"]
            blocks.add(each.block)
            name = f"block {each.block + 1} of {self.amount.blocks}: {each.technique}"
            found.append((name, seconds))
        for name, apart in self.apart.items():
            found += [(f"{name}: {what}", EXPECTED_S[what]) for _, what in apart]
            each = min(EXPECTED_S["train"] * self.amount.seeds, self.amount.train_s or 1e9)
            for case in self.training[name]:
                found.append((f"{name}: accuracy", each * case.workload.training))
        return found

    @property
    def seconds(self) -> float:
        """Expected duration."""
        return sum(seconds for _, seconds in self.steps)


@dataclass(frozen=True)
class Plan:
    """The cases of a run by technique, and what they will take."""

    cases: dict[str, list[Case]]
    techniques: dict[str, Technique]
    amount: Effort

    @property
    def matches(self) -> list[list[Case]]:
        """The matches of all techniques, in the order of their numbers."""
        return [match for cases in self.cases.values() for match in matches(cases)]

    @property
    def parts(self) -> Parts:
        """Everything that the run measures."""
        cases = [case for cases in self.cases.values() for case in cases]
        return self.left({case.id: Entry(case) for case in cases}, self.matches)

    def left(self, entries: dict[str, Entry], numbered: list[list[Case]]) -> Parts:
        """What the run measures beyond `entries`; `numbered` are its matches.

        A block of a match that was interrupted is not in the entries of any of its cases.
        """
        rounds = []
        for block, name in product(range(self.amount.blocks), self.cases):
            lacking = [
                (number, match)
                for number, match in enumerate(numbered)
                if any(
                    case.technique == name and entries[case.id].lacks(number, block)
                    for case in match
                )
            ]
            if lacking:
                rounds.append(Round(block, name, lacking))
        apart, training = {}, {}
        for name, cases in self.cases.items():
            still = [case for case in cases if entries[case.id].status == "OK"]
            apart[name] = [(c, what) for c in still for what in self._left_apart(entries[c.id])]
            training[name] = [c for c in trained(still) if entries[c.id].trained is None]
        return Parts(self.amount, rounds, apart, training)

    def _left_apart(self, entry: Entry) -> list[str]:
        """What of `apart` was not found yet."""
        left = self.apart(entry.case)
        for done in ["cold start"] * len(entry.cold) + ["probe"] * bool(entry.probed):
            left.remove(done)
        return left

    def apart(self, case: Case) -> list[str]:
        """What is measured of a case in freshly executed processes, in order."""
        technique = self.techniques[case.technique]
        starts = technique.cold_starts if self.amount.blocks > 1 else 1
        found = ["cold start"] * (starts if case.variant.measured.cold else 0)
        return found + ["probe"] * (technique.probes and case.variant.role != "control")

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
            f"about {clock(self.parts.seconds)}"
        )
        return "\n".join(lines)


def _hanging(text: str) -> str:
    return textwrap.fill(text, width=80, subsequent_indent="    ")


def trained(cases: list[Case]) -> list[Case]:
    """The cases that are trained for their accuracy."""
    wanted = [c for c in cases if c.workload.accuracy and c.variant.measured.accuracy]
    return [c for c in wanted if c.variant.role != "control"]
