"""From samples to one time per case, from which all ratios of a piece of work follow.

The three steps are additive in logarithms, so times divided by each other are the ratios:

1. Within a block, a contender's time is the mean of its fastest third of rounds. Other programs
   only make a sample slower, and hit some rounds of each contender. On seven published records (412
   pairs) a pair's log ratio scatters between blocks with an sd of 1.9% to 4.5%, and the median of
   log ratios within rounds with 2.4% to 6.3%; the mean is better on six records, and 2.8% against
   2.7% on the seventh. On a record measured after this choice it is 3.7% against 5.6%. Slow first
   rounds need no extra rule. A cost that comes only every so many steps counts as far as it falls
   within a sample.
2. If a piece of work was split over several matches, the baselines, which are in all of them, join
   them: their ratios in the first match stay, and a new case is placed as far from their mean as in
   its match. The machine's speed in a block is the median of its matches, so that one disturbed
   match moves no time.
3. Over blocks it is the mean, or, if a case lacks some, the least-squares fit of blocks and cases.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp, log

import numpy as np

from bench.analysis import verdicts

FASTEST = 3  # one of so many rounds of a block counts,
FEWEST = 2  # but no fewer than these

Samples = dict[str, dict[int, dict[int, list[float]]]]  # by case, match and block


def undisturbed(samples: list[float]) -> float:
    """Seconds per step in a block, from the samples of its rounds."""
    count = max(FEWEST, round(len(samples) / FASTEST))
    return float(np.mean(sorted(samples)[:count]))


def block_times(samples: dict[str, list[float]]) -> dict[str, float]:
    """The log time of each contender of one block of a match, from their samples by round."""
    return {name: log(undisturbed(rounds)) for name, rounds in samples.items()}


@dataclass
class Fit:
    """Log times by block and case, and of each case over all blocks.

    Cases that share no match, directly or through others, belong to different `groups` of a block
    and are not compared there. `levels`: how much faster the machine was in a block than in the
    group's first match. Times are at that match's speed; ratios do not depend on it.
    """

    blocks: dict[int, dict[str, float]] = field(default_factory=dict)
    groups: dict[int, dict[str, int]] = field(default_factory=dict)
    pooled: dict[str, float] = field(default_factory=dict)
    levels: dict[int, dict[int, float]] = field(default_factory=dict)

    def time(self, case: str) -> tuple[float, tuple[float, float] | None]:
        """Seconds per step: the geometric mean over blocks, and its 95% interval."""
        levels = self._levels(case)
        played = [t[case] - levels[b] for b, t in self.blocks.items() if case in t]
        interval = verdicts.t_interval(played)
        center = self.pooled[case] - float(np.mean(list(levels.values())))
        if interval.low is None:
            return exp(center), None
        half = (interval.high - interval.low) / 2
        return exp(center), (exp(center - half), exp(center + half))

    def time_at_looks(self, case: str, level: float) -> tuple[float, tuple[float, float] | None]:
        """Seconds per step of a case that may have left early.

        All blocks tell the machine's speed; the case's blocks tell the rest.
        """
        speed = {
            b: float(np.mean([t[n] - self.pooled[n] for n in t])) for b, t in self.blocks.items()
        }
        relative = [times[case] - speed[b] for b, times in self.blocks.items() if case in times]
        levels = self._levels(case)
        center = self.pooled[case] - float(np.mean(list(levels.values())))
        shared = verdicts.t_interval([speed[b] - levels[b] for b in speed])
        if shared.sd is None or len(relative) < 2:
            return exp(center), None
        parts = [
            (shared.sd**2 / shared.n, shared.n - 1),
            (float(np.var(relative, ddof=1)) / len(relative), len(relative) - 1),
        ]
        sd, freedom = verdicts.summed(parts)
        half = verdicts.quantile(level, freedom) * sd
        return exp(center), (exp(center - half), exp(center + half))

    def _levels(self, case: str) -> dict[int, float]:
        """Of each block, that of the case's group; where it did not play, of the block's first."""
        return {
            block: self.levels.get(block, {}).get(groups.get(case, 0), 0.0)
            for block, groups in self.groups.items()
        }

    def ratio(self, top: str, bottom: str) -> verdicts.Ratio | None:
        """The time of one case over that of another; None if no block has both."""
        each = self.log_ratios(top, bottom)
        return verdicts.compare(each) if each else None

    def log_ratios(self, top: str, bottom: str) -> list[float]:
        """The log ratios of the blocks that have both, centred on the ratio over all blocks."""
        measured = [self.blocks[b][top] - self.blocks[b][bottom] for b in self.shared(top, bottom)]
        if not measured:
            return []
        shift = self.pooled[top] - self.pooled[bottom] - float(np.mean(measured))
        return [value + shift for value in measured]

    def shared(self, top: str, bottom: str) -> list[int]:
        """The blocks in which two cases can be compared."""
        groups = self.groups.items()
        return [block for block, g in groups if top in g and g[top] == g.get(bottom)]

    def first(self, count: int) -> Fit:
        """The fit of only the first blocks."""
        blocks = {block: times for block, times in self.blocks.items() if block < count}
        if len(blocks) == len(self.blocks):
            return self
        groups = {block: self.groups[block] for block in blocks}
        return Fit(blocks, groups, _pooled(blocks), self.levels)


def fit(samples: Samples) -> Fit:
    """Fit the samples of the cases of one piece of work."""
    fitted = Fit()
    places = {
        (block, match)
        for matches in samples.values()
        for match, blocks in matches.items()
        for block in blocks
    }
    for block in sorted({block for block, _ in places}):
        times, groups = fitted.blocks.setdefault(block, {}), fitted.groups.setdefault(block, {})
        shifts: dict[int, list[float]] = {}
        for match in sorted(match for other, match in places if other == block):
            played = {
                name: matches[match][block]
                for name, matches in samples.items()
                if matches.get(match, {}).get(block)
            }
            if played:
                group, shift = _join(times, groups, block_times(played))
                shifts.setdefault(group, []).append(shift)
        fitted.levels[block] = {group: float(np.median(each)) for group, each in shifts.items()}
    fitted.pooled = _pooled(fitted.blocks)
    return fitted


def fit_of(blocks: list[dict[str, float]]) -> Fit:
    """The fit of blocks whose log times are known, each of one match."""
    by_number = {number: dict(times) for number, times in enumerate(blocks)}
    groups = {number: dict.fromkeys(times, 0) for number, times in by_number.items()}
    return Fit(by_number, groups, _pooled(by_number))


def _join(
    times: dict[str, float], groups: dict[str, int], new: dict[str, float]
) -> tuple[int, float]:
    """Add the contenders of another match of a block to those of the matches before.

    Returns the group that they belong to, and by how much the machine was faster in this match than
    in the group's first.
    """
    known = [name for name in new if name in times]
    group = groups[known[0]] if known else len(groups)
    anchors = [name for name in known if groups[name] == group]
    shift = float(np.mean([times[name] - new[name] for name in anchors])) if anchors else 0.0
    for name, value in new.items():
        if name not in times:
            times[name], groups[name] = value + shift, group
    return group, shift


def _pooled(blocks: dict[int, dict[str, float]]) -> dict[str, float]:
    """The log time of each case over blocks."""
    blocks = {block: times for block, times in blocks.items() if times}
    names = list(dict.fromkeys(name for times in blocks.values() for name in times))
    if all(len(times) == len(names) for times in blocks.values()):
        return {n: float(np.mean([times[n] for times in blocks.values()])) for n in names}
    return _least_squares(blocks, names)


def _least_squares(blocks: dict[int, dict[str, float]], names: list[str]) -> dict[str, float]:
    """A level for each case and one for each block, whose sum over blocks is zero."""
    cells = [(row, names.index(name)) for row, b in enumerate(blocks) for name in blocks[b]]
    values = [value for times in blocks.values() for value in times.values()]
    design = np.zeros((len(cells) + 1, len(names) + len(blocks)))
    for number, (row, column) in enumerate(cells):
        design[number, column] = design[number, len(names) + row] = 1
    design[-1, len(names) :] = 1
    levels = np.linalg.lstsq(design, np.array([*values, 0.0]), rcond=None)[0]
    return dict(zip(names, levels[: len(names)].tolist(), strict=True))
