"""What to use: `rank` orders the rows of a piece of work for a goal, within limits.

In each framework the best row is chosen among those that were shown to gain over their baseline,
keep accuracy, and are better than the plain code. Of the rows that can't be told from the best, the
one that needs least work is chosen. If none gains, it is the plain code. Over both frameworks it is
the better of the two. Better or worse means that the whole interval is beyond 3%; of points gained,
any.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from bench.analysis import accuracy
from bench.analysis.families import OF_LEARNING, family_of
from bench.analysis.pairing import baseline
from bench.analysis.table import (
    BATCH,
    FIRST_CALL,
    GAINED,
    MEMORY,
    NOT_COMPARABLE,
    RATE,
    SIZE,
    START,
    STEPS,
    TIME,
    WITH_IMPORTS,
    Figure,
    Row,
    Table,
    is_better,
    is_worse,
    level,
    quotient,
)
from bench.analysis.values import MOST_OTHERS
from bench.analysis.verdicts import DELTA
from bench.record import DIFFERENT, Case, Record
from shared.specs import TASKS, more_is_better, parameter_count

TRAIN, PREDICT, INPUT, DEVICES, PROBE = "train", "predict", "input", "devices", "probe"
RECIPE, FIT, UPDATE = "recipe", "fit", "update"
NAMES = {
    TRAIN: "train step",
    PREDICT: "prediction",
    INPUT: "input pipeline",
    DEVICES: "several devices",
    PROBE: "probe",
    RECIPE: "training",
    FIT: "train step",
    UPDATE: "optimizer's update",
}
ADD_WORK = ("finite_guard", "gradient_clipping")  # techniques that no step gets faster by
OF_UPDATES = "optimizer_implementations"  # the technique whose step is the update alone
LARGE = 1e6  # parameters: from here on a step is mostly arithmetic


def is_large(task: str) -> bool | None:
    """Whether a task's model is large; None if the task is unknown."""
    known = TASKS.get(task)
    return known and parameter_count(known.model) >= LARGE


# Goals --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Goal:
    """An aim: which figure decides, and for which kinds of work."""

    name: str
    figure: str
    title: str
    unit: str
    size: float
    kinds: tuple[str, ...]


STEPPED = (TRAIN, UPDATE)
GOALS = {
    goal.name: goal
    for goal in (
        Goal("train-speed", TIME, "time of a train step", "ms", 1e-3, STEPPED),
        Goal("latency", TIME, "time of a prediction", "ms", 1e-3, (PREDICT,)),
        Goal("throughput", RATE, "samples per second", "samples/s", 1.0, (INPUT, DEVICES, PROBE)),
        Goal("accuracy", GAINED, "points of accuracy gained over the plain training", "points", 1.0,
             (TRAIN, PREDICT, RECIPE)),
        Goal("memory", MEMORY, "peak memory above import", "MB", 1e6, (*STEPPED, PREDICT)),
        Goal("batch", BATCH, "largest batch that fits into memory", "samples", 1.0, (FIT,)),
        Goal("cold-start", FIRST_CALL, "first call in a new process", "s", 1.0,
             (*STEPPED, PREDICT)),
        Goal("start", START, "time to the first prediction in a new process", "s", 1.0,
             (PREDICT,)),
        Goal("size", SIZE, "size on disk", "MB", 1e6, (TRAIN, PREDICT)),
        Goal("convergence", STEPS, "steps to the target", "steps", 1.0, (RECIPE,)),
    )
}  # fmt: skip
# metric -> what is gained of it, and its unit, where these are not those of accuracy
OF_METRIC = {
    "bits_per_character": ("bits per character saved against the plain training", "bits saved"),
    "mAP": ("points of mAP gained over the plain training", "points"),
}


@dataclass(frozen=True)
class Limits:
    """Limits of a choice: points of accuracy lost, bytes of memory; and the number of steps."""

    accuracy_drop: float | None = None
    memory: float | None = None
    steps: int | None = None


