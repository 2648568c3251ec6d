"""A ranking in words: for `choose`, `try` and the page."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from bench.analysis.accuracy import Accuracy
from bench.analysis.ranking import GOALS, OF_ACCURACY, RECIPE, Ranking, Work, beaten, rank
from bench.analysis.table import (
    BATCH,
    FIRST_CALL,
    GAINED,
    MEMORY,
    MORE_IS_BETTER,
    RATE,
    SIZE,
    START,
    STEPS,
    TIME,
    WITH_IMPORTS,
    Figure,
    Row,
    is_worse,
)
from bench.record import UNTOLD, LossCheck
from bench.report.formatting import MISSING, interval, number, plus_minus, ratio
from bench.report.names import called, name_of, sizes, title
from bench.report.technique_tables import Table, of_figures, of_words
from bench.report.text import hanging, plain, wrap

DEAR = 0.10  # so much more memory is said wherever a gain in time is
PROVISIONAL = "provisional: one block, no interval"
UNITS = {"accuracy": " points", "bits_per_character": " bits", "mAP": " points"}
HEADS = {
    TIME: "time",
    RATE: "samples/s",
    MEMORY: "memory",
    BATCH: "largest batch",
    SIZE: "size",
    STEPS: "steps to the target",
    GAINED: "accuracy",
    FIRST_CALL: "first call",
    START: "time to the first prediction",
}


# Figures ------------------------------------------------------------------------------------------


def shown(name: str, figure: Figure | None, size: float = 1.0, unit: str = "") -> str:
    """A figure with its unit: brackets hold an interval, and nothing else does."""
    if figure is None:
        return MISSING
    text = number(figure.value / size) + unit
    bounds = interval((figure.low / size, figure.high / size), like=figure.value / size)
    if figure.kind == "interval":
        return f"{text} ({bounds})"
    # A batch that fits does so, whether a little more would or not.
    return f"{text}, measured {bounds}" if figure.kind == "range" and name != BATCH else text


def provisional(work: Work) -> str:
    """What is to be known of figures of one block."""
    if work.others is None:
        return PROVISIONAL
    return f"{PROVISIONAL}, beside other programs that used {work.others:.0%} of the cores"


def figure_of(ranking: Ranking, row: Row) -> str:
    """The figure that decides, in its goal's unit."""
    goal = ranking.goal
    size, unit = (1.0, "s") if ranking.aim.whole else (goal.size, goal.unit)
    return shown(goal.figure, ranking.aim.figure(row), size, f" {unit}")


class Words(NamedTuple):
    """How a figure's gains are told: a gain, the same in short, what is taken."""

    gain: str
    short: str
    taken: str


WORDS = {
    TIME: Words("{} times as fast", "{}x", "time"),
    RATE: Words("{} times the samples/s", "{}x", "time of a sample"),
    MEMORY: Words("{}% less memory", "{}% less", "memory"),
    BATCH: Words("{} times the largest batch", "{}x the largest batch", "memory of a sample"),
    SIZE: Words("{}% smaller", "{}% smaller", "size"),
    STEPS: Words("{} times as few steps", "{}x as few steps", "steps"),
    FIRST_CALL: Words("first call {} times as fast", "{}x", "first call"),
    START: Words("first prediction {} times as early", "{}x", "time to the first prediction"),
}


def gain_of(ratio: Figure, name: str, *, short: bool = False) -> str:
    """1.30 times as fast (1.23–1.36); 58% less memory (56–60); of a figure over its baseline's.

    Brackets hold an interval, and nothing else does.
    """
    if name in (MEMORY, SIZE):
        parts = (ratio.value, ratio.high, ratio.low)
        value, *bounds = (minus(f"{round(100 * (1 - part))}") for part in parts)
        around = (" to " if "−" in "".join(bounds) else "–").join(bounds)
    else:
        times = ratio if name in MORE_IS_BETTER else ratio.turned()
        value = number(times.value)
        around = interval((times.low, times.high), like=times.value)
    words = WORDS[name].short if short else WORDS[name].gain
    return words.format(value) + bounded(ratio, around)


def bounded(ratio: Figure, bounds: str) -> str:
    """What stands after a figure: its interval, the range of what was measured, or nothing."""
    return {"interval": f" ({bounds})", "range": f", measured {bounds}"}.get(ratio.kind, "")


def minus(text: str) -> str:
    """A figure with a minus sign, which no dash between two figures is taken for."""
    return text.replace("-", "−")


def at_memory(row: Row, name: str) -> str:
    """What a gain in time was shown to cost in memory: at 1.4x the memory."""
    ratio = row.ratios.get(MEMORY)
    if name not in (TIME, RATE) or not ratio or not is_worse(MEMORY, ratio, margin=DEAR):
        return ""
    return f"at {ratio.value:.1f}x the memory"


def ratio_of(figure: Figure) -> str:
    """A ratio: brackets hold an interval, and nothing else does."""
    if figure.kind == "interval":
        return ratio(figure.value, (figure.low, figure.high))
    text = ratio(figure.value, None)
    if figure.kind == "range":
        return f"{text}, measured {number(figure.low)} to {number(figure.high)},"
    return f"{text}, exact," if figure.kind == "exact" else text


