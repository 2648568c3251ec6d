"""What to use: for each piece of work one table over all techniques that have rows on it.

Every figure is the one that was measured for its row. A figure has an interval where processes were
repeated, a range where one process repeated itself, neither where it was measured once, and is
exact where it is a count or the size of a file. Which of two is faster says their ratio in the
blocks that both played, whose interval is narrower than those of their times; which takes less
memory, or starts sooner, their ratio with the scatter of the run (see `scatter`). Shown to be less
or more is what lies wholly beyond 3%, of points gained beyond none.

Only what keeps accuracy is advised (see `accuracy`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

from bench.analysis import accuracy, comparisons, pairing
from bench.analysis.accuracy import Accuracy, agree
from bench.analysis.pairing import baseline
from bench.analysis.prices import price
from bench.analysis.reading import DIFFERENT, framework_title, on_device, peak, work_of
from bench.analysis.scatter import SCATTERED, Scatter, processes, scatters
from bench.analysis.values import at, is_number, is_pair
from bench.analysis.verdicts import Ratio, shown_less, shown_more
from shared.specs import more_is_better

Record = dict[str, Any]
TRAIN, PREDICT, INPUT, DEVICES, PROBE = "train", "predict", "input", "devices", "probe"
RECIPE, FIT = "recipe", "fit"
NAMES = {
    TRAIN: "train step",
    PREDICT: "prediction",
    INPUT: "input pipeline",
    DEVICES: "several devices",
    PROBE: "probe",
    RECIPE: "training",
    FIT: "train step",
}
FAMILIES = ("train_step", "input", "parallel", "recipes", "compression", "deployment")
FAMILIES += ("diagnosis", "adaptation")
OF_LEARNING = ("recipes", "adaptation")  # what changes what is learned


@dataclass(frozen=True)
class Goal:
    """An aim: which figure decides, whether less of it is better, and of which kinds of work."""

    name: str
    figure: str
    title: str
    unit: str
    size: float
    kinds: tuple[str, ...]
    less: bool = True


GOALS = {
    goal.name: goal
    for goal in (
        Goal("train-speed", "time", "time of a train step", "ms", 1e-3, (TRAIN,)),
        Goal("latency", "time", "time of a prediction", "ms", 1e-3, (PREDICT,)),
        Goal("throughput", "rate", "samples per second", "samples/s", 1.0,
             (INPUT, DEVICES, PROBE), less=False),
        Goal("accuracy", "gained", "points gained over the plain training", "points", 1.0,
             (TRAIN, PREDICT, RECIPE), less=False),
        Goal("memory", "memory", "peak memory above import", "MB", 1e6, (TRAIN, PREDICT)),
        Goal("batch", "batch", "largest batch that fits into memory", "samples", 1.0, (FIT,),
             less=False),
        Goal("cold-start", "first_call", "first call in a new process", "s", 1.0,
             (TRAIN, PREDICT)),
        Goal("start", "start", "time to the first prediction in a new process", "s", 1.0,
             (PREDICT,)),
        Goal("size", "size", "size on disk", "MB", 1e6, (TRAIN, PREDICT)),
    )
}  # fmt: skip


# metric -> what is gained of it, and its unit, where these are not those of accuracy
GAINED = {
    "bits_per_character": ("bits per character saved against the plain training", "bits saved"),
    "mAP": ("points of mAP gained over the plain training", "points"),
}


@dataclass(frozen=True)
class Figure:
    """A measured figure in base units. `kind`: interval, range, once or exact.

    `count`: of how many processes it is, where it is of one or a few.
    """

    value: float
    low: float
    high: float
    kind: str
    count: int = 1


@dataclass(frozen=True)
class Option:
    """A row of a decision table: a case with its figures, its accuracy and its price.

    `own`: the comparison with its own baseline. `beaten`: a row that is better or equal in all.
    `repeats`: other techniques' rows of the same program.
    """

    case: dict
    figures: dict[str, Figure]
    accuracy: Accuracy
    work: int
    price: str
    own: dict | None = None
    gain: float | None = None
    beaten: Option | None = None
    repeats: list[Option] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Framework and variant."""
        return f"{framework_title(self.case)} {title(self.case)}"

    @property
    def is_baseline(self) -> bool:
        """Whether it is what others are compared with."""
        return self.case["role"] == "baseline"

    @property
    def faster(self) -> bool:
        """Whether it was shown to take less time than its own baseline."""
        own = self.own or {}
        return own.get("verdict") != DIFFERENT and shown_less(own.get("ci"))


