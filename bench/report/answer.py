"""What `bench.analysis.decisions` answers, in words: for the terminal, the page and README.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from bench.analysis.decisions import (
    GOALS,
    RECIPE,
    Accuracy,
    Answer,
    Figure,
    Goal,
    Limits,
    Option,
    Work,
    title,
)
from bench.analysis.pairing import program
from bench.analysis.reading import framework_title
from bench.analysis.values import at
from bench.report.blocks import Table, of_figures, of_words
from bench.report.figures import MISSING, interval, number, plus_minus, ratio
from bench.report.text import hanging, plain, wrap
from shared.specs import TASKS, parameter_count

Record = dict[str, Any]
PROVISIONAL = "provisional: one block, no interval"
UNITS = {"accuracy": " points", "bits_per_character": " bits", "mAP": " points"}


def name_of(option: Option) -> str:
    """PyTorch channels_last + compile (stacking: 2_compiled); PyTorch baseline."""
    technique, variant, words = option.case["technique"], option.case["variant"], title(option.case)
    if option.is_baseline:
        count = len(option.repeats)
        of = f"baseline of {technique}" + (f" and {count} more" if count else "")
        of = of if variant != "baseline" else ""
    else:
        of = technique if words.replace(" ", "_") == variant else f"{technique}: {variant}"
    name = f"{framework_title(option.case)} {words}"
    return f"{name} ({of})" if of else name


def parameters(tasks: Iterable[str]) -> list[int]:
    """How many parameters the models of these tasks have, the smallest first."""
    return sorted(parameter_count(TASKS[name].model) for name in tasks if name in TASKS)


def rounded(count: int) -> str:
    """12, 24 thousand, 10 million."""
    if count < 1e3:
        return str(count)
    size, word = (1e6, "million") if count >= 1e6 else (1e3, "thousand")
    return f"{float(f'{count / size:.2g}'):g} {word}"


def about(work: Work) -> str:
    """How large its model is, and whether its times are provisional."""
    said = [f"{rounded(count)} parameters" for count in parameters([work.task])]
    return "; ".join([*said, PROVISIONAL] if work.provisional else said)


def figure_of(found: Figure | None, goal: Goal, limits: Limits | None = None) -> str:
    """A figure in its goal's unit; its interval in brackets, a range in words."""
    unit, size = goal.unit, goal.size
    if limits and limits.steps and goal.figure == "time":
        unit, size = "s", 1.0
    return shown(found, size, f" {unit}")


def shown(found: Figure | None, size: float, unit: str = "") -> str:
    """A figure with its unit: brackets hold an interval, and nothing else does."""
    if found is None:
        return MISSING
    text = number(found.value / size) + unit
    bounds = interval([found.low / size, found.high / size], like=found.value / size)
    if found.kind == "interval":
        return f"{text} ({bounds})"
    return f"{text}, measured {bounds}" if found.kind == "range" else text


def measure(goal: Goal, limits: Limits) -> str:
    """What is compared for a goal."""
    if limits.steps and goal.figure == "time":
        return f"time of {limits.steps:,} steps, first call included"
    return goal.title


def accuracy_of(found: Accuracy) -> str:
    """What a row does to accuracy, always in words; nothing where that is no question."""
    if not found.asked:
        return ""
    if found.exact:
        return "same work" + (f", proven on {found.proven_on}" if found.proven_on else "")
    if found.mean is None:
        return "accuracy not measured"
    change = plus_minus(found.mean, found.ci, signed=True)
    metric = (found.metric or "accuracy").replace("_", " ")
    return f"{metric} {change}{UNITS.get(found.metric, '')}"


def beside(goal: Goal, option: Option) -> str:
    """What a row does to accuracy, where that is not the figure itself."""
    return "" if goal.figure == "gained" else accuracy_of(option.accuracy)


def gain_of(option: Option) -> str:
    """How much of its own baseline's time a row takes, with the verdict; or how its rate is."""
    if option.gain is None:
        return "baseline" if option.is_baseline else ""
    if option.own is None:  # compared by its rate
        one = at(option.case, "metrics", "one_replica") is not None
        whose = "one replica's" if one else "its baseline's"
        return f"{number(1 / option.gain)} times {whose} samples/s"
    verdict = option.own.get("verdict")
    share = f"{number(option.gain, places=3)} of its baseline's time"
    return f"{share}, {verdict}" if verdict else share


