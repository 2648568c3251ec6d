"""Do runs of one class of machine agree?

Each ratio that two runs have of the same programs is compared by itself: it agrees where it differs
by no more than the combined 95% intervals of both, the root of the sum of the squares of the halves
that face each other, in logarithms. What a figure scatters by from run to run stands beside what
the noise within a run lets expect: two runs whose intervals are true agree in 95% of their ratios.

A run is a results.json, its folder, or a revision of this repository, whose docs/results.json is
read from the history.
"""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations
from math import log
from pathlib import Path
from statistics import fmean, median, variance

from msgspec import Struct

from bench.analysis.analyse import analyse, raw
from bench.analysis.declared import complete
from bench.analysis.families import family_of
from bench.analysis.machine_class import same_class, words
from bench.analysis.reading import load
from bench.analysis.table import (
    BETWEEN_RUNS,
    FIRST_CALL,
    MEMORY,
    RATE,
    START,
    TIME,
    Figure,
    Table,
    is_better,
    is_worse,
)
from bench.analysis.verdicts import quantile
from bench.harness.processes import ROOT
from bench.record import DIFFERENT, FRAMEWORKS, Case, Record, decode
from bench.report.content import LARGE, SMALL
from bench.report.formatting import compact
from bench.report.names import parameters, rounded

NORMAL = quantile(0.95, float("inf"))
# What is compared, in words, and by which figure.
KINDS = {
    "steps": ("train steps", TIME),
    "predictions": ("predictions", TIME),
    "pipelines": ("input pipelines", RATE),
    "replicas": ("replicas and other devices", RATE),
    "starts": ("starts of deployed models", START),
    "first_calls": ("first calls", FIRST_CALL),
    "memory": ("peaks of memory", MEMORY),
}
OF_FAMILIES = {"input": "pipelines", "parallel": "replicas"}
FIGURES = {START: "starts", FIRST_CALL: "first_calls", MEMORY: "memory"}
SIZES = (
    f"below {rounded(SMALL)} parameters",
    f"{rounded(SMALL)} to {rounded(LARGE)}",
    f"{rounded(LARGE)} and more",
    "unknown",
)
LESS, MORE, NONE, UNTOLD = "less", "more", "no difference", "untold"
VERDICTS = {"equivalent": NONE, "inconclusive": UNTOLD, None: UNTOLD}


# What a run has -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """A ratio: its logarithm, how far the 95% interval reaches down and up, and what it shows.

    `within`: the variance of the logarithm by the noise that the run saw.
    """

    log: float
    down: float
    up: float
    shows: str
    within: float


Key = tuple[str, str, str, str]  # kind, framework or both, size of the model, which programs
Both = dict[Key, tuple[Measured, Measured]]  # the ratios of two runs


def ratios(record: Record) -> dict[Key, Measured]:
    """Every ratio of a record that has an interval."""
    return dict(_ratios(record))


def _ratios(record: Record) -> Iterator[tuple[Key, Measured]]:
    cases = {case.id: case for case in record.cases}
    for comparison in record.comparisons:
        pair = cases.get(comparison.numerator), cases.get(comparison.denominator)
        if None in pair or comparison.kind == "control" or comparison.verdict == DIFFERENT:
            continue
        if comparison.ci and comparison.sd is not None and comparison.n:
            shows = VERDICTS.get(comparison.verdict) or _direction(comparison.verdict)
            figure = Figure(comparison.ratio, *comparison.ci, "interval")
            kind = "predictions" if comparison.mode == "predict" else "steps"
            within = comparison.sd**2 / comparison.n
            yield _key(kind, *pair), _measured(figure, shows, within)
    for row in Table(record).rows:
        for name, ratio in row.ratios.items() if row.base else ():
            kind = FIGURES.get(name) or OF_FAMILIES.get(family_of(row.case.technique))
            if name == TIME or name not in BETWEEN_RUNS or kind is None:
                continue
            if ratio.kind == "interval" and ratio.low > 0 and row.case.role != "control":
                stated = (log(ratio.high / ratio.low) / 2 / NORMAL) ** 2
                within = max(0.0, stated - 2 * BETWEEN_RUNS[name] ** 2)
                better, worse = is_better(name, ratio), is_worse(name, ratio)
                shows = LESS if better else MORE if worse else UNTOLD
                yield _key(kind, row.case, row.base), _measured(ratio, shows, within)


def _direction(verdict: str) -> str:
    return LESS if "faster" in verdict else MORE


def _measured(figure: Figure, shows: str, within: float) -> Measured:
    down, up = log(figure.value / figure.low), log(figure.high / figure.value)
    return Measured(log(figure.value), down, up, shows, within)


def _key(kind: str, top: Case, bottom: Case) -> Key:
    sides = dict.fromkeys(FRAMEWORKS[case.framework] for case in (top, bottom))
    settings = (f" ({compact(case.settings)})" * bool(case.settings) for case in (top, bottom))
    programs = " ÷ ".join(map("{}{}".format, (top.id, bottom.id), settings))
    return kind, " ÷ ".join(sides), _size(top.task), programs


def _size(task: str) -> str:
    """How large the model of a task is, of `SIZES`."""
    for count in parameters([task]):
        return SIZES[(count >= SMALL) + (count >= LARGE)]
    return SIZES[-1]


# How two runs agree -------------------------------------------------------------------------------


class Agreement(Struct, frozen=True):
    """Of ratios that two runs have: how many agree, and what their verdicts did.

    `same`: both show the same. `lost`: one can't tell what the other shows. `otherwise`: one shows
    a difference where the other shows that there is none. `opposite`: less in one, more in the
    other.
    """

    ratios: int
    agree: int
    same: int
    lost: int
    otherwise: int
    opposite: int

    @property
    def share(self) -> float:
        """Of the ratios, those that agree."""
        return self.agree / self.ratios


def agreement(pairs: Iterable[tuple[Measured, Measured]]) -> Agreement:
    """The agreement of pairs of the same ratio."""
    pairs = list(pairs)
    kinds = [_verdicts(a.shows, b.shows) for a, b in pairs]
    counts = {name: kinds.count(name) for name in ("same", "lost", "otherwise", "opposite")}
    return Agreement(len(pairs), sum(agree(a, b) for a, b in pairs), **counts)


def agree(a: Measured, b: Measured) -> bool:
    """Whether two runs' ratios differ by no more than the combined 95% intervals."""
    low, high = sorted((a, b), key=lambda each: each.log)
    return high.log - low.log <= (low.up**2 + high.down**2) ** 0.5


