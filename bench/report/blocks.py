"""The tables of one technique and task, as text in columns."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from bench.analysis.reading import DIFFERENT, FRAMEWORKS, Row, View, above_import
from bench.analysis.values import at, is_pair
from bench.report.figures import MISSING, compact, interval, number, plus_minus, ratio, scaled
from bench.report.text import plain

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
    detail: bool = False  # not for the terminal
    name: str = ""


def tables(found: View, task: dict) -> list[Table]:
    """Every table that has a figure."""
    rows = found.rows
    every = [speed(rows), ratios(found), cost(rows), lifetimes(rows), memory_parts(rows)]
    every += [energy(rows), accuracy(rows, task), probed(rows), rates(rows), repetitions(rows)]
    return [table for table in every if table]


def speed(rows: Rows) -> Table | None:
    """Step time with its interval, and throughput; a case that is not OK shows its status.

    Where no step is timed (input pipelines) there is throughput alone.
    """
    timed = any(at(case, "timing", "median_s") for case in _cases(rows))

    def figures(case: dict) -> list[str]:
        timing = case.get("timing")
        step = scaled(at(timing, "median_s"), 1e3)
        bounds = [scaled(bound, 1e3) for bound in at(timing, "ci_s") or []]
        around = f" ({interval(bounds, like=step)})" if is_pair(bounds) else ""
        rate = number(at(case, "metrics", "samples_per_s", "value"))
        return [number(step) + around, rate] if timed else [rate]

    around = "\n(95% interval)" if any(at(c, "timing", "ci_s") for c in _cases(rows)) else ""
    heads = [f"step [ms]{around}", "samples/s"] if timed else ["samples/s"]
    return _side_by_side("Speed", heads, rows, figures, statuses=True, name="speed")


def cost(rows: Rows) -> Table | None:
    """First call, share of the machine's peak, and memory."""
    device = _on_device(rows)

    def figures(case: dict) -> list[str]:
        timing, memory = case.get("timing"), case.get("memory")
        found = [
            number(at(timing, "cold_first_call_s")),
            number(at(timing, "warm_first_call_s")),
            _share(at(case, "metrics", "share_of_peak")),
            _megabytes(above_import(memory)),
        ]
        return [*found, _megabytes(at(memory, "device_peak", "allocated"))] if device else found

    heads = ["cold\n[s]", "warm\n[s]", "of peak\n[%]", "memory\n[MB]"]
    heads += ["GPU\n[MB]"] if device else []
    title = "First call, share of the machine's peak, memory above import"
    return _side_by_side(title, heads, rows, figures, name="cost")


def energy(rows: Rows) -> Table | None:
    """Joules by the machine's counters, where it has any."""

    def figures(case: dict) -> list[str]:
        step, sample = (at(case, "metrics", f"energy_per_{name}") for name in ("step", "sample"))
        bounds = [scaled(bound, 1e3) for bound in at(sample, "ci") or []]
        return [
            _with_bounds(at(step, "value"), at(step, "ci")),
            _with_bounds(scaled(at(sample, "value"), 1e3), bounds),
        ]

    heads = ["step [J]\n(95% interval)", "sample [mJ]\n(95% interval)"]
    return _side_by_side("Energy of processors and GPUs", heads, rows, figures, name="energy")


def lifetimes(rows: Rows) -> Table | None:
    """The first call, the steps that repay it, and the whole time of so many steps."""
    counts = (100, 1_000, 10_000)
    columns = of_words("variant", "framework")
    columns += of_figures("cold first call [s]\n(lowest–highest)", "break-even [steps]\n(interval)")
    columns += of_figures(*(f"{count:,}\nsteps [s]" for count in counts))

    def line(case: dict) -> Iterator[list[str]]:
        if cold := at(case, "metrics", "cold_first_calls_s"):
            totals = (at(case, "metrics", f"total_{n}_steps_s", "value") for n in counts)
            yield [
                _with_bounds(at(cold, "value"), at(cold, "ci")),
                _break_even(at(case, "metrics", "break_even_steps")),
                *map(number, totals),
            ]

    repaid = {
        batch: found
        for batch, found in rows.items()
        if any(at(case, "metrics", "break_even_steps") for row in found for case in row.cases)
    }
    lines = _by_case(repaid, line)
    return _table("First call against faster steps", columns, lines, words=2, name="lifetimes")


def _break_even(metric: dict | None) -> str:
    """Steps until a slower first call is repaid; "never" where steps are not faster."""
    if metric is None:
        return MISSING
    if metric.get("value") is None:
        return "never"
    low, high = metric.get("ci") or (None, None)
    last = "never" if high is None else number(high)
    return f"{number(metric['value'])} ({number(low)}–{last})"


def _with_bounds(value: Any, bounds: Any) -> str:
    return f"{number(value)} ({interval(bounds, like=value)})" if is_pair(bounds) else number(value)