def price_of(option: Option) -> str:
    """What it takes to get a row."""
    first = option.figures.get("first_call")
    called = f"first call {number(first.value)} s" if first else ""
    return ", ".join(filter(None, (option.price, called))) or MISSING


def share_of(found: Answer, option: Option) -> str:
    """A row's figure as a share of its own baseline's, where both were measured."""
    same = ("technique", "framework", "flavour")
    for each in found.work.options:
        for base in (each, *each.repeats):
            theirs = found.figure(base)
            own = base.is_baseline and all(base.case.get(k) == option.case.get(k) for k in same)
            if own and theirs and not option.is_baseline:
                value = found.figure(option).value / theirs.value
                places = 3 if value >= 0.01 else None
                words = "of" if found.goal.less else "times"
                return f"{number(value, places=places)} {words} its baseline's"
    return "baseline" if option.is_baseline else ""


def sentence(found: Answer, option: Option) -> str:
    """A row with its figure, its gain, its accuracy and its price."""
    figure = figure_of(found.figure(option), found.goal, found.limits)
    if found.goal.figure == "rate" or (found.goal.figure == "time" and not found.limits.steps):
        gain = gain_of(option)
    else:
        gain = "" if found.goal.figure == "gained" else share_of(found, option)
    takes = price_of(option)
    parts = [figure, gain, beside(found.goal, option)]
    parts += [f"takes {takes}"] if takes != MISSING else []
    return f"{name_of(option)}: {'; '.join(filter(None, parts))}"


def brief(found: Answer, option: Option) -> str:
    """A row with its figure and its accuracy."""
    figure = figure_of(found.figure(option), found.goal, found.limits)
    said = [figure, beside_best(found, option), beside(found.goal, option)]
    return f"{name_of(option)}: {', '.join(filter(None, said))}"


def beside_best(found: Answer, option: Option) -> str:
    """A row's time in that of the best, where both were timed side by side."""
    names = tuple(program(each.case) for each in (option, found.best))
    pair = found.work.ratios.get(names)
    if found.goal.figure != "time" or found.limits.steps or not pair:
        return ""
    return f"{ratio(pair.ratio, pair.ci)} times the best"


def lines(found: Answer, *, every: bool = False) -> list[tuple[str, str]]:
    """An answer as labels and texts: what is cheapest, what is best, and why no other.

    Nothing is cheaper than a baseline.
    """
    said = []
    if found.cheapest and not found.best.is_baseline:
        said.append(("cheapest", sentence(found, found.cheapest)))
    said.append((_first(found), sentence(found, found.best)))
    if not every:
        other = _other_side(found)
        said += [("other", brief(found, other))] if other else []
        said += [("perhaps", sentence(found, option)) for option in perhaps(found)[:1]]
        return [*said, ("why", why(found))]
    said += [("near", brief(found, o)) for o in found.equal]
    said += [(_rest(found, o), brief(found, o)) for o in found.rest]
    said += [("unknown", f"{brief(found, o)}") for o in found.unknown]
    said += [("left out", f"{brief(found, o)}: {reason}") for o, reason in found.refused]
    missing = "its figure was not measured"
    return said + [("left out", f"{name_of(o)}: {missing}") for o in found.lacking]


def perhaps(found: Answer) -> list[Option]:
    """What would be better, if it kept an accuracy that was not measured."""
    return list(filter(found.better, found.unknown))


def _first(found: Answer) -> str:
    return "first" if found.provisional else "best"


def _rest(found: Answer, option: Option) -> str:
    """What was measured once, or is held against what was, is in order and no more."""
    return "next" if option in found.next else "worse"


def _other_side(found: Answer) -> Option | None:
    """The best of the other framework."""
    side = found.best.case["framework"]
    every = [*found.equal, *found.rest]
    return next((o for o in every if o.case["framework"] != side), None)