def accuracy_of(kept: Accuracy) -> str:
    """What a row does to accuracy, always in words; nothing where that is no question."""
    if not kept.asked:
        return ""
    if kept.exact:
        return "same work" + (f", proven for {called(kept.proven_on)}" if kept.proven_on else "")
    if kept.check:
        return _checked(kept)
    if kept.mean is None:
        return "accuracy not measured"
    change = plus_minus(kept.mean, kept.ci, signed=True)
    metric = (kept.metric or "accuracy").replace("_", " ")
    return f"{metric} {change}{UNITS.get(kept.metric, '')}"


def _checked(kept: Accuracy) -> str:
    """What a check has told, and of what: never of an accuracy that was trained for."""
    check, untold = kept.check, kept.check.verdict == UNTOLD
    if isinstance(check, LossCheck):
        over = f"over {check.steps} steps"
        told = f"loss {check.verdict} {over}"
        told = f"whether the loss is kept {over} can't be told" if untold else told
        difference = check.difference
        if difference is None:
            return told
        return f"{told} ({plus_minus(difference.mean, difference.ci, signed=True)} nats)"
    told = f"predictions {check.verdict}"
    told = "whether predictions are kept can't be told" if untold else told
    points, loss = check.points, check.loss
    parts = [f"{check.flipped / check.samples:.1%} of {check.samples:,} flip"]
    if points and points.ci:
        low, high = points.ci
        parts.append(f"right {points.mean:+.2f} points, {low:+.2f} to {high:+.2f}")
    more = f"{plus_minus(loss.mean, loss.ci, signed=True)} nats" if loss else "not finite"
    return f"{told} ({', '.join([*parts, f'loss {more}'])})"


# A ranking ----------------------------------------------------------------------------------------


def measure(ranking: Ranking) -> str:
    """What is compared."""
    if ranking.aim.whole:
        return f"time of {ranking.aim.limits.steps:,} steps, first call included"
    return ranking.goal.title


def full_name(row: Row) -> str:
    """PyTorch channels_last + compile (stacking)."""
    return f"{row.case.framework_title} {name_of(row.case, others=len(row.repeats))}"


def _sentence(ranking: Ranking, row: Row) -> str:
    """A row with its figure, what that gains over its baseline, its accuracy and its price."""
    goal, gain = ranking.goal, ranking.aim.gain(row)
    parts = [figure_of(ranking, row)]
    if row.is_baseline:
        parts.append("baseline")
    elif gain and goal.figure != GAINED:
        verdict = row.verdict if goal.figure == TIME and not ranking.aim.whole else None
        told = None if verdict == "faster" else verdict
        parts.append(", ".join(filter(None, [gain_of(gain, goal.figure), told])))
        parts.append(at_memory(row, goal.figure))
    parts += [_kept(ranking, row), _takes(row)]
    return f"{full_name(row)}: {'; '.join(filter(None, parts))}"


def _kept(ranking: Ranking, row: Row) -> str:
    """What a row does to accuracy, where that is not the figure itself."""
    return "" if ranking.goal.figure == GAINED else accuracy_of(row.accuracy)


def _takes(row: Row) -> str:
    first = row.figures.get(FIRST_CALL)
    called = f"first call {number(first.value)} s" if first else ""
    price = ", ".join(filter(None, (row.price, called)))
    return f"takes {price}" if price else ""


def _brief(ranking: Ranking, row: Row) -> str:
    """A row with its figure, its time in that of the best, and its accuracy."""
    times = ""
    if ranking.goal.figure == TIME and not ranking.aim.whole:
        beside = ranking.aim.ratio(row, ranking.best)
        same = beside is None or beside.kind == "exact"  # another row of the same program
        times = "" if same else f"{ratio_of(beside)} times the best"
    parts = [figure_of(ranking, row), times, _kept(ranking, row)]
    return f"{full_name(row)}: {', '.join(filter(None, parts))}"


def perhaps(ranking: Ranking) -> list[Row]:
    """What would be better, if it kept an accuracy that was not measured."""
    unknown = ranking.placed("unknown")
    return [row for row in ranking.tempting if row in unknown]


def lines(ranking: Ranking, *, every: bool = False) -> list[tuple[str, str]]:
    """A ranking as labels and texts: what is cheapest, what is best, and why no other."""
    parts = []
    if ranking.cheapest:
        parts.append(("cheapest", _sentence(ranking, ranking.cheapest)))
    best = "first" if ranking.aim.provisional else "best"
    parts.append((best, _sentence(ranking, ranking.best)))
    if not every:
        other = _of_other_framework(ranking)
        parts += [("other", _brief(ranking, other))] if other else []
        parts += [("perhaps", _sentence(ranking, row)) for row in perhaps(ranking)[:1]]
        return [*parts, ("why", why(ranking))]
    for other in ranking.others:
        words = full_name(other.row) if other.place == "lacking" else _brief(ranking, other.row)
        parts.append((LABELS[other.place], ": ".join(filter(None, (words, other.reason)))))
    return parts


