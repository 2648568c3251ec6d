"""Analyses records as if their runs had been shorter: do two agree, how do blocks scatter?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import exp, log
from statistics import fmean, median

import numpy as np

from bench.analysis import comparisons, pairing
from bench.analysis.bounds import LOOKS, Looks
from bench.analysis.fit import Samples, fit
from bench.analysis.sequential import DECIDED, PRIOR, Pair, judge
from bench.analysis.verdicts import FEWEST_SEEDS, Ratio
from bench.record import DIFFERENT, Case, Comparison, Record
from shared.specs import TASKS

FEWEST = LOOKS[0]  # blocks
SHARES = (4, 2, 1)  # of a block's rounds one of so many is kept, to see what more rounds give
MOST_ROUNDS = 30  # for which it is said what they would give


@dataclass(frozen=True)
class Design:
    """A number of blocks, the looks at them, and the weight of others' scatter."""

    title: str
    blocks: int
    looks: Looks = ()
    prior: float = PRIOR


DESIGNS = (
    Design(f"{FEWEST} blocks, as by default", FEWEST),
    Design("the same, prior 2", FEWEST, prior=2.0),
    Design("the same, prior 0", FEWEST, prior=0.0),
    Design("looks at 3, 5, prior 2", 5, (3, 5), 2.0),
    Design("looks at 3, 5, 8", 8, LOOKS),
)
Ratios = dict[tuple[str, str], Ratio]  # by the ids of numerator and denominator
SIZES = ("small", "large")  # of models, see `Task.blocks`


@dataclass(frozen=True)
class Agreement:
    """How well records agree by a design: the number of common ratios, and of those that agree.

    lowest: the share for the two records that agree least. half_width: the median.
    """

    compared: int
    within: int
    lowest: float
    decided: float
    half_width: float


def agreement(records: Iterable[Record], design: Design, size: str) -> Agreement | None:
    """Whether two records' ratios differ by no more than their intervals, as `design` has them."""
    judged = [ratios(record, design, size) for record in records]
    every = [ratio for of_one in judged for ratio in of_one.values()]
    counts = []
    for one, other in combinations(judged, 2):
        both = [(one[pair], other[pair]) for pair in one.keys() & other.keys()]
        if both:
            counts.append((sum(_agree(*ratio) for ratio in both), len(both)))
    if not counts:
        return None
    return Agreement(
        compared=sum(count for _, count in counts),
        within=sum(within for within, _ in counts),
        lowest=min(within / count for within, count in counts),
        decided=fmean(ratio.verdict in DECIDED for ratio in every),
        half_width=median((ratio.ci[1] / ratio.ci[0]) ** 0.5 - 1 for ratio in every),
    )


def ratios(record: Record, design: Design, size: str) -> Ratios:
    """The ratios of a record's rows of small or large models that have an interval by a design."""
    made: Ratios = {}
    for samples, compared in works(record):
        kept = [(c, pair) for c, pair in compared if _is_of(size, c) and c.kind != "control"]
        if kept:
            of_design = fit(_first(samples, design.blocks))
            pairs = [pair for _, pair in kept]
            judged = judge(of_design, pairs, design.looks, design.prior)
            made |= {
                (c.numerator, c.denominator): ratio
                for (c, _), ratio in zip(kept, judged, strict=True)
                if ratio and ratio.ci
            }
    return made


def _is_of(size: str, comparison: Comparison) -> bool:
    """Whether two rows of so large a model are compared, which nobody chose by their figures."""
    task = TASKS.get(comparison.task)
    chosen = comparison.variant.startswith(comparisons.BEST) or comparison.verdict == DIFFERENT
    return not chosen and SIZES[bool(task and task.blocks)] == size


def _agree(one: Ratio, other: Ratio) -> bool:
    """Whether they differ by no more than the halves of the intervals that face each other."""
    low, high = sorted((one, other), key=lambda ratio: ratio.ratio)
    up, down = log(low.ci[1] / low.ratio), log(high.ratio / high.ci[0])
    return log(high.ratio / low.ratio) <= (up**2 + down**2) ** 0.5


def _first(samples: Samples, blocks: int, one_of: int = 1) -> Samples:
    """The first blocks, with one of so many rounds of each."""
    return {
        name: {
            match: {block: rounds[::one_of] for block, rounds in of_match.items() if block < blocks}
            for match, of_match in matches.items()
        }
        for name, matches in samples.items()
    }


# What blocks scatter by ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Scatter:
    """The sd of a block's log ratio by its number of rounds: from the process, and from rounds.

    by_rounds: measured. stays: the part that no number of rounds removes. of_round: the rest, per
    round.
    """

    pairs: int
    by_rounds: dict[int, float]
    stays: float
    of_round: float

    def at(self, rounds: int) -> float:
        """The sd of a block of so many rounds."""
        return (self.stays**2 + self.of_round**2 / rounds) ** 0.5