def _verdicts(a: str, b: str) -> str:
    if a == b:
        return "same"
    if UNTOLD in (a, b):
        return "lost"
    return "otherwise" if NONE in (a, b) else "opposite"


# The record ---------------------------------------------------------------------------------------


class Run(Struct, frozen=True):
    """A run: its name, when it started, its machine, how many ratios it has."""

    name: str
    started: str
    machine: str
    ratios: int


class Pair(Struct, frozen=True):
    """Two runs by their names, and how their ratios of times agree."""

    a: str
    b: str
    of: Agreement


class Group(Struct, frozen=True):
    """Ratios of a kind in all pairs of runs of one class.

    `within`: the median, over ratios, of the deviation of a logarithm that the noise within a run
    lets expect; `between`: of what it has from run to run. `coverage`: the share of runs that agree
    with the others, where the ratio is compared run by run.
    """

    name: str
    of: Agreement
    within: float
    between: float


class Reproduced(Struct, frozen=True):
    """How runs agree: `runs` of one class, in the order of time, and those of `others`.

    `changed`: kind -> the runs from which on a figure is measured in another way; there those
    before are not compared with those after. `opposite`: which ratios have opposite verdicts, and
    in how many pairs of runs.
    """

    runs: list[Run]
    others: list[Run]
    changed: dict[str, list[str]]
    pairs: list[Pair]
    apart: list[Pair]
    kinds: list[Group]
    sides: list[Group]
    sizes: list[Group]
    whole: Group
    opposite: dict[str, int]


