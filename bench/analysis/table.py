"""The tidy table of a record: every figure of every row, and its ratio to its baseline's.

A row may name another variant to be compared with (`against`).

A figure has an interval if several processes measured it, a range if one process measured it
repeatedly, and neither if it was measured once. Counts and file sizes are exact. The ratio of two
times is over the blocks that have both, so its interval is narrower than those of the times. Peak
memory, first calls, starts, and rates of pipelines and replicas are measured at one time of a run,
in one process or a few. Their ratios have the scatter of the rows that the same run measured in
several processes, and the scatter from run to run, `BETWEEN_RUNS`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import exp, inf, log
from typing import Any

from bench.analysis import accuracy, comparisons, pairing
from bench.analysis.accuracy import Accuracy
from bench.analysis.families import OF_TRAINING, family_of
from bench.analysis.verdicts import DELTA, half_width, shown_less, shown_more
from bench.record import DIFFERENT, Case, Comparison, Metric, Record
from shared.specs import more_is_better

# Figures by name; any other is a metric of the case.
TIME, RATE, MEMORY, BATCH, SIZE = "time", "samples_per_s", "memory", "largest_batch", "size"
STEPS, GAINED, FIRST_CALL, START = "steps_to_target", "gained", "first_call", "start"
WITH_IMPORTS = "memory_with_imports"  # of all processes
COMPARED = (TIME, RATE, MEMORY, BATCH, SIZE, STEPS, GAINED, FIRST_CALL, START)
MORE_IS_BETTER = (RATE, BATCH, GAINED, "efficiency", "share_of_limit")
COUNTED = ("checkpoint", "parameters", "parameters_not_zero", "macs", "found", "plain_unhealthy")

# Metrics that are figures of another name.
RENAMED = ("cold_first_calls_s", "compressed_artifact", "artifact", "memory_all", "memory")

# The sd of a figure's logarithm from run to run of a machine, beyond what processes of one run
# scatter by: a run that measures a row at one time does not see it. As docs/reproducibility.json
# has them, by moments: `twinbench validate reproduce`.
BETWEEN_RUNS = {MEMORY: 0.037, FIRST_CALL: 0.077, START: 0.042, RATE: 0.081}

# Why there is no ratio, or none that decides.
NOT_MEASURED = "not measured in this record"
NO_ACCURACY = "accuracy not measured"
ONCE = "measured once, without an interval"
NOT_COMPARABLE = "not the same work"


@dataclass(frozen=True)
class Figure:
    """A figure or a ratio of two, in base units. `kind`: interval, range, once or exact.

    `count`: the number of processes, if it was one or a few.
    """

    value: float
    low: float
    high: float
    kind: str
    count: int = 1

    @property
    def bounds(self) -> tuple[float, float] | None:
        """The bounds to judge by; None if it was measured once."""
        return None if self.kind == "once" else (self.low, self.high)

    def turned(self) -> Figure:
        """The inverse of a ratio."""
        return Figure(1 / self.value, _over(1, self.high), _over(1, self.low), self.kind)


def _over(top: float, bottom: float) -> float:
    """A bound divided by a bound, which may touch 0."""
    return top / bottom if bottom > 0 else inf


def quotient(figure: Figure, other: Figure) -> Figure:
    """The ratio of two figures, by the bounds of both."""
    kinds = {figure.kind, other.kind}
    kind = next(kind for kind in ("once", "range", "interval", "exact") if kind in kinds)
    value = figure.value / other.value
    if kind == "once":
        return Figure(value, value, value, kind)
    low, high = max(0.0, figure.low) / other.high, _over(figure.high, other.low)
    return Figure(value, low, high, kind)


def level(name: str, figure: Figure | None) -> float:
    """A figure as a number, of which less is better; no figure counts as the worst."""
    if figure is None:
        return inf
    return -figure.value if name in MORE_IS_BETTER else figure.value


def is_better(name: str, ratio: Figure) -> bool:
    """Whether the whole interval of a ratio shows a better figure, beyond the margin.

    Points gained are not a ratio: any gain counts.
    """
    if ratio.bounds is None or name == GAINED:
        return ratio.bounds is not None and ratio.low > 0
    return (shown_more if name in MORE_IS_BETTER else shown_less)(ratio.bounds)


def is_worse(name: str, ratio: Figure, margin: float = DELTA) -> bool:
    """Whether the whole interval shows a worse figure; `margin`: what counts as no difference."""
    if ratio.bounds is None or name == GAINED:
        return ratio.bounds is not None and ratio.high < 0
    return ratio.high < 1 / (1 + margin) if name in MORE_IS_BETTER else ratio.low > 1 + margin


# Figures of a case --------------------------------------------------------------------------------


def figures(case: Case) -> dict[str, Figure]:
    """Every figure of a case, by name."""
    return {name: figure for name, figure in _figures(case) if figure}


def _figures(case: Case) -> Iterator[tuple[str, Figure | None]]:
    timing, metrics = case.timing, dict(case.metrics)
    calls = metrics.pop("cold_first_calls_s", Metric())
    compressed = metrics.pop("compressed_artifact", Metric())
    metrics.pop("artifact", None)
    processes = [metrics.pop(name, None) for name in ("memory_all", "memory")]
    yield TIME, _measured(timing.median_s, timing.ci_s)
    yield MEMORY, _memory(case)
    yield SIZE, _exact(case.artifact_bytes)
    yield "compressed_size", _exact(compressed.value)
    first = _measured(timing.cold_first_call_s, None, calls.samples or calls.ci)
    yield FIRST_CALL, first and _of_processes(first, calls.samples)
    yield WITH_IMPORTS, _metric(next(filter(None, processes), Metric()))
    yield GAINED, _points_gained(case)
    for name, metric in metrics.items():
        figure = _exact(metric.value) if name in COUNTED else _metric(metric)
        if figure and name in BETWEEN_RUNS:
            figure = _of_processes(figure, metric.samples)
        yield name, figure
    if BATCH in metrics and (most := metrics[BATCH].value):  # 5% more does not fit
        yield BATCH, Figure(most, most, 1.05 * most, "range")


def _metric(metric: Metric) -> Figure | None:
    return _measured(metric.value, metric.ci, metric.samples)


def _measured(value, ci, samples=None) -> Figure | None:
    """A figure with its interval, or the range of what it was repeated, where it has either."""
    if value is None:
        return None
    if ci and None not in ci:
        return Figure(value, *ci, "interval")
    repeated = [sample for sample in samples or () if sample is not None]
    if len(repeated) > 1 and min(repeated) <= value <= max(repeated):
        return Figure(value, min(repeated), max(repeated), "range")
    return Figure(value, value, value, "once") if value > 0 else None


def _exact(value: float | None) -> Figure | None:
    return None if value is None else Figure(value, value, value, "exact")


def _of_processes(figure: Figure, samples: list | None) -> Figure:
    count = len(samples or ()) or 1
    return Figure(figure.value, figure.low, figure.high, figure.kind, count)


def _memory(case: Case) -> Figure | None:
    """The device's peak, which its allocator counts, else that above the imports."""
    memory = case.memory
    if memory is None:
        return None
    if memory.device_peak_bytes is not None:
        return _exact(memory.device_peak_bytes)
    mean = memory.above_import_bytes
    peaks = memory.samples.get("above_import_bytes")
    value = memory.above_import if mean is None else mean
    figure = _measured(value, memory.above_import_ci, peaks)
    return _of_processes(figure, peaks) if figure and figure.value > 0 else None


