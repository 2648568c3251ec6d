"""The rule of a ladder, and what its runs say: which rung stays, and what each brought.

Fixed beforehand: a rung is measured against the program below it in `blocks` pairs of runs, next to
each other in time and with the same seed; which of the two runs first turns from pair to pair. The
rung hurts

- where the 95% interval of the figure that it is judged by lies wholly on the wrong side of the
  program below, or
- where the 95% interval of its quality lies wholly more than the task's margin on the wrong side,
  or
- where that figure is `FAR` times that of the program below in its first pair: it needs no others.

A rung that hurts, or fails, or whose quality is no number, is shown and left out of what follows,
in that framework. Intervals are Student's t over pairs, of log ratios, and of differences for the
quality. Of ratios three pairs know little of their own scatter: that of the rungs before counts,
too, as in `bench.analysis.sequential`; never that of later ones, so that a decision stands. Of the
quality it does not: a rung that changes no number, such as an input pipeline, has no scatter at
all. A single pair has no interval, so that only what is `FAR` beyond is left out then.

Against the plain program a rung stands at the product of the ratios up to it, each taken next to
its own program below, since a machine's speed may drift between the first rung and the last. In the
end the plain program, the whole stack, and each rung alone on the plain program run next to one
another: what the parts promise is the product of their ratios.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp, log
from statistics import fmean

import numpy as np

from bench.analysis.certificates import difference
from bench.analysis.verdicts import Interval, Ratio, compare, quantile, summed, t_interval
from bench.ladders.ladder import JUDGED, Ladder, Rung
from bench.ladders.record import Climbed, Run, Rungs
from bench.record import Block, Case

PARTS = "parts"  # the stage in which each rung stands alone beside the stack
MULTIPLIED = ("iteration", "memory")  # figures of which the parts promise a product
FAR = 3.0  # far beyond what a machine does to a pair
PRIOR = 2.0  # degrees of freedom that the variance of other rungs, which are few, counts for
COMPARED = ("iteration", "memory", "whole", "latency", "size")  # ratios to the program below
FIGURES = (*COMPARED, "epoch", "samples_per_s", "utilisation", "fluctuation", "whole_memory")
FIGURES += ("host_memory", "device_utilisation", "device_fluctuation", "quality", "first_step")

Pairs = list[tuple[Run, Run]]  # of a program and another, block by block
Values = dict[str, list[float]]  # figure -> of each pair the log ratio, or by how much it is better


@dataclass(frozen=True)
class Step:
    """A rung in one framework.

    `below`, `rungs`: the program below it, and its program. `state`: "open" (pairs are missing),
    "kept", "left out", "failed" or "nothing" (it changes nothing here). `figures`: means over its
    runs, as far as measured. `below_by`: figure -> ratio to the program below; `plain_by`: to the
    plain one. `quality`: how much better than below, with its interval. `values`: of each pair.
    """

    rung: Rung
    below: Rungs
    rungs: Rungs
    state: str
    reason: str | None = None
    figures: dict[str, float] = field(default_factory=dict)
    below_by: dict[str, Ratio] = field(default_factory=dict)
    plain_by: dict[str, Ratio] = field(default_factory=dict)
    quality: Interval | None = None
    values: Values = field(default_factory=dict)

    @property
    def stands(self) -> Rungs:
        """The program on which the next rung is put."""
        return self.rungs if self.state == "kept" else self.below

    @property
    def helps(self) -> bool:
        """Whether it is kept, and the whole 95% interval of its figure is better."""
        if self.state != "kept":
            return False
        if self.rung.judged == "quality":
            low = getattr(self.quality, "low", None)
            return low is not None and low > 0
        ci = getattr(self.below_by.get(self.rung.judged), "ci", None)
        return ci is not None and ci[1] < 1


def climb(ladder: Ladder, runs: Sequence[Run], framework: str, blocks: int) -> list[Step]:
    """The rungs in order, up to the first that is still open."""
    of_framework = [run for run in runs if run.framework == framework]
    steps: list[Step] = []
    for rung in ladder.rungs:
        below = steps[-1].stands if steps else ()
        if framework in rung.nothing:
            steps.append(Step(rung, below, below, "nothing", rung.nothing[framework]))
            continue
        steps.append(_step(ladder, rung, below, of_framework, blocks, steps))
        if steps[-1].state == "open":
            break
    return steps


def climbs_of(ladder: Ladder, record: Climbed) -> dict[str, list[Step]]:
    """Framework -> the rungs of a record."""
    return {
        framework: climb(ladder, record.runs, framework, record.blocks)
        for framework in record.frameworks
    }


def _step(
    ladder: Ladder, rung: Rung, below: Rungs, runs: list[Run], blocks: int, before: list[Step]
) -> Step:
    here = [run for run in runs if run.stage == rung.name]
    rungs = (*below, rung.name)
    pairs = _pairs(here, rungs, below)
    values = _values(ladder, pairs)
    ratios = {name: _ratio(values[name], _kin(before, name)) for name in COMPARED if name in values}
    quality = None
    if "quality" in values:
        quality = t_interval(values["quality"])
    complete = len(pairs) >= blocks
    state, reason = _judged(ladder, rung, here, rungs, values, ratios, quality, complete)
    return Step(
        rung,
        below,
        rungs,
        state,
        reason,
        means(here, rungs),
        ratios,
        _chained(ratios, before),
        quality,
        values,
    )


def _pairs(runs: list[Run], rungs: Rungs, others: Rungs) -> Pairs:
    """The runs of both programs, block by block, where both ended well."""
    first, second = _by_block(runs, rungs), _by_block(runs, others)
    return [(first[block], second[block]) for block in sorted(first.keys() & second.keys())]


def _by_block(runs: list[Run], rungs: Rungs) -> dict[int, Run]:
    """The run of a program in each block in which it ended well."""
    return {run.block: run for run in runs if run.status == "OK" and run.rungs == rungs}


def _values(ladder: Ladder, pairs: Pairs) -> Values:
    """What each pair says of each figure that all of them have."""
    values = {name: logs for name in COMPARED if (logs := _log_ratios(pairs, name))}
    both = [(run.value("quality"), other.value("quality")) for run, other in pairs]
    if both and not any(value is None for pair in both for value in pair):
        sign = 1 if ladder.more_is_better else -1
        values["quality"] = [sign * (quality - other) for quality, other in both]
    return values


def _log_ratios(pairs: Pairs, figure: str) -> list[float]:
    """The log ratio of a figure of each pair; nothing where one lacks it."""
    values = [(run.value(figure), other.value(figure)) for run, other in pairs]
    if any(not value or value < 0 for pair in values for value in pair):
        return []
    return [log(value / other) for value, other in values]


def _kin(steps: list[Step], figure: str) -> list[list[float]]:
    """What the pairs of these rungs say of a figure."""
    return [step.values[figure] for step in steps if figure in step.values]


def _ratio(logs: list[float], kin: list[list[float]]) -> Ratio:
    """The ratio that these log ratios are of."""
    mean, freedom = _interval(logs, kin)
    ci = mean.ci and (exp(mean.low), exp(mean.high))
    return Ratio(exp(mean.mean), ci, mean.sd, mean.n, None, freedom=freedom)


def _interval(values: list[float], kin: list[list[float]]) -> tuple[Interval, float]:
    """The 95% interval of a mean, and its degrees of freedom.

    The variance that `kin` have on average counts for `PRIOR` of them (Smyth, 2004).
    """
    kin = [each for each in kin if len(each) > 1]
    if len(values) < 2 or not kin:
        return t_interval(values), len(values) - 1
    scatter = sum(np.var(each) * len(each) for each in kin) / sum(len(each) - 1 for each in kin)
    freedom = len(values) - 1 + PRIOR
    sd = float((np.var(values) * len(values) + PRIOR * scatter) / freedom) ** 0.5
    mean, half = fmean(values), quantile(0.95, freedom) * sd / len(values) ** 0.5
    return Interval(mean, mean - half, mean + half, sd, len(values)), freedom


def _judged(
    ladder: Ladder,
    rung: Rung,
    runs: list[Run],
    rungs: Rungs,
    values: Values,
    ratios: dict[str, Ratio],
    quality: Interval | None,
    complete: bool,
) -> tuple[str, str | None]:
    """The state of a rung, and why it is not kept."""
    for run in runs:
        whose = "" if run.rungs == rungs else "the program below: "
        if run.status != "OK":
            return "failed", f"{whose}{run.reason}"
        if run.value("quality") is None:
            return "failed", f"{whose}its quality is no number"
    far = next(iter(values.get(rung.judged, ())), 0.0)
    if rung.judged != "quality" and far > log(FAR):
        return "left out", f"{JUDGED[rung.judged]}: {exp(far):.1f} times that of the program below"
    if not complete:
        return "open", None
    said = hurts(rung, ratios, quality, ladder.spec.margin)
    return ("left out", said) if said else ("kept", None)


def hurts(
    rung: Rung, ratios: dict[str, Ratio], quality: Interval | None, margin: float
) -> str | None:
    """Why a rung hurts by the rule; None if it does not."""
    judged, ci = JUDGED[rung.judged], getattr(ratios.get(rung.judged), "ci", None)
    if ci and ci[0] > 1:
        return f"{judged}: {ci[0]:.2f} to {ci[1]:.2f} times that of the program below"
    worst = -margin if rung.judged != "quality" else 0.0
    if quality and quality.high is not None and quality.high < worst:
        return f"quality: {-quality.high:.2f} to {-quality.low:.2f} worse than the program below"
    return None


def means(runs: Sequence[Run], rungs: Rungs) -> dict[str, float]:
    """The mean of each figure over the runs of a program; its first step is that of the first run.

    Later runs find a compiler's cache on disk.
    """
    ended = dict(sorted(_by_block(runs, rungs).items())).values()
    figures = {}
    for name in FIGURES:
        values = [value for run in ended if (value := run.value(name)) is not None]
        if values:
            figures[name] = values[0] if name == "first_step" else fmean(values)
    return figures


def _chained(ratios: dict[str, Ratio], before: list[Step]) -> dict[str, Ratio]:
    """The ratios to the plain program: products with those of all rungs below that were kept."""
    kept = [step.below_by for step in before if step.state == "kept"]
    return {
        name: product([*(by[name] for by in kept if name in by), ratio])
        for name, ratio in ratios.items()
    }


def product(ratios: list[Ratio]) -> Ratio:
    """The product of independent ratios, with an interval where all have one."""
    mean, count = sum(log(each.ratio) for each in ratios), min(each.n for each in ratios)
    if any(each.sd is None for each in ratios):
        return Ratio(exp(mean), None, None, count, None)
    sd, freedom = summed([(r.sd**2 / r.n, r.freedom or r.n - 1) for r in ratios])
    half = quantile(0.95, freedom) * sd
    return Ratio(exp(mean), (exp(mean - half), exp(mean + half)), sd, count, None, None, freedom)


# What the parts promise ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Promise:
    """Of a figure: the ratio that the rungs promise one by one, and the ratio of their stack.

    `alone`: rung -> its ratio on the plain program. `top`: that of the whole ladder.
    """

    promised: Ratio
    gave: Ratio
    top: Ratio | None
    alone: dict[str, Ratio]


def parts_of(steps: list[Step]) -> list[Rungs]:
    """The programs of the last stage: plain, each part on plain, their stack, the whole ladder.

    Parts are the kept rungs judged by a figure whose ratios can be multiplied.
    """
    if not steps or steps[-1].state == "open":
        return []
    parts = [s.rung.name for s in steps if s.state == "kept" and s.rung.judged in MULTIPLIED]
    alone = [(name,) for name in parts]
    return list(dict.fromkeys([(), *alone, tuple(parts), steps[-1].stands]))


def promises(runs: Sequence[Run], framework: str, steps: list[Step]) -> dict[str, Promise]:
    """Figure -> what the parts promised and what the stack gave, from the blocks that have all."""
    programs = parts_of(steps)
    here = _last(runs, framework)
    names = [s.rung.name for s in steps if s.state == "kept" and s.rung.judged in MULTIPLIED]
    if not programs or not names:
        return {}
    made = {}
    for figure in MULTIPLIED:
        by = {rungs: _by_log(here, rungs, figure) for rungs in programs[1:]}
        blocks = sorted(set.intersection(*(set(logs) for logs in by.values()))) if by else []
        if not blocks:
            continue
        kin = _kin(steps, figure)
        ratios = {rungs: _ratio([logs[b] for b in blocks], kin) for rungs, logs in by.items()}
        made[figure] = Promise(
            compare([sum(by[(name,)][block] for name in names) for block in blocks]),
            ratios[tuple(names)],
            ratios.get(steps[-1].stands),
            {name: ratios[(name,)] for name in names},
        )
    return made


def _last(runs: Sequence[Run], framework: str) -> list[Run]:
    """The runs of the last stage of a framework."""
    return [run for run in runs if (run.stage, run.framework) == (PARTS, framework)]


def top_quality(
    ladder: Ladder, runs: Sequence[Run], framework: str, steps: list[Step]
) -> Interval | None:
    """How much better the top of the ladder is than the plain program, measured next to it."""
    values = _values(ladder, _top_pairs(runs, framework, steps))
    if "quality" not in values:
        return None
    return t_interval(values["quality"])


def top_ratio(runs: Sequence[Run], framework: str, steps: list[Step], figure: str) -> Ratio | None:
    """The ratio of a figure of the ladder's top to the plain program's, measured next to it."""
    logs = _log_ratios(_top_pairs(runs, framework, steps), figure)
    return _ratio(logs, _kin(steps, figure)) if logs else None


def between(runs: Sequence[Run], climbs: dict[str, list[Step]], figure: str) -> list[Ratio | None]:
    """The ratios of a figure of PyTorch to TensorFlow: for the plain programs, and for the tops."""
    if set(climbs) != {"pt", "tf"} or not all(map(parts_of, climbs.values())):
        return [None, None]
    ratios = []
    for programs in ({"pt": (), "tf": ()}, {f: steps[-1].stands for f, steps in climbs.items()}):
        pt, tf = (_by_block(_last(runs, f), programs[f]) for f in ("pt", "tf"))
        pairs = [(pt[block], tf[block]) for block in sorted(pt.keys() & tf.keys())]
        logs = _log_ratios(pairs, figure)
        ratios.append(_ratio(logs, []) if logs else None)
    return ratios


def _top_pairs(runs: Sequence[Run], framework: str, steps: list[Step]) -> Pairs:
    if not steps or steps[-1].state == "open" or not steps[-1].stands:
        return []
    return _pairs(_last(runs, framework), steps[-1].stands, ())


def _by_log(runs: list[Run], rungs: Rungs, figure: str) -> dict[int, float]:
    """Block -> the log of the ratio of a figure to the plain program's."""
    by_block = {}
    for run, plain in _pairs(runs, rungs, ()):
        if logs := _log_ratios([(run, plain)], figure):
            (by_block[run.block],) = logs
    return by_block


