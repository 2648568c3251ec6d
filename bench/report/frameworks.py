"""PyTorch or TensorFlow: for a few cases, which is ahead when both run the same kind of program.

Plain code is compared with plain code, and a technique with the same technique.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from bench.analysis.questions import Answer
from bench.analysis.ranking import UPDATE, Ranking
from bench.analysis.table import MEMORY, Figure, Row, is_better, is_worse
from bench.analysis.verdicts import DELTA
from bench.record import FRAMEWORKS
from bench.report.advised import NO_DIFFERENCE, gained, is_file
from bench.report.bars import chosen
from bench.report.names import called, name_of, sizes
from bench.report.technique_tables import Table, of_words

MOST = 8  # cases
STARRED = "*"  # accuracy not shown, as in the picture
COLUMNS = ("with plain code", "with a technique")
UNKNOWN = "not compared"
# What is compared, in the sentences.
KINDS = ("with plain code", "with the same technique", "with different programs of a technique")
LEGEND = (
    "1.19x: times as fast, with its 95% interval in brackets. A lead counts if even the low end of "
    f"its interval is above {DELTA:.0%}. “Not compared”: plain code was not measured in both.",
    "“With a technique”: the one that gains most in both. Where a cell has two names, these are "
    "different programs, such as two runtimes. The lead is theirs, not the framework's. "
    f"{STARRED} Accuracy was not shown to be kept: check it on your data.",
)


@dataclass(frozen=True)
class Line:
    """A case: what is compared in each of `COLUMNS`; None where there is no such pair."""

    answer: Answer
    pairs: tuple[tuple[Row, Row] | None, ...]

    def kind(self, column: int) -> str | None:
        """Which of `KINDS` is compared there; None where nothing is."""
        pair = self.pairs[column]
        return pair and KINDS[2 if column and len(_names(pair)) > 1 else column]

    def leader(self, column: int) -> str | None:
        """The framework shown to be ahead; None where none is."""
        between = self._between(column)
        if between is None:
            return None
        if is_better(self.answer.goal.figure, between):
            return "pt"
        return "tf" if is_worse(self.answer.goal.figure, between) else None

    def lead(self, column: int) -> str:
        """Who is ahead, by how much; or why nobody is."""
        if self._between(column) is None:
            return UNKNOWN
        leader = self.leader(column)
        return f"{FRAMEWORKS[leader]}, {self.gain(column)}" if leader else NO_DIFFERENCE

    def gain(self, column: int, *, bounds: bool = True) -> str:
        """By how much the leader is ahead: 1.64x (1.51–1.78)."""
        between = self._between(column)
        ratio = between if self.leader(column) == "pt" else between.turned()
        kind = ratio.kind if bounds else "once"
        return gained(replace(ratio, kind=kind), self.answer.goal, short=True)

    def led_by(self, column: int) -> str:
        """By how much, and with what, if that is one technique: 1.12x, bfloat16*."""
        gain, kind = self.gain(column, bounds=False), self.kind(column)
        return f"{gain}, {_in_words(self.pairs[column])}" if kind == KINDS[1] else gain

    def _between(self, column: int) -> Figure | None:
        pair = self.pairs[column]
        between = pair and self.answer.sides["pt"].aim.ratio(*pair)
        return between if between and between.bounds else None


def lines(listed: list[Answer]) -> list[Line]:
    """The cases, large models first."""
    shown = [one for one in chosen(listed) if one.work.kind != UPDATE]
    shown += [one for one in listed if one.goal.figure == MEMORY and one.main]
    both = [one for one in shown if len(one.sides) == len(FRAMEWORKS)][:MOST]
    return [Line(one, (plain(*one.sides.values()), alike(*one.sides.values()))) for one in both]


def table(listed: list[Answer]) -> Table:
    """A line for each case, large models first."""
    shown = lines(listed)
    models = _models(shown)
    rows = []
    for one in shown:
        work = one.answer.work
        case = f"{one.answer.question.aim}\n{models[work.task]}, batch {work.batch_size}"
        optimized = one.pairs[1]
        technique = f"{one.lead(1)}: {_in_words(optimized)}" if optimized else "no shared gain"
        rows.append([case, one.lead(0), technique])
    return Table(
        "PyTorch or TensorFlow?", of_words("who is ahead", *COLUMNS), rows, name="frameworks"
    )


def overview(listed: list[Answer]) -> dict[str, str]:
    """Aim -> which framework leads at what, unlike programs apart."""
    shown = lines(listed)
    models = _models(shown)
    made = {}
    for aim in dict.fromkeys(one.answer.question.aim for one in shown):
        asked = [one for one in shown if one.answer.question.aim == aim]
        leads = {kind: _leads(asked, kind, models) for kind in KINDS}
        parts = [f"{kind} {text}" for kind, text in leads.items() if text]
        compared = any(one.lead(column) != UNKNOWN for one in asked for column in (0, 1))
        made[aim] = "; ".join(parts) or (NO_DIFFERENCE if compared else UNKNOWN)
    return made


def _leads(asked: list[Line], kind: str, models: dict[str, str]) -> str:
    """PyTorch for GPT (1.12x, bfloat16*), TensorFlow for small CNN (2.05x, 3.64x); "" for none."""
    compared = [(one, at) for one in asked for at in range(len(COLUMNS)) if one.kind(at) == kind]
    leaders: dict[str, set[str | None]] = {}  # by task
    for one, at in compared:
        leaders.setdefault(one.answer.work.task, set()).add(one.leader(at))
    led: dict[str, dict[str, list[str]]] = {}  # framework -> place -> by how much
    for one, at in compared:
        if leader := one.leader(at):
            work = one.answer.work
            batch = f" at batch {work.batch_size}" if len(leaders[work.task]) > 1 else ""
            places = led.setdefault(FRAMEWORKS[leader], {})
            places.setdefault(f"{models[work.task]}{batch}", []).append(one.led_by(at))
    parts = []
    for name, places in led.items():
        by = [f"{place} ({', '.join(gains)})" for place, gains in places.items()]
        parts.append(f"{name} for {' and '.join(by)}")
    return ", ".join(parts)


def described(listed: list[Answer]) -> str:
    """ResNet-18 on 64-pixel photos: 11 million parameters; small CNN on digits: 33 thousand."""
    tasks = dict.fromkeys(one.answer.work.task for one in lines(listed))
    return "; ".join(": ".join(filter(None, (called(task), sizes([task])))) for task in tasks)


def _models(shown: list[Line]) -> dict[str, str]:
    """Tasks by their model only, where that tells them apart."""
    named = {task: called(task) for task in (one.answer.work.task for one in shown)}
    models = {task: words.partition(" on ")[0] for task, words in named.items()}
    return models if len(set(models.values())) == len(models) else named


def _in_words(pair: tuple[Row, Row]) -> str:
    """What is compared, and whether accuracy is kept."""
    names = " against ".join(_names(pair))
    judged = [row.accuracy for row in pair if row.accuracy.asked]
    if lost := next((one for one in judged if one.lost), None):
        return f"{names}, {lost.what} lost"
    return names if all(one.kept for one in judged) else f"{names}{STARRED}"


def _names(pair: tuple[Row, Row]) -> list[str]:
    """The technique of a pair in one or two names: two are unlike programs."""
    return list(dict.fromkeys(name_of(row.case, short=True) for row in pair))


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
