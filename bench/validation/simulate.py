"""Runs that end early, simulated from recorded noise: what they cover, find and say falsely.

And rows that lose accuracy: how large a loss has to be before their seeds show it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp, log

import numpy as np

from bench.analysis.bounds import LOOKS
from bench.analysis.fit import fit_of
from bench.analysis.sequential import DECIDED, Pair, judge
from bench.analysis.verdicts import DELTA, Ratio, compare_accuracy

BASE = "baseline"
# True ratios of the contenders of a simulated piece of work; how many of each makes them kin of
# about as many as a real one has.
TRUTHS = (1.0, 1.0, 1.0, 1 + DELTA, 1.05, 1.10, 1 / 1.10, 1.5)
WORKS = 3_000
LOSSES = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0)  # of a row's metric, in margins of its task


@dataclass
class Outcome:
    """What was said of contenders of one true ratio."""

    covered: int = 0
    blocks: int = 0
    verdicts: list[str | None] = field(default_factory=list)

    def add(self, truth: float, found: Ratio) -> None:
        """Count one contender."""
        self.covered += found.ci[0] <= truth <= found.ci[1]
        self.blocks += found.n
        self.verdicts.append(found.verdict)

    def share(self, *verdicts: str) -> float:
        """How often one of these was said."""
        return sum(each in verdicts for each in self.verdicts) / len(self.verdicts)


def play(noise: np.ndarray, truths: Sequence[float], looks: tuple[int, ...] = LOOKS) -> list[Ratio]:
    """One run: `noise` by block and contender; whoever is decided at a look leaves."""
    names = [str(number) for number in range(len(truths))]
    pairs = [Pair(name, BASE) for name in names]
    blocks: list[dict[str, float]] = []
    alive = set(names)
    for number, row in enumerate(noise[: looks[-1]], 1):
        values = {name: log(truths[int(name)]) + float(row[int(name)]) for name in sorted(alive)}
        blocks.append({BASE: 0.0} | values)
        if number in looks:
            found = judge(fit_of(blocks), pairs, looks)
            each = zip(names, found, strict=True)
            alive = {name for name, one in each if one.verdict not in DECIDED}
    return judge(fit_of(blocks), pairs, looks)


def simulate(noise: Sequence[float], seed: int, works: int = WORKS) -> dict[float, Outcome]:
    """What is said of each true ratio where the log ratios of a block scatter as `noise` does."""
    random, found = np.random.default_rng(seed), {truth: Outcome() for truth in TRUTHS}
    values = np.asarray(noise) - np.mean(noise)  # in the simulated world the truth is known
    for _ in range(works):
        drawn = random.choice(values, (LOOKS[-1], len(TRUTHS)))
        for truth, one in zip(TRUTHS, play(drawn, TRUTHS), strict=True):
            found[truth].add(truth, one)
    return found


def summary(noise: Sequence[float], found: dict[float, Outcome]) -> str:
    """Coverage, errors and power in a few lines."""
    every = list(found.values())
    count = sum(len(each.verdicts) for each in every)
    lines = [
        f"noise sd {exp(float(np.std(noise))) - 1:.3f} of {len(noise)} blocks; "
        f"intervals cover the truth in {sum(each.covered for each in every) / count:.1%}; "
        f"{sum(each.blocks for each in every) / count:.1f} blocks on average"
    ]
    equal, margin = found[1.0], found[1 + DELTA]
    lines.append(
        f'  wrong: at 1 "faster" or "slower" {equal.share("faster", "slower"):.1%}; at the margin '
        f'"slower" {margin.share("faster", "slower"):.1%}, "equivalent" '
        f"{margin.share('equivalent'):.1%}"
    )
    for truth, each in found.items():
        shares = {v: each.share(v) for v in dict.fromkeys(each.verdicts)}
        said = ", ".join(f"{v} {s:.1%}" for v, s in sorted(shares.items(), key=lambda i: -i[1]))
        size = len(each.verdicts)
        lines.append(
            f"  true ratio {truth:.3f}: {said}; covered {each.covered / size:.1%}; "
            f"{each.blocks / size:.1f} blocks"
        )
    return "\n".join(lines)


def shares(name: str, found: dict[float, Outcome]) -> list[dict]:
    """For each true ratio how often it is told apart, found equivalent, and covered."""
    rows = []
    for truth, own in found.items():
        count = len(own.verdicts)
        rows.append(
            {"name": name, "truth": truth, "covered": own.covered / count}
            | {"blocks": own.blocks / count, "equivalent": own.share("equivalent")}
            | {"slower": own.share("slower", "slightly slower")}
            | {"faster": own.share("faster", "slightly faster")}
        )
    return rows


def losses(
    task: str, noise: Sequence[float], seeds: int, seed: int, works: int = WORKS
) -> list[dict]:
    """For each true loss how often rows that are trained with so many seeds show or deny it.

    noise: how a row's differences scatter over seeds, in margins of its task.
    """
    random, rows = np.random.default_rng(seed), []
    values = np.asarray(noise) - np.mean(noise)
    for truth in LOSSES:
        kept, lost, covered = 0, 0, 0
        for drawn in random.choice(values, (works, seeds)):
            found = compare_accuracy(
                list(drawn - truth), [0.0] * seeds, margin=1.0, more_is_better=True
            )
            low, high = found["ci"]
            kept += low >= -1.0
            lost += high < 0
            covered += low <= -truth <= high
        row = {"task": task, "noise": float(np.std(noise)), "of": len(noise)}
        row |= {"lost": truth, "kept": kept / works, "worse": lost / works}
        rows.append(row | {"covered": covered / works})
    return rows


def losses_summary(rows: list[dict]) -> str:
    """Each task's coverage, errors and power in a few lines; a loss in margins of its task."""
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