def why(found: Answer) -> str:
    """What stands against the answer: better rows left out, and what cannot be told from it."""
    parts = []
    refused = [(option, reason) for option, reason in found.refused if found.better(option)]
    if refused:
        option, reason = refused[0]
        figure = figure_of(found.figure(option), found.goal, found.limits)
        more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
        loss = f": {accuracy_of(option.accuracy)}" if "accuracy" in reason else ""
        parts.append(f"{name_of(option)} has {figure} but {reason}{loss}{more}")
    if others := perhaps(found)[1:]:
        parts.append(f"{len(others)} more would be better, of unmeasured accuracy")
    if found.equal:
        parts.append(f"{len(found.equal)} not shown to be worse")
    counted = Counter(_rest(found, option) for option in found.rest)
    if counted["worse"]:
        parts.append(f"{counted['worse']} shown to be worse")
    if counted["next"]:
        of = "one block's times" if found.provisional else "values measured once"
        parts.append(f"{counted['next']} in order of {of}")
    if found.refused or found.unknown:
        return "; ".join(parts) or "no other row that keeps accuracy has this figure"
    return "; ".join(parts) or "it is the only row with this figure"


# The decision table ------------------------------------------------------------------------------

# figure -> its head and its unit's size
COLUMNS = {
    "gained": ("gained [{unit}]", 1.0),
    "steps": ("steps to target", 1.0),
    "time": ("time [ms]", 1e-3),
    "rate": ("samples/s", 1.0),
    "efficiency": ("efficiency [%]", 1.0),
    "of_limit": ("of the limit [%]", 1.0),
    "batch": ("largest batch [samples]", 1.0),
    "memory": ("memory [MB]", 1e6),
    "processes": ("memory, imports too [MB]", 1e6),
    "size": ("size [MB]", 1e6),
    "first_call": ("first call [s]", 1.0),
    "start": ("first prediction [s]", 1.0),
}


def decision_table(work: Work) -> Table:
    """Every row of a piece of work with all of its figures, what is beaten by others last."""
    names = [n for n in COLUMNS if any(n in o.figures for o in work.options)]
    if work.kind != RECIPE:  # there it is the accuracy's column that says it
        names = [name for name in names if name != "gained"]
    unit = work.worded(GOALS["accuracy"]).unit
    heads = (COLUMNS[name][0].format(unit=unit) for name in names)
    columns = [*of_words("row"), *of_figures("÷ own baseline", *heads)]
    columns += of_words("accuracy", "takes")
    kept = {"to choose from": [o for o in work.options if o.accuracy.kept and not o.beaten]}
    kept["beaten in everything by one above"] = [
        o for o in work.options if o.accuracy.kept and o.beaten
    ]
    kept["not shown to keep accuracy"] = [o for o in work.options if not o.accuracy.kept]
    rows = []
    for heading, options in kept.items():
        if options:
            rows.append([heading, *[""] * (len(columns) - 1)])
        rows += [_row(o, names) for o in options]
    return Table(
        ": ".join(filter(None, (work.title, about(work)))), columns, rows, name="decisions"
    )


def _row(option: Option, names: list[str]) -> list[str]:
    verdict = (option.own or {}).get("verdict") or ""
    gain = number(option.gain, places=3) if option.gain else MISSING
    cells = [shown(option.figures.get(name), COLUMNS[name][1]) for name in names]
    takes = option.price or MISSING
    return [
        name_of(option),
        f"{gain}\n{verdict}".strip(),
        *cells,
        accuracy_of(option.accuracy) or MISSING,
        takes,
    ]


# The terminal ------------------------------------------------------------------------------------

LABEL = 11  # cells: of an answer's label


def text(found: list[Answer], width: int, *, every: bool = False) -> list[str]:
    """Answers as lines of a terminal."""
    said: list[str] = []
    for each in found:
        heading = f"{each.work.title}: {measure(each.goal, each.limits)}"
        heading += f" ({PROVISIONAL})" if each.provisional else ""
        said += ["", *wrap(plain(heading), width)]
        for label, words in lines(each, every=every):
            said += hanging(f"  {label}", plain(words), width, LABEL)
    return said[1:]