# Pieces of work -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """A piece of work, and its rows in the order of their main figure.

    `apart`: the technique, if its baseline was not shown to do the same work as the others; the
    framework, if the frameworks' models differ.
    """

    kind: str
    task: str
    batch_size: int
    rows: list[Row]
    table: Table
    apart: str = ""

    @property
    def title(self) -> str:
        """ "digits-cnn, batch 128, train step"; a row about the largest batch has no batch size."""
        size = "" if self.kind == FIT else f"batch {self.batch_size}, "
        words = f"{self.task}, {size}{NAMES[self.kind]}"
        return f"{words} ({self.apart})" if self.apart else words

    @property
    def main(self) -> str:
        """The name of its main figure."""
        return MAIN.get(self.kind, TIME)

    @property
    def members(self) -> list[Row]:
        """The rows and their repeats in other techniques."""
        return [member for row in self.rows for member in row.members]

    @property
    def frameworks(self) -> list[str]:
        """The frameworks that have rows."""
        return sorted({row.case.framework for row in self.rows})

    @property
    def large(self) -> bool | None:
        """Whether its model is large; None if the task is unknown."""
        return is_large(self.task)

    @property
    def provisional(self) -> bool:
        """Whether its steps were timed in one block only, so that they have no intervals."""
        times = [row.figures[TIME] for row in self.rows if TIME in row.figures]
        ratios = [row.ratios[TIME] for row in self.members if TIME in row.ratios]
        known = ratios or times
        return bool(known) and not any(figure.bounds for figure in known)

    @cached_property
    def others(self) -> float | None:
        """The share of the cores that other programs used during its one block, if too large."""
        if not self.provisional:
            return None
        names = {name for row in self.members for name in (row.case.id, row.case.program_id)}
        blocks = [block for block in self.table.record.blocks if names & set(block.order)]
        most = max((block.others or 0.0 for block in blocks), default=0.0)
        return most if most > MOST_OTHERS else None

    @cached_property
    def noise(self) -> float:
        """A ratio that one block may show without a real difference, by the run's controls."""
        controls = [c for c in self.table.record.comparisons if c.kind == "control" and c.ratio]
        ratios = [control.ratio for control in controls]
        return max([1 + DELTA, *ratios, *(1 / ratio for ratio in ratios)])

    @property
    def goals(self) -> list[Goal]:
        """The goals that some row has a figure for, the main one first."""
        named = {name for row in self.rows for name in row.figures}
        return [g for g in GOALS.values() if self.kind in g.kinds and g.figure in named]

    def worded(self, goal: Goal) -> Goal:
        """A goal in words for this work: with its metric, or a GPU's memory."""
        cases = [row.case for row in self.rows]
        if goal.figure == GAINED:
            metric = next((c.accuracy.metric for c in cases if c.accuracy), None)
            title, unit = OF_METRIC.get(metric, (goal.title, goal.unit))
            return replace(goal, title=title, unit=unit)
        if goal.figure == MEMORY and any(map(on_device, cases)):
            return replace(goal, title="peak memory of the GPU")
        budgets = [(case.evidence or {}).get("budget_bytes") for case in cases]
        if goal.figure == BATCH and any(budgets):
            budget = next(filter(None, budgets))
            return replace(goal, title=f"largest batch in {budget / 1e6:,.0f} MB above import")
        return goal


def on_device(case: Case) -> bool:
    """Whether its peak memory is that of a GPU."""
    return case.memory is not None and case.memory.device_peak_bytes is not None


# What a row must have one of to take part.
SHOWN = (TIME, RATE, MEMORY, BATCH, SIZE, STEPS, GAINED, FIRST_CALL, START, WITH_IMPORTS)
SHOWN += ("efficiency", "share_of_limit")
MAIN = {INPUT: RATE, DEVICES: RATE, PROBE: RATE, RECIPE: GAINED, FIT: BATCH}


def works(record: Record) -> list[Work]:
    """Every piece of work, the one with most rows first."""
    table = Table(record)
    grouped: dict[tuple, list[Row]] = {}
    proofs: dict[tuple, Case] = {}
    for rows in _by_baseline(table):
        base = rows[0].case
        kind = _kind(rows)
        side = base.framework_title if _unpaired(record, base) else ""
        key = (kind, base.task, base.batch_size, side)
        apart = base.technique if kind == PROBE else side
        if not apart and not _same_work(record, base, proofs.setdefault(key, base)):
            apart = base.technique
        learned = kind == RECIPE or any(GAINED in row.ratios for row in rows)
        rows = [_plain_gain(row) if learned else row for row in rows]
        rows = [row for row in rows if not row.figures.keys().isdisjoint(SHOWN)]
        grouped.setdefault((*key[:3], apart), []).extend(rows)
    made = [
        Work(kind, task, batch, _of_one_memory(_merged(rows)), table, apart)
        for (kind, task, batch, apart), rows in grouped.items()
        if rows
    ]
    for work in made:
        work.rows.sort(key=lambda row: level(work.main, row.figures.get(work.main)))
    return sorted(made, key=lambda work: -len(work.rows))