def quotient(ours: Figure, theirs: Figure) -> tuple[float, float] | None:
    """Bounds of a ratio by those of both; None where one of them was measured once."""
    if "once" in (ours.kind, theirs.kind) or min(ours.low, theirs.low) <= 0:
        return None
    return ours.low / theirs.high, ours.high / theirs.low


Ratios = dict[tuple[str, str], Ratio]  # of the times of two programs


@dataclass(frozen=True)
class Work:
    """A piece of work, and its rows: those to choose from in the order of their main figure."""

    kind: str
    task: str
    batch_size: int
    options: list[Option]
    # The technique, where its baseline was not shown to do the others' work; the framework, where
    # the frameworks' models are no twins.
    apart: str = ""
    ratios: Ratios = field(default_factory=dict)
    scatters: dict[str, Scatter] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """digits-cnn, batch 128, train step; the largest batch is of no batch size."""
        size = "" if self.kind == FIT else f"batch {self.batch_size}, "
        words = f"{self.task}, {size}{NAMES[self.kind]}"
        return f"{words} ({self.apart})" if self.apart else words

    def bounds(self, name: str, one: Option, other: Option) -> tuple[float, float] | None:
        """Between which bounds a figure of a row is that of another, as a ratio.

        None where one of them was measured once. Points gained have no ratio: see `_gained_less`.
        """
        ours, theirs = one.figures[name], other.figures[name]
        pair = (pairing.program(one.case), pairing.program(other.case))
        if name == "time" and pair in self.ratios and "once" not in (ours.kind, theirs.kind):
            return self.ratios[pair].ci or (0.0, inf)  # of unlike work nothing is shown
        if name in SCATTERED and "exact" not in (ours.kind, theirs.kind) and self.scatters:
            counts = (ours.count, theirs.count)
            return self.scatters[name].bounds(ours.value / theirs.value, counts)
        return quotient(ours, theirs)

    @property
    def provisional(self) -> bool:
        """Whether its steps were timed in one block, so that no time has an interval."""
        times = [o.figures["time"] for o in self.options if "time" in o.figures]
        return bool(times) and all(time.kind == "once" for time in times)

    def worded(self, goal: Goal) -> Goal:
        """A goal in the words of what was measured here: of this metric, of a GPU's memory."""
        cases = [option.case for option in self.options]
        metric = next(filter(None, (at(case, "accuracy", "metric") for case in cases)), None)
        if goal.figure == "gained" and metric in GAINED:
            what, unit = GAINED[metric]
            return replace(goal, title=what, unit=unit)
        if goal.figure == "memory" and any(on_device(case.get("memory")) for case in cases):
            return replace(goal, title="peak memory of the GPU")
        budget = next(filter(None, (at(case, "evidence", "budget_bytes") for case in cases)), None)
        if goal.figure == "batch" and is_number(budget):
            return replace(goal, title=f"largest batch in {budget / 1e6:,.0f} MB above import")
        return goal

    @property
    def goals(self) -> list[Goal]:
        """The goals that some row has a figure for, the main one first."""
        every = [goal for goal in GOALS.values() if self.kind in goal.kinds]
        return [g for g in every if any(g.figure in option.figures for option in self.options)]


def title(case: dict) -> str:
    """A variant in plain words: its own title, or what its name and its settings say."""
    words = case["variant"].replace("_", " ")
    given = case.get("title")
    if isinstance(given, str) and given not in ("", words):
        return given
    settings = case.get("settings")
    stacked = [_setting(n, v) for n, v in settings.items()] if isinstance(settings, dict) else []
    if case["variant"][:2] in ("1_", "2_", "3_", "4_") and len(stacked) > 1 and all(stacked):
        return " + ".join(stacked)
    return words[2:] if words[:2] in ("0 ", "1 ", "2 ", "3 ", "4 ") else words