# Certificates -------------------------------------------------------------------------------------


def twin_difference(
    ladder: Ladder, runs: Sequence[Run], stage: str, climbs: dict[str, list[Step]]
) -> str | None:
    """Why the frameworks' work at a rung differs, by their first losses; None if it is equal.

    "another computation": only one of them has a rung that changes the losses by design. "not
    measured": one of them did not run.
    """
    twins = []
    for framework, steps in climbs.items():
        step = next((step for step in steps if step.rung.name == stage), None)
        if step is None or not step.figures:
            return "not measured"
        twins.append((step.rungs, _case(ladder, runs, stage, framework, step.rungs)))
    if len(twins) < 2:
        return "not measured"
    (rungs, one), (other_rungs, other) = twins
    if any((r.name in rungs) != (r.name in other_rungs) for r in ladder.rungs if r.changes):
        return "another computation"
    if {block.block for block in one.blocks}.isdisjoint(block.block for block in other.blocks):
        return "not measured"
    return difference(one, other)


def _case(ladder: Ladder, runs: Sequence[Run], stage: str, framework: str, rungs: Rungs) -> Case:
    """A rung's runs in the form in which certificates are compared."""
    here = [run for run in runs if (run.stage, run.framework) == (stage, framework)]
    tolerances = [r.loss_tolerance for r in ladder.rungs if r.name in rungs and r.loss_tolerance]
    return Case(
        id=f"{framework}/{stage}",
        technique=ladder.name,
        framework=framework,
        variant=stage,
        role="variant",
        task=ladder.task,
        batch_size=ladder.batch,
        status="OK",
        loss_tolerance=max([ladder.spec.parity, *tolerances]),
        blocks=[
            Block(
                match=0,
                block=block,
                losses=run.evidence.losses,
                weights_sha256=run.evidence.weights_sha256,
            )
            for block, run in _by_block(here, rungs).items()
            if run.evidence
        ],
    )