MOST_SIDE_BY_SIDE = 4  # figures of a probe
DERIVED = ("samples_per_s", "share_of_peak", "cold_first_calls_s", "break_even_steps", "total_")
DERIVED += ("energy_",)
RATE = re.compile(r"rate_(\d+)_threads_batch_(\d+)")  # the figures of a table of their own


def probed(rows: Rows) -> Table | None:
    """What the technique's own probe found: a column for each of its figures.

    Where those are too many for both frameworks side by side, each case has a line.
    """
    names = {
        name: at(metric, "unit")
        for case in _cases(rows)
        for name, metric in (case.get("metrics") or {}).items()
        if not name.startswith(DERIVED) and not RATE.fullmatch(name)
    }

    def figures(case: dict) -> list[str]:
        found = case.get("metrics") or {}
        return [_in_unit(at(found, name, "value"), unit) for name, unit in names.items()]

    heads = [
        f"{name_shown(name)}\n[{unit_shown(unit)}]" if unit else name_shown(name)
        for name, unit in names.items()
    ]
    if len(names) <= MOST_SIDE_BY_SIDE:
        named = _side_by_side("Measured apart", heads, rows, figures, name="probed")
        return named if names else None
    columns = of_words("variant", "framework")
    columns += of_figures(*heads)
    lines = _by_case(rows, lambda case: [figures(case)] if case["status"] == "OK" else [])
    return _table("Measured apart", columns, lines, words=2, name="probed")


def rates(rows: Rows) -> Table | None:
    """Samples/s that a probe found by batch size, a line for each case and number of threads."""
    found = {name for case in _cases(rows) for name in case.get("metrics") or {}}
    tried = [tuple(map(int, match.groups())) for match in map(RATE.fullmatch, found) if match]
    threads, sizes = (sorted({pair[place] for pair in tried}) for place in (0, 1))
    columns = of_words("variant", "framework", "threads")  # a table that goes on below repeats them
    columns += of_figures(*(f"batch\n{size}" for size in sizes))

    def line(case: dict) -> Iterator[list[str]]:
        for count in threads if case["status"] == "OK" else ():
            found = (at(case, "metrics", f"rate_{count}_threads_batch_{n}", "value") for n in sizes)
            yield [str(count), *map(number, found)]

    lines = _by_case(rows, line)
    return _table("Samples/s by batch size", columns, lines, words=3, name="rates")


def repetitions(rows: Rows) -> Table | None:
    """Every repetition of what a probe repeats, in the order of time."""
    columns = of_words("variant", "framework", "figure", "repetitions")

    def repeated(case: dict) -> Iterator[list[str]]:
        for name, metric in (case.get("metrics") or {}).items():
            unit, samples = at(metric, "unit"), at(metric, "samples") or []
            if len(samples) > 1 and name != "cold_first_calls_s":  # which has a table of its own
                figure = f"{name_shown(name)} [{unit_shown(unit)}]"
                every = " ".join(_in_unit(sample, unit) for sample in samples)
                yield [figure, every]

    return _table("Every repetition", columns, _by_case(rows, repeated), words=3, detail=True)


def unit_shown(unit: str | None) -> str:
    """A figure's unit as a head has it."""
    return plain({"bytes": "MB", "samples/s": "1/s"}.get(unit, compact(unit)))


def name_shown(name: str) -> str:
    """A figure's name as a head has it."""
    return plain(name.replace("_", " "))


def _in_unit(value: Any, unit: str | None) -> str:
    return _megabytes(value) if unit == "bytes" else number(value)


def memory_parts(rows: Rows) -> Table | None:
    """Memory split into parameters, gradients, optimizer state and the rest; GPU peaks."""
    device = ("allocated", "reserved") if _on_device(rows) else ()

    def figures(case: dict) -> list[str]:
        memory = case.get("memory")
        found = [above_import(memory), *(at(memory, f"{part}_bytes") for part in MEMORY_PARTS)]
        found += [at(memory, "device_peak", name) for name in device]
        return list(map(_megabytes, found))

    heads = ["peak", *MEMORY_PARTS, *(f"GPU {name}" for name in device)]
    title = "Memory above import, and what it holds [MB]"
    return _side_by_side(title, heads, rows, figures, detail=True, name="memory")


def phases(rows: Rows) -> Table | None:
    """Memory in each phase of a process, imports included."""
    parts = ("import", "build", "first_step_peak", "steady_peak")

    def figures(case: dict) -> list[str]:
        return [_megabytes(at(case, "memory", f"{part}_bytes")) for part in parts]

    heads = ["import", "build", "first step", "later steps"]
    return _side_by_side("Memory by phase, imports included [MB]", heads, rows, figures)


