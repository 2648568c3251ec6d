"""The ratios of a record, their verdicts, and the noise of the run.

Cases of the same piece of work are compared, whatever their technique: each with its baseline or
the variant that it names ("baseline"; "control" if that is the same work), and with the same
variant in the other framework ("framework"). Also compared are the fastest rows of both frameworks
that keep accuracy.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from statistics import median

import numpy as np

from bench.analysis import accuracy, certificates, sequential
from bench.analysis.accuracy import Tasks
from bench.analysis.bounds import Looks
from bench.analysis.fit import Fit, Samples, fit
from bench.analysis.pairing import baseline, compared_with
from bench.analysis.verdicts import Ratio
from bench.record import DIFFERENT, Case, Comparison, Control, NoiseFloor, Work
from shared.specs import more_is_better

Fits = dict[Work, Fit]
BEST = "best: "  # begins the name of a comparison of the best of both


def samples(cases: list[Case]) -> dict[Work, Samples]:
    """The samples of each piece of work, by program."""
    by_work: dict[Work, Samples] = {}
    for case in cases:
        if case.has_times:
            by_work.setdefault(case.work, {})[case.program_id] = {
                int(match): {int(block): values for block, values in blocks.items() if values}
                for match, blocks in case.timing.step_s.items()
            }
    return by_work


def fits(cases: list[Case]) -> Fits:
    """The fitted times of each piece of work, by program."""
    return {work: fit(by_program) for work, by_program in samples(cases).items()}


@dataclass(frozen=True)
class Pair:
    """Two cases to compare, and the kind of comparison."""

    kind: str
    name: str
    top: Case
    bottom: Case

    @property
    def noise(self) -> tuple:
        """The kind of its noise: pairs of the same frameworks share one, controls have another."""
        return (self.kind == "control", self.top.framework, self.bottom.framework)


def compare_all(
    cases: list[Case], tasks: Tasks, fits: Fits, looks: Looks = (), seed_looks: Looks = ()
) -> list[Comparison]:
    """Every ratio of a record, once.

    `looks`, `seed_looks`: numbers of blocks and of seeds after which decided cases leave.
    """
    made = []
    for work, times in fits.items():
        contenders = [case for case in cases if case.work == work and case.has_times]
        pairs = _pairs(contenders)
        made += _compared(times, pairs, looks)
        best = _best([c for c in contenders if accuracy.of(c, cases, tasks).kept], times)
        if best:  # chosen by its figures, it lends the others no variance
            last = _compared(times, [*pairs, best], looks)[-1:]
            made += [comparison for comparison in last if comparison.variant == best.name]
    by_id = {case.id: case for case in cases}

    def flagged(comparison: Comparison) -> Comparison:
        top, bottom = by_id[comparison.numerator], by_id[comparison.denominator]
        if comparison.kind == "baseline":
            bottom = baseline(top, cases) or bottom  # to which accuracy is held
        return _flag_accuracy(comparison, top, bottom, cases, tasks, seed_looks)

    return list(map(flagged, made))


def _pairs(contenders: list[Case]) -> list[Pair]:
    """What is compared of one piece of work: within its side, and with the twin."""
    pairs = []
    for case in contenders:
        base = compared_with(case, contenders)
        if base and base.program_id != case.program_id:
            kind = "control" if case.role == "control" else "baseline"
            pairs.append(Pair(kind, case.variant, case, base))
    for case in contenders:
        if case.framework == "pt" and case.role != "control":
            pairs += [
                Pair("framework", case.variant, case, twin)
                for twin in contenders
                if twin.framework == "tf" and _same_row(twin, case)
            ]
    return pairs


def _same_row(one: Case, other: Case) -> bool:
    return (one.technique, one.variant) == (other.technique, other.variant)


def _best(cases: list[Case], times: Fit) -> Pair | None:
    """The fastest of one framework against the fastest of the other, unless they are twins."""
    sides = [
        [case for case in cases if case.framework == name and case.role != "control"]
        for name in ("pt", "tf")
    ]
    if not all(sides):
        return None
    pt, tf = (min(side, key=lambda case: times.time(case.program_id)[0]) for side in sides)
    if _same_row(pt, tf):
        return None
    return Pair("framework", f"{BEST}{pt.variant} | {tf.variant}", pt, tf)


def _compared(times: Fit, pairs: list[Pair], looks: Looks) -> list[Comparison]:
    """The comparisons of one piece of work."""
    asked = [sequential.Pair(p.top.program_id, p.bottom.program_id, p.noise) for p in pairs]
    ratios = zip(pairs, sequential.judge(times, asked, looks), strict=True)
    return [_comparison(pair, ratio) for pair, ratio in ratios if ratio]


def side_by_side(
    times: Fit, sides: dict[str, str], looks: Looks = ()
) -> dict[tuple[str, str], Ratio]:
    """The ratio of any two programs of a piece of work, by their names in the order of `sides`.

    `sides`: the framework of each program.
    """
    names = [name for name in sides if name in times.pooled]
    asked = [sequential.Pair(a, b, (sides[a], sides[b])) for a, b in combinations(names, 2)]
    judged = zip(asked, sequential.judge(times, asked, looks), strict=True)
    return {(pair.top, pair.bottom): ratio for pair, ratio in judged if ratio}


def _comparison(pair: Pair, ratio: Ratio) -> Comparison:
    top, bottom = pair.top, pair.bottom
    reason = certificates.difference(top, bottom)
    return Comparison(
        technique=top.technique,
        variant=pair.name,
        task=top.task,
        batch_size=top.batch_size,
        mode=top.mode,
        kind=pair.kind,
        numerator=top.id,
        denominator=bottom.id,
        ratio=ratio.ratio,
        ci=ratio.ci,
        sd=ratio.sd,
        n=ratio.n,
        freedom=ratio.freedom,
        look=ratio.look,
        verdict=DIFFERENT if reason else ratio.verdict,
        reason=reason,
    )


def _flag_accuracy(
    comparison: Comparison,
    top: Case,
    bottom: Case,
    cases: list[Case],
    tasks: Tasks,
    seed_looks: Looks,
) -> Comparison:
    """A win in speed that costs more of the metric than its margin is no win for either side.

    The mean over seeds decides, whatever its interval: what may have lost is no win either.
    It is "faster, less accurate" where the numerator is faster, "slower, more accurate" where
    the denominator is.
    """
    if comparison.verdict in ("slower", "slightly slower"):
        loser, winner, verdict = top, bottom, "slower, more accurate"
    elif comparison.verdict in ("faster", "slightly faster"):
        winner, loser, verdict = top, bottom, "faster, less accurate"
    else:
        return comparison
    difference = accuracy.difference_at_any(winner, loser, cases, tasks, seed_looks)
    task = tasks[winner.task]
    sign = 1 if more_is_better(task.metric) else -1
    if difference and sign * difference.mean < -task.margin:
        return comparison.but(verdict=verdict)
    return comparison


# Noise ------------------------------------------------------------------------------------------


def noise_floor(cases: list[Case], comparisons: list[Comparison]) -> NoiseFloor:
    """How small a difference this run can tell, and what the harness costs."""
    by_id = {case.id: case for case in cases}
    bounds = [c.ci for c in comparisons if c.ci and c.kind != "control"]
    halves = [(high / low) ** 0.5 - 1 for low, high in bounds]
    empty: dict[str, list[float]] = {}
    shortest = []
    for case in cases:
        for block in case.blocks:
            values = case.timing.step_s.get(str(block.match), {}).get(str(block.block))
            if values:
                shortest.append(block.shortest_s)
                empty.setdefault(case.framework, []).append(block.empty_s / median(values))
    return NoiseFloor(
        controls=[_control(c, by_id[c.numerator]) for c in comparisons if c.kind == "control"],
        median_half_width=median(halves) if halves else None,
        p90_half_width=float(np.quantile(halves, 0.9)) if halves else None,
        ratios=len(halves),
        empty_sample_share={name: max(values) for name, values in empty.items()},
        shortest_sample_s=min(shortest, default=None),
    )


def _control(comparison: Comparison, case: Case) -> Control:
    return Control(
        framework=case.framework,
        flavour=case.flavour,
        technique=comparison.technique,
        task=comparison.task,
        ratio=comparison.ratio,
        ci=comparison.ci,
        sd=comparison.sd,
        verdict=comparison.verdict,
    )