def reproduced(records: dict[str, Record], changed: dict[str, list[str]]) -> Reproduced:
    """How records agree, by their names. ValueError where fewer than two are of one class.

    Every figure is derived anew from what was measured, so that all are judged by one rule.
    """
    for kind, names in changed.items():
        if kind not in KINDS or not set(names) <= records.keys():
            known = f"a kind of {', '.join(KINDS)}, and runs of {', '.join(records)}"
            raise ValueError(f"--changed {kind}:{','.join(names)}: give {known}")
    by_time = dict(sorted(records.items(), key=lambda item: item[1].started))
    ours = max((_alike(by_time, one) for one in by_time), key=len)
    if len(ours) < 2:
        raise ValueError("no two of the runs are of one class of machine")
    has = {name: ratios(analyse(raw(record))) for name, record in by_time.items()}
    about = {
        name: Run(name, record.started, words(record.environment), len(has[name]))
        for name, record in by_time.items()
    }
    together = {pair: _shared(*pair, has, list(by_time), changed) for pair in combinations(ours, 2)}
    others = [name for name in by_time if name not in ours]
    whole = {pair: both for pair, both in together.items() if both}
    return Reproduced(
        runs=[about[name] for name in ours],
        others=[about[name] for name in others],
        changed=changed,
        pairs=[Pair(*pair, _of_times(both)) for pair, both in whole.items()],
        apart=[
            Pair(a, b, _of_times(_shared(a, b, has, list(by_time), changed)))
            for a in ours
            for b in others
        ],
        kinds=_groups(whole, 0, {kind: words for kind, (words, _) in KINDS.items()}),
        sides=_groups(whole, 1),
        sizes=_groups(whole, 2, {size: size for size in SIZES}),
        whole=_group("all", whole, lambda key: True),
        opposite=_opposite(whole.values()),
    )


def _opposite(whole: Iterable[Both]) -> dict[str, int]:
    """The ratios of opposite verdicts, and in how many pairs of runs they have them."""
    return dict(
        Counter(
            f"{KINDS[kind][0]}, {programs}"
            for both in whole
            for (kind, _, _, programs), (a, b) in both.items()
            if _verdicts(a.shows, b.shows) == "opposite"
        )
    )


def _alike(records: dict[str, Record], one: str) -> list[str]:
    first = records[one].environment
    return [name for name, other in records.items() if same_class(first, other.environment)]


def _shared(
    a: str,
    b: str,
    has: dict[str, dict[Key, Measured]],
    order: list[str],
    changed: dict[str, list[str]],
) -> Both:
    """The ratios that both runs have, but for figures that were measured in another way."""
    places = sorted(map(order.index, (a, b)))
    left_out = {
        kind
        for kind, names in changed.items()
        if any(places[0] < order.index(name) <= places[1] for name in names)
    }
    return {
        key: (has[a][key], has[b][key])
        for key in has[a]
        if key in has[b] and key[0] not in left_out
    }


def _of_times(both: Both) -> Agreement:
    return agreement(pair for key, pair in both.items() if KINDS[key[0]][1] == TIME)


def _groups(
    whole: dict[tuple[str, str], Both], place: int, titles: dict[str, str] | None = None
) -> list[Group]:
    """A group for each value at a place of the keys."""
    values = {key[place] for both in whole.values() for key in both}
    titles = titles or {value: value for value in sorted(values)}
    titles = {value: title for value, title in titles.items() if value in values}
    return [
        _group(title, whole, lambda key, value=value: key[place] == value)
        for value, title in titles.items()
    ]


def _group(name: str, whole: dict[tuple[str, str], Both], chosen) -> Group:
    pairs: list[tuple[Measured, Measured]] = []
    by_ratio: dict[tuple, dict[str, Measured]] = {}
    for (a, b), both in whole.items():
        for key, pair in both.items():
            if chosen(key):
                pairs.append(pair)
                by_ratio.setdefault(key, {}).update({a: pair[0], b: pair[1]})
    within = [fmean(one.within for one in runs.values()) ** 0.5 for runs in by_ratio.values()]
    between = [variance(one.log for one in runs.values()) ** 0.5 for runs in by_ratio.values()]
    return Group(name, agreement(pairs), median(within), median(between))


# Runs that are given ------------------------------------------------------------------------------


def read(given: str) -> tuple[str, Record]:
    """A run's name and its record: of a path, or of the docs/results.json of a revision.

    Raises ValueError with one line where it is neither.
    """
    path = Path(given)
    if path.exists():
        return (path.stem if path.suffix == ".json" else path.name), load(path)
    text = of_revision(given)
    if text is None:
        raise ValueError(f"{given}: no run, and no revision that has a docs/results.json")
    try:
        record = decode(text)
    except ValueError as error:
        raise ValueError(f"{given}:docs/results.json: {error}") from None
    return given, record.but(cases=list(map(complete, record.cases)))


def of_revision(revision: str) -> bytes | None:
    """The docs/results.json of a revision, which may be a link; None where there is none."""
    command = ["git", "-C", str(ROOT), "cat-file", "--batch", "--follow-symlinks"]
    asked = f"{revision}:docs/results.json\n".encode()
    try:
        answered = subprocess.run(command, input=asked, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    header, _, content = answered.partition(b"\n")
    return content if header.split()[1:2] == [b"blob"] else None
