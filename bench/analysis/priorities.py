"""Which technique pays, what it costs, and under which conditions: made from a record's rows.

A row gains in a figure if it was shown to be better than its own baseline with its whole interval,
by more than what counts as no difference (accuracy: by any of it), and keeps accuracy (see
`accuracy`). It pays if it gains in some figure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from bench.analysis import accuracy
from bench.analysis.accuracy import Accuracy
from bench.analysis.decisions import family_of
from bench.analysis.effects import Effect, Effects
from bench.analysis.pairing import baseline
from bench.analysis.prices import price
from bench.analysis.values import at, is_number
from bench.analysis.verdicts import shown_less
from shared.specs import TASKS, parameter_count

Record = dict[str, Any]
LARGE = 1e6  # parameters: from here on a step is mostly arithmetic
TIME, RATE, MEMORY, BATCH, SIZE = "time", "samples_per_s", "memory", "largest_batch", "size"
STEPS, ACCURACY = "steps_to_target", "accuracy"
FIGURES = (TIME, RATE, MEMORY, BATCH, SIZE, STEPS, ACCURACY)
MORE_IS_BETTER = (RATE, BATCH)
OF_TRAINING = ("input", "parallel")  # families that leave what is trained as it is
UPDATE = "optimizer_implementations"  # its step is the update alone


@dataclass(frozen=True)
class Row:
    """A row of the record that is no baseline, with its effects by figure, and its price.

    An effect is a ratio to the own baseline, `base`, of which less is better; of accuracy it is in
    points.
    """

    case: dict
    base: dict | None
    technique: str
    effects: dict[str, Effect]
    accuracy: Accuracy
    takes: str

    @property
    def large(self) -> bool | None:
        """Whether its model is a large one; None for a task that is not known (any more)."""
        task = TASKS.get(self.case["task"])
        return task and parameter_count(task.model) >= LARGE

    @property
    def mode(self) -> str:
        """Whether it trains or predicts."""
        return self.case.get("mode", "train")

    def gains(self, figure: str) -> bool:
        """Whether it was shown to be better than its baseline, and keeps accuracy."""
        return bool(self.accuracy.kept) and self.improves(figure)

    def improves(self, figure: str) -> bool:
        """Whether it was shown to be better than its baseline, whatever it does to accuracy."""
        found = self.effects.get(figure)
        if not found or not found.bounded:
            return False
        return found.low > 0 if figure == ACCURACY else shown_less(found.bounds)

    @property
    def pays(self) -> bool:
        """Whether it gains in some figure."""
        return any(map(self.gains, self.effects))


@dataclass(frozen=True)
class Cost:
    """What a technique costs beside its time: known from the code and the zoo of models.

    `lines` of code to copy, of its own file and what goes with it; `packages` that it imports
    beside its framework; of how many `models` it refuses some (None where that was not recorded).
    """

    lines: int
    packages: tuple[str, ...] = ()
    refused: int | None = None
    models: int | None = None


@dataclass(frozen=True)
class Priority:
    """A technique in one framework: its rows, and what it costs."""

    technique: str
    framework: str
    rows: list[Row]
    cost: Cost | None

    def best(self, figure: str) -> Row | None:
        """The row with the largest gain, by the bound of its interval."""
        return next(iter(_ordered(self.rows, figure)), None)

    def paid(self, large: bool) -> tuple[int, int]:
        """How many rows paid, of those with large models, or with small ones."""
        own = [row for row in self.rows if row.large is large]
        return sum(row.pays for row in own), len(own)

    @property
    def first_calls(self) -> list[float]:
        """Seconds of the first calls in new processes."""
        found = [at(row.case, "timing", "cold_first_call_s") for row in self.rows]
        return [seconds for seconds in found if is_number(seconds)]

    @property
    def lossy(self) -> int:
        """How many rows lose accuracy."""
        return sum(row.accuracy.lost for row in self.rows)


def rows(record: Record, effects: Effects | None = None) -> list[Row]:
    """Every row that ran, but for baselines and controls; `effects`: of the record, if made."""
    effects = effects or Effects(record)
    return [
        _row(record, effects, case)
        for case in record["cases"]
        if case["status"] == "OK" and case["role"] == "variant"
    ]


def _row(record: Record, effects: Effects, case: dict) -> Row:
    technique = case["technique"]
    kept = accuracy.of(case, record["cases"], record["tasks"])
    if family_of(technique) in OF_TRAINING or technique == "batch_size_finder":
        kept = Accuracy(True, asked=False)
    _, takes = price(case)
    base = baseline(case, record["cases"])
    return Row(case, base, technique, dict(_effects(effects, case)), kept, takes)


def _effects(effects: Effects, case: dict) -> Iterator[tuple[str, Effect]]:
    timed = is_number(at(case, "timing", "median_s"))
    for figure in FIGURES:
        if figure == RATE and timed:
            continue  # the same as its time
        found, _ = effects.of(case, figure)
        if found:
            yield figure, found.turned() if figure in MORE_IS_BETTER else found


def priorities(record: Record, costs: dict[tuple[str, str], Cost]) -> list[Priority]:
    """The matrix: a line for each technique and framework, by the share of rows that pay."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in filter(lambda row: row.effects, rows(record)):
        found.setdefault((row.technique, row.case["framework"]), []).append(row)
    made = [Priority(*key, own, costs.get(key)) for key, own in found.items()]
    return sorted(made, key=lambda p: -sum(row.pays for row in p.rows) / len(p.rows))