def _setting(name: str, value: Any) -> str | None:
    """A setting as a word; None for one that is no switch and no type."""
    if value is True:
        return name.replace("compiled", "compile")
    return {"bfloat16": "bf16", "float16": "fp16"}.get(value) if isinstance(value, str) else None


FORMER = {"checks": "recipes"}  # what is a technique no more, and in published records is one


@cache
def families() -> dict[str, str]:
    """Technique -> family, by where the benchmark files are; of records, those that are gone."""
    folder = Path(__file__).parents[1]
    return FORMER | {
        path.stem.removeprefix("bench_"): path.parent.name for path in folder.glob("*/bench_*.py")
    }


def family_of(technique: str) -> str:
    """The family of a technique; one that is not known (any more) is of the first."""
    return families().get(technique, FAMILIES[0])


# Rows --------------------------------------------------------------------------------------------


def works(record: Record) -> list[Work]:
    """Every piece of work with its options, that with the most of them first."""
    found: dict[tuple, list[Option]] = {}
    proofs: dict[tuple, dict | None] = {}
    for technique, cases in _by_baseline(record):
        base = cases[0]
        kind = _kind(technique, cases)
        side = framework_title(base) if _unpaired(record, base) else ""
        key = (kind, base["task"], base["batch_size"], side)
        apart = technique if kind == PROBE else side
        if not apart and not _same_work(record, base, proofs.setdefault(key, base)):
            apart = technique
        options = [option(record, case, base, kind, _learns(cases)) for case in cases]
        found.setdefault((*key[:3], apart), []).extend(o for o in options if o)
    fits, scattered, made = _fits(record), scatters(record), []
    for (kind, task, batch, apart), options in found.items():
        if options:
            merged = _of_one_memory(_merged(options))
            ratios = _ratios(merged, fits, record)
            work = Work(kind, task, batch, merged, apart, ratios, scattered)
            made.append(replace(work, options=_judged(work, MAIN[kind])))
    return sorted(made, key=lambda work: -len(work.options))


def _fits(record: Record) -> comparisons.Fits:
    """The times of every piece of work."""
    sampled = [case for case in record["cases"] if at(case, "timing", "step_s") is not None]
    return comparisons.fits(pairing.resolved(sampled))


def _ratios(options: list[Option], fits: comparisons.Fits, record: Record) -> Ratios:
    """How the timed rows of a piece of work compare with each other.

    What the record compares, as it does that, so that no answer says two things.
    """
    timed = [option.case for option in options if "time" in option.figures]
    fit = fits.get(pairing.work_of(timed[0])) if timed else None
    if not fit:
        return {}
    sides = {pairing.program(case): case["framework"] for case in timed}
    found = comparisons.side_by_side(fit, sides, record.get("looks"))
    programs = {case["id"]: pairing.program(case) for case in record["cases"]}
    for own in record["comparisons"]:
        pair = (programs.get(own["numerator"]), programs.get(own["denominator"]))
        if own.get("verdict") == DIFFERENT and pair in found:  # of unlike work none is faster
            for names in (pair, pair[::-1]):
                found[names] = replace(found[names], ci=None)
        elif pair in found and is_number(own.get("ratio")) and is_pair(own.get("ci")):
            (low, high), back = own["ci"], pair[::-1]
            found[pair] = replace(found[pair], ratio=own["ratio"], ci=(low, high))
            found[back] = replace(found[back], ratio=1 / own["ratio"], ci=(1 / high, 1 / low))
    return found


def _by_baseline(record: Record) -> Iterator[tuple[str, list[dict]]]:
    """For each technique, task, batch and mode its cases that ran, but for controls and bounds."""
    groups: dict[tuple, list[dict]] = {}
    for case in record["cases"]:
        if case["status"] == "OK" and case["role"] not in ("control", "bound"):
            side = case["framework"] if _unpaired(record, case) else ""
            key = (case["technique"], work_of(case), case["batch_size"], side)
            groups.setdefault(key, []).append(case)
    for (technique, *_), cases in groups.items():
        yield technique, sorted(cases, key=lambda case: case["role"] != "baseline")


