"""PyTorch or TensorFlow: for a few cases, which is ahead when both run the same kind of program.

Plain code is compared with plain code, and a technique with the same technique.
"""

from __future__ import annotations

from bench.analysis.questions import Answer
from bench.analysis.ranking import UPDATE, Aim, Ranking
from bench.analysis.table import MEMORY, Row, is_better, is_worse
from bench.analysis.verdicts import DELTA
from bench.record import FRAMEWORKS
from bench.report.advised import NO_DIFFERENCE, UNLIKE, gained, is_file, place_of
from bench.report.bars import chosen
from bench.report.names import name_of, sizes
from bench.report.technique_tables import Table, of_words

MOST = 8  # cases
LEGEND = (
    f"A lead counts where its whole 95% interval, in brackets, is beyond {DELTA:.0%}. There is no "
    "overall winner. “Not compared”: plain code was not measured in both.",
    f"“Same technique” compares the one that gains most in both. “{UNLIKE.capitalize()}”: two "
    "runtimes, or two variants of it. Such a lead is theirs, not the framework's.",
    "“Accuracy kept”: the same work, or shown by trainings. “Not shown”: check it on your data.",
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
    untouched, optimized = plain(pt, tf), alike(pt, tf)
    return [
        case,
        _ahead(pt.aim, *untouched) if untouched else "not compared",
        f"{_ahead(pt.aim, *optimized)}: {_in_words(optimized)}"
        if optimized
        else "no technique helps both",
    ]


def _in_words(pair: tuple[Row, Row]) -> str:
    """What is compared, whether these are unlike programs, and whether accuracy is kept."""
    names = dict.fromkeys(name_of(row.case, short=True) for row in pair)
    kept = [row.accuracy for row in pair if row.accuracy.asked]
    judged = next((one for one in kept if not one.kept), kept[0] if kept else None)
    parts = [" against ".join(names), UNLIKE if len(names) > 1 else ""]
    if judged:
        verdict = "kept" if judged.kept else "lost" if judged.lost else "not shown"
        parts.append(f"{judged.what} {verdict}")
    return "; ".join(filter(None, parts))


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
