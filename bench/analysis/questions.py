"""The questions of a reader, each answered by a filter of the ranking.

They are: what to use for each aim, which framework is ahead, which rows gain, which techniques pay,
and which address a bottleneck.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from bench.analysis.ranking import (
    DEVICES,
    FIT,
    GOALS,
    INPUT,
    PREDICT,
    RECIPE,
    TRAIN,
    UPDATE,
    Goal,
    Ranking,
    Work,
    rank,
    works,
)
from bench.analysis.table import (
    COMPARED,
    FIRST_CALL,
    GAINED,
    MORE_IS_BETTER,
    START,
    Figure,
    Row,
    is_better,
    is_worse,
    level,
)
from bench.record import FRAMEWORKS, Record


@dataclass(frozen=True)
class Question:
    """A question: the goals that answer it, and the kinds of work.

    `aim`: what is wanted, in two or three words.
    """

    words: str
    aim: str
    goals: tuple[str, ...]
    kinds: tuple[str, ...]


QUESTIONS = (
    Question("Is a train step too slow?", "train faster", ("train-speed",), (TRAIN,)),
    Question("Is a prediction too slow?", "predict faster", ("latency",), (PREDICT,)),
    Question("Does training wait for its data?", "feed data faster", ("throughput",), (INPUT,)),
    Question(
        "Is one device too slow, or too small?", "use several devices", ("throughput",), (DEVICES,)
    ),
    Question(
        "Does training run out of memory?", "train in less memory", ("memory", "batch"),
        (TRAIN, FIT),
    ),
    Question("Is the model too large to ship?", "ship a smaller file", ("size",), (TRAIN, PREDICT)),
    Question(
        "Does it not converge, or not well enough?", "be more accurate",
        ("accuracy", "convergence"), (RECIPE, TRAIN, PREDICT),
    ),
    Question(
        "Is the optimizer's update too slow?", "faster optimizer step", ("train-speed",), (UPDATE,)
    ),
)  # fmt: skip


# What to use --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """A question at one piece of work: its ranking in each framework, and how the best compare.

    `between`: PyTorch's best over TensorFlow's best; for accuracy the difference in points. `main`:
    for models of this size (for accuracy: for this task; predictions of one sample and of a batch
    separately) the piece of work with most rows that keep accuracy, whatever the result. If that
    can't tell, also the next one that can.
    """

    question: Question
    goal: Goal
    work: Work
    sides: dict[str, Ranking]
    between: Figure | None
    main: bool = False

    @property
    def provisional(self) -> bool:
        """Whether only the times of one block decide."""
        return any(side.aim.provisional for side in self.sides.values())

    @property
    def ahead(self) -> str | None:
        """The framework that was shown to be ahead, if any."""
        if self.between is None:
            return None
        if is_worse(self.goal.figure, self.between):
            return "tf"
        return "pt" if is_better(self.goal.figure, self.between) else None

    def seen_from(self, framework: str) -> Figure:
        """The figure of that framework's best over the other's."""
        between = self.between
        if framework == "pt":
            return between
        if self.goal.figure == GAINED:
            return Figure(-between.value, -between.high, -between.low, between.kind)
        return between.turned()

    @property
    def tells(self) -> bool:
        """Whether something gains in one of the frameworks, with or without loss of accuracy."""
        return any(not s.best.is_baseline or s.tempting for s in self.sides.values())


def answers(record: Record, of: list[Work] | None = None) -> list[Answer]:
    """Every question with its works: large models first, then by how many rows keep accuracy.

    `of`: the record's works, if they are known.
    """
    grouped = _paired(works(record) if of is None else of)
    made = []
    told: dict[tuple, list[bool]] = {}  # whether the works before tell something
    for question in QUESTIONS:
        for name in question.goals:
            if name == "convergence":
                continue  # which comes second to accuracy
            asked = [_answer(question, GOALS[name], own) for own in grouped]
            for answer in sorted(filter(None, asked), key=_order):
                before = told.setdefault((question, _size(answer)), [])
                after_nothing = _size(answer) is not None and answer.tells and not any(before)
                made.append(replace(answer, main=not before or after_nothing))
                before.append(answer.tells)
    return made


def _paired(every: list[Work]) -> list[list[Work]]:
    """The works, those of two frameworks whose models are no twins together."""
    grouped: dict[tuple, list[Work]] = {}
    for work in every:
        alone = work.apart and work.apart in {row.case.framework_title for row in work.rows}
        apart = "" if alone else work.apart
        grouped.setdefault((work.kind, work.task, work.batch_size, apart), []).append(work)
    return list(grouped.values())


def _answer(question: Question, goal: Goal, works: list[Work]) -> Answer | None:
    """None where no row but the baselines has the figure."""
    if works[0].kind not in question.kinds or works[0].kind not in goal.kinds:
        return None
    sides = {}
    for framework in FRAMEWORKS:
        ranked = [rank(work, goal, framework=framework) for work in works]
        for side in ranked:
            if side and side.tried:
                sides[framework] = side
    if not sides:
        return None
    between = None
    if len(sides) == len(FRAMEWORKS) and len(works) == 1:
        between = _between(*sides.values())
    first = next(iter(sides.values()))
    return Answer(question, first.goal, first.work, sides, between)


def _between(pt: Ranking, tf: Ranking) -> Figure | None:
    """How the best of both compare; their accuracy by the seeds that both trained with."""
    if pt.goal.figure == GAINED:
        return pt.work.table.between(pt.best.case, tf.best.case, GAINED)[0]
    return pt.aim.ratio(pt.best, tf.best)


def _order(answer: Answer) -> tuple:
    """Large models first, then by how many rows keep accuracy, then the larger batch."""
    tried = [row for side in answer.sides.values() for row in side.tried]
    safe = sum(bool(row.accuracy.kept) for row in tried)
    return not answer.work.large, -safe, -answer.work.batch_size


def _size(answer: Answer) -> object:
    """Of which works one is shown: of which task, or of how large a model."""
    if answer.goal.figure == GAINED:
        return answer.work.task
    if answer.work.kind in (INPUT, DEVICES):
        return None
    # What answers one request at once is often not what answers many together.
    single = (answer.goal.name, answer.work.batch_size) == ("latency", 1)
    return answer.work.large, single


# Which technique pays -----------------------------------------------------------------------------

FIGURES = tuple(name for name in COMPARED if name not in (FIRST_CALL, START))


@dataclass(frozen=True)
class Cost:
    """What a technique costs besides time, from its code and from the zoo of models.

    `lines`: code to copy, with the files that go with it. `packages`: imported besides the
    framework. `refused`: how many of `models` it refuses (None if that was not recorded).
    """

    lines: int
    packages: tuple[str, ...] = ()
    refused: int | None = None
    models: int | None = None


@dataclass(frozen=True)
class Priority:
    """A technique in one framework: its rows, each with its work, and its cost."""

    technique: str
    framework: str
    rows: list[tuple[Work, Row]]
    cost: Cost | None

    @property
    def paid(self) -> int:
        """How many rows gain in any figure."""
        return sum(row.pays for _, row in self.rows)

    @property
    def first_calls(self) -> list[float]:
        """Seconds of the first calls in new processes."""
        calls = (row.figures.get(FIRST_CALL) for _, row in self.rows)
        return [call.value for call in calls if call]


def priorities(record: Record, costs: dict[tuple[str, str], Cost]) -> list[Priority]:
    """One entry per technique and framework, ordered by the share of rows that pay."""
    places = {case.id: place for place, case in enumerate(record.cases)}
    every = [(work, row) for work in works(record) for row in _changes(work)]
    grouped: dict[tuple[str, str], list[tuple[Work, Row]]] = {}
    for work, row in sorted(every, key=lambda pair: places[pair[1].case.id]):
        if not row.ratios.keys().isdisjoint(FIGURES):
            key = (row.case.technique, row.case.framework)
            grouped.setdefault(key, []).append((work, row))
    made = [Priority(*key, rows, costs.get(key)) for key, rows in grouped.items()]
    return sorted(made, key=lambda p: -p.paid / len(p.rows))


def _changes(work: Work) -> list[Row]:
    """Every technique's rows that are no baselines."""
    return [row for row in work.members if not row.is_baseline]


