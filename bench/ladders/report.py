"""What a climb shows: which techniques to use and what they gain, with tables and a chart.

Everything is made from the record of `climbing.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bench.analysis.verdicts import Interval, Ratio, shown_more
from bench.harness.worker import on_cpu
from bench.ladders import rule
from bench.ladders.ladder import JUDGED, Ladder
from bench.ladders.record import Climbed
from bench.ladders.rule import Step, climbs_of
from bench.record import FRAMEWORKS
from bench.report.formatting import MISSING, number, ratio, scaled
from bench.report.names import called
from bench.report.svg_shapes import Box, Chart, Label, Line, Mark, Scale, across, scale
from bench.report.tables import escape, parts_as_markdown, parts_as_text
from bench.report.technique_tables import Table, of_figures, of_words

# figure -> head of its column, factor to its unit
SHOWN = {
    "iteration": ("iteration\n[ms]", 1e3),
    "epoch": ("epoch\n[s]", 1.0),
    "samples_per_s": ("samples/s", 1.0),
    "utilisation": ("cores in\nuse [%]", 1.0),
    "fluctuation": ("its sd\n[%]", 1.0),
    "device_utilisation": ("GPU\nbusy [%]", 1.0),
    "device_fluctuation": ("its sd\n[%]", 1.0),
    "memory": ("peak\n[MB]", 1e-6),
    "host_memory": ("host's\npeak [MB]", 1e-6),
    "whole_memory": ("peak of\nwhole [MB]", 1e-6),
    "first_step": ("first\nstep [s]", 1.0),
    "whole": ("whole\n[s]", 1.0),
    "latency": ("latency\n[ms]", 1e3),
    "size": ("size\n[MB]", 1e-6),
}
STATES = {  # of a rung that does not help -> how it is called
    "kept": "stays, no gain shown",
    "left out": "hurts: left out",
    "failed": "failed",
    "open": "not yet",
    "nothing": "changes nothing",
}

PRICES = {"iteration": "time", "memory": "memory"}

Climbs = dict[str, list[Step]]


def content(ladder: Ladder, record: Climbed) -> list[str | Table]:
    """All sentences and tables, in order."""
    climbs = climbs_of(ladder, record)
    answers = [_answer(ladder, record, framework, steps) for framework, steps in climbs.items()]
    state = "" if record.finished else " Not finished."
    pairs = f"{record.blocks} pair{'s' * (record.blocks > 1)} a rung"
    parts: list[str | Table] = [
        *filter(None, [*answers, _ahead(record, climbs)]),
        f"{ladder.title}, {called(ladder.task)}, batch {ladder.batch}, "
        f"{pairs} on {_machine(record)}.{state}",
        ladder.about,
        *_flaws(record, climbs),
    ]
    for framework, steps in climbs.items():
        table = _figures(ladder, record, framework, steps)
        parts += [table] if table.rows else []
    parts.append(_ratios(ladder, record, climbs))
    for framework, steps in climbs.items():
        table = _promised(ladder, record, framework, steps)
        parts += [table] if table else []
    if ladder.published:
        parts.append(_published(ladder, record, climbs))
    return parts


def _answer(ladder: Ladder, record: Climbed, framework: str, steps: list[Step]) -> str:
    """Which rungs to use in a framework, and what the whole ladder gives over the plain program."""
    metric = ladder.spec.metric.replace("_", " ")
    helping = [step for step in steps if step.helps]
    keeping = [s for s in helping if getattr(s.quality, "low", None) is not None]
    keeping = [s for s in keeping if s.quality.low > -ladder.spec.margin]
    groups = {
        "use": keeping,
        f"a gain, but {metric} not settled": [step for step in helping if step not in keeping],
        "no gain shown": [s for s in steps if s.state == "kept" and not s.helps],
        "leave out": [step for step in steps if step.state == "left out"],
        "failed": [step for step in steps if step.state == "failed"],
    }
    parts = [
        f"{group}: {', '.join(f'{step.rung.title}{_price(step)}' for step in some)}"
        for group, some in groups.items()
        if some
    ]
    if not parts:
        return ""
    lines = [f"{FRAMEWORKS[framework]}: {'; '.join(parts)}."]
    gains = [
        f"{JUDGED[figure]} {_ratio(top)}"
        for figure in ("iteration", "memory", "latency")
        if (top := rule.top_ratio(record.runs, framework, steps, figure))
    ]
    if gains:
        lines.append(f"All that stays, together ÷ plain: {', '.join(gains)}.")
    if top := rule.top_quality(ladder, record.runs, framework, steps):
        lines.append(_top(ladder, top))
    return " ".join(lines)


def _price(step: Step) -> str:
    """What a rung that stays takes more of than the program below, where the interval shows it."""
    if step.state != "kept":
        return ""
    more = [
        f"{below.ratio:.2f} times the {words}"
        for figure, words in PRICES.items()
        if figure != step.rung.judged
        and (below := step.below_by.get(figure))
        and shown_more(below.ci)
    ]
    return f" (takes {', '.join(more)})" if more else ""


def _ahead(record: Climbed, climbs: Climbs) -> str:
    """How the frameworks stand to each other, plain and at the top of the last stage."""
    if _unlike_devices(record):
        return ""
    plain, top = rule.between(record.runs, climbs, "iteration")
    if not plain or not top:
        return ""
    parts = [
        f"{name} {_ratio(pair)}{'' if _is_shown(pair) else ', no difference shown'}"
        for name, pair in (("plain", plain), ("at the top", top))
    ]
    return (
        f"{FRAMEWORKS['pt']} / {FRAMEWORKS['tf']}, {JUDGED['iteration']}, run anew in the end: "
        f"{'; '.join(parts)}."
    )


def _is_shown(pair: Ratio) -> bool:
    """Whether any difference was shown."""
    return pair.ci is not None and not pair.ci[0] <= 1 <= pair.ci[1]


def _unlike_devices(record: Climbed) -> bool:
    """Whether one framework ran on a GPU and the other did not."""
    devices = record.environment.devices
    return len({on_cpu(device) for device in devices.values()}) > 1


def _flaws(record: Climbed, climbs: Climbs) -> list[str]:
    """What a reader must know of the runs before the tables."""
    flaws = []
    if _unlike_devices(record):
        flaws.append("One framework ran on a GPU and the other did not: they are not compared.")
    for run in record.runs:
        if run.stage == rule.PARTS and run.status != "OK" and run.framework in climbs:
            title = FRAMEWORKS[run.framework]
            flaws.append(f"In the end {title}'s {run.program}: {run.reason}.")
    if any(run.together == 1 for run in record.runs):
        flaws.append(
            "Memory did not hold the programs of a pair together: they ran after each other, and "
            "what the machine did meanwhile is in their ratios."
        )
    return list(dict.fromkeys(flaws))


def _machine(record: Climbed) -> str:
    """The processor, and the GPU where it trained on one."""
    environment = record.environment
    names = environment.cpu or MISSING, (environment.gpu or {}).get("name")
    return " with ".join(name for name in names if name)


def as_text(ladder: Ladder, record: Climbed, width: int = 100) -> str:
    """For the terminal."""
    return parts_as_text(content(ladder, record), width)


def as_markdown(ladder: Ladder, record: Climbed) -> str:
    """For a page, with the chart."""
    title = escape(ladder.title)
    drawn = [f"![{title}](ladder.svg)"] if picture(ladder, record) else []
    return "\n\n".join([f"# {title}", *drawn, parts_as_markdown(content(ladder, record))])


def _figures(ladder: Ladder, record: Climbed, framework: str, steps: list[Step]) -> Table:
    """The figures of every program of a framework, from plain to the top."""
    plain = _plain(record, framework, steps)
    rows = [("plain", plain), *((step.rung.title, step.figures) for step in steps)]
    shown = [name for name in SHOWN if any(name in figures for _, figures in rows)]
    better = "more is better" if ladder.more_is_better else "less is better"
    heads = [*(SHOWN[name][0] for name in shown), ladder.spec.metric.replace("_", " ")]
    return Table(
        f"{FRAMEWORKS[framework]}: each rung on those below that were kept ({heads[-1]}: {better})",
        [*of_words("program"), *of_figures(*heads)],
        [
            [
                title,
                *(number(scaled(figures.get(name), SHOWN[name][1])) for name in shown),
                number(figures.get("quality")),
            ]
            for title, figures in rows
            if figures
        ],
    )


def _plain(record: Climbed, framework: str, steps: list[Step]) -> dict[str, float]:
    """The figures of the plain program, beside the first rung that was run."""
    first = next((step.rung.name for step in steps if step.state != "nothing"), None)
    runs = [run for run in record.of(framework) if run.stage == first]
    return rule.means(runs, ())


def _ratios(ladder: Ladder, record: Climbed, climbs: Climbs) -> Table:
    """Every rung against the one below and against plain, and what the rule says of it."""
    heads = ("÷ below", "quality\nto below", "iteration\n÷ plain", "memory\n÷ plain")
    columns = of_words("rung", "judged by")
    for framework in climbs:
        columns += of_figures(*heads, group=FRAMEWORKS[framework])
        columns += of_words("rule", group=FRAMEWORKS[framework])
    columns += of_words("first losses\nof twins")
    rows = []
    for rung in ladder.rungs:
        row = [rung.title, JUDGED[rung.judged]]
        for steps in climbs.values():
            step = next((each for each in steps if each.rung is rung), None)
            row += _said(step)
        alike = rule.twin_difference(ladder, record.runs, rung.name, climbs)
        row.append("agree" if alike is None else alike)
        rows.append(row)
    return Table("Ratios with 95% intervals, and the rule", columns, rows)


def _said(step: Step | None) -> list[str]:
    if step is None:
        return [*4 * [MISSING], STATES["open"]]
    state = "helps" if step.helps else STATES[step.state]
    rule_ = state + (f" ({step.reason})" if step.reason else "")
    return [
        _ratio(step.below_by.get(step.rung.judged)),
        _difference(step.quality),
        _ratio(step.plain_by.get("iteration")),
        _ratio(step.plain_by.get("memory")),
        rule_,
    ]


def _ratio(value: Ratio | None) -> str:
    return ratio(value.ratio, value.ci) if value else MISSING


def _difference(value: Interval | None) -> str:
    if value is None:
        return MISSING
    if value.ci is None:
        return f"{value.mean:+.2f}"
    return f"{value.mean:+.2f} ({value.low:+.2f} to {value.high:+.2f})"


def _promised(ladder: Ladder, record: Climbed, framework: str, steps: list[Step]) -> Table | None:
    """What the parts promised, beside what their stack and the whole ladder gave."""
    by_figure = rule.promises(record.runs, framework, steps)
    if not by_figure:
        return None
    promises = by_figure.values()
    heads = {"iteration": "iteration", "memory": "peak memory"}
    alone = {name for promise in promises for name in promise.alone}
    rows = [
        [f"{rung.title}, alone", *(_ratio(promise.alone.get(rung.name)) for promise in promises)]
        for rung in ladder.rungs
        if rung.name in alone
    ]
    rows += [
        ["product: what the parts promise", *(_ratio(each.promised) for each in promises)],
        ["their stack gave", *(_ratio(each.gave) for each in promises)],
        ["the whole ladder gave", *(_ratio(each.top) for each in promises)],
    ]
    columns = of_words("program")
    columns += of_figures(*(f"{heads[figure]}\n÷ plain" for figure in by_figure))
    title = f"{FRAMEWORKS[framework]}: what the parts promised, and what the stack gave"
    return Table(title, columns, rows)


def _top(ladder: Ladder, top: Interval) -> str:
    """Whether the quality at the top is within the margin of the bottom."""
    margin, metric = ladder.spec.margin, ladder.spec.metric.replace("_", " ")
    if top.low is None:
        verdict = "one pair, no interval"
    elif top.low > -margin:
        verdict = f"within the margin of {margin:g}, or better"
    elif top.high < -margin:
        verdict = f"worse by more than the margin of {margin:g}"
    else:
        verdict = f"not decided at the margin of {margin:g}"
    return f"Its {metric} changed by {_difference(top)}, above 0 is better: {verdict}."


def _published(ladder: Ladder, record: Climbed, climbs: Climbs) -> Table:
    """What others published of such trainings, beside the top of this ladder."""
    columns = of_words("published", "machine and source")
    columns += of_figures("÷ before,\nor points")
    for framework in climbs:
        columns += of_figures("top ÷ plain,\nor points", group=FRAMEWORKS[framework])
    rows = []
    for claim in ladder.published:
        points = claim.figure == "quality"
        row = [claim.said, claim.where, f"{claim.change:+g}" if points else number(claim.change)]
        for framework, steps in climbs.items():
            if points:
                top = rule.top_quality(ladder, record.runs, framework, steps)
                row.append(_difference(top))
            else:
                top = rule.top_ratio(record.runs, framework, steps, claim.figure)
                row.append(_ratio(top))
        rows.append(row)
    title = f"Published of such trainings, beside this climb on {_machine(record)}"
    return Table(title, columns, rows)


# The picture --------------------------------------------------------------------------------------

PANELS = {  # figure -> title, and percents between which its axis runs
    "iteration": ("iteration ÷ plain", 29.0, 51.0),
    "memory": ("peak memory ÷ plain", 54.0, 76.0),
    "quality": ("", 79.0, 99.0),
}
LINE, TOP = 32, 36  # pixels


@dataclass(frozen=True)
class Program:
    """A program as it is drawn: the value and interval of each figure."""

    title: str
    framework: str
    kept: bool
    figures: dict[str, tuple[float | None, tuple[float, float] | None]]

    def values(self, figure: str) -> list[float]:
        """A value and the bounds of its interval."""
        value, ci = self.figures.get(figure, (None, None))
        return [] if value is None else [value, *(ci or ())]

    def shapes(self, axis: Scale, y: float, figure: str) -> list[Any]:
        """A mark at its value, with its interval."""
        if not self.values(figure):
            return []
        value, ci = self.figures[figure]
        tip = f"{FRAMEWORKS[self.framework]}: {number(value)}"
        around = [Line(axis(ci[0]), y, axis(ci[1]), y, f"interval {self.framework}")] if ci else []
        return [*around, Mark(axis(value), y, self.framework, not self.kept, tip)]


def picture(ladder: Ladder, record: Climbed) -> Chart | None:
    """Both frameworks' climbs side by side: time and memory to plain, and quality, rung by rung."""
    rows = _rows(ladder, record)
    if not rows:
        return None
    bottom = TOP + LINE * len(rows) + 6
    shapes: list[Any] = []
    for figure, (title, left, right) in PANELS.items():
        values = [v for row in rows.values() for program in row for v in program.values(figure)]
        if not values:
            continue
        axis = scale(values, left, right, log=figure != "quality")
        shapes.append(
            Label(left, TOP - 22, title or ladder.spec.metric.replace("_", " "), "heading")
        )
        shapes += across(axis, TOP - 14, bottom)
        if figure != "quality" and axis.low < 1 < axis.high:
            shapes.append(Line(axis(1), TOP - 14, axis(1), bottom, "one"))
        for place, row in enumerate(rows.values()):
            for program in row:
                y = TOP + LINE * place + (8 if program.framework == "pt" else 18)
                shapes += program.shapes(axis, y, figure)
    for place, title in enumerate(rows):
        y = TOP + LINE * place
        if place % 2:
            shapes.insert(0, Box(0, y, 100, LINE, "band"))
        shapes.append(Label(0, y + 17, title, "label-line"))
    return Chart(
        title=f"{ladder.title}, rung by rung",
        description=" ".join(f"{title}: {_in_words(row)}." for title, row in rows.items()),
        height=bottom + 20,
        shapes=shapes,
        key=[*FRAMEWORKS.items(), ("told", "stays"), ("open", "hurts or is not decided")],
    )


def _rows(ladder: Ladder, record: Climbed) -> dict[str, list[Program]]:
    """Title -> the program in each framework, from plain to the top."""
    rows = {title: [] for title in ("plain", *(rung.title for rung in ladder.rungs))}
    for framework, steps in climbs_of(ladder, record).items():
        if plain := _plain(record, framework, steps):
            figures = {"iteration": (1.0, None), "memory": (1.0, None)}
            figures["quality"] = (plain.get("quality"), None)
            rows["plain"].append(Program("plain", framework, True, figures))
        for step in steps:
            if step.figures and step.plain_by:
                figures = {name: (r.ratio, r.ci) for name, r in step.plain_by.items()}
                figures["quality"] = (step.figures.get("quality"), None)
                title = step.rung.title
                rows[title].append(Program(title, framework, step.state == "kept", figures))
    return {title: row for title, row in rows.items() if row}


def _in_words(row: list[Program]) -> str:
    """A row of the picture in words."""
    return "; ".join(
        f"{FRAMEWORKS[program.framework]} iteration {number(program.figures['iteration'][0])} of "
        f"plain, quality {number(program.figures['quality'][0])}"
        f"{'' if program.kept else ' (hurts or is open)'}"
        for program in row
        if "iteration" in program.figures
    )
