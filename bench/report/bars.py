"""One picture of what optimizations gain: bars for each framework, longer is better.

Each pair is a piece of work, large models first. Each framework shows the row that gains most over
its plain code. Rows of files that gain over float32 in the same runtime come last, below a heading.
"""

from __future__ import annotations

from typing import Any

from bench.analysis.questions import QUESTIONS, Answer
from bench.analysis.ranking import PREDICT, UPDATE, Ranking
from bench.analysis.table import TIME, Figure, Row
from bench.record import FRAMEWORKS
from bench.report.advised import is_file, named, over, place_of, tempting
from bench.report.answer import accuracy_of, at_memory
from bench.report.formatting import interval, number
from bench.report.names import name_of
from bench.report.svg_shapes import Box, Chart, Label, Line, Scale, across, scale

MOST = 8  # pieces of work
LEFT, RIGHT = 1.0, 40.0  # percents between which bars run; figures are right of them
NAME, BAR, GAP = 17, 15, 12  # pixels: the line of a name, a bar, the room below the bars
WIDTH = 460  # pixels: on a phone its text can still be read
TITLE = "Times as fast as the same framework's plain code"
FILES = "Times as fast as float32 in the same runtime"


def chosen(listed: list[Answer]) -> list[Answer]:
    """The works that are shown: of those whose speed something gains, large models first.

    The main ones, and every large model.
    """
    speeds = [one for one in listed if one.goal.figure == TIME and one.tells]
    made = [one for one in speeds if one.main]
    seen = {(one.question, one.work.task) for one in made}
    made += [one for one in speeds if one.work.large and (one.question, one.work.task) not in seen]
    return sorted(made, key=lambda one: (not one.work.large, QUESTIONS.index(one.question)))[:MOST]


def chart(listed: list[Answer], anchors: dict[str, str] | None = None) -> Chart | None:
    """The bars of these answers; None where nothing gains.

    anchors: where a technique's rows are on the page, to which its bars link.
    """
    shown = sorted(chosen(listed), key=_of_files)
    rows = [row for one in shown for row in _rows(one)]
    if not rows:
        return None
    ends = [end for row in rows for end in _bounds(_times(row))]
    axis = scale([1.0, *ends], LEFT, RIGHT, log=True)
    axis = Scale(1.0, axis.high, LEFT, RIGHT, log=True)
    shapes: list[Any] = []
    y = 8.0
    for place, one in enumerate(shown):
        if _of_files(one) and not (place and _of_files(shown[place - 1])):
            shapes += [Line(0, y, 100, y, "rule"), Label(0, y + NAME, FILES, "title")]
            y += NAME + 8
        shapes.append(Label(0, y + NAME - 5, _work(one), "label"))
        y += NAME
        for framework in FRAMEWORKS:
            side = one.sides.get(framework)
            shapes += _bar(axis, y, framework, side, anchors or {}, of_file=_of_files(one))
            y += BAR + 2
        y += GAP
    starred = any(not row.accuracy.kept for row in rows)
    key = list(FRAMEWORKS.items())
    key += [("plain", "* accuracy not shown")] if starred else []
    return Chart(
        title=TITLE,
        description=" ".join(map(_in_words, shown)),
        height=y + 20,
        shapes=[*across(axis, 2, y), *shapes],
        key=key,
    )


def _rows(one: Answer) -> list[Row]:
    return list(filter(None, map(_row, one.sides.values())))


def _of_files(one: Answer) -> bool:
    """Whether all that it shows gains over float32 in the same runtime."""
    return bool(_rows(one)) and all(is_file(row.base) for row in _rows(one))


def _row(side: Ranking) -> Row | None:
    """The row that gains most, whether or not it is known to keep accuracy."""
    row = tempting(side) or named(side)
    return row if row and TIME in row.ratios else None


def _times(row: Row) -> Figure:
    return row.ratios[TIME].turned()


def _bounds(figure: Figure) -> tuple[float, float]:
    return figure.bounds or (figure.value, figure.value)


def _work(one: Answer) -> str:
    """Train ResNet-18 on 64-pixel photos, batch 16: a phone has room for no more."""
    verb = {PREDICT: "Predict", UPDATE: "Optimizer step,"}.get(one.work.kind, "Train")
    return f"{verb} {place_of(one)}"


def _bar(
    axis: Scale,
    y: float,
    framework: str,
    side: Ranking | None,
    anchors: dict[str, str],
    *,
    of_file: bool,
) -> list[Any]:
    """of_file: whether the heading above says what the gain is over."""
    middle = y + BAR - 3
    if side is None:
        return [Label(LEFT + 1, middle, f"{FRAMEWORKS[framework]}: not measured", "tick")]
    row = _row(side)
    if row is None:
        nothing = f"{FRAMEWORKS[framework]}: nothing was shown to help"
        return [Label(LEFT + 1, middle, nothing, "tick")]
    times = _times(row)
    low, high = _bounds(times)
    star = "" if row.accuracy.kept else "*"
    gain = f"{number(times.value)}x{star} {name_of(row.case, short=True)}"
    gain += "" if of_file else over(row, TIME)
    text = ", ".join(filter(None, (gain, at_memory(row, TIME))))
    link = anchors.get(row.case.technique, "")
    shapes: list[Any] = [
        Box(axis(1), y, axis(times.value) - axis(1), BAR, framework),
        Label(axis(max(high, times.value)) + 1, middle, text, "figure", link=link),
    ]
    if times.bounds:
        shapes.insert(1, Line(axis(max(low, 1)), y + BAR / 2, axis(high), y + BAR / 2, "one"))
    return shapes


def _in_words(one: Answer) -> str:
    sides = []
    for framework, title in FRAMEWORKS.items():
        side = one.sides.get(framework)
        row = side and _row(side)
        if not row:
            sides.append(f"{title}: {'nothing was shown to help' if side else 'not measured'}")
            continue
        times, kept = _times(row), accuracy_of(row.accuracy)
        around = f" ({interval(times.bounds, like=times.value)})" if times.bounds else ""
        gain = f"{number(times.value)} times as fast{around}{over(row, TIME)}"
        words = filter(None, (name_of(row.case, short=True), gain, at_memory(row, TIME), kept))
        sides.append(f"{title}: {', '.join(words)}")
    return f"{_work(one)}. {'; '.join(sides)}."