LABELS = {
    "equal": "near",
    "worse": "worse",
    "next": "next",
    "unknown": "unknown",
    "refused": "left out",
    "lacking": "left out",
}


def _of_other_framework(ranking: Ranking) -> Row | None:
    """The best of the other framework."""
    others = [name for name in ranking.work.frameworks if name != ranking.best.case.framework]
    sides = (rank(ranking.work, ranking.goal, ranking.aim.limits, name) for name in others)
    return next((side.best for side in sides if side), None)


def why(ranking: Ranking) -> str:
    """What stands against the best: better rows left out, and what cannot be told from it."""
    parts = []
    counted = Counter(other.place for other in ranking.others)
    refused = [o for o in ranking.others if o.place == "refused" and ranking.better(o.row)]
    if refused:
        row, reason = refused[0].row, refused[0].reason
        more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
        loss = f": {accuracy_of(row.accuracy)}" if reason in OF_ACCURACY else ""
        parts.append(f"{full_name(row)} has {figure_of(ranking, row)} but {reason}{loss}{more}")
    once = "one block's times" if ranking.aim.provisional else "values measured once"
    counts = (
        (len(perhaps(ranking)[1:]), "more would be better, of unmeasured accuracy"),
        (counted["equal"], "not shown to be worse"),
        (counted["worse"], "shown to be worse"),
        (counted["next"], f"in order of {once}"),
    )
    parts += [f"{count} {words}" for count, words in counts if count]
    if counted["refused"] or counted["unknown"]:
        return "; ".join(parts) or "no other row that keeps accuracy has this figure"
    return "; ".join(parts) or "it is the only row with this figure"


LABEL = 11  # cells: of an answer's label


def text(rankings: list[Ranking], width: int, *, every: bool = False) -> list[str]:
    """Rankings as lines of a terminal."""
    said: list[str] = []
    for ranking in rankings:
        heading = f"{ranking.work.title}: {measure(ranking)}"
        heading += f" ({provisional(ranking.work)})" if ranking.aim.provisional else ""
        said += ["", *wrap(plain(heading), width)]
        for label, words in lines(ranking, every=every):
            said += hanging(f"  {label}", plain(words), width, LABEL)
    return said[1:]


# The decision table -------------------------------------------------------------------------------

# figure -> its head and its unit's size
COLUMNS = {
    GAINED: ("gained [{unit}]", 1.0),
    STEPS: ("steps to target", 1.0),
    TIME: ("time [ms]", 1e-3),
    RATE: ("samples/s", 1.0),
    "efficiency": ("efficiency [%]", 1.0),
    "share_of_limit": ("of the limit [%]", 1.0),
    BATCH: ("largest batch [samples]", 1.0),
    MEMORY: ("memory [MB]", 1e6),
    WITH_IMPORTS: ("memory, imports too [MB]", 1e6),
    SIZE: ("size [MB]", 1e6),
    FIRST_CALL: ("first call [s]", 1.0),
    START: ("first prediction [s]", 1.0),
}


def decision_table(work: Work) -> Table:
    """Every row of a piece of work with all of its figures, what is beaten by others last."""
    names = [name for name in COLUMNS if any(name in row.figures for row in work.rows)]
    if work.kind != RECIPE:  # there it is the accuracy's column that says it
        names = [name for name in names if name != GAINED]
    unit = work.worded(GOALS["accuracy"]).unit
    heads = (COLUMNS[name][0].format(unit=unit) for name in names)
    columns = [*of_words("row"), *of_figures("÷ own baseline", *heads)]
    columns += of_words("accuracy", "takes")
    by_another = beaten(work)
    safe = [row for row in work.rows if row.accuracy.kept]
    groups = {
        "to choose from": [row for row in safe if row.case.id not in by_another],
        "beaten in everything by one above": [row for row in safe if row.case.id in by_another],
        "not shown to keep accuracy": [row for row in work.rows if not row.accuracy.kept],
    }
    cells = []
    for heading, rows in groups.items():
        if rows:
            cells.append([heading, *[""] * (len(columns) - 1)])
        cells += [_cells(row, names) for row in rows]
    about = filter(None, (sizes([work.task]), provisional(work) if work.provisional else ""))
    title = ": ".join(filter(None, (work.title, "; ".join(about))))
    return Table(title, columns, cells, name="decisions")


def _cells(row: Row, names: list[str]) -> list[str]:
    gain = ratio(row.time_ratio.value if row.time_ratio else None, None)
    against = f"against {title(row.base)}" if row.base and row.case.against else ""
    gain = f"{row.lacks} not measured" if row.lacks else gain
    figures = [shown(name, row.figures.get(name), COLUMNS[name][1]) for name in names]
    kept = accuracy_of(row.accuracy) or MISSING
    named = "\n".join(filter(None, (gain, row.verdict, against)))
    return [full_name(row), named, *figures, kept, row.price or MISSING]
