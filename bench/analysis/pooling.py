"""Pools runs on machines of one class into one record, whose intervals hold for other runs, too.

The unit of replication is the run: the scatter of its blocks does not tell how far another run
would be away. So each run gives one estimate of a row's time, which is one block of the pooled
record. The analysis then judges runs as it judges blocks. A ratio is the mean of the runs' log
ratios with Student's t-interval over runs: the random-effects interval of Hartung and Knapp (2001)
with equal weights. Ratios of one kind share their variance, see `sequential`.

Peak memory, first calls and probes have one figure per run, too. Metrics of training are means of a
seed over runs: all runs use the same seeds, so the number of seeds makes the interval. A ratio that
only one run has is that run's. Two rows are the same work if the runs' certificates say so, by the
rule for blocks. Counts, file sizes and proofs are those of the newest run. Left out are samples of
single steps, loads, interruptions, and rows whose settings differ from the newest run's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations
from statistics import fmean, median
from typing import Any

from bench.analysis.analyse import analyse, raw
from bench.analysis.machine_class import differences, same_class
from bench.record import (
    Accuracy,
    Block,
    Case,
    ColdStart,
    Comparison,
    Environment,
    Metric,
    Record,
    Timing,
)

MATCH = "0"  # in which all play
Rows = dict[str, list[Case | None]]  # by id: the same program in each run


def by_class(records: Sequence[Record]) -> list[list[Record]]:
    """The records grouped by class of machine, in their order; any two of a group are alike."""
    classes: list[list[Record]] = []
    for record in records:
        fitting = [c for c in classes if all(_alike(record, one) for one in c)]
        (fitting[0] if fitting else classes).append(record if fitting else [record])
    return classes


def _alike(record: Record, other: Record) -> bool:
    return same_class(record.environment, other.environment)


def pool(records: Sequence[Record]) -> Record:
    """The record of several runs on one class of machine; a single record is returned unchanged.

    Raises ValueError with one line if the runs can't be pooled.
    """
    if len(records) == 1:
        return records[0]
    _check(records)
    runs = sorted(records, key=lambda record: record.started)
    newest = runs[-1]
    named = {case.id: case for run in runs for case in run.cases}  # the newest run's counts
    rows = {name: [_same(run, case) for run in runs] for name, case in named.items()}
    measured = newest.but(
        command=" + ".join(dict.fromkeys(run.command for run in runs)),
        finished=all(run.finished for run in runs),
        environment=_environment(runs),
        techniques=_merged(run.techniques for run in runs),
        tasks=_merged(run.tasks for run in runs),
        cases=[_case(named[name], each) for name, each in rows.items()],
        pooled=[run.started for run in runs],
        looks=[len(runs)],
        resumed=[],
        seconds={},
        matches=[],
        blocks=[],
        passes=[],
    )
    whole = analyse(raw(measured))
    of_one = _of_runs(runs, rows)
    compared = [of_one.get(_pair(c), c) if c.n == 1 else c for c in whole.comparisons]
    return whole.but(comparisons=compared)


def _check(records: Sequence[Record]) -> None:
    for first, other in combinations(records, 2):
        if not _alike(first, other):
            apart = differences(first.environment, other.environment)[0]
            raise ValueError(f"runs on different classes of machine can't be pooled: {apart}")
        if first.pooled or other.pooled:
            raise ValueError("one of the records is pooled already: give its runs")
        if other.environment.model != first.environment.model:
            raise ValueError("runs of different files can't be pooled: give runs of one file")
    if len({record.started for record in records}) < len(records):
        raise ValueError("a run is given twice: give each once")


def _environment(runs: Sequence[Record]) -> Environment:
    """That of the newest run, at the median of the speeds that the runs found."""
    peaks = [run.environment.peak_flops or {} for run in runs]
    speeds = {name: median(_known(peak.get(name) for peak in peaks)) for name in _merged(peaks)}
    return runs[-1].environment.but(peak_flops=speeds or None)


def _same(run: Record, case: Case) -> Case | None:
    """The same program in another run; None where that was not measured, or has other settings."""
    other = next((one for one in run.cases if one.id == case.id), None)
    usable = other and other.status == "OK" and other.settings == case.settings
    return other if usable and other.program_id == case.program_id else None


def _of_runs(runs: Sequence[Record], rows: Rows) -> dict[tuple[str, str], Comparison]:
    """The newest comparison of each pair that is pooled, as a run made it."""
    return {
        _pair(comparison): comparison
        for number, run in enumerate(runs)
        for comparison in run.comparisons
        if all(name in rows and rows[name][number] for name in _pair(comparison))
    }


def _pair(comparison: Comparison) -> tuple[str, str]:
    return comparison.numerator, comparison.denominator


def _case(newest: Case, runs: Sequence[Case | None]) -> Case:
    """A case of all runs that have it. `runs`: by run, None where one lacks it."""
    has = {number: case for number, case in enumerate(runs) if case}
    if not has:
        return newest
    newest = has[max(has)]
    times = {number: case.timing.median_s for number, case in has.items() if case.has_times}
    owns = newest.program_id == newest.id  # else it shows another's figures
    steps = {MATCH: {str(number): [time] for number, time in times.items() if time}}
    blocks = {number: _block(number, case) for number, case in has.items() if case.blocks}
    trained = [case for case in has.values() if case.accuracy and case.accuracy.per_seed]
    most = max((len(case.accuracy.per_seed) for case in trained), default=0)
    whole = [case for case in trained if len(case.accuracy.per_seed) == most]
    changes: dict[str, Any] = {}
    if trained:
        changes["accuracy"] = _accuracy([case.accuracy for case in trained], whole[-1].accuracy)
        changes["trained_metrics"] = whole[-1].trained_metrics
        changes["trained_artifacts"] = whole[-1].trained_artifacts
    return newest.but(
        timing=Timing(step_s=steps if owns and steps[MATCH] else {}),
        blocks=[blocks[number] for number in sorted(blocks)] if owns else [],
        cold_starts=[_cold_start(c.cold_starts) for c in has.values() if c.cold_starts],
        probed=_probed([case.probed for case in has.values()]),
        **changes,
    )


def _block(number: int, case: Case) -> Block:
    """A run's first block, whose certificate is the run's, with the medians of all its blocks."""
    energy = [fmean(block.energy_j) for block in case.blocks if block.energy_j]
    first_calls = _known(block.first_call_s for block in case.blocks)
    return case.blocks[0].but(
        match=int(MATCH),
        block=number,
        first_call_s=median(first_calls) if first_calls else None,
        peak_bytes=max(_known(block.peak_bytes for block in case.blocks), default=None),
        energy_j=[median(energy)] if energy else None,
    )


def _cold_start(starts: Sequence[ColdStart]) -> ColdStart:
    """What the new processes of a run found, as that of one: the median of each figure."""
    first_calls = _known(start.first_call_s for start in starts)
    return starts[0].but(
        first_call_s=median(first_calls) if first_calls else None,
        memory=_medians([start.memory for start in starts]),
        parts=_medians([start.parts for start in starts]),
    )


def _medians(starts: Sequence[dict[str, float | None]]) -> dict[str, float | None]:
    """The median of each entry of what all have; None where one does not know it."""
    names = [name for name in starts[0] if all(name in start for start in starts)]
    values = {name: [start[name] for start in starts] for name in names}
    return {name: None if None in some else median(some) for name, some in values.items()}


def _probed(runs: Sequence[dict[str, Metric]]) -> dict[str, Metric]:
    """The median of each figure over the runs, whose values are its samples."""
    names = dict.fromkeys(name for metrics in runs for name in metrics)
    return {name: _metric([m[name] for m in runs if name in m]) for name in names}


def _metric(metrics: Sequence[Metric]) -> Metric:
    values = _known(metric.value for metric in metrics)
    if len(values) < 2:
        return next((one for one in metrics if one.value is not None), metrics[-1])
    return metrics[-1].but(value=median(values), ci=None, samples=values)


def _accuracy(runs: Sequence[Accuracy], longest: Accuracy) -> Accuracy:
    """The metric of each seed: its mean over the runs that trained with it."""
    per_seed = []
    for seed in range(len(longest.per_seed)):
        values = [run.per_seed[seed] for run in runs if seed < len(run.per_seed)]
        per_seed.append(None if None in values else fmean(values))
    return Accuracy(metric=longest.metric, per_seed=per_seed)


# Helpers ------------------------------------------------------------------------------------------


def _known(values: Iterable[Any]) -> list:
    return [value for value in values if value is not None]


def _merged(dicts: Iterable[dict]) -> dict:
    """All entries; of those of one name the last."""
    whole: dict = {}
    for one in dicts:
        whole |= one
    return whole