def _by_baseline(table: Table) -> Iterator[list[Row]]:
    """The rows of each technique, task, batch and mode, its baseline first."""
    groups: dict[tuple, list[Row]] = {}
    for row in table.rows:
        case = row.case
        if case.role not in ("control", "bound"):
            side = case.framework if _unpaired(table.record, case) else ""
            groups.setdefault((case.technique, case.work, side), []).append(row)
    for rows in groups.values():
        yield sorted(rows, key=lambda row: not row.is_baseline)


def _unpaired(record: Record, case: Case) -> bool:
    """Whether the frameworks have a task's model, but not with equal weights or equal losses."""
    if not accuracy.facts(record.tasks, case.task).paired:
        return True
    base = case if case.role == "baseline" else baseline(case, record.cases)
    bases = {other.id for other in record.cases if other.role == "baseline"}
    return base is not None and any(
        base.id in (c.numerator, c.denominator) and bases >= {c.numerator, c.denominator}
        for c in record.comparisons
        if c.kind == "framework" and c.verdict == DIFFERENT
    )


def _kind(rows: list[Row]) -> str:
    case = rows[0].case
    family, named = family_of(case.technique), {name for row in rows for name in row.figures}
    if BATCH in named:
        return FIT
    if family in OF_LEARNING and any(
        row.case.accuracy and row.case.accuracy.mean is not None for row in rows
    ):
        return RECIPE
    if TIME in named and case.technique == OF_UPDATES:
        return UPDATE
    if RATE in named and TIME not in named:
        return {"input": INPUT, "parallel": DEVICES}.get(family, PROBE)
    return PREDICT if case.mode == "predict" else TRAIN


def _same_work(record: Record, one: Case, other: Case) -> bool:
    """Whether two baselines start from the same weights and see the same first loss.

    What was not timed carries no proof; its task and its batch are the same.
    """
    if one.certificate is None or other.certificate is None:
        return True
    same = one.certificate.weights_sha256 == other.certificate.weights_sha256
    facts = accuracy.facts(record.tasks, one.task)
    return same and accuracy.agree(facts, one.losses[:1], other.losses[:1])


def _plain_gain(row: Row) -> Row:
    """A baseline of a training gains nothing."""
    nothing = {GAINED: Figure(0.0, 0.0, 0.0, "exact")} if row.is_baseline else {}
    return replace(row, figures=row.figures | nothing)


def _merged(rows: list[Row]) -> list[Row]:
    """The same program in several techniques as one row, a baseline's where there is one.

    What is trained to its own accuracy is a row of its own.
    """
    programs: dict[tuple, list[Row]] = {}
    for row in rows:
        trained = "" if row.accuracy.exact else row.case.id
        programs.setdefault((row.case.program_id, trained), []).append(row)
    made = []
    for same in programs.values():
        same.sort(key=lambda row: (not row.is_baseline, _width(row)))
        figures = {name: f for row in reversed(same) for name, f in row.figures.items()}
        made.append(replace(same[0], figures=figures, repeats=tuple(same[1:])))
    return made


def _width(row: Row) -> float:
    figure = row.figures.get(TIME) or row.figures.get(RATE)
    return figure.high / figure.low if figure else 0.0


def _of_one_memory(rows: list[Row]) -> list[Row]:
    """Where a GPU's peaks were counted, those of what ran on the CPU are another figure."""
    if not any(on_device(row.case) for row in rows):
        return rows
    return [
        row
        if on_device(row.case)
        else replace(row, figures={n: f for n, f in row.figures.items() if n != MEMORY})
        for row in rows
    ]


# Ranking ------------------------------------------------------------------------------------------

LITTLE = 0.01  # share of a whole that does not decide how sure it is


