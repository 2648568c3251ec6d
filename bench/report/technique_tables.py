"""The tables of one technique and task, as text in columns."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from bench.analysis.reading import Row, View
from bench.record import (
    DIFFERENT,
    FRAMEWORKS,
    Accuracy,
    Case,
    Comparison,
    Memory,
    Metric,
    TaskFacts,
)
from bench.report.formatting import (
    MISSING,
    compact,
    number,
    plus_minus,
    ratio,
    scaled,
    with_bounds,
)
from bench.report.text import plain
from shared.specs import LOSS_MARGIN

UNITS = {
    "accuracy": "Accuracy in %",
    "bits_per_character": "Bits per character",
    "mAP": "mAP@[.5:.95] in %",
}
MEMORY_PARTS = ("parameters", "gradients", "optimizer", "rest")

Rows = dict[int, list[Row]]  # by batch size


@dataclass(frozen=True)
class Column:
    """A column: the framework it belongs to (or ""), and its name with the unit."""

    group: str
    head: str
    right: bool = True

    @property
    def title(self) -> str:
        """Framework and name on one line."""
        return f"{self.group} {self.head}".strip().replace("\n", " ")


def of_words(*heads: str, group: str = "") -> list[Column]:
    """Columns of names and verdicts."""
    return [Column(group, head, right=False) for head in heads]


def of_figures(*heads: str, group: str = "") -> list[Column]:
    """Columns whose cells are aligned to the right."""
    return [Column(group, head) for head in heads]


@dataclass(frozen=True)
class Table:
    """Rows of cells under columns; a row that has only its first cell is a subheading.

    `name`: what a chart of the same figures is found by.
    """

    title: str
    columns: list[Column]
    rows: list[list[str]]
    detail: bool = False  # for the page in HTML
    name: str = ""


def tables(view: View, task: TaskFacts) -> list[Table]:
    """Every table that has a figure."""
    rows = view.rows
    every = [speed(rows), ratios(view), cost(rows), lifetimes(rows), memory_parts(rows)]
    every += [energy(rows), accuracy(rows, task), kept_loss(rows), kept_predictions(rows)]
    every += [probed(rows), rates(rows), repetitions(rows)]
    return [table for table in every if table]


Cell = Callable[[Case], str]  # what a column has of a case


def speed(rows: Rows) -> Table | None:
    """Step time with its interval, and throughput; a case that is not OK shows its status.

    Where no step is timed (input pipelines) there is throughput alone.
    """
    columns: dict[str, Cell] = {}
    if any(case.timing.median_s for case in _cases(rows)):
        around = "\n(95% interval)" if any(case.timing.ci_s for case in _cases(rows)) else ""
        columns[f"step [ms]{around}"] = lambda case: with_bounds(
            case.timing.median_s, case.timing.ci_s, 1e3
        )
    columns["samples/s"] = lambda case: number(case.value_of("samples_per_s"))
    return _side_by_side("Speed", columns, rows, statuses=True, name="speed")


def cost(rows: Rows) -> Table | None:
    """First call, share of the machine's peak, and memory."""
    columns: dict[str, Cell] = {
        "cold\n[s]": lambda case: number(case.timing.cold_first_call_s),
        "warm\n[s]": lambda case: number(case.timing.warm_first_call_s),
        "of peak\n[%]": lambda case: _share(case.metrics.get("share_of_peak")),
        "memory\n[MB]": lambda case: _megabytes(_memory(case).above_import),
    }
    if _on_device(rows):
        columns["GPU\n[MB]"] = lambda case: _megabytes(_memory(case).device_peak_bytes)
    title = "First call, share of the machine's peak, memory above import"
    return _side_by_side(title, columns, rows, name="cost")


def energy(rows: Rows) -> Table | None:
    """Joules by the machine's counters, where it has any."""
    columns: dict[str, Cell] = {
        "step [J]\n(95% interval)": lambda case: _bounded(case.metrics.get("energy_per_step")),
        "sample [mJ]\n(95% interval)": lambda case: _bounded(
            case.metrics.get("energy_per_sample"), 1e3
        ),
    }
    return _side_by_side("Energy of processors and GPUs", columns, rows, name="energy")


