"""PyTorch or TensorFlow: for a few cases, which is ahead when both run the same kind of program.

Plain code is compared with plain code, and a technique with the same technique.
"""

from __future__ import annotations

from bench.analysis.questions import Answer
from bench.analysis.ranking import UPDATE, Aim, Ranking
from bench.analysis.table import MEMORY, Row, is_better, is_worse
from bench.analysis.verdicts import DELTA
from bench.record import FRAMEWORKS
from bench.report.advised import NO_DIFFERENCE, gained, is_file, place_of
from bench.report.bars import chosen
from bench.report.names import name_of, sizes
from bench.report.technique_tables import Table, of_words

MOST = 8  # cases
LEGEND = (
    "Each cell names the framework that is ahead, by how much, and the 95% interval in brackets. A "
    f"lead counts where the whole interval is beyond {DELTA:.0%}. “Same technique” compares the "
    "one that gains most in both (*: accuracy was not shown to be kept). “Not compared”: plain "
    "code was not measured in both. There is no overall winner."
)


def table(listed: list[Answer]) -> Table:
    """A line for each case, large models first."""
    shown = [one for one in chosen(listed) if one.work.kind != UPDATE]
    shown += [one for one in listed if one.goal.figure == MEMORY and one.main]
    lines = [_line(one) for one in shown if len(one.sides) == len(FRAMEWORKS)]
    columns = of_words("your case", "ahead, plain code", "ahead, same technique")
    return Table("PyTorch or TensorFlow?", columns, lines[:MOST], name="frameworks")


def _line(one: Answer) -> list[str]:
    pt, tf = (one.sides[name] for name in FRAMEWORKS)
    case = f"{one.question.aim}\n{', '.join((place_of(one), sizes([one.work.task])))}"
    pairs = plain(pt, tf), alike(pt, tf)
    untouched, optimized = (_ahead(pt.aim, *pair) if pair else None for pair in pairs)
    if optimized:
        names = dict.fromkeys(_named(row) for row in pairs[1])
        optimized += f": {' and '.join(names)}"
    return [case, untouched or "not compared", optimized or "no technique helps both"]


def _named(row: Row) -> str:
    """A row's name, with a star where accuracy was not shown to be kept."""
    return name_of(row.case, short=True) + ("" if row.accuracy.kept else "*")


def plain(pt: Ranking, tf: Ranking) -> tuple[Row, Row] | None:
    """Plain code of both: the best baseline that is no exported file."""
    pair = []
    for side in (pt, tf):
        rows = [row for row in side.work.rows if row.is_baseline and not is_file(row.case)]
        rows = [row for row in rows if row.case.framework == side.framework]
        pair += sorted(filter(side.aim.figure, rows), key=side.aim.level)[:1]
    return tuple(pair) if len(pair) == len(FRAMEWORKS) else None


def alike(pt: Ranking, tf: Ranking) -> tuple[Row, Row] | None:
    """The best row of each framework in the technique that gains in both, and gains most."""
    best: list[dict[str, Row]] = []
    for side in (pt, tf):
        helps = sorted([*side.gaining, *side.tempting], key=side.aim.level, reverse=True)
        best.append({row.case.technique: row for row in helps})  # the best of each comes last
    pairs = [(best[0][name], best[1][name]) for name in best[0].keys() & best[1].keys()]
    figure = pt.goal.figure
    return min(
        pairs,
        key=lambda pair: pair[0].ratios[figure].value * pair[1].ratios[figure].value,
        default=None,
    )


def _ahead(aim: Aim, pt: Row, tf: Row) -> str:
    between = aim.ratio(pt, tf)
    if between is None or not between.bounds:
        return "not compared"
    if is_better(aim.goal.figure, between):
        return f"PyTorch, {gained(between, aim.goal, short=True)}"
    if is_worse(aim.goal.figure, between):
        return f"TensorFlow, {gained(between.turned(), aim.goal, short=True)}"
    return NO_DIFFERENCE