def _points_gained(case: Case) -> Figure | None:
    """How much better the metric is that a training ends with than its baseline's."""
    difference = case.accuracy.difference if case.accuracy else None
    if not difference or difference.mean is None:
        return None
    return _gained(difference, case.accuracy.metric)


def _gained(difference, metric: str | None) -> Figure:
    mean = difference.mean
    low, high = difference.ci or (mean, mean)
    kind = "interval" if difference.ci else "once"
    if more_is_better(metric):
        return Figure(mean, low, high, kind)
    return Figure(-mean, -high, -low, kind)


# Prices -------------------------------------------------------------------------------------------

# How much work a price is, cheaper ones first: training is its epochs more than calibrating, a
# teacher that has to be trained first as much as ten of them.
FREE, COMPILE, CALIBRATE, TEACHER = 0, 1, 2, 10
# Where predictions are compiled, the baselines are too: their first call takes so many seconds.
COMPILES = 2.0


def price(case: Case) -> tuple[int, str]:
    """How much work a row needs, as a rank and in words ("" for none)."""
    declared = case.price
    if declared and declared.epochs:
        trained = "a trained teacher, " if declared.teacher else ""
        work = CALIBRATE + declared.epochs + TEACHER * declared.teacher
        return work, f"{trained}{declared.epochs} epochs of training"
    if declared and declared.calibration:
        return CALIBRATE, "calibration"
    return (COMPILE, "compiling") if _compiles(case) else (FREE, "")