def _unpaired(record: Record, case: dict) -> bool:
    """Whether the frameworks have a task's model, but not with equal weights or equal losses."""
    if at(record["tasks"], case["task"], "paired") is False:
        return True
    own = case if case["role"] == "baseline" else baseline(case, record["cases"])
    bases = {each["id"] for each in record["cases"] if each["role"] == "baseline"}
    unlike = [
        {each["numerator"], each["denominator"]}
        for each in record["comparisons"]
        if each["kind"] == "framework" and each.get("verdict") == DIFFERENT
    ]
    return any(at(own, "id") in pair and pair <= bases for pair in unlike)


def _kind(technique: str, cases: list[dict]) -> str:
    family = family_of(technique)
    if any(at(case, "metrics", "largest_batch", "value") for case in cases):
        return FIT
    if family in OF_LEARNING and any(at(case, "accuracy", "mean") is not None for case in cases):
        return RECIPE
    if any(at(case, "timing", "median_s") for case in cases):
        return PREDICT if cases[0].get("mode") == "predict" else TRAIN
    if any(at(case, "metrics", "samples_per_s", "value") for case in cases):
        return {"input": INPUT, "parallel": DEVICES}.get(family, PROBE)
    return PREDICT if cases[0].get("mode") == "predict" else TRAIN


def _learns(cases: list[dict]) -> bool:
    """Whether some of a technique's rows were trained against its baseline."""
    return any(at(case, "accuracy", "difference", "mean") is not None for case in cases)


def _same_work(record: Record, one: dict, other: dict) -> bool:
    """Whether two baselines start from the same weights and see the same first loss.

    What was not timed carries no proof; its task and its batch are the same.
    """
    proofs = [case.get("certificate") for case in (one, other)]
    if None in proofs:
        return True
    same = at(proofs[0], "weights_sha256") == at(proofs[1], "weights_sha256")
    return same and agree(record["tasks"], one["task"], *(p["losses"][:1] for p in proofs))


def option(record: Record, case: dict, base: dict, kind: str, learns: bool) -> Option | None:
    """A case with all that is known of it; None where nothing was measured."""
    own_base = baseline(case, record["cases"]) or base
    figures = dict(_figures(case))
    if kind == RECIPE or learns:
        figures |= _gained(case)
    if not figures:
        return None
    own = next(
        (
            c
            for c in record["comparisons"]
            if c["kind"] == "baseline" and c["numerator"] == case["id"]
        ),
        None,
    )
    needs = price(case)
    kept = accuracy.of(case, record["cases"], record["tasks"])
    if kind in (INPUT, DEVICES, FIT):  # what feeds, spreads or fits is trained elsewhere
        kept = Accuracy(True, asked=False)
    found = Option(case, figures, kept, *needs, own=own)
    return replace(found, gain=_gain(found, own_base))


def _gained(case: dict) -> dict[str, Figure]:
    """How much better the metric is that a training ends with than its own baseline's."""
    if case["role"] == "baseline":
        return {"gained": Figure(0.0, 0.0, 0.0, "exact")}
    found = at(case, "accuracy", "difference") or {}
    mean, ci = found.get("mean"), found.get("ci")
    if not is_number(mean):
        return {}
    low, high = ci if is_pair(ci) else (mean, mean)
    if not more_is_better(at(case, "accuracy", "metric")):
        mean, low, high = -mean, -high, -low
    return {"gained": Figure(mean, low, high, "interval" if is_pair(ci) else "once")}


def _gain(found: Option, base: dict) -> float | None:
    """Time over the own baseline's: as it was compared, or by the rates of what is not timed.

    Replicas are held against the one replica of the same probe, where there is one.
    """
    if found.own and found.own.get("verdict") != DIFFERENT and is_number(found.own.get("ratio")):
        return found.own["ratio"]
    rate = found.figures.get("rate")
    if "time" in found.figures or not rate:
        return None
    one = at(found.case, "metrics", "one_replica", "value")
    if is_number(one) and one > 0:
        return one / rate.value
    if found.is_baseline or base is found.case:
        return None
    if base["framework"] != found.case["framework"]:
        return None
    theirs = at(base, "metrics", "samples_per_s", "value")
    return theirs / rate.value if is_number(theirs) and theirs > 0 else None


