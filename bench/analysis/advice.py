"""What to use for each aim, in each framework, and which framework is ahead.

An aim is a question of `priorities`, at one piece of work that has rows for it. In a framework the
best row is named among those shown to gain over their own baseline, accuracy kept. Of those that
cannot be told from the best it is the one that takes least to get.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from bench.analysis.accuracy import is_untrained_model
from bench.analysis.effects import Effect, Effects
from bench.analysis.pairing import baseline, program
from bench.analysis.prices import price
from bench.analysis.priorities import (
    ACCURACY,
    BATCH,
    MORE_IS_BETTER,
    QUESTIONS,
    TIME,
    Question,
    Row,
    rows,
)
from bench.analysis.values import at, is_number
from bench.analysis.verdicts import DELTA, shown_less, shown_more

Record = dict[str, Any]
FRAMEWORKS = ("pt", "tf")


@dataclass(frozen=True)
class Side:
    """What to use in one framework: `best`, or the `plain` row where nothing was shown to gain.

    `tried`: of how many rows. `equal` cannot be told from the best, `cheaper` gains less and takes
    less. `tempting` would gain more, but loses accuracy or was not measured for it; `kept_on`: the
    tasks on which it was shown to keep it. `nearest`: where none gains at any price, the best of
    those that keep accuracy, or of all. Other models that were trained nowhere are neither.
    """

    framework: str
    plain: dict
    tried: int
    best: Row | None = None
    equal: list[Row] = field(default_factory=list)
    cheaper: Row | None = None
    tempting: Row | None = None
    nearest: Row | None = None
    kept_on: list[str] = field(default_factory=list)

    @property
    def case(self) -> dict:
        """What is used."""
        return self.best.case if self.best else self.plain


@dataclass(frozen=True)
class Advice:
    """An aim at one piece of work: its sides, and how they compare.

    `between`: what PyTorch's side takes over what TensorFlow's takes; of accuracy the difference in
    points. `main`: of the works with models of its size (for accuracy: of its task; times of one
    prediction apart from those of a batch) the one with most rows to advise, whatever came out;
    where that tells nothing, also the next that does.
    `batch_size`: None where it makes no difference. `provisional`: one block's times, without
    intervals.
    """

    question: Question
    figure: str
    task: str
    batch_size: int | None
    sides: list[Side]
    between: Effect | None
    main: bool = False
    provisional: bool = False

    @property
    def ahead(self) -> str | None:
        """The framework that was shown to be ahead."""
        found = self.between
        if not found or not found.bounded:
            return None
        if self.figure == ACCURACY:
            return "pt" if found.low > 0 else "tf" if found.high < 0 else None
        return "pt" if shown_less(found.bounds) else "tf" if shown_more(found.bounds) else None

    def seen_from(self, framework: str) -> Effect:
        """What that framework's side takes over what the other's takes."""
        found = self.between
        if framework == "pt":
            return found
        if self.figure == ACCURACY:
            return Effect(-found.value, -found.high, -found.low, found.kind)
        return found.turned()

    @property
    def tells(self) -> bool:
        """Whether something gains in either framework, be it at an unknown price."""
        return any(side.best or side.tempting for side in self.sides)


def advice(record: Record) -> list[Advice]:
    """Every aim with its works: large models first, then by how many rows there are to advise."""
    effects, found = Effects(record), []
    every = rows(record, effects)
    before: dict[tuple, list[bool]] = {}  # whether the works before tell something
    for question, figure in _asked():
        works: dict[tuple, list[Row]] = {}
        for row in every:
            if question.asks(row) and figure in row.effects:
                key = (row.case["task"], row.case["batch_size"], row.mode)
                key = key[:1] if figure == ACCURACY else key  # which no batch and no mode changes
                works.setdefault(key, []).append(row)
        ordered = sorted(works.values(), key=_rank)
        for own in ordered:
            # What answers one request at once is often not what answers many together.
            single = (figure, own[0].mode, own[0].case["batch_size"]) == (TIME, "predict", 1)
            size: Any = None if question.family else (own[0].large, single)
            size = own[0].case["task"] if figure == ACCURACY else size
            made = _advice(question, figure, own, every, effects)
            told = before.setdefault((question, size), [])
            after_nothing = size is not None and made.tells and not any(told)
            found.append(replace(made, main=not told or after_nothing))
            told.append(made.tells)
    return found


def _asked() -> Iterator[tuple[Question, str]]:
    """The figures that answer each question: of memory the peak, then the largest batch."""
    for question in QUESTIONS:
        yield question, question.figures[0]
        if BATCH in question.figures:
            yield question, BATCH


def _rank(own: list[Row]) -> tuple:
    """Large models first, then by how many rows keep accuracy, then the larger batch."""
    safe = sum(bool(row.accuracy.kept) for row in own)
    return not own[0].large, -safe, -own[0].case["batch_size"]


def _advice(
    question: Question, figure: str, own: list[Row], every: list[Row], effects: Effects
) -> Advice:
    provisional = figure == TIME and not any(row.effects[figure].bounded for row in own)
    sides = []
    for framework in FRAMEWORKS:
        mine = [row for row in own if row.case["framework"] == framework]
        if mine:
            side = _side(framework, figure, mine, effects, provisional)
            sides.append(replace(side, kept_on=_kept_on(side.tempting, every)))
    between = None
    paired = at(effects.record["tasks"], own[0].case["task"], "paired") is not False
    if len(sides) == len(FRAMEWORKS) and paired:
        between, _ = effects.between(*(side.case for side in sides), figure)
        if between and figure in MORE_IS_BETTER:
            between = between.turned()
    case = own[0].case
    return Advice(
        question,
        figure,
        case["task"],
        None if figure == ACCURACY else case["batch_size"],
        sides,
        between,
        provisional=provisional,
    )


def _side(
    framework: str, figure: str, mine: list[Row], effects: Effects, provisional: bool
) -> Side:
    def level(case: dict) -> float:
        """The row's own figure, of which less is better."""
        if figure == ACCURACY:
            found, _ = effects.of(case, figure)
            return -found.value if found else 0.0  # a baseline gains nothing
        value = _value(effects, case, figure)
        if not value:
            return inf
        return 1 / value if figure in MORE_IS_BETTER else value

    def unlike(one: Row, other: Row) -> bool:
        """Whether the first is told from the second: its whole interval is worse.

        By any difference, not by what counts as one: nobody gets a worse row in a better one's
        place because that takes less.
        """
        found, _ = effects.between(one.case, other.case, figure)
        if not found or not found.bounded:
            return level(one.case) > level(other.case)
        if figure == ACCURACY:
            return found.high < 0
        return (found.turned() if figure in MORE_IS_BETTER else found).low > 1

    bases = [b for row in mine if (b := baseline(row.case, effects.record["cases"]))]
    plain = min(bases, key=level)
    gaining = [
        row
        for row in _each_once(mine)
        if row.gains(figure) or (provisional and _first(row, _noise(effects.record)))
    ]
    gaining.sort(key=lambda row: level(row.case))
    cases = effects.record["cases"]
    same = [row for row in mine if not is_untrained_model(row.case, cases)]
    tempting = [row for row in same if not row.accuracy.kept and row.improves(figure)]
    tempting = min(tempting, key=lambda row: (level(row.case), price(row.case)[0]), default=None)
    if not gaining:
        near = min(same or mine, key=lambda row: (not row.accuracy.kept, level(row.case)))
        nearest = None if tempting else near
        return Side(framework, plain, len(mine), tempting=tempting, nearest=nearest)
    equal = [row for row in gaining if row is gaining[0] or not unlike(row, gaining[0])]
    best = min(equal, key=lambda row: (price(row.case)[0], level(row.case)))
    equal.remove(best)
    cheap = [row for row in gaining if price(row.case)[0] < price(best.case)[0]]
    if tempting and not unlike(best, tempting):
        tempting = None
    return Side(framework, plain, len(mine), best, equal, next(iter(cheap), None), tempting)


