"""Whether runs on one class of machine agree.

Each ratio that two runs have is compared: it agrees if it differs by no more than the combined 95%
intervals, the root of the sum of squares of the half-intervals that face each other, in logarithms.
Two runs with correct intervals agree in 95% of their ratios. The scatter from run to run is shown
beside that expected from the noise within a run.

How much more figures scatter between runs than within one is estimated by moments (DerSimonian and
Laird, 1986): for two runs, the variance of a ratio's logarithm minus the mean of both variances
within, on average over ratios; then the median over pairs of runs. How many ratios agree is not
looked at. The analysis adds the result of all runs (`BETWEEN_RUNS`); the result of every second run
is judged by the other runs.

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
    Table,
    is_better,
    is_worse,
)
from bench.analysis.verdicts import BETWEEN_FREEDOM, half_width, quantile, summed
from bench.harness.processes import ROOT
from bench.record import DIFFERENT, FRAMEWORKS, Case, Record, decode
from bench.report.content import LARGE, SMALL
from bench.report.formatting import compact
from bench.report.names import parameters, rounded

# What is compared, in words, and by which figure.
KINDS = {
    "steps": ("train steps", TIME),
    "predictions": ("predictions", TIME),
    "pipelines": ("input pipelines", RATE),
    "replicas": ("replicas and other devices", RATE),
    "starts": ("starts of deployed models", START),
    "first_calls": ("first calls", FIRST_CALL),
    "step_peaks": ("peaks of memory of train steps", MEMORY),
    "prediction_peaks": ("peaks of memory of predictions", MEMORY),
}
OF_FAMILIES = {"input": "pipelines", "parallel": "replicas"}
FIGURES = {START: "starts", FIRST_CALL: "first_calls"}
PEAKS = {"train": "step_peaks", "predict": "prediction_peaks"}
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
    """A ratio: its logarithm, the reach of its 95% interval down and up, and its verdict.

    `within`: the variance of the logarithm by the noise within the run, with its degrees of
    freedom.
    """

    log: float
    down: float
    up: float
    shows: str
    within: tuple[float, float]


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
            kind = "predictions" if comparison.mode == "predict" else "steps"
            within = comparison.sd**2 / comparison.n, comparison.freedom or comparison.n - 1
            yield _key(kind, *pair), _measured(comparison.ratio, comparison.ci, shows, within)
    table = Table(record)
    for row in table.rows:
        for name, ratio in row.ratios.items() if row.base and row.case.role != "control" else ():
            kind = _kind(name, row.case)
            if kind is None or ratio.kind != "interval" or ratio.low <= 0:
                continue
            of = [table.value(case, name)[0] for case in (row.case, row.base)]
            if within := table.noise(name, *of):
                better, worse = is_better(name, ratio), is_worse(name, ratio)
                shows = LESS if better else MORE if worse else UNTOLD
                measured = _measured(ratio.value, (ratio.low, ratio.high), shows, within)
                yield _key(kind, row.case, row.base), measured


def _kind(name: str, case: Case) -> str | None:
    """Of `KINDS`, what a figure of a case is; None of what is not compared here."""
    if name not in BETWEEN_RUNS:
        return None
    if name == MEMORY:
        return PEAKS[case.mode]
    return FIGURES.get(name) or OF_FAMILIES.get(family_of(case.technique))


def _direction(verdict: str) -> str:
    return LESS if "faster" in verdict else MORE


def _measured(
    ratio: float, ci: tuple[float, float], shows: str, within: tuple[float, float]
) -> Measured:
    return Measured(log(ratio), log(ratio / ci[0]), log(ci[1] / ratio), shows, within)


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
    """How many ratios of two runs agree, and how their verdicts changed.

    `same`: both have the same. `lost`: one can't tell what the other shows. `otherwise`: one shows
    a difference and the other equivalence. `opposite`: less in one, more in the other.
    """

    ratios: int
    agree: int
    same: int
    lost: int
    otherwise: int
    opposite: int

    @property
    def share(self) -> float:
        """The share of the ratios that agree."""
        return self.agree / self.ratios


def agreement(pairs: Iterable[tuple[Measured, Measured]]) -> Agreement:
    """The agreement of pairs of the same ratio."""
    pairs = list(pairs)
    kinds = [_verdicts(a.shows, b.shows) for a, b in pairs]
    counts = {name: kinds.count(name) for name in ("same", "lost", "otherwise", "opposite")}
    return Agreement(len(pairs), sum(agree(a, b) for a, b in pairs), **counts)


def agree(a: Measured, b: Measured) -> bool:
    """Whether two ratios differ by no more than the combined 95% intervals."""
    low, high = sorted((a, b), key=lambda each: each.log)
    return high.log - low.log <= (low.up**2 + high.down**2) ** 0.5


def agree_with(figure: str, deviation: float, a: Measured, b: Measured) -> bool:
    """Whether two ratios agree if figures have this deviation between runs.

    For times: whether the interval of their change contains 1, as `compare` computes it.
    """
    if figure == TIME:
        sd, freedom = summed([a.within, b.within, (2 * deviation**2, BETWEEN_FREEDOM)])
        most = quantile(0.95, freedom) * sd
    else:
        most = sum(half_width(one.within, 2 * deviation**2) ** 2 for one in (a, b)) ** 0.5
    return abs(a.log - b.log) <= most


def _verdicts(a: str, b: str) -> str:
    if a == b:
        return "same"
    if UNTOLD in (a, b):
        return "lost"
    return "otherwise" if NONE in (a, b) else "opposite"


# The record ---------------------------------------------------------------------------------------


class Run(Struct, frozen=True):
    """A run: its name, start, machine, and number of ratios."""

    name: str
    started: str
    machine: str
    ratios: int


class Pair(Struct, frozen=True):
    """Two runs by name, and how their ratios of times agree."""

    a: str
    b: str
    of: Agreement


class Group(Struct, frozen=True):
    """Ratios of a kind in all pairs of runs of one class.

    Medians over ratios of the deviation of a logarithm: `within`, expected from the noise within a
    run; `between`, additional from run to run.
    """

    name: str
    of: Agreement
    within: float
    between: float


class Change(Struct, frozen=True):
    """A kind that a commit measures differently, from a run on; `what`: the commit's first line.

    Runs before and after are not compared in it.
    """

    kind: str
    run: str
    commit: str
    what: str


class Judged(Struct, frozen=True):
    """Ratios of a kind in runs that did not give the `deviation`, and how many agree with it."""

    kind: str
    deviation: float
    ratios: int
    agree: int


class Half(Struct, frozen=True):
    """Deviations from the runs `of`, judged `by` the other runs."""

    of: list[str]
    by: list[str]
    kinds: list[Judged]


class Reproduced(Struct, frozen=True):
    """How runs agree: `runs` of one class in the order of time, and those of `others`.

    `deviations`: by figure, the sd of its logarithm between runs, from all runs (for times, of
    their ratio); `halves`: from every second run. `opposite`: ratios with opposite verdicts, and in
    how many pairs of runs.
    """

    runs: list[Run]
    others: list[Run]
    changed: list[Change]
    deviations: dict[str, float]
    halves: list[Half]
    pairs: list[Pair]
    apart: list[Pair]
    kinds: list[Group]
    sides: list[Group]
    sizes: list[Group]
    whole: Group
    opposite: dict[str, int]


def reproduced(records: dict[str, Record], changed: list[Change]) -> Reproduced:
    """How records agree, by their names. ValueError if fewer than two are of one class.

    Every figure is derived again from the measurements, so that all are judged by one rule.
    """
    for change in changed:
        if change.kind not in KINDS or change.run not in records:
            known = f"a kind of {', '.join(KINDS)}, and one of the runs {', '.join(records)}"
            raise ValueError(f"--changed {change.kind}:{change.run}: give {known}")
    by_time = dict(sorted(records.items(), key=lambda item: item[1].started))
    ours = max((_alike(by_time, one) for one in by_time), key=len)
    if len(ours) < 2:
        raise ValueError("no two runs are on the same class of machine")
    runs = {name: ratios(analyse(raw(record))) for name, record in by_time.items()}
    has = Ratios(runs, changed)
    about = {
        name: Run(name, record.started, words(record.environment), len(runs[name]))
        for name, record in by_time.items()
    }
    others = [name for name in by_time if name not in ours]
    halves = [half for half in (ours[::2], ours[1::2]) if len(half) > 1]
    whole = has.pairs(ours)
    return Reproduced(
        runs=[about[name] for name in ours],
        others=[about[name] for name in others],
        changed=changed,
        deviations=has.deviations(ours),
        halves=[has.judged(*both) for both in (halves, halves[::-1]) if len(halves) == 2],
        pairs=[Pair(*pair, _of_times(both)) for pair, both in whole.items()],
        apart=[Pair(a, b, _of_times(has.shared(a, b))) for a in ours for b in others],
        kinds=_groups(whole, 0, {kind: words for kind, (words, _) in KINDS.items()}),
        sides=_groups(whole, 1),
        sizes=_groups(whole, 2, {size: size for size in SIZES}),
        whole=_group("all", whole, lambda key: True),
        opposite=_opposite(whole.values()),
    )


@dataclass(frozen=True)
class Ratios:
    """The ratios of runs in the order of time, and the changes of how a kind is measured."""

    runs: dict[str, dict[Key, Measured]]
    changed: list[Change]

    def shared(self, a: str, b: str) -> Both:
        """The ratios that both runs have and measured in the same way."""
        ways = {kind: self._way(kind, a) == self._way(kind, b) for kind in KINDS}
        a_has, b_has = self.runs[a], self.runs[b]
        return {key: (a_has[key], b_has[key]) for key in a_has if key in b_has and ways[key[0]]}

    def pairs(self, names: list[str]) -> dict[tuple[str, str], Both]:
        """What any two of these runs share, except those that share nothing."""
        every = {pair: self.shared(*pair) for pair in combinations(names, 2)}
        return {pair: both for pair, both in every.items() if both}

    def deviations(self, names: list[str]) -> dict[str, float]:
        """By figure, the sd of its logarithm between runs beyond the noise within, by moments.

        For two runs it is the mean over their ratios, and over pairs the median, so that no run
        decides alone.
        """
        beyond: dict[str, list[float]] = {}
        for both in self.pairs(names).values():
            parts: dict[str, list[float]] = {}
            for key, (a, b) in both.items():
                within = (a.within[0] + b.within[0]) / 2
                parts.setdefault(KINDS[key[0]][1], []).append((a.log - b.log) ** 2 / 2 - within)
            for figure, each in parts.items():
                beyond.setdefault(figure, []).append(fmean(each))
        of_ratios = {figure: max(0.0, median(each)) for figure, each in sorted(beyond.items())}
        # A ratio has two figures, each with its own; of times it counts itself.
        return {f: (v if f == TIME else v / 2) ** 0.5 for f, v in of_ratios.items()}

    def judged(self, of: list[str], by: list[str]) -> Half:
        """The result of some runs, judged by others."""
        given, pairs = self.deviations(of), list(self.pairs(by).values())
        kinds = []
        for kind, (_, figure) in KINDS.items():
            agreed = [
                agree_with(figure, given[figure], *pair)
                for both in pairs
                for key, pair in both.items()
                if key[0] == kind and figure in given
            ]
            if agreed:
                kinds.append(Judged(kind, given[figure], len(agreed), sum(agreed)))
        return Half(of, by, kinds)

    def _way(self, kind: str, name: str) -> int:
        """How often what is measured in a kind has changed until a run."""
        order = list(self.runs)
        until = [one for one in self.changed if order.index(one.run) <= order.index(name)]
        return sum(one.kind == kind for one in until)


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
    within = [fmean(one.within[0] for one in runs.values()) ** 0.5 for runs in by_ratio.values()]
    between = [variance(one.log for one in runs.values()) ** 0.5 for runs in by_ratio.values()]
    return Group(name, agreement(pairs), median(within), median(between))


# Runs that are given ------------------------------------------------------------------------------


def read(given: str) -> tuple[str, Record]:
    """A run's name and its record, from a path or from docs/results.json of a revision.

    Raises ValueError with one line if it is neither.
    """
    path = Path(given)
    if path.exists():
        return (path.stem if path.suffix == ".json" else path.name), load(path)
    text = of_revision(given)
    if text is None:
        raise ValueError(f"{given}: neither a run nor a revision that has docs/results.json")
    try:
        record = decode(text)
    except ValueError as error:
        raise ValueError(f"{given}:docs/results.json: {error}") from None
    return given, record.but(cases=list(map(complete, record.cases)))


def of_revision(revision: str) -> bytes | None:
    """The docs/results.json of a revision, which may be a link; None if there is none."""
    command = ["git", "-C", str(ROOT), "cat-file", "--batch", "--follow-symlinks"]
    asked = f"{revision}:docs/results.json\n".encode()
    try:
        answered = subprocess.run(command, input=asked, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    header, _, content = answered.partition(b"\n")
    return content if header.split()[1:2] == [b"blob"] else None


def change(given: str) -> Change:
    """The meaning of KIND:RUN:COMMIT; ValueError with one line if it is wrong or git knows none."""
    kind, _, rest = given.partition(":")
    run, _, commit = rest.partition(":")
    command = ["git", "-C", str(ROOT), "log", "-1", "--format=%s", "--end-of-options", commit, "--"]
    try:
        what = subprocess.run(command, capture_output=True, check=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        what = ""
    if not (run and commit and what):
        raise ValueError(f"--changed {given}: give KIND:RUN:COMMIT, a commit of this repository")
    return Change(kind, run, commit, what)