def _figures(case: dict) -> Iterator[tuple[str, Figure]]:
    timing, metrics, memory = (case.get(name) or {} for name in ("timing", "metrics", "memory"))
    counted = on_device(memory)
    repeated = None if counted else at(memory, "above_import_ci")
    peaks = None if counted else at(memory, "samples", "above_import_bytes")
    every = {
        "time": (timing.get("median_s"), timing.get("ci_s"), None),
        "memory": (peak(memory), repeated, peaks),
        "size": (case.get("artifact_bytes"), None, None),
        "first_call": (
            timing.get("cold_first_call_s"),
            None,
            at(metrics, "cold_first_calls_s", "samples") or at(metrics, "cold_first_calls_s", "ci"),
        ),
        "start": _metric(metrics, "start"),
        "rate": _metric(metrics, "samples_per_s"),
        "processes": _metric(metrics, "memory_all")
        if "memory_all" in metrics
        else _metric(metrics, "memory"),
        "efficiency": _metric(metrics, "efficiency"),
        "of_limit": _metric(metrics, "share_of_limit"),
        "steps": _metric(metrics, "steps_to_target"),
    }
    if is_number(most := at(metrics, "largest_batch", "value")):
        yield "batch", Figure(most, most, 1.05 * most, "exact")  # 5% more does not fit
    for name, (value, ci, samples) in every.items():
        if is_number(value) and value > 0:
            exact = name == "size" or (name == "memory" and counted)
            found = _figure(value, ci, samples, exact=exact)
            yield name, replace(found, count=processes(case, name)) if name in SCATTERED else found


def _metric(metrics: dict, name: str) -> tuple[Any, Any, Any]:
    return tuple(at(metrics, name, part) for part in ("value", "ci", "samples"))


def _figure(value: float, ci: Any, samples: Any, *, exact: bool) -> Figure:
    if exact:
        return Figure(value, value, value, "exact")
    if is_pair(ci):
        return Figure(value, ci[0], ci[1], "interval")
    repeated = [v for v in samples if is_number(v)] if isinstance(samples, list) else []
    if len(repeated) > 1 and min(repeated) <= value <= max(repeated):
        return Figure(value, min(repeated), max(repeated), "range")
    return Figure(value, value, value, "once")


# What is beaten, and what is the same ------------------------------------------------------------


def _merged(options: list[Option]) -> list[Option]:
    """The same program in several techniques as one row, a baseline's where there is one."""
    found: list[Option] = []
    for each in options:
        place = next((n for n, other in enumerate(found) if _same_program(each, other)), None)
        if place is None:
            found.append(each)
        else:
            pair = (found[place], each)
            kept, again = sorted(pair, key=lambda o: (not o.is_baseline, _width(o)))
            figures = again.figures | kept.figures  # what the one lacks
            repeats = [*found[place].repeats, replace(again, repeats=[])]
            found[place] = replace(kept, figures=figures, repeats=repeats)
    return found


def _of_one_memory(options: list[Option]) -> list[Option]:
    """Where a GPU's peaks were counted, those of what ran on the CPU are another figure."""
    counted = [on_device(option.case.get("memory")) for option in options]
    if not any(counted):
        return options
    return [
        option
        if own
        else replace(option, figures={n: f for n, f in option.figures.items() if n != "memory"})
        for option, own in zip(options, counted, strict=True)
    ]


def _width(option: Option) -> float:
    found = option.figures.get("time") or option.figures.get("rate")
    return found.high / found.low if found else 0.0


def _same_program(one: Option, other: Option) -> bool:
    """Whether the record says so, and both keep what the program was trained to."""
    same = pairing.program(one.case) == pairing.program(other.case)
    return same and one.accuracy.exact and other.accuracy.exact


MAIN = {
    TRAIN: "time",
    PREDICT: "time",
    INPUT: "rate",
    DEVICES: "rate",
    PROBE: "rate",
    RECIPE: "gained",
    FIT: "batch",
}
MORE_IS_BETTER = ("rate", "efficiency", "of_limit", "gained", "batch")
DECIDING = ("time", "rate", "memory", "size", "first_call", "start")