def by_bound(rows: list[Row], name: str) -> list[Row]:
    """The rows that gain, ordered by the bound nearest to no gain."""
    gaining = [row for row in rows if row.gains(name)]
    if name in MORE_IS_BETTER:
        return sorted(gaining, key=lambda row: -row.ratios[name].low)
    return sorted(gaining, key=lambda row: row.ratios[name].high)


@dataclass(frozen=True)
class Leaf:
    """The end of a path: the rows that gain, the largest gain first, and how many do not.

    `large`: size of the models; None if that makes no difference. `unproven`: rows with a figure
    that were not shown to gain; `once`: with a figure without an interval; `refused`: would gain,
    but were not shown to keep accuracy.
    """

    question: Question
    goal: Goal
    framework: str
    large: bool | None
    rows: list[Row]
    unproven: int
    once: int
    refused: int


def path(record: Record) -> list[tuple[Question, list[Leaf]]]:
    """Every question with its leaves; none if no row has a figure."""
    every = works(record)
    made = []
    for question in QUESTIONS:
        asked = [work for work in every if work.kind in question.kinds]
        unknown = any(work.large is None for work in asked)  # a model of the user's
        whole = unknown or not {INPUT, DEVICES}.isdisjoint(question.kinds)
        leaves = [
            _leaf(question, GOALS[name], framework, large, asked)
            for name in question.goals
            for framework in FRAMEWORKS
            for large in ((None,) if whole else (False, True))
        ]
        made.append((question, list(filter(None, leaves))))
    return made


