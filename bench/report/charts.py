"""The forest plot of ratios, and memory by phase."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from bench.analysis.reading import View
from bench.analysis.verdicts import DELTA, shown_less, shown_more
from bench.record import DIFFERENT, Case, Comparison, Control
from bench.report.formatting import number, ratio
from bench.report.svg_shapes import (
    Box,
    Chart,
    Label,
    Line,
    Mark,
    Scale,
    across,
    scale,
    short,
    side_of,
)

LEFT, RIGHT = 4.0, 84.0  # percents between which the axis of ratios runs; figures stand right of it
LINE = 18  # pixels from one line of marks to the next


# Forest plot -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """A ratio in a forest plot: whose it is ("pt", "tf", "both"), and what it compares."""

    side: str
    what: str
    ratio: float
    ci: tuple[float, float] | None
    verdict: str | None

    @property
    def told(self) -> bool:
        """Whether a difference in speed was shown."""
        return shown_less(self.ci) or shown_more(self.ci)


SIDES = {
    "pt": "PyTorch ÷ own baseline",
    "tf": "TensorFlow ÷ own baseline",
    "both": "PyTorch ÷ TensorFlow",
}
Group = tuple[str | None, str, list[Measured]]  # a heading above it, its label, its ratios


def forest(view: View) -> Chart | None:
    """The ratios of step time with their intervals, variant by variant."""
    groups: list[Group] = []
    for batch, rows in view.rows.items():
        heading: str | None = f"batch {batch}"
        entries = []
        for row in rows:
            compared = (view.with_baseline(row.pt), view.with_baseline(row.tf), view.twins(row))
            entries.append((row.label, list(zip(SIDES, SIDES.values(), compared, strict=True))))
        for comparison in view.others(batch):
            side, pair = view.framework(comparison) or "both", view.pair(comparison)
            entries.append((pair, [(side, pair, comparison)]))
        for label, pairs in entries:
            if measured := [m for each in pairs if (m := _measured(*each))]:
                groups.append((heading, label, measured))
                heading = None
    return _forest("Ratios of step time", groups, list(SIDES.items()))


def controls_forest(controls: list[Control]) -> Chart | None:
    """The A/A controls: how far from 1 a ratio comes by chance."""
    groups: list[Group] = []
    for control in controls:
        names = (control.framework_title, control.technique, control.task)
        what = " · ".join(name for name in names if name)
        if measured := _measured(side_of(control), "A/A", control):
            groups.append((None, what, [measured]))
    key = [("pt", "PyTorch ÷ itself"), ("tf", "TensorFlow ÷ itself")]
    return _forest("A/A controls", groups, key)


def _measured(side: str, what: str, comparison: Comparison | Control | None) -> Measured | None:
    if not comparison or comparison.ratio is None or comparison.verdict == DIFFERENT:
        return None
    return Measured(side, what, comparison.ratio, comparison.ci, comparison.verdict)


def _forest(title: str, groups: list[Group], key: list[tuple[str, str]]) -> Chart | None:
    every = [measured for _, _, some in groups for measured in some]
    if not every:
        return None
    values = [v for m in every for v in (m.ratio, *(m.ci or []))]
    axis = scale([*values, 1 / (1 + DELTA), 1 + DELTA], LEFT, RIGHT, log=True)
    shapes: list[Any] = []
    y = 4.0
    for heading, label, some in groups:
        if heading:
            y += 18
            shapes.append(Label(0, y, short(heading), "heading"))
        y += 20
        shapes.append(Label(0, y, short(label), "label"))
        for measured in some:
            y += LINE
            shapes += _interval_line(axis, y - 5, label, measured)
        y += 2
    bottom = y + 6
    used = {measured.side for measured in every}
    band = Box(axis(1 / (1 + DELTA)), 0, axis(1 + DELTA) - axis(1 / (1 + DELTA)), bottom, "band")
    middle = Line(axis(1), 0, axis(1), bottom, "one")
    key = [entry for entry in key if entry[0] in used]
    if any(m.verdict for m in every):
        key += [("told", "filled: a difference was shown"), ("open", "open: none was")]
    return Chart(
        title=f"{title} with 95% intervals (log axis; grey: ±{DELTA:.0%})",
        description=_forest_in_words(every),
        height=bottom + 22,
        shapes=[band, *across(axis, 0, bottom), middle, *shapes],
        key=key,
    )


def _interval_line(axis: Scale, y: float, label: str, measured: Measured) -> list[Any]:
    tip = f"{label}: {measured.what} {ratio(measured.ratio, measured.ci)}"
    tip += f", {measured.verdict}" if measured.verdict else ""
    x = axis(measured.ratio)
    shapes: list[Any] = []
    if measured.ci:
        low, high = map(axis, measured.ci)
        shapes.append(Line(low, y, high, y, f"interval {measured.side}"))
        shapes += [Line(end, y - 3, end, y + 3, f"interval {measured.side}") for end in (low, high)]
    shapes.append(Mark(x, y, measured.side, not measured.told, tip))
    shapes.append(Label(99, y + 4, ratio(measured.ratio, None), "figure", "end"))
    return shapes


def _forest_in_words(every: list[Measured]) -> str:
    values = [measured.ratio for measured in every]
    verdicts = Counter(measured.verdict for measured in every if measured.verdict)
    counts = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items())
    span = f"{len(every)} ratios from {number(min(values))} to {number(max(values))}"
    return f"{span}{f': {counts}' if counts else ''}. Below 1 the first named is faster."


# Memory bars -------------------------------------------------------------------------------------

PHASES = {
    "build_bytes": "after build",
    "first_step_peak_bytes": "peak of the first step",
    "steady_peak_bytes": "peak of later steps",
}


def phases_of(case: Case) -> list[float | None]:
    """Bytes above import in each phase; none of a case whose memory was not measured."""
    memory = case.memory
    if memory is None or memory.import_bytes is None:
        return []
    sizes = [getattr(memory, phase) for phase in PHASES]
    return [None if size is None else max(0.0, size - memory.import_bytes) for size in sizes]


def memory_bars(view: View) -> Chart | None:
    """Memory above import by phase, a bar each."""
    entries = [
        (batch if place == 0 else None, f"{row.label} · {case.framework_title}", case)
        for batch, rows in view.rows.items()
        for place, (row, case) in enumerate(
            (row, case)
            for row in rows
            for case in row.cases
            if case.status == "OK" and any(size is not None for size in phases_of(case))
        )
    ]
    largest = max((v for e in entries for v in phases_of(e[2]) if v is not None), default=0)
    if not largest:
        return None
    axis = Scale(0, largest / 1e6, 1, 97)
    shapes: list[Any] = []
    y = 4.0
    for batch, label, case in entries:
        if batch is not None:
            y += 18
            shapes.append(Label(0, y, f"batch {batch}", "heading"))
        y += 20
        sizes = phases_of(case)
        figures = " · ".join(number(v / 1e6) if v is not None else "—" for v in sizes)
        shapes += [Label(0, y, short(label), "label"), Label(99, y, figures, "figure", "end")]
        y += 5
        for place, value in enumerate(sizes):
            if value is not None:
                style = f"bar {side_of(case)} phase-{place}"
                shapes.append(Box(axis(0), y, axis(value / 1e6) - axis(0), 7, style))
            y += 8
    bottom = y + 6
    return Chart(
        title="Memory above import by phase [MB]",
        description=(
            f"{len(entries)} cases with three bars each, from top to bottom: "
            f"{', '.join(PHASES.values())}. The longest is {number(largest / 1e6)} MB."
        ),
        height=bottom + 22,
        shapes=[*across(axis, 0, bottom), *shapes],
        key=[(f"phase-{place}", words) for place, words in enumerate(PHASES.values())],
    )