@dataclass(frozen=True)
class Aim:
    """A goal at a piece of work, within limits."""

    work: Work
    goal: Goal
    limits: Limits

    @property
    def whole(self) -> bool:
        """Whether the time of a number of steps counts, with the first call."""
        return self.limits.steps is not None and self.goal.figure == TIME

    @property
    def provisional(self) -> bool:
        """Whether only the times of one block decide."""
        return self.goal.figure == TIME and self.work.provisional

    def figure(self, row: Row) -> Figure | None:
        """The figure that decides."""
        figure = row.figures.get(self.goal.figure)
        if figure is None or not self.whole:
            return figure
        return _of_steps(row, self.limits.steps, self.work.table)

    def level(self, row: Row) -> float:
        """The figure as a number, of which less is better."""
        return level(self.goal.figure, self.figure(row))

    def ratio(self, row: Row, other: Row) -> Figure | None:
        """The figure of a row over that of another; None if the two did different work.

        For points gained: the points more, over the seeds that both were trained with.
        """
        table, pair = self.work.table, (self.figure(row), self.figure(other))
        if self.goal.figure == TIME:
            ratio, reason = table.between(row.case, other.case, TIME)
            if ratio and self.whole:
                return self._ratio_of_steps(row, other, ratio)
            return ratio if ratio or reason == NOT_COMPARABLE else quotient(*pair)
        if self.goal.figure == GAINED:
            plain = row.is_baseline or other.is_baseline  # which gains nothing, over any other
            seeds = None if plain else table.between(row.case, other.case, GAINED)[0]
            return seeds if seeds and seeds.bounds else _less(*pair)
        return table.ratio(self.goal.figure, *pair)[0]

    def _ratio_of_steps(self, row: Row, other: Row, ratio: Figure) -> Figure:
        """The ratio of two times of many steps, by that of a step: it is the narrower one."""
        whole = quotient(self.figure(row), self.figure(other))
        if whole.bounds is None or ratio.bounds is None:
            return whole
        firsts = [self.work.table.spread(FIRST_CALL, r.figures[FIRST_CALL]) for r in (row, other)]
        first, other_first = firsts
        steps = (self.limits.steps - 1) * other.figures[TIME].value
        low = (first.low + ratio.low * steps) / (other_first.high + steps)
        high = (first.high + ratio.high * steps) / (other_first.low + steps)
        return Figure(whole.value, low, high, "interval")

    def gain(self, row: Row) -> Figure | None:
        """A row's figure over its baseline's, see `Row`."""
        if not self.whole:
            return row.ratios.get(self.goal.figure)
        for base in self.work.members:
            if base.case is row.base and self.figure(base) and self.figure(row):
                return self.ratio(row, base)
        return None

    def improves(self, row: Row) -> bool:
        """Whether the figure was shown to be better; with one block, by more than noise."""
        gain = self.gain(row)
        if row.is_baseline or gain is None:
            return False
        if self.provisional and not gain.bounds:
            if self.work.others or row.case.technique in ADD_WORK:
                return False  # it is the other programs' doing, or chance
            return gain.value < 1 / self.work.noise
        return is_better(self.goal.figure, gain)

    def told_worse(self, row: Row, other: Row) -> bool:
        """Whether a row can be told to be worse than another: by any difference, else by order."""
        ratio = self.ratio(row, other)
        if ratio is None or ratio.bounds is None:
            return self.level(row) > self.level(other)
        return is_worse(self.goal.figure, ratio, margin=0.0)

    def refused(self, row: Row) -> str | None:
        """Which limit a row exceeds, or can't be shown to keep; None if none."""
        if row.verdict == DIFFERENT:
            return "it was not shown to do its baseline's work"
        if self.limits.memory is not None:
            peak = row.figures.get(MEMORY)
            if peak is None:
                return "its memory was not measured"
            if peak.value > self.limits.memory:
                size = peak.value / 1e6
                return f"takes {f'{size:,.0f}' if size >= 100 else f'{size:.3g}'} MB"
        if self.goal.figure == GAINED:  # what is asked for, not what is to be kept
            return None
        kept, drop = row.accuracy, self.limits.accuracy_drop
        cases = self.work.table.record.cases
        if kept.asked and drop is not None:
            kept = accuracy.of(row.case, cases, self.work.table.record.tasks, drop)
        if kept.kept:
            return None
        if accuracy.is_untrained_model(row.case, cases):
            return UNTRAINED
        if kept.check is None and (kept.mean is None or kept.ci is None):
            return NOT_MEASURED
        return LOSES[kept.what] if kept.lost else KEEPS[kept.what]