def scatter(records: Iterable[Record]) -> Scatter | None:
    """How much blocks of small models scatter, if all their rounds were played.

    It is the median over pairs of programs of the variance over first blocks, as that of normal
    noise, so that a disturbed pair counts little.
    """
    records = list(records)
    most = max((len(rounds) for record in records for rounds in _rounds(record)), default=0)
    counts = [most // share for share in SHARES]
    variances: dict[int, list[float]] = {share: [] for share in SHARES}
    for record in records:
        for samples, compared in works(record):
            fits = {share: fit(_first(samples, FEWEST, share)) for share in SHARES}
            for comparison, pair in compared:
                if _is_of("small", comparison) and _whole(samples, pair, most):
                    for share, fitted in fits.items():
                        values = fitted.log_ratios(pair.top, pair.bottom)
                        if len(values) == FEWEST:
                            variances[share].append(float(np.var(values, ddof=1)))
    if not all(variances.values()) or counts[0] < 1:
        return None
    # Half the sum of two squares is below ln 2 as often as above it.
    typical = [median(variances[share]) / log(2) for share in SHARES]
    slope, level = np.polyfit([1 / count for count in counts], typical, 1)
    return Scatter(
        pairs=len(variances[1]),
        by_rounds={count: value**0.5 for count, value in zip(counts, typical, strict=True)},
        stays=max(0.0, float(level)) ** 0.5,
        of_round=max(0.0, float(slope)) ** 0.5,
    )


def _rounds(record: Record) -> Iterable[list[float]]:
    for samples, _ in works(record):
        yield from (r for of in samples.values() for m in of.values() for r in m.values())


def _whole(samples: Samples, pair: Pair, most: int) -> bool:
    """Whether both played nine tenths of the rounds in each of the first blocks."""
    return all(
        len(rounds) >= 0.9 * most
        for name in (pair.top, pair.bottom)
        for blocks in samples[name].values()
        for block, rounds in blocks.items()
        if block < FEWEST
    )


# Noise for simulations ----------------------------------------------------------------------------


def noise_of(record: Record) -> dict[str, list[float]]:
    """How a record's log ratios scatter around their means, by the frameworks of the pair."""
    noise: dict[str, list[float]] = {}
    for samples, compared in works(record):
        fitted = fit(samples)
        for _, pair in compared:
            values = fitted.log_ratios(pair.top, pair.bottom)
            if len(values) >= FEWEST:  # of fewer the deviation is hardly known
                wider = (len(values) / (len(values) - 1)) ** 0.5  # a mean is nearer than the truth
                name = " ÷ ".join(dict.fromkeys(pair.kin[1:]))
                noise.setdefault(name, []).extend(
                    wider * (value - fmean(values)) for value in values
                )
    return noise


def accuracy_noise_of(record: Record) -> dict[str, list[float]]:
    """How a row's metric scatters over seeds, by task, in margins of the task."""
    noise: dict[str, list[float]] = {}
    for case in record.cases:
        baseline = pairing.baseline(case, record.cases)
        ours, theirs = (
            side.accuracy.per_seed if side and side.accuracy else [] for side in (case, baseline)
        )
        if None in (*ours, *theirs):
            continue
        differences = [a - b for a, b in zip(ours, theirs, strict=False)]
        if case.role == "baseline" or len(differences) <= FEWEST_SEEDS or not any(differences):
            continue
        wider = (len(differences) / (len(differences) - 1)) ** 0.5
        scale, mean = wider / record.tasks[case.task].margin, fmean(differences)
        noise.setdefault(case.task, []).extend(scale * (one - mean) for one in differences)
    return noise


def works(record: Record) -> list[tuple[Samples, list[tuple[Comparison, Pair]]]]:
    """Each piece of work: its samples by program, and its comparisons."""
    cases = pairing.resolved(record.cases)
    by_id = {case.id: case for case in cases}
    pieces = []
    for work, samples in comparisons.samples(cases).items():
        compared = [
            (comparison, _pair(comparison, by_id))
            for comparison in record.comparisons
            if by_id[comparison.numerator].work == work
        ]
        pieces.append((samples, compared))
    return pieces


def _pair(comparison: Comparison, by_id: dict[str, Case]) -> Pair:
    top, bottom = by_id[comparison.numerator], by_id[comparison.denominator]
    kin = (comparison.kind == "control", top.framework, bottom.framework)
    return Pair(top.program_id, bottom.program_id, kin)


# In words -----------------------------------------------------------------------------------------


def table(records: Sequence[Record]) -> str:
    """Whether the records agree by each design, and how much their blocks scatter, in lines."""
    lines = [f"{'ratios of two records':<28}{'compared':>9}{'within':>8}{'lowest':>8}"]
    lines[0] += f"{'decided':>9}{'± (median)':>12}"
    for size in SIZES:
        for design in DESIGNS:
            made = agreement(records, design, size)
            if made:
                lines.append(
                    f"{size + ': ' + design.title:<34.34}{made.compared:>5}"
                    f"{made.within / made.compared:>8.1%}{made.lowest:>8.1%}"
                    f"{made.decided:>9.1%}{made.half_width:>12.1%}"
                )
    if len(lines) == 1:
        lines = ["whether ratios of two runs agree takes two records with the same rows"]
    if seen := scatter(records):
        rounds = ", ".join(f"{n}: {exp(sd) - 1:.1%}" for n, sd in seen.by_rounds.items())
        lines += [
            "",
            f"a block's ratio scatters by, with so many rounds, {rounds} "
            f"({seen.pairs} pairs of small models);",
            f"of that {exp(seen.stays) - 1:.1%} stays for as long as a process lives; with "
            f"{MOST_ROUNDS} rounds it would be {exp(seen.at(MOST_ROUNDS)) - 1:.1%}",
        ]
    return "\n".join(lines)