def _judged(work: Work, main: str) -> list[Option]:
    """In the order of the main figure, and which are beaten by a row that keeps accuracy."""
    sign = -1 if main in MORE_IS_BETTER else 1
    ordered = sorted(
        work.options, key=lambda o: sign * o.figures[main].value if main in o.figures else inf
    )
    safe = [o for o in ordered if o.accuracy.kept]
    return [
        replace(o, beaten=next((s for s in safe if s is not o and _beats(work, s, o, main)), None))
        for o in ordered
    ]


def _beats(work: Work, one: Option, other: Option, main: str) -> bool:
    """Better in the main figure by intervals, and nowhere worse: not in accuracy, nor in price."""
    if main not in one.figures or main not in other.figures:
        return False
    if main == "gained":
        better = _gained_less(other.figures[main], one.figures[main])
    else:
        shown = shown_more if main in MORE_IS_BETTER else shown_less
        better = shown(work.bounds(main, one, other))
    if not better or one.work > other.work or _accuracy_rank(one) < _accuracy_rank(other):
        return False
    return all(
        name in one.figures and _no_worse(name, one.figures[name], other.figures[name])
        for name in DECIDING
        if name in other.figures
    )


def _gained_less(one: Figure, other: Figure) -> bool:
    """Whether a row was shown to gain fewer points: what was measured once shows nothing."""
    return "once" not in (one.kind, other.kind) and one.high < other.low


def _no_worse(name: str, ours: Figure, theirs: Figure) -> bool:
    return ours.value >= theirs.value if name in MORE_IS_BETTER else ours.value <= theirs.value


def _accuracy_rank(option: Option) -> float:
    """Points gained over the own baseline by the bound of the interval; exact work gains none."""
    found = option.accuracy
    if found.exact or found.mean is None:
        return 0.0 if found.exact else -1e9
    bound = found.ci or [found.mean, found.mean]
    return min(0.0, bound[0] if more_is_better(found.metric) else -bound[1])


# Answers -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Limits:
    """What a choice must keep to: points of the metric, bytes; and how many steps it is for."""

    accuracy_drop: float | None = None
    memory: float | None = None
    steps: int | None = None


@dataclass(frozen=True)
class Answer:
    """For one piece of work and one goal: what to use, and why not another.

    `best` has the best figure, `equal` what was not shown to be worse, `rest` all others: shown to
    be worse, or, those in `next`, measured once and in order of that. `cheapest` takes less to get
    than the best: of the rows shown to gain over their own baseline the one that takes least, or a
    baseline that was not shown to be worse. `unknown` are those
    whose accuracy was not measured, `refused` those that break a limit, with the reason, and
    `lacking` those of which the figure was not measured.
    """

    work: Work
    goal: Goal
    best: Option
    cheapest: Option | None
    equal: list[Option]
    rest: list[Option]
    unknown: list[Option]
    refused: list[tuple[Option, str]]
    limits: Limits
    lacking: list[Option] = field(default_factory=list)
    next: list[Option] = field(default_factory=list)

    def figure(self, option: Option) -> Figure:
        """The figure that decides, of a row of this answer."""
        return deciding(option, self.goal, self.limits)

    @property
    def provisional(self) -> bool:
        """Whether nothing but one block's times decided."""
        return self.goal.figure == "time" and self.work.provisional

    def better(self, option: Option) -> bool:
        """Whether a row's figure is better than that of the best."""
        ours, best = self.figure(option).value, self.figure(self.best).value
        return ours < best if self.goal.less else ours > best


LITTLE = 0.01  # share of a whole that does not decide how sure it is


def deciding(option: Option, goal: Goal, limits: Limits) -> Figure | None:
    """A row's figure for a goal; for a number of steps their whole time, first call included."""
    found = option.figures.get(goal.figure)
    if found is None or limits.steps is None or goal.figure != "time":
        return found
    first = option.figures.get("first_call")
    if first is None:
        return None
    more = limits.steps - 1
    value = first.value + more * found.value
    bounds = (first.low + more * found.low, first.high + more * found.high)
    if found.kind == "once" or (first.kind == "once" and first.value > LITTLE * value):
        return Figure(value, value, value, "once")
    return Figure(value, *bounds, "range" if first.value > LITTLE * value else found.kind)