def _compiles(case: Case) -> bool:
    if case.mode == "predict":
        return (case.timing.cold_first_call_s or 0.0) > COMPILES
    if case.role != "variant":
        return False
    return bool(case.price and case.price.compiled) or case.settings.get("compiled") is True


# Rows ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A case with its figures, as it is ranked.

    `base`: the case it is compared with. `ratios`: its figures over those of `base`; points gained
    are over its baseline. `effort`: how much work it needs; `price`: the same in words.
    `comparison`: with `base`. `repeats`: rows of other techniques that run the same program.
    """

    case: Case
    base: Case | None
    figures: dict[str, Figure]
    ratios: dict[str, Figure]
    accuracy: Accuracy
    effort: int = FREE
    price: str = ""
    comparison: Comparison | None = None
    repeats: tuple[Row, ...] = ()

    @property
    def is_baseline(self) -> bool:
        """Whether other rows are compared with it."""
        return self.case.role == "baseline"

    @property
    def lacks(self) -> str | None:
        """The variant it is compared with, if that was not measured."""
        return self.case.against if self.base is None else None

    @property
    def verdict(self) -> str | None:
        """The verdict of its time over its baseline's."""
        return self.comparison.verdict if self.comparison else None

    @property
    def members(self) -> tuple[Row, ...]:
        """The row and its repeats."""
        return (self, *self.repeats)

    def improves(self, name: str) -> bool:
        """Whether a figure was shown to be better than its baseline's, whatever the accuracy."""
        return name in self.ratios and is_better(name, self.ratios[name])

    def gains(self, name: str) -> bool:
        """Whether a figure was shown to be better, and accuracy is kept."""
        return bool(self.accuracy.kept) and self.improves(name)

    @property
    def time_ratio(self) -> Figure | None:
        """The time of a step, or else of a sample, over its baseline's."""
        rate = self.ratios.get(RATE)
        return self.ratios.get(TIME) or (rate and rate.turned())

    @property
    def pays(self) -> bool:
        """Whether it gains in some figure other than its start."""
        return any(self.gains(name) for name in self.ratios if name not in (FIRST_CALL, START))