def _kept_on(row: Row | None, every: list[Row]) -> list[str]:
    """The other tasks on which a row of the same name was trained and kept accuracy."""
    if row is None or row.accuracy.mean is not None:
        return []
    same = ("technique", "variant", "framework")
    found = [o for o in every if all(o.case[key] == row.case[key] for key in same)]
    trained = [o for o in found if o.accuracy.mean is not None]
    return list(dict.fromkeys(o.case["task"] for o in trained if o.accuracy.kept))


def _value(effects: Effects, case: dict, figure: str) -> float | None:
    if figure == TIME:
        return at(case, "timing", "median_s")
    found, _ = effects.value(case, figure)
    return found.value if found else None


def _first(row: Row, noise: float) -> bool:
    """Whether a row took less time than its baseline in the one block that there is."""
    return bool(row.accuracy.kept) and row.effects[TIME].value < 1 / noise


def _noise(record: Record) -> float:
    """A ratio that one block may show of no difference: what its own controls show, at least."""
    ratios = [c["ratio"] for c in record["comparisons"] if c["kind"] == "control"]
    ratios = [ratio for ratio in ratios if is_number(ratio) and ratio > 0]
    return max([1 + DELTA, *ratios, *(1 / ratio for ratio in ratios)])


def _each_once(found: Iterable[Row]) -> list[Row]:
    """A program that several techniques have is one row, unless each trains it in its own way."""
    return list(
        {program(row.case) if row.accuracy.exact else row.case["id"]: row for row in found}.values()
    )