def _leaf(
    question: Question, goal: Goal, framework: str, large: bool | None, asked: list[Work]
) -> Leaf | None:
    rows = [
        row
        for work in asked
        for row in _changes(work)
        if large in (None, work.large)
        and row.case.framework == framework
        and goal.figure in row.ratios
    ]
    if not rows:
        return None
    best = by_bound(rows, goal.figure)
    refused = [row for row in rows if not row.accuracy.kept and _seems_better(goal, row)]
    others = [row for row in rows if row not in best and row not in refused]
    once = sum(row.ratios[goal.figure].bounds is None for row in others)
    counted = (len(others) - once, once, len(refused))
    return Leaf(question, goal, framework, large, best, *counted)


def _seems_better(goal: Goal, row: Row) -> bool:
    nothing = 0.0 if goal.figure == GAINED else 1.0
    even = Figure(nothing, nothing, nothing, "exact")
    return level(goal.figure, row.ratios[goal.figure]) < level(goal.figure, even)


# What addresses a bottleneck ----------------------------------------------------------------------

# Bottleneck -> the goal and the kinds of work whose rows count. Which techniques do something about
# it, each benchmark file says of its own.
REMEDIES = {
    "input": ("throughput", (INPUT,)),
    "overhead": ("train-speed", (TRAIN, UPDATE)),
    "arithmetic": ("train-speed", (TRAIN, UPDATE)),
    "memory bandwidth": ("train-speed", (TRAIN, UPDATE)),
    "memory size": ("memory", (TRAIN,)),
    "communication": ("throughput", (DEVICES,)),
}


@dataclass(frozen=True)
class Remedy:
    """A row that gains, and addresses a bottleneck."""

    work: Work
    goal: Goal
    row: Row

    @property
    def gain(self) -> Figure:
        """Over its baseline's figure."""
        return self.row.ratios[self.goal.figure]


def remedies(
    record: Record, framework: str, bottleneck: str, *, of_prediction: bool = False
) -> list[Remedy]:
    """Rows of a framework that address a bottleneck and gain, the largest gain first.

    Each technique gives its best row per piece of work. of_prediction: whether predictions are
    meant, not train steps.
    """
    name, kinds = REMEDIES[bottleneck]
    if of_prediction and TRAIN in kinds:
        name, kinds = "latency" if name == "train-speed" else name, (PREDICT,)
    best: dict[tuple[str, str], Remedy] = {}
    for work in works(record):
        ranking = rank(work, GOALS[name], framework=framework) if work.kind in kinds else None
        for row in ranking.gaining if ranking else ():
            if bottleneck in (row.case.remedies or ()) and row.ratios[ranking.goal.figure].bounds:
                key = (row.case.technique, work.title)
                best.setdefault(key, Remedy(work, ranking.goal, row))
    return sorted(best.values(), key=lambda one: level(one.goal.figure, one.gain))