class Table:
    """The figures of a record's cases, and the ratios of any two of them."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self._figures = {case.id: figures(case) for case in record.cases}
        self._scatter = {name: self._pooled(name) for name in BETWEEN_RUNS}
        self._compared = {(c.numerator, c.denominator): c for c in reversed(record.comparisons)}

    @cached_property
    def rows(self) -> list[Row]:
        """Every case that ran."""
        return [self._row(case) for case in self.record.cases if case.status == "OK"]

    def _row(self, case: Case) -> Row:
        base = pairing.compared_with(case, self.record.cases)
        named = self._figures[case.id]
        ratios = {}
        for name in COMPARED:
            timed = name == RATE and TIME in named  # the same as its time
            ratio = None if timed else self.against_baseline(case, name)[0]
            if ratio:
                ratios[name] = ratio
        kept = accuracy.of(case, self.record.cases, self.record.tasks)
        if family_of(case.technique) in OF_TRAINING or case.technique == "batch_size_finder":
            kept = Accuracy(True, asked=False)  # what feeds, spreads or fits is trained elsewhere
        compared = self._compared.get((case.id, base.id)) if base else None
        return Row(case, base, named, ratios, kept, *price(case), comparison=compared)

    def kept_on(self, row: Row) -> list[str]:
        """The other tasks on which the same variant was trained and kept accuracy."""
        if row.accuracy.trained:
            return []
        same = (row.case.technique, row.case.variant, row.case.framework)
        trained = [
            other
            for other in self.rows
            if (other.case.technique, other.case.variant, other.case.framework) == same
            and other.accuracy.trained
            and other.accuracy.kept
        ]
        return list(dict.fromkeys(other.case.task for other in trained))

    def value(self, case: Case, name: str) -> tuple[Figure | None, str | None]:
        """A figure of a case, or the reason why there is none."""
        figure = self._figures[case.id].get(name)
        return (figure, None) if figure else (None, NOT_MEASURED)

    def against_baseline(
        self, case: Case, name: str, variant: str | None = None
    ) -> tuple[Figure | None, str | None]:
        """A figure over that of the case it is compared with, or of another variant by name.

        Accuracy is compared with the baseline unless a variant is named.
        """
        cases = self.record.cases
        if variant is not None:
            other = pairing.variant_of(case, variant, cases)
        elif name in ("accuracy", GAINED):
            other = pairing.baseline(case, cases)
        else:
            other = pairing.compared_with(case, cases)
        return (None, NOT_MEASURED) if other is None else self.between(case, other, name)

    def between(self, case: Case, other: Case, name: str) -> tuple[Figure | None, str | None]:
        """A figure over that of any other case, or the reason why that is unknown.

        "accuracy": the difference in points; "gained": of any metric, more is better.
        """
        if name == TIME:
            return self._time(case, other)
        if name == "accuracy" and accuracy.facts(self.record.tasks, case.task).metric != name:
            return None, NO_ACCURACY
        if name in ("accuracy", GAINED):
            return self._more_accurate(case, other)
        pair = [self._figures[each.id].get(name) for each in (case, other)]
        if name == MEMORY and len({figure and figure.kind == "exact" for figure in pair}) > 1:
            return None, NOT_COMPARABLE  # a GPU's and the host's
        return self.ratio(name, *pair) if all(pair) else (None, NOT_MEASURED)

    def ratio(self, name: str, figure: Figure, other: Figure) -> tuple[Figure | None, str | None]:
        """A ratio of two figures."""
        if not figure.value or not other.value:
            return None, NOT_MEASURED
        if name in BETWEEN_RUNS and self.noise(name, figure, other):
            return self._scattered(name, figure.value / other.value, figure, other), None
        return quotient(figure, other), None

    def noise(self, name: str, *of: Figure) -> tuple[float, float] | None:
        """The variance of log figures, or their log ratio, within this run; degrees of freedom.

        `of`: figures of a row, of one process or a few. None if one has an interval already.
        """
        # A rate that has an interval is that of a time, of many processes.
        others = ("exact", "interval") if name == RATE else ("exact",)
        return None if any(figure.kind in others for figure in of) else self._within(name, of)

    def _within(self, name: str, of: tuple[Figure, ...]) -> tuple[float, float]:
        sd, freedom = self._scatter[name]
        return sd**2 * sum(1 / figure.count for figure in of), freedom

    # Time

    def _time(self, case: Case, other: Case) -> tuple[Figure | None, str | None]:
        """As the run compared both, block by block; or their programs."""
        for pair in ((case.id, other.id), (other.id, case.id)):
            if comparison := self._compared.get(pair):
                if comparison.verdict == DIFFERENT:
                    return None, NOT_COMPARABLE
                if comparison.ratio is not None:
                    ratio = _bounded(comparison.ratio, comparison.ci)
                    return (ratio if pair[0] == case.id else ratio.turned()), None
        pair = (case.program_id, other.program_id)
        if len(set(pair)) == 1:
            return _exact(1.0), None
        if pair not in self._side_by_side:
            return None, NOT_MEASURED
        ratio = self._side_by_side[pair]
        return ratio, None if ratio else NOT_COMPARABLE

    @cached_property
    def _side_by_side(self) -> dict[tuple[str, str], Figure | None]:
        """The ratio of each two programs of a piece of work; None of unlike work.

        What the record compares, as it does that, so that no answer says two things.
        """
        looks = tuple(self.record.looks or ())
        timed = [case for case in pairing.resolved(self.record.cases) if case.has_times]
        ratios = {}
        for work, times in comparisons.fits(timed).items():
            sides = {
                case.program_id: case.framework
                for case in timed
                if case.work == work and case.role not in ("control", "bound")
            }
            made = comparisons.side_by_side(times, sides, looks)
            ratios |= {pair: _bounded(each.ratio, each.ci) for pair, each in made.items()}
            ratios |= {pair[::-1]: ratios[pair].turned() for pair in made}
        programs = {case.id: case.program_id for case in self.record.cases}
        for comparison in self.record.comparisons:
            pair = (programs.get(comparison.numerator), programs.get(comparison.denominator))
            if pair in ratios and comparison.verdict == DIFFERENT:
                ratios[pair] = ratios[pair[::-1]] = None
            elif ratios.get(pair) and comparison.ratio is not None and comparison.ci:
                ratios[pair] = _bounded(comparison.ratio, comparison.ci)
                ratios[pair[::-1]] = ratios[pair].turned()
        return ratios

    # Accuracy

    def _more_accurate(self, case: Case, other: Case) -> tuple[Figure | None, str | None]:
        """By the seeds that both trained with."""
        tasks, looks = self.record.tasks, tuple(self.record.seed_looks or ())
        if pairing.baseline(case, self.record.cases) is other:
            gained = self._figures[case.id].get(GAINED)
            return (gained, None) if gained else (None, NO_ACCURACY)
        difference = accuracy.difference(case, other, tasks, looks)
        if difference is None or difference.mean is None:
            return None, NO_ACCURACY
        return _gained(difference, accuracy.facts(tasks, case.task).metric), None

    # Scatter

    def _pooled(self, name: str) -> tuple[float, int]:
        """The sd of a figure's logarithm over a row's processes in this run, and its freedom."""
        squares, freedom = 0.0, 0
        for case in self.record.cases:
            values = [log(v) for v in _samples(case, name) if v is not None and v > 0]
            if len(values) > 1 and case.program_id == case.id:
                mean = sum(values) / len(values)
                squares += sum((value - mean) ** 2 for value in values)
                freedom += len(values) - 1
        return (squares / freedom) ** 0.5 if freedom else 0.0, freedom

    def spread(self, name: str, figure: Figure) -> Figure:
        """A figure of one process or a few with its 95% interval."""
        return self._scattered(name, figure.value, figure)

    def _scattered(self, name: str, value: float, *of: Figure) -> Figure:
        """A figure of a row, or a ratio of two, with its interval."""
        within = self._within(name, of)
        if not within[1]:
            return _bounded(value, None)
        between = 0.0 if self.record.pooled else BETWEEN_RUNS[name]  # else what scatters is runs
        wide = exp(half_width(within, len(of) * between**2))
        return _bounded(value, (value / wide, value * wide))


def _samples(case: Case, name: str) -> list[float | None]:
    """What each process of a row had."""
    if name == MEMORY:
        return (case.memory.samples.get("above_import_bytes") if case.memory else None) or []
    metric = case.metrics.get("cold_first_calls_s" if name == FIRST_CALL else name, Metric())
    return (None if metric.ci and name != FIRST_CALL else metric.samples) or []


def _bounded(value: float, ci: tuple[float, float] | None) -> Figure:
    if ci:
        return Figure(value, *ci, "interval")
    return Figure(value, value, value, "once")


# The tidy table -----------------------------------------------------------------------------------

PARTS = ("import", "build", "first_step_peak", "steady_peak", "parameters", "gradients")
PARTS += ("optimizer", "rest")  # of memory
UNITS = {TIME: "s", MEMORY: "bytes", SIZE: "bytes", "compressed_size": "bytes", FIRST_CALL: "s"}
UNITS |= {"warm_first_call": "s"} | {f"memory_{part}": "bytes" for part in PARTS}
OF_ROWS = ("id", "technique", "framework", "flavour", "variant", "title", "program", "role")
OF_ROWS += ("against",)
OF_ROWS += ("task", "batch_size", "mode", "status", "reason")
OF_FIGURES = ("value", "low", "high", "kind")
COLUMNS = (*OF_ROWS, "blocks", "price", "accuracy", "figure", *OF_FIGURES, "unit")
COLUMNS += tuple(f"{to}_{name}" for to in ("to_baseline", "pytorch_to_tensorflow")
                 for name in ("ratio", "low", "high", "kind", "verdict"))  # fmt: skip


def table(record: Record) -> list[dict[str, Any]]:
    """One line per figure of each row, by `COLUMNS`, as plain data in base units.

    `accuracy`: whether it is kept: "yes", "no", "not asked" or "not measured", or the result of a
    check, such as "loss kept" or "predictions can't be told". A row that did not run has one line
    without a figure. Ratios are to the baseline or the variant `against`; for points gained, they
    are points. For times there is also PyTorch's over TensorFlow's.
    """
    whole = Table(record)
    rows = {row.case.id: row for row in whole.rows}
    cases, lines = {case.id: case for case in record.cases}, []
    for case in record.cases:
        about = {name: getattr(case, name) for name in OF_ROWS}
        program = cases.get(case.program_id, case)
        about["blocks"] = program.timing.block_count or None
        row = rows.get(case.id)
        lines += [about | line for line in _lines(row, record)] if row else [about]
    return [dict.fromkeys(COLUMNS) | line for line in lines]


def _lines(row: Row, record: Record) -> Iterator[dict[str, Any]]:
    case, kept = row.case, row.accuracy
    answer = {True: "yes", False: "no", None: "not measured"}[kept.kept]
    answer = f"{kept.what} {kept.check.verdict}" if kept.check else answer
    about = {"price": row.price, "accuracy": answer if kept.asked else "not asked"}
    measured = row.figures | {name: figure for name, figure in _parts(case) if figure}
    for name, metric in case.metrics.items():
        if metric.value == 0 and name not in RENAMED:  # which is no figure to rank by
            measured.setdefault(name, Figure(0.0, 0.0, 0.0, "once"))
    if not measured:
        yield about
    for name, figure in measured.items():
        unit = case.metrics[name].unit if name in case.metrics else UNITS.get(name)
        line = about | {"figure": name, "unit": unit} | _columns(figure)
        if ratio := row.ratios.get(name):
            line |= {f"to_baseline_{key}": value for key, value in _ratio(ratio).items()}
        if name == TIME:
            line |= {"to_baseline_verdict": row.verdict, **_to_twin(case, record)}
        yield line


def _parts(case: Case) -> Iterator[tuple[str, Figure | None]]:
    """What is shown of a row and is ranked by nothing."""
    yield "warm_first_call", _measured(case.timing.warm_first_call_s, None)
    for part in PARTS if case.memory else ():
        samples = case.memory.samples.get(f"{part}_bytes")
        yield f"memory_{part}", _measured(getattr(case.memory, f"{part}_bytes"), None, samples)
    if case.accuracy and case.accuracy.mean is not None:
        metric = case.accuracy.metric or "accuracy"
        yield metric, _measured(case.accuracy.mean, case.accuracy.ci)


def _columns(figure: Figure) -> dict[str, Any]:
    return {name: getattr(figure, name) for name in OF_FIGURES}


def _ratio(figure: Figure) -> dict[str, Any]:
    columns = _columns(figure)
    return {"ratio": columns.pop("value"), **columns}


def _to_twin(case: Case, record: Record) -> dict[str, Any]:
    """The ratio of a case and its twin, whichever of both it is; none between unlike work."""
    for comparison in record.comparisons:
        ids = (comparison.numerator, comparison.denominator)
        is_twin = comparison.kind == "framework" and comparison.variant == case.variant
        if is_twin and case.id in ids:
            line = {"verdict": comparison.verdict}
            if comparison.verdict != DIFFERENT and comparison.ratio:
                line |= _ratio(_bounded(comparison.ratio, comparison.ci))
            return {f"pytorch_to_tensorflow_{name}": value for name, value in line.items()}
    return {}