# The path ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Question:
    """A question of the path: which figures answer it, of which mode, family or technique.

    `aim`: what is wanted, in two or three words.
    """

    words: str
    aim: str
    figures: tuple[str, ...]
    mode: str | None = None
    family: str | None = None
    technique: str | None = None

    def asks(self, row: Row) -> bool:
        """Whether a row could be an answer."""
        if UPDATE in (row.technique, self.technique):
            return row.technique == self.technique
        own = family_of(row.technique)
        if own in OF_TRAINING or self.family:
            return own == self.family
        return self.mode in (None, row.mode)


QUESTIONS = (
    Question("Is a train step too slow?", "train faster", (TIME,), mode="train"),
    Question("Is a prediction too slow?", "predict faster", (TIME,), mode="predict"),
    Question("Does training wait for its data?", "feed data faster", (RATE,), family="input"),
    Question(
        "Is one device too slow, or too small?", "use several devices", (RATE,), family="parallel"
    ),
    Question(
        "Does training run out of memory?", "train in less memory", (MEMORY, BATCH), mode="train"
    ),
    Question("Is the model too large to ship?", "ship a smaller file", (SIZE,)),
    Question("Does it not converge, or not well enough?", "be more accurate", (ACCURACY, STEPS)),
    Question("Is the optimizer's update too slow?", "update faster", (TIME,), technique=UPDATE),
)


@dataclass(frozen=True)
class Leaf:
    """Where the path ends: the rows that gain, the largest gain first, and how many do not.

    `large`: of which models; None where that makes no difference. `unproven` have a figure, and
    were not shown to gain; `once` have one without an interval; `refused` would gain, but were not
    shown to keep accuracy.
    """

    question: Question
    figure: str
    framework: str
    large: bool | None
    rows: list[Row]
    unproven: int
    once: int
    refused: int


@dataclass(frozen=True)
class Answered:
    """A question with its leaves; none of them where no row has a figure."""

    question: Question
    leaves: list[Leaf] = field(default_factory=list)


def path(record: Record) -> list[Answered]:
    """Every question, and the rows at which it ends."""
    every = rows(record)
    found = []
    for question in QUESTIONS:
        asked = [row for row in every if question.asks(row)]
        unknown = any(row.large is None for row in asked)  # a model of the user's
        sizes = (None,) if question.family or unknown else (False, True)
        leaves = [
            leaf
            for figure in question.figures
            for framework in ("pt", "tf")
            for large in sizes
            if (leaf := _leaf(question, figure, framework, large, asked))
        ]
        found.append(Answered(question, leaves))
    return found


def _leaf(
    question: Question, figure: str, framework: str, large: bool | None, asked: list[Row]
) -> Leaf | None:
    own = [
        row
        for row in asked
        if figure in row.effects
        and row.case["framework"] == framework
        and large in (None, row.large)
    ]
    if not own:
        return None
    best = _ordered(own, figure)
    refused = [row for row in own if not row.accuracy.kept and _better(row, figure)]
    kept = [row for row in own if row not in best and row not in refused]
    once = sum(not row.effects[figure].bounded for row in kept)
    counted = (len(kept) - once, once, len(refused))
    return Leaf(question, figure, framework, large, best, *counted)


def _better(row: Row, figure: str) -> bool:
    effect = row.effects[figure]
    return effect.value > 0 if figure == ACCURACY else effect.value < 1


def _ordered(own: list[Row], figure: str) -> list[Row]:
    """The rows that gain, by the bound that is nearest to no gain."""
    gaining = [row for row in own if row.gains(figure)]
    if figure == ACCURACY:
        return sorted(gaining, key=lambda row: -row.effects[figure].low)
    return sorted(gaining, key=lambda row: row.effects[figure].high)