def lifetimes(rows: Rows) -> Table | None:
    """The first call, the steps that repay it, and the whole time of so many steps."""
    counts = (100, 1_000, 10_000)
    columns = of_words("variant", "framework")
    columns += of_figures("cold first call [s]\n(lowest–highest)", "break-even [steps]\n(interval)")
    columns += of_figures(*(f"{count:,}\nsteps [s]" for count in counts))

    def line(case: Case) -> Iterator[list[str]]:
        if cold := case.metrics.get("cold_first_calls_s"):
            totals = (case.value_of(f"total_{count}_steps_s") for count in counts)
            even = _break_even(case.metrics.get("break_even_steps"))
            yield [_bounded(cold), even, *map(number, totals)]

    repaid = {
        batch: some
        for batch, some in rows.items()
        if any("break_even_steps" in case.metrics for row in some for case in row.cases)
    }
    lines = _by_case(repaid, line)
    return _table("First call against faster steps", columns, lines, words=2, name="lifetimes")


def _break_even(metric: Metric | None) -> str:
    """Steps until a slower first call is repaid; "never" where steps are not faster."""
    if metric is None:
        return MISSING
    if metric.value is None:
        return "never"
    low, high = metric.ci or (None, None)
    last = "never" if high is None else number(high)
    return f"{number(metric.value)} ({number(low)}–{last})"


def _bounded(metric: Metric | None, factor: float = 1) -> str:
    return with_bounds(metric.value, metric.ci, factor) if metric else MISSING


MOST_SIDE_BY_SIDE = 4  # figures of a probe
DERIVED = ("samples_per_s", "share_of_peak", "cold_first_calls_s", "break_even_steps", "total_")
DERIVED += ("energy_", "flipped", "points_more", "loss_more")
RATE = re.compile(r"rate_(\d+)_threads_batch_(\d+)")  # the figures of a table of their own


def probed(rows: Rows) -> Table | None:
    """What the technique's own probe reported: a column for each of its figures.

    Where those are too many for both frameworks side by side, each case has a line.
    """
    units = {
        name: metric.unit
        for case in _cases(rows)
        for name, metric in case.metrics.items()
        if not name.startswith(DERIVED) and not RATE.fullmatch(name)
    }

    columns = {
        f"{name_shown(name)}\n[{unit_shown(unit)}]" if unit else name_shown(name): partial(
            _metric, name, unit
        )
        for name, unit in units.items()
    }
    if len(columns) <= MOST_SIDE_BY_SIDE:
        return _side_by_side("Measured apart", columns, rows, name="probed") if columns else None

    def line(case: Case) -> list[list[str]]:
        return [[cell(case) for cell in columns.values()]] if case.status == "OK" else []

    heads = [*of_words("variant", "framework"), *of_figures(*columns)]
    return _table("Measured apart", heads, _by_case(rows, line), words=2, name="probed")


def _metric(name: str, unit: str | None, case: Case) -> str:
    return _in_unit(case.value_of(name), unit)


def rates(rows: Rows) -> Table | None:
    """Samples/s of a probe by batch size, a line for each case and number of threads."""
    names = {name for case in _cases(rows) for name in case.metrics}
    tried = [tuple(map(int, match.groups())) for match in map(RATE.fullmatch, names) if match]
    threads, sizes = (sorted({pair[place] for pair in tried}) for place in (0, 1))
    columns = of_words("variant", "framework", "threads")  # a table that goes on below repeats them
    columns += of_figures(*(f"batch\n{size}" for size in sizes))

    def line(case: Case) -> Iterator[list[str]]:
        for count in threads if case.status == "OK" else ():
            values = (case.value_of(f"rate_{count}_threads_batch_{size}") for size in sizes)
            yield [str(count), *map(number, values)]

    lines = _by_case(rows, line)
    return _table("Samples/s by batch size", columns, lines, words=3, name="rates")


def repetitions(rows: Rows) -> Table | None:
    """Every repetition of what a probe repeats, in the order of time."""
    columns = of_words("variant", "framework", "figure", "repetitions")

    def repeated(case: Case) -> Iterator[list[str]]:
        for name, metric in case.metrics.items():
            samples = metric.samples or []
            if len(samples) > 1 and name != "cold_first_calls_s":  # which has a table of its own
                figure = f"{name_shown(name)} [{unit_shown(metric.unit)}]"
                yield [figure, " ".join(_in_unit(sample, metric.unit) for sample in samples)]

    return _table("Every repetition", columns, _by_case(rows, repeated), words=3, detail=True)


def unit_shown(unit: str | None) -> str:
    """A figure's unit as a head has it."""
    return plain({"bytes": "MB", "samples/s": "1/s"}.get(unit, compact(unit)))


def name_shown(name: str) -> str:
    """A figure's name as a head has it."""
    return plain(name.replace("_", " "))


def _in_unit(value: float | None, unit: str | None) -> str:
    return _megabytes(value) if unit == "bytes" else number(value)


