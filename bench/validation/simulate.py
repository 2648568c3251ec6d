"""Simulates runs with recorded noise: what intervals cover, and which verdicts are right or wrong.

It also simulates rows that lose accuracy: how large a loss must be before their seeds show it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp, log

import numpy as np

from bench.analysis.bounds import Looks
from bench.analysis.fit import fit_of
from bench.analysis.sequential import DECIDED, Pair, judge
from bench.analysis.verdicts import DELTA, Ratio, compare_accuracy
from bench.harness.plan import EFFORT

BASE = "baseline"
# True ratios of the contenders of a simulated piece of work; how many of each makes them kin of
# about as many as a real one has.
TRUTHS = (1.0, 1.0, 1.0, 1 + DELTA, 1.05, 1.10, 1 / 1.10, 1.5)
WORKS = 3_000
LOSSES = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0)  # of a row's metric, in margins of its task


@dataclass
class Outcome:
    """The verdicts on contenders of one true ratio."""

    covered: int = 0
    blocks: int = 0
    verdicts: list[str | None] = field(default_factory=list)

    def add(self, truth: float, result: Ratio) -> None:
        """Count one contender."""
        self.covered += result.ci[0] <= truth <= result.ci[1]
        self.blocks += result.n
        self.verdicts.append(result.verdict)

    def share(self, *verdicts: str) -> float:
        """How often one of these verdicts was reached."""
        return sum(verdict in verdicts for verdict in self.verdicts) / len(self.verdicts)


def play(noise: np.ndarray, truths: Sequence[float], looks: Looks) -> list[Ratio]:
    """One run: `noise` by block and contender; decided contenders leave at a look."""
    names = [str(number) for number in range(len(truths))]
    pairs = [Pair(name, BASE) for name in names]
    blocks: list[dict[str, float]] = []
    alive = set(names)
    for number, row in enumerate(noise, 1):
        values = {name: log(truths[int(name)]) + float(row[int(name)]) for name in sorted(alive)}
        blocks.append({BASE: 0.0} | values)
        if number in looks:
            results = zip(names, judge(fit_of(blocks), pairs, looks), strict=True)
            alive = {name for name, result in results if result.verdict not in DECIDED}
    return judge(fit_of(blocks), pairs, looks)


def simulate(
    noise: Sequence[float], seed: int, works: int = WORKS, *, looks: Looks = EFFORT["default"].looks
) -> dict[float, Outcome]:
    """The verdicts for each true ratio if log ratios of a block scatter like `noise`.

    `looks`: of the runs; by default those of a default run.
    """
    count = looks[-1] if looks else EFFORT["default"].blocks
    random, outcomes = np.random.default_rng(seed), {truth: Outcome() for truth in TRUTHS}
    values = np.asarray(noise) - np.mean(noise)  # in the simulated world the truth is known
    for _ in range(works):
        drawn = random.choice(values, (count, len(TRUTHS)))
        for truth, result in zip(TRUTHS, play(drawn, TRUTHS, looks), strict=True):
            outcomes[truth].add(truth, result)
    return outcomes


def summary(noise: Sequence[float], outcomes: dict[float, Outcome]) -> str:
    """Coverage, errors and power in a few lines."""
    count = sum(len(outcome.verdicts) for outcome in outcomes.values())
    covered = sum(outcome.covered for outcome in outcomes.values()) / count
    blocks = sum(outcome.blocks for outcome in outcomes.values()) / count
    equal, margin = outcomes[1.0], outcomes[1 + DELTA]
    lines = [
        f"noise sd {exp(float(np.std(noise))) - 1:.3f} of {len(noise)} blocks; "
        f"intervals cover the truth in {covered:.1%}; {blocks:.1f} blocks on average",
        f'  wrong: at 1 "faster" or "slower" {equal.share("faster", "slower"):.1%}; at the margin '
        f'"slower" {margin.share("faster", "slower"):.1%}, "equivalent" '
        f"{margin.share('equivalent'):.1%}",
    ]
    for truth, outcome in outcomes.items():
        by_verdict = {v: outcome.share(v) for v in dict.fromkeys(outcome.verdicts)}
        ordered = sorted(by_verdict.items(), key=lambda item: -item[1])
        size = len(outcome.verdicts)
        lines.append(
            f"  true ratio {truth:.3f}: {', '.join(f'{v} {share:.1%}' for v, share in ordered)}; "
            f"covered {outcome.covered / size:.1%}; {outcome.blocks / size:.1f} blocks"
        )
    return "\n".join(lines)


def shares(name: str, outcomes: dict[float, Outcome]) -> list[dict]:
    """For each true ratio, how often it is told apart, found equivalent, and covered."""
    rows = []
    for truth, outcome in outcomes.items():
        count = len(outcome.verdicts)
        rows.append(
            {"name": name, "truth": truth, "covered": outcome.covered / count}
            | {"blocks": outcome.blocks / count, "equivalent": outcome.share("equivalent")}
            | {"slower": outcome.share("slower", "slightly slower")}
            | {"faster": outcome.share("faster", "slightly faster")}
        )
    return rows


def losses(
    task: str, noise: Sequence[float], seeds: int, seed: int, works: int = WORKS
) -> list[dict]:
    """For each true loss, how often rows trained with so many seeds show or deny it.

    noise: how a row's differences scatter over seeds, in margins of its task.
    """
    random, rows = np.random.default_rng(seed), []
    values = np.asarray(noise) - np.mean(noise)
    for truth in LOSSES:
        kept, lost, covered = 0, 0, 0
        for drawn in random.choice(values, (works, seeds)):
            result = compare_accuracy(
                list(drawn - truth), [0.0] * seeds, margin=1.0, more_is_better=True
            )
            low, high = result.ci
            kept += low >= -1.0
            lost += high < 0
            covered += low <= -truth <= high
        row = {"task": task, "noise": float(np.std(noise)), "of": len(noise)}
        row |= {"lost": truth, "kept": kept / works, "worse": lost / works}
        rows.append(row | {"covered": covered / works})
    return rows


def losses_summary(rows: list[dict]) -> str:
    """Coverage, errors and power for each task in a few lines; losses in margins of the task."""
    lines = []
    for row in rows:
        if row["lost"] == LOSSES[0]:
            scatter = f"noise sd {row['noise']:.2f} margins of {row['of']} differences"
            lines.append(f"{row['task']}: {scatter}")
        lines.append(
            f"  {row['lost']:g} margins lost: kept {row['kept']:.1%}, shown to be worse "
            f"{row['worse']:.1%}; covered {row['covered']:.1%}"
        )
    return "\n".join(lines)