NOT_MEASURED = "its accuracy was not measured"
LOSES = {
    "accuracy": "loses accuracy",
    "loss": "ends with a higher loss",
    "predictions": "predicts worse",
}
KEEPS = {
    "accuracy": "was not shown to keep accuracy",
    "loss": "was not shown to keep its loss",
    "predictions": "was not shown to keep its predictions",
}
OF_ACCURACY = (NOT_MEASURED, *LOSES.values(), *KEEPS.values())
NO_FIGURE = "its figure was not measured"
UNTRAINED = "is another model, which was trained nowhere"


def _of_steps(row: Row, steps: int, table: Table) -> Figure | None:
    """The time of so many steps, first call included."""
    step, first = row.figures[TIME], row.figures.get(FIRST_CALL)
    if first is None:
        return None
    first, more = table.spread(FIRST_CALL, first), steps - 1
    value = first.value + more * step.value
    if step.kind == "once" or (first.kind == "once" and first.value > LITTLE * value):
        return Figure(value, value, value, "once")
    return Figure(value, first.low + more * step.low, first.high + more * step.high, "interval")


def _less(points: Figure, others: Figure) -> Figure:
    """The points that a row gains less those of another."""
    value = points.value - others.value
    if "once" in (points.kind, others.kind):
        return Figure(value, value, value, "once")
    return Figure(value, points.low - others.high, points.high - others.low, "interval")


@dataclass(frozen=True)
class Placed:
    """Where a row is placed relative to the best, and why it is left out if it is.

    `place`: "equal" was not shown to be worse; "worse"; "next" was measured once and is placed by
    that; "unknown": its accuracy was not measured; "refused": it exceeds a limit; "lacking": it has
    no figure.
    """

    row: Row
    place: str
    reason: str = ""


@dataclass(frozen=True)
class Ranking:
    """The rows of a piece of work for a goal, in one framework or over both.

    `best`: what to use. `plain`: the best baseline. `gaining`: rows that gain over their baseline,
    keep the limits and are better than the plain code; of these, `alike` can't be told from the
    best. `cheapest`: needs less work than the best: a baseline that was not shown to be worse, or
    else the gaining row that needs least. `tempting`: would be better, but was not shown to keep
    accuracy. `tried`: all changes that have the figure. `others`: every row but the best, in order.
    """

    aim: Aim
    framework: str | None
    best: Row
    plain: Row | None
    gaining: list[Row]
    alike: list[Row]
    cheapest: Row | None
    tempting: list[Row]
    tried: list[Row]
    others: list[Placed]

    @property
    def work(self) -> Work:
        """The piece of work."""
        return self.aim.work

    @property
    def goal(self) -> Goal:
        """The goal, in the words of this work."""
        return self.aim.goal

    def placed(self, *places: str) -> list[Row]:
        """The other rows in these places."""
        return [other.row for other in self.others if other.place in places]

    def better(self, row: Row) -> bool:
        """Whether a row's figure is better than that of the best."""
        return self.aim.level(row) < self.aim.level(self.best)


def rank(
    work: Work, goal: Goal, limits: Limits = Limits(), framework: str | None = None
) -> Ranking | None:
    """What to use; None if no row has the figure and keeps the limits."""
    aim = Aim(work, work.worded(goal), limits)
    if framework is not None:
        return _rank(aim, framework)
    sides = [side for name in work.frameworks if (side := _rank(aim, name))]
    best = min((side.best for side in sides), key=aim.level, default=None)
    return best and _rank(aim, None, best)