def memory_parts(rows: Rows) -> Table | None:
    """Memory split into parameters, gradients, optimizer state and the rest; GPU peaks."""
    columns: dict[str, Cell] = {"peak": lambda case: _megabytes(_memory(case).above_import)}
    columns |= {part: partial(_bytes, f"{part}_bytes") for part in MEMORY_PARTS}
    for name in ("allocated", "reserved") if _on_device(rows) else ():
        columns[f"GPU {name}"] = partial(_of_device, name)
    title = "Memory above import, and what it holds [MB]"
    return _side_by_side(title, columns, rows, detail=True, name="memory")


def phases(rows: Rows) -> Table | None:
    """Memory in each phase of a process, imports included."""
    parts = ("import_bytes", "build_bytes", "first_step_peak_bytes", "steady_peak_bytes")
    heads = ("import", "build", "first step", "later steps")
    columns = {head: partial(_bytes, part) for head, part in zip(heads, parts, strict=True)}
    return _side_by_side("Memory by phase, imports included [MB]", columns, rows)


def _bytes(part: str, case: Case) -> str:
    return _megabytes(getattr(_memory(case), part))


def _of_device(name: str, case: Case) -> str:
    return _megabytes((_memory(case).device_peak or {}).get(name))


def accuracy(rows: Rows, task: TaskFacts) -> Table | None:
    """The task's metric over seeds, and the difference to the baseline's with its verdict."""

    def mean(case: Case) -> str:
        return plus_minus(case.accuracy.mean, case.accuracy.ci) if case.accuracy else MISSING

    def difference(case: Case) -> str:
        is_baseline = case.accuracy and case.role == "baseline" and not case.accuracy.difference
        return "baseline" if is_baseline else difference_of(case.accuracy)

    title = f"{unit_of(task.metric)} (margin ±{compact(task.margin)})"
    if any(case.accuracy and case.accuracy.ci for case in _cases(rows)):
        title += ", ± half the 95% interval"
    columns: dict[str, Cell] = {"mean": mean, "difference\nto baseline": difference}
    return _side_by_side(title, columns, rows, name="accuracy")


def difference_of(trained: Accuracy | None) -> str:
    """The difference to the accuracy of the baseline, its verdict below."""
    if trained is None or trained.difference is None:
        return MISSING
    difference = trained.difference
    return _under(plus_minus(difference.mean, difference.ci, signed=True), difference.verdict)


def kept_loss(rows: Rows) -> Table | None:
    """The loss after a short training, and the difference to the baseline's with its verdict."""

    def mean(case: Case) -> str:
        values = case.loss_check.per_seed if case.loss_check else []
        return number(fmean(values)) if values and None not in values else MISSING

    def difference(case: Case) -> str:
        check = case.loss_check
        if check is None or check.verdict is None:
            return "baseline" if check else MISSING
        found = check.difference
        shown = plus_minus(found.mean, found.ci, signed=True) if found else MISSING
        return _under(shown, check.verdict)

    title = f"Held-out loss after a short training [nats] (margin ±{compact(LOSS_MARGIN)})"
    columns: dict[str, Cell] = {"loss": mean, "difference\nto baseline": difference}
    return _side_by_side(title, columns, rows, name="kept_loss")


def kept_predictions(rows: Rows) -> Table | None:
    """What a trained model's predictions have lost and gained beside those in float32."""

    def flipped(case: Case) -> str:
        found = case.fidelity
        return number(100 * found.flipped / found.samples) if found else MISSING

    def right(case: Case) -> str:
        points = case.fidelity and case.fidelity.points
        if not points or points.ci is None:
            return MISSING
        low, high = (f"{bound:+.2f}" for bound in points.ci)
        return _under(f"{points.mean:+.2f} ({low} to {high})", case.fidelity.verdict)

    def loss(case: Case) -> str:
        found = case.fidelity and case.fidelity.loss
        return plus_minus(found.mean, found.ci, signed=True) if found else MISSING

    columns: dict[str, Cell] = {
        "flipped\n[%]": flipped,
        "right\n[points]": right,
        "loss\n[nats]": loss,
    }
    title = "Predictions of one trained model, against the same in float32"
    return _side_by_side(title, columns, rows, name="kept_predictions")


def unit_of(metric: str | None) -> str:
    """A metric with its unit, as it stands in a head."""
    return UNITS.get(metric, compact(metric))