def accuracy(rows: Rows, task: dict) -> Table | None:
    """The task's metric over seeds, and the difference to the own baseline with its verdict."""

    def figures(case: dict) -> list[str]:
        found = case.get("accuracy")
        is_baseline = found and case["role"] == "baseline" and not at(found, "difference")
        apart = "baseline" if is_baseline else difference_of(found)
        return [plus_minus(at(found, "mean"), at(found, "ci")), apart]

    title = f"{unit_of(task.get('metric'))} (margin ±{compact(task.get('margin'))})"
    if any(at(c, "accuracy", "ci") for c in _cases(rows)):
        title += ", ± half the 95% interval"
    heads = ["mean", "difference\nto baseline"]
    return _side_by_side(title, heads, rows, figures, name="accuracy")


def difference_of(found: dict | None) -> str:
    """The difference to the own baseline's accuracy, its verdict below."""
    difference = at(found, "difference")
    apart = plus_minus(at(difference, "mean"), at(difference, "ci"), signed=True)
    return _under(apart, at(difference, "verdict"))


def unit_of(metric: str | None) -> str:
    """A metric with its unit, as it stands in a head."""
    return UNITS.get(metric, compact(metric))


def ratios(found: View) -> Table | None:
    """Each variant against its own baseline in both frameworks, and the twins against each other.

    A comparison of any other pair (best against best, say) gets a row that names the pair.
    """
    heads = ("PyTorch ÷\nown baseline", "TensorFlow ÷\nown baseline", "PyTorch ÷\nTensorFlow")
    columns = [*of_words("variant"), *of_figures(*heads)]
    lines = {}
    for batch, rows in found.rows.items():
        lines[batch] = [
            [row.label, _own(row.pt, found), _own(row.tf, found), versus(found.twins(row))]
            for row in rows
        ]
        lines[batch] += [_pair_line(comparison, found) for comparison in found.others(batch)]
    title = "Ratios of step time (below 1: the first is faster)"
    return _table(title, columns, lines, name="ratios")


def _own(case: dict | None, found: View) -> str:
    comparison = found.own(case)
    timed = at(case, "status") == "OK" and at(case, "timing", "median_s")
    is_baseline = at(case, "role") == "baseline" and timed
    return "baseline" if is_baseline and not comparison else versus(comparison)


def versus(comparison: dict | None) -> str:
    """A ratio with its interval and its verdict below; no ratio between unlike work."""
    verdict = at(comparison, "verdict")
    if verdict == DIFFERENT:
        return verdict
    return _under(ratio(at(comparison, "ratio"), at(comparison, "ci")), verdict)


def _under(figure: str, verdict: str | None) -> str:
    if not verdict:
        return figure
    return plain(verdict) if figure == MISSING else f"{figure}\n{plain(verdict)}"


def _pair_line(comparison: dict, found: View) -> list[str]:
    """The ratio of a named pair, in the column of its framework or of both."""
    cells = [MISSING] * 3
    cells[{"pt": 0, "tf": 1}.get(found.side(comparison), 2)] = versus(comparison)
    return [found.pair(comparison), *cells]


def _by_case(
    rows: Rows, lines: Callable[[dict], Iterable[list[str]]]
) -> dict[int, list[list[str]]]:
    """The lines of each case, each under the case's variant and framework."""
    return {
        batch: [
            [row.label, FRAMEWORKS[case["framework"]], *line]
            for row in found
            for case in row.cases
            for line in lines(case)
        ]
        for batch, found in rows.items()
    }


def _cases(rows: Rows) -> list[dict]:
    return [case for found in rows.values() for row in found for case in row.cases]


def _on_device(rows: Rows) -> bool:
    return any(at(case, "memory", "device_peak") for case in _cases(rows))


def _megabytes(count: Any) -> str:
    return number(scaled(count, 1e-6))


def _share(metric: dict | None) -> str:
    """A share of the peak in percent, whichever unit the record has it in."""
    factor = 1 if at(metric, "unit") == "%" else 100
    return number(scaled(at(metric, "value"), factor))


def _side_by_side(
    title: str,
    heads: list[str],
    rows: Rows,
    figures: Callable[[dict], list[str]],
    *,
    statuses: bool = False,
    detail: bool = False,
    name: str = "",
) -> Table | None:
    """The same columns for both frameworks; rows without any figure are left out.

    With `statuses`, a case that is not OK shows its status where its first figure would stand.
    """

    def half(case: dict | None) -> list[str]:
        if case and case["status"] == "OK":
            return figures(case)
        return [case["status"] if case and statuses else MISSING, *[MISSING] * (len(heads) - 1)]

    columns = of_words("variant")
    for group in FRAMEWORKS.values():
        columns += of_figures(*heads, group=group)
    lines = {b: [[r.label, *half(r.pt), *half(r.tf)] for r in found] for b, found in rows.items()}
    return _table(title, columns, lines, detail=detail, name=name)


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
    for batch, found in lines.items():
        found = [line for line in found if any(cell != MISSING for cell in line[words:])]
        if found:
            rows += [[f"batch {batch}", *[""] * (len(columns) - 1)], *found]
    return Table(title, columns, rows, detail, name) if rows else None