def answer(record: Record, work: Work, goal: Goal, limits: Limits) -> Answer | None:
    """What to use for a goal; None where no row has its figure and keeps to the limits."""
    goal = work.worded(goal)
    sign = 1 if goal.less else -1
    every = [o for o in work.options if deciding(o, goal, limits)]
    every.sort(key=lambda o: sign * deciding(o, goal, limits).value)
    kept, unknown, refused = [], [], []
    for each in every:
        reason = _refused(record, each, limits, goal)
        if reason is None:
            kept.append(each)
        elif reason == NOT_MEASURED:
            unknown.append(each)
        else:
            refused.append((each, reason))
    if not kept:
        return None
    best, *others = kept

    placed = {WORSE: [], NEXT: [], EQUAL: []}
    for option in others:
        placed[_place(work, option, best, goal, limits)].append(option)
    return Answer(
        work,
        goal,
        best,
        _cheapest(work, kept, [best, *placed[EQUAL]], goal, limits),
        placed[EQUAL],
        [o for o in others if o not in placed[EQUAL]],
        unknown,
        refused,
        limits,
        [option for option in work.options if deciding(option, goal, limits) is None],
        placed[NEXT],
    )


WORSE, NEXT, EQUAL = "worse", "next", "equal"


def _place(work: Work, option: Option, best: Option, goal: Goal, limits: Limits) -> str:
    """Whether a row was shown to be worse than the best, was not, or comes next.

    Next are those that were measured once, or are held against such a one.
    """
    ours, theirs = (deciding(each, goal, limits) for each in (option, best))
    if goal.figure == "gained":
        once = "once" in (ours.kind, theirs.kind)
        return NEXT if once else WORSE if _gained_less(ours, theirs) else EQUAL
    whole = limits.steps is not None and goal.figure == "time"
    bounds = quotient(ours, theirs) if whole else work.bounds(goal.figure, option, best)
    if bounds is None:
        return NEXT
    return WORSE if (shown_more if goal.less else shown_less)(bounds) else EQUAL


NOT_MEASURED = "its accuracy was not measured"


def _refused(record: Record, option: Option, limits: Limits, goal: Goal) -> str | None:
    """Which limit a row breaks, or cannot be shown to keep."""
    if at(option.own, "verdict") == DIFFERENT:
        return "it was not shown to do its baseline's work"
    if limits.memory is not None:
        peak = option.figures.get("memory")
        if peak is None:
            return "its memory was not measured"
        if peak.value > limits.memory:
            size = peak.value / 1e6
            return f"takes {f'{size:,.0f}' if size >= 100 else f'{size:.3g}'} MB"
    if goal.figure == "gained":  # what is asked for, not what is to be kept
        return None
    found = option.accuracy
    if found.asked and limits.accuracy_drop is not None:
        found = accuracy.of(option.case, record["cases"], record["tasks"], limits.accuracy_drop)
    if found.kept:
        return None
    if accuracy.is_untrained_model(option.case, record["cases"]):
        return "is another model, which was trained nowhere"
    if found.mean is None or found.ci is None:
        return NOT_MEASURED
    return "loses accuracy" if found.lost else "was not shown to keep accuracy"


def _cheapest(
    work: Work, kept: list[Option], ahead: list[Option], goal: Goal, limits: Limits
) -> Option | None:
    """What takes least to get among the changes that gain over their own baseline.

    A baseline that was not shown to be worse than the best takes nothing.
    """
    for each in ahead:
        if each.is_baseline and each is not kept[0]:
            return each
    gains = [o for o in kept if not o.is_baseline and _helps(work, o, kept, goal, limits)]
    found = min(gains, key=lambda o: (o.work, kept.index(o)), default=None)
    return found if found and found.work < kept[0].work else None


def _helps(work: Work, option: Option, kept: list[Option], goal: Goal, limits: Limits) -> bool:
    """Whether a row was shown to be better than its own baseline for this goal."""
    if goal.figure == "time" and limits.steps is None:
        return option.faster
    same = ("technique", "framework", "flavour")
    bases = [
        each
        for other in kept
        for each in (other, *other.repeats)
        if each.is_baseline and all(each.case.get(k) == option.case.get(k) for k in same)
    ]
    return any(
        _place(work, base, option, goal, limits) == WORSE
        for base in bases
        if deciding(base, goal, limits)
    )