def ratios(view: View) -> Table | None:
    """Each variant against its own baseline in both frameworks, and the twins against each other.

    A comparison of any other pair (best against best, say) gets a row that names the pair.
    """
    heads = ("PyTorch ÷\nown baseline", "TensorFlow ÷\nown baseline", "PyTorch ÷\nTensorFlow")
    columns = [*of_words("variant"), *of_figures(*heads)]
    lines = {}
    for batch, rows in view.rows.items():
        lines[batch] = [
            [
                row.label,
                _to_baseline(row.pt, view),
                _to_baseline(row.tf, view),
                versus(view.twins(row)),
            ]
            for row in rows
        ]
        lines[batch] += [_pair_line(comparison, view) for comparison in view.others(batch)]
    title = "Ratios of step time (below 1: the first is faster)"
    return _table(title, columns, lines, name="ratios")


def _to_baseline(case: Case | None, view: View) -> str:
    comparison = view.with_baseline(case)
    is_timed = case is not None and case.status == "OK" and case.timing.median_s
    if case and not comparison and case.role == "baseline":
        return "baseline" if is_timed else MISSING
    if is_timed and case.against:
        named = plain(case.against)
        return f"{versus(comparison)}\nagainst {named}" if comparison else f"{named} not measured"
    return versus(comparison)


def versus(comparison: Comparison | None) -> str:
    """A ratio with its interval and its verdict below; no ratio between unlike work."""
    if comparison is None:
        return MISSING
    if comparison.verdict == DIFFERENT:
        return DIFFERENT
    return _under(ratio(comparison.ratio, comparison.ci), comparison.verdict)


def _under(figure: str, verdict: str | None) -> str:
    if not verdict:
        return figure
    return plain(verdict) if figure == MISSING else f"{figure}\n{plain(verdict)}"


def _pair_line(comparison: Comparison, view: View) -> list[str]:
    """The ratio of a named pair, in the column of its framework or of both."""
    cells = [MISSING] * 3
    cells[{"pt": 0, "tf": 1}.get(view.framework(comparison), 2)] = versus(comparison)
    return [view.pair(comparison), *cells]


def _by_case(
    rows: Rows, lines: Callable[[Case], Iterable[list[str]]]
) -> dict[int, list[list[str]]]:
    """The lines of each case, each under the case's variant and framework."""
    return {
        batch: [
            [row.label, FRAMEWORKS[case.framework], *line]
            for row in some
            for case in row.cases
            for line in lines(case)
        ]
        for batch, some in rows.items()
    }


def _cases(rows: Rows) -> list[Case]:
    return [case for some in rows.values() for row in some for case in row.cases]


def _memory(case: Case) -> Memory:
    """The memory of a case; of one that was not measured nothing is known."""
    return case.memory or Memory()


def _on_device(rows: Rows) -> bool:
    return any(_memory(case).device_peak for case in _cases(rows))


def _megabytes(count: float | None) -> str:
    return number(scaled(count, 1e-6))


def _share(metric: Metric | None) -> str:
    """A share of the peak in percent, whichever unit the record has it in."""
    if metric is None:
        return MISSING
    return number(scaled(metric.value, 1 if metric.unit == "%" else 100))


def _side_by_side(
    title: str,
    columns: dict[str, Cell],
    rows: Rows,
    *,
    statuses: bool = False,
    detail: bool = False,
    name: str = "",
) -> Table | None:
    """The same columns for both frameworks; rows without any figure are left out.

    With `statuses`, a case that is not OK shows its status where its first figure would stand.
    """

    def half(case: Case | None) -> list[str]:
        if case and case.status == "OK":
            return [cell(case) for cell in columns.values()]
        return [case.status if case and statuses else MISSING, *[MISSING] * (len(columns) - 1)]

    heads = of_words("variant")
    for group in FRAMEWORKS.values():
        heads += of_figures(*columns, group=group)
    lines = {b: [[r.label, *half(r.pt), *half(r.tf)] for r in some] for b, some in rows.items()}
    return _table(title, heads, lines, detail=detail, name=name)


def _table(
    title: str,
    columns: list[Column],
    lines: dict[int, list[list[str]]],
    *,
    words: int = 1,
    detail: bool = False,
    name: str = "",
) -> Table | None:
    """Lines under a subheading for each batch size; None where there is no figure at all.

    The first `words` columns hold names.
    """
    rows = []
    for batch, some in lines.items():
        shown = [line for line in some if any(cell != MISSING for cell in line[words:])]
        if shown:
            rows += [[f"batch {batch}", *[""] * (len(columns) - 1)], *shown]
    return Table(title, columns, rows, detail, name) if rows else None