def _rank(aim: Aim, framework: str | None, best: Row | None = None) -> Ranking | None:
    """`best`: what is known to be it."""
    rows = [row for row in aim.work.rows if framework in (None, row.case.framework)]
    ordered = sorted(filter(aim.figure, rows), key=aim.level)
    reasons = {row.case.id: aim.refused(row) for row in ordered}
    kept = [row for row in ordered if reasons[row.case.id] is None]
    if not kept:
        return None
    plain = next((row for row in kept if row.is_baseline), None)
    members = [member for row in kept for member in row.members]
    gaining = [
        row
        for row in members
        if aim.improves(row) and (plain is None or aim.level(row) < aim.level(plain))
    ]
    best = best or _best(aim, gaining) or plain or kept[0]
    shown = next(row for row in rows if best in row.members)
    others = [Placed(row, _place(aim, row, best)) for row in kept if row is not shown]
    equal = [other.row for other in others if other.place == "equal"]
    return Ranking(
        aim,
        framework,
        best,
        plain,
        gaining,
        alike=[r for r in gaining if r not in shown.members and not aim.told_worse(r, best)],
        cheapest=_cheapest(best, gaining, equal),
        tempting=_tempting(aim, ordered, reasons, best),
        tried=[m for row in rows for m in row.members if not m.is_baseline and aim.gain(m)],
        others=sorted(others, key=lambda other: other.place != "equal")
        + [Placed(row, "unknown") for row in ordered if reasons[row.case.id] == NOT_MEASURED]
        + [
            Placed(row, "refused", reason)
            for row in ordered
            if (reason := reasons[row.case.id]) not in (None, NOT_MEASURED)
        ]
        + [Placed(row, "lacking", NO_FIGURE) for row in rows if aim.figure(row) is None],
    )


def _best(aim: Aim, gaining: list[Row]) -> Row | None:
    """Of those that cannot be told from the first, what takes least to get.

    By any difference, not by what counts as one: nobody gets a worse row in a better one's place
    because that takes less.
    """
    if not gaining:
        return None
    first = gaining[0]
    alike = [row for row in gaining if row is first or not aim.told_worse(row, first)]
    return min(alike, key=lambda row: (row.effort, aim.level(row)))


def _place(aim: Aim, row: Row, best: Row) -> str:
    """Where a row stands beside the best; of unlike work nothing is shown."""
    ratio = aim.ratio(row, best)
    if ratio is not None and ratio.bounds is None:
        return "next"
    return "worse" if ratio and is_worse(aim.goal.figure, ratio) else "equal"


def _cheapest(best: Row, gaining: list[Row], equal: list[Row]) -> Row | None:
    if best.is_baseline:
        return None
    if plain := next((row for row in equal if row.is_baseline), None):
        return plain
    cheapest = min(gaining, key=lambda row: row.effort, default=None)
    return cheapest if cheapest and cheapest.effort < best.effort else None


def _tempting(aim: Aim, rows: list[Row], reasons: dict[str, str], best: Row) -> list[Row]:
    """What would be better than the best, if it kept accuracy; another model tempts nobody."""
    lossy = [row for row in rows if reasons[row.case.id] and not row.accuracy.kept]
    return sorted(
        (
            row
            for row in lossy
            if reasons[row.case.id] != UNTRAINED
            and aim.improves(row)
            and aim.level(row) < aim.level(best)
            and (best.is_baseline or aim.told_worse(best, row))
        ),
        key=lambda row: (aim.level(row), row.effort),
    )


# What is beaten -----------------------------------------------------------------------------------

DECIDING = (TIME, RATE, MEMORY, SIZE, FIRST_CALL, START)


def beaten(work: Work) -> dict[str, Row]:
    """By case id, the rows that are worse than another row that keeps accuracy, with that row."""
    goal = next(goal for goal in GOALS.values() if goal.figure == work.main)
    aim = Aim(work, goal, Limits())
    safe = [row for row in work.rows if row.accuracy.kept]
    by = {row.case.id: next((s for s in safe if _beats(aim, s, row)), None) for row in work.rows}
    return {name: row for name, row in by.items() if row}


def _beats(aim: Aim, row: Row, other: Row) -> bool:
    """Better in the main figure by intervals, and nowhere worse: not in accuracy, nor in price."""
    if row is other or not aim.figure(row) or not aim.figure(other):
        return False
    ratio = aim.ratio(other, row)
    better = ratio is not None and is_worse(aim.goal.figure, ratio)
    if not better or row.effort > other.effort or _points_lost(row) > _points_lost(other):
        return False
    return all(
        level(name, row.figures.get(name)) <= level(name, figure)
        for name, figure in other.figures.items()
        if name in DECIDING
    )


def _points_lost(row: Row) -> float:
    """By the bound of the interval; exact work loses none, and what is not known more than any."""
    kept = row.accuracy
    if kept.exact or kept.mean is None:
        return 0.0 if kept.exact else inf
    low, high = kept.ci or (kept.mean, kept.mean)
    return max(0.0, -low if more_is_better(kept.metric) else high)
