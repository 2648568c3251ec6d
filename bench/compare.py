"""Show what changed between two runs beyond the noise of both, or list many runs.

    twinbench compare OLD NEW
    twinbench compare OLD NEW --fail-if slower:5%
    twinbench compare A B C

A machine's speed drifts, so runs are compared by ratios that each measured
within itself: of a variant to its baseline, and of the two frameworks. First
it says how the machines differ. Memory was measured once per run, so only
large changes are shown, without a verdict. Rows whose settings changed are
named and not compared.

Three or more runs get one column each. A ratio is listed if some run differs
from the first beyond noise.

With --fail-if, the exit status is 1 if the whole 95% interval of a change is
beyond the limit, if a row failed that was measured before, or if a row is no
longer shown to do the same work.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from pathlib import Path
from statistics import fmean

from bench.analysis.accuracy import difference
from bench.analysis.machine_class import same_class, words
from bench.analysis.reading import load
from bench.analysis.verdicts import Ratio, compare_runs
from bench.record import DIFFERENT, FRAMEWORKS, Case, Comparison, Record
from bench.report import parsers
from bench.report.content import run_line
from bench.report.formatting import MISSING, compact, interval, number, plus_minus, ratio, scaled
from bench.report.side_by_side import machine_lines
from bench.report.svg_shapes import letters
from bench.report.tables import grid, markdown_table
from bench.report.technique_tables import Table, of_figures, of_words
from bench.report.text import plain, wrap

# verdicts that say that something did
CHANGED = ("faster", "slower", "slightly faster", "slightly slower", "better", "worse")
NOT_MEASURED = "not measured"
WIDTH = 80  # of the terminal
MEMORY_CHANGE = 0.10  # share by which a peak differs at least, to be shown
SETTINGS = ("onednn", "compiler", "seeds")

Key = tuple[str, tuple[str, str], tuple[str, str]]  # kind; case and settings on both sides


def conditions(*runs: Record) -> dict[str, list[str]]:
    """Versions and settings that differ between runs: name -> each run's."""
    stated = [_stated(run) for run in runs]
    names = dict.fromkeys(name for one in stated for name in one)
    values = {name: [one.get(name, MISSING) for one in stated] for name in names}
    return {name: each for name, each in values.items() if len(set(each)) > 1}


def _stated(record: Record) -> dict[str, str]:
    """Versions and settings of a run, in words."""
    environment = record.environment
    stated = {name: compact(getattr(environment, name)) for name in SETTINGS}
    for side, versions in environment.packages.items():
        owner = f"{FRAMEWORKS[side]}: " if side in FRAMEWORKS else ""
        stated |= {f"{owner}{name}": compact(of) for name, of in (versions or {}).items()}
    return stated


# Tables ------------------------------------------------------------------------------------------


def tables(old: Record, new: Record, *, every: bool = False) -> list[Table]:
    """What differs between two runs: conditions, rows, ratios, accuracy and memory.

    `every`: also what did not change, and rows that only one run has. Raises ValueError if the runs
    have no row in common.
    """
    cases = [{case.id: case for case in record.cases} for record in (old, new)]
    both = [(cases[0][name], cases[1][name]) for name in cases[0] if name in cases[1]]
    if not both:
        raise ValueError("the two runs have no row in common")
    same = [pair for pair in both if len(set(map(_settings, pair))) == 1]
    every_table = [
        _conditions("Not the same in both runs", ["old", "new"], [old, new]),
        _statuses(*cases, every),
        _ratios(_common(old, new), cases[1], every),
        _accuracies(same, new, every),
        _memory(same),
    ]
    return [table for table in every_table if table.rows]


def _conditions(title: str, names: list[str], runs: list[Record]) -> Table:
    rows = [[name, *values] for name, values in conditions(*runs).items()]
    return Table(title, of_words("what", *names), rows)


# Many runs ---------------------------------------------------------------------------------------


def many(runs: list[Record], *, every: bool = False) -> list[Table]:
    """What differs between runs, and each ratio of step times in all of them.

    ValueError if no two runs have a ratio in common.
    """
    names = letters(len(runs))
    differing = _conditions("Not the same in all runs", names, runs)
    return [differing, _all_ratios(runs, names, every)]


def _all_ratios(runs: list[Record], names: list[str], every: bool) -> Table:
    """A line a ratio, a column a run; beside a ratio that changed against the first its verdict."""
    ratios = [_ratios_of(run) for run in runs]
    cases = {case.id: case for run in runs for case in run.cases}
    keys = dict.fromkeys(key for of_run in ratios for key in of_run)
    several = [key for key in keys if sum(key in of_run for of_run in ratios) > 1]
    if not several:
        raise ValueError("the runs have no ratio in common")
    rows = []
    for key in several:
        comparisons = [of_run.get(key) for of_run in ratios]
        first = next(filter(None, comparisons))
        verdicts = [None if c in (None, first) else _moved(first, c) for c in comparisons]
        if every or any(verdict in CHANGED for verdict in verdicts):
            rows.append([_pair(first, cases), *map(_cell, comparisons, verdicts)])
    columns = [*of_words("ratio of"), *of_figures(*names)]
    title = f"Ratios of step time: {len(several)} in two runs or more"
    return Table(title, columns, rows or [["none changed", *[""] * len(names)]])


def _ratios_of(run: Record) -> dict[Key, Comparison]:
    """By what is divided by what, with the settings of both: with others it is another program."""
    settings = {case.id: _settings(case) for case in run.cases}
    return {
        (c.kind, *((side, settings[side]) for side in (c.numerator, c.denominator))): c
        for c in run.comparisons
        if c.kind != "control" and {c.numerator, c.denominator} <= settings.keys()
    }


def _settings(case: Case | None) -> str:
    return compact(case and case.settings)


def _moved(first: Comparison, other: Comparison) -> str | None:
    """Whether a ratio changed against another run's; nothing where either has no interval."""
    if not _has_noise(first) or not _has_noise(other):
        return None
    change = _change(first, other)
    return change.verdict if change else DIFFERENT


def _has_noise(comparison: Comparison) -> bool:
    """Whether a ratio has what its change is judged by."""
    return None not in (comparison.ratio, comparison.sd, comparison.n)


def _cell(comparison: Comparison | None, verdict: str | None) -> str:
    if comparison is None:
        return MISSING
    if comparison.verdict == DIFFERENT or comparison.ratio is None:
        return DIFFERENT
    figure = ratio(comparison.ratio, comparison.ci)
    return f"{figure}\n{verdict}" if verdict in CHANGED else figure


# Two runs ----------------------------------------------------------------------------------------


def _statuses(old: dict[str, Case], new: dict[str, Case], every: bool) -> Table:
    """Cases that ended otherwise, or were measured in one run alone (counted, or with `every`)."""
    columns = of_words("case", "old", "new")
    rows, alone = [], Counter()
    for name in dict.fromkeys([*old, *new]):
        pair = [cases.get(name) for cases in (old, new)]
        ended = tuple(case.status if case else NOT_MEASURED for case in pair)
        settings = list(map(_settings, pair))
        if NOT_MEASURED in ended and not every:
            alone[ended] += 1
        elif ended[0] != ended[1]:
            rows.append([name, *ended])
        elif settings[0] != settings[1]:
            rows.append([name, *map(", ".join, zip(ended, settings, strict=True))])
    rows += [[f"{count} cases", *ended] for ended, count in alone.items()]
    return Table("Cases that ended otherwise", columns, rows)


def _common(old: Record, new: Record) -> list[tuple[Comparison, Comparison]]:
    """The comparisons that both runs made of their cases, but for the controls.

    ValueError where none of them has a deviation in both; those that lack one are left out.
    """
    before, after = _ratios_of(old), _ratios_of(new)
    both = [(before[key], after[key]) for key in before if key in after]
    judged = [pair for pair in both if all(map(_has_noise, pair))]
    if both and not judged:
        raise ValueError("a run of one block has no noise to compare with")
    return judged


def _ratios(
    common: list[tuple[Comparison, Comparison]], cases: dict[str, Case], every: bool
) -> Table:
    """Ratios of step time in both runs, and by how much they changed."""
    heads = of_figures("old", "new", "new ÷ old\n(95% interval)")
    columns = [*of_words("ratio of"), *heads, *of_words("the first is")]
    rows, counts = [], Counter()
    for old, new in common:
        change = _change(old, new)
        verdict = change.verdict if change else DIFFERENT
        counts[verdict] += 1
        if every or verdict in CHANGED:
            shown = [number(c.ratio, places=3) for c in (old, new)] if change else ["", ""]
            rows.append([_pair(new, cases), *shown, _in_brackets(change), verdict])
    summary = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
    return Table(f"Ratios of step time: {summary}", columns, rows or [["none changed", *[""] * 4]])


def _in_brackets(change: Ratio | None) -> str:
    return f"{change.ratio:.3f} ({interval(change.ci, like=1.0)})" if change else MISSING


def _change(old: Comparison, new: Comparison) -> Ratio | None:
    """How a comparison's ratio changed; None where a run held the two for different work."""
    if DIFFERENT in (old.verdict, new.verdict):
        return None
    return compare_runs(*map(_judged, (new, old)))


def _judged(comparison: Comparison) -> Ratio:
    freedom = comparison.freedom  # where a run that ends early shares variances
    return Ratio(comparison.ratio, None, comparison.sd, comparison.n, None, freedom=freedom)


def _pair(comparison: Comparison, cases: dict[str, Case]) -> str:
    """technique, task, batch: what is divided by what."""
    first, second = cases[comparison.numerator], cases[comparison.denominator]
    where = f"{comparison.technique}, {comparison.task_title} {comparison.batch_size}"
    if comparison.kind == "framework" and first.variant == second.variant:
        what = f"{first.variant}, {first.framework_title} ÷ {second.framework_title}"
    else:
        same_side = first.framework_title == second.framework_title
        what = f"{first.full_title} ÷ {second.variant if same_side else second.full_title}"
    return f"{where}: {what}"


def _accuracies(both: list[tuple[Case, Case]], new_run: Record, every: bool) -> Table:
    """Accuracies, paired by the seeds that both runs trained: one may have ended at a look."""
    heads = of_figures("old", "new", "difference\n(± half the 95% interval)")
    columns = [*of_words("case"), *heads, *of_words("")]
    rows = []
    for old, new in both:
        change = difference(new, old, new_run.tasks)
        if change and (every or change.verdict in CHANGED):
            seeds = [case.accuracy.per_seed for case in (old, new)]
            count = min(map(len, seeds))
            means = [number(fmean(values[:count]), places=2) for values in seeds]
            moved = plus_minus(change.mean, change.ci, signed=True)
            rows.append([new.id, *means, moved, change.verdict or MISSING])
    return Table("Accuracy, paired by seed", columns, rows)


def _memory(both: list[tuple[Case, Case]]) -> Table:
    """Peaks that changed by more than `MEMORY_CHANGE`; one value a run."""
    columns = [*of_words("case"), *of_figures("old [MB]", "new [MB]", "new ÷ old")]
    rows = []
    for pair in both:
        old, new = (case.peak_bytes for case in pair)
        if old and old > 0 and new is not None and abs(new / old - 1) > MEMORY_CHANGE:
            sizes = [number(scaled(size, 1e-6)) for size in (old, new)]
            rows.append([pair[1].id, *sizes, number(new / old, places=2)])
    title = (
        f"Peak memory that changed by more than {MEMORY_CHANGE:.0%} (one value a run, no verdict)"
    )
    return Table(title, columns, rows)


def slower(old: Record, new: Record, share: float) -> list[str]:
    """Sentences: ratios that rose by more than `share`, and rows that can't be compared any more.

    ValueError if the runs have no ratio in common.
    """
    cases = {case.id: case for case in new.cases}
    failures, common = [], _common(old, new)
    if not common:
        raise ValueError("--fail-if: the runs have no ratio of step times in common")
    before = {(case.id, _settings(case)): case.status for case in old.cases}
    for case in new.cases:
        if before.get((case.id, _settings(case))) == "OK" != case.status:
            failures.append(f"no longer measured: {case.id}: {case.status}: {case.reason}")
    old_ratios, new_ratios = _ratios_of(old), _ratios_of(new)
    for key in old_ratios.keys() & new_ratios.keys():
        if old_ratios[key].verdict != DIFFERENT == new_ratios[key].verdict:
            failures.append(f"no longer the same work: {_pair(new_ratios[key], cases)}")
    for old_pair, new_pair in common:
        change = _change(old_pair, new_pair)
        if change and change.ci[0] > 1 + share:
            pair = f"{_pair(new_pair, cases)}: {_in_brackets(change)}"
            failures.append(f"slower by more than {share:.1%}: {pair}")
    return failures


# What is printed ---------------------------------------------------------------------------------


def sentences(old: Record, new: Record) -> list[str]:
    """What a reader must know before the tables, first how the machines differ."""
    named = {"old": old, "new": new}
    lines = [*machine_lines(named), *(f"{name}: {run_line(run)}" for name, run in named.items())]
    alike = same_class(old.environment, new.environment)
    if differing := [*["the machine"] * (not alike), *conditions(old, new)]:
        lines.append(
            "NOT THE SAME CONDITIONS: whatever changed below may come from what differs "
            f"({', '.join(differing)})."
        )
    return lines + _unfinished(named)


def _unfinished(runs: dict[str, Record]) -> list[str]:
    return [
        f"NOT FINISHED: the {name} run was cut short."
        for name, record in runs.items()
        if not record.finished
    ]


def render(old: Record, new: Record, *, every: bool, markdown: bool) -> str:
    """The whole comparison as text for the terminal, or as Markdown."""
    return _rendered(sentences(old, new), tables(old, new, every=every), markdown)


def render_many(runs: list[Record], *, every: bool, markdown: bool) -> str:
    """The comparison of any number of runs."""
    named = dict(zip(letters(len(runs)), runs, strict=True))
    said = [f"{name}: {words(r.environment)}; {run_line(r)}" for name, r in named.items()]
    return _rendered(
        [*machine_lines(named), *said, *_unfinished(named)], many(runs, every=every), markdown
    )


def _rendered(intro: list[str], parts: list[Table], markdown: bool) -> str:
    if markdown:
        lines = ["# What changed", *intro]
        for table in parts:
            lines += [f"## {table.title}", markdown_table(table).strip("\n")]
        return "\n\n".join(lines) + "\n"
    lines = [line for text in intro for line in wrap(plain(text), WIDTH)]
    for table in parts:
        lines += ["", *grid(table, WIDTH)]
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status (1: --fail-if holds, 2: an error)."""
    parser = parsers.described("twinbench compare", __doc__)
    parser.add_argument(
        "runs", type=Path, nargs="+", metavar="run", help="a results.json, or its folder"
    )
    parser.add_argument("--all", action="store_true", help="also list what did not change")
    parser.add_argument(
        "--format",
        choices=("terminal", "markdown"),
        default="terminal",
        help="of what is printed (default: terminal)",
    )
    parser.add_argument(
        "--fail-if",
        type=_limit,
        metavar="slower:P%",
        help="exit with status 1 if a step became slower by more than P%%",
    )
    given = parser.parse_args(arguments)
    if len(given.runs) < 2:
        parser.error("give two runs or more")
    if len(given.runs) > 2 and given.fail_if is not None:
        parser.error("--fail-if compares two runs: give two")
    try:
        runs = [load(path) for path in given.runs]
        shown = {"every": given.all, "markdown": given.format == "markdown"}
        print(render(*runs, **shown) if len(runs) == 2 else render_many(runs, **shown), end="")
        failures = [] if given.fail_if is None else slower(*runs, given.fail_if)
    except ValueError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    print("".join(f"{failure}\n" for failure in failures), end="", file=sys.stderr)
    return 1 if failures else 0


def _limit(text: str) -> float:
    """The share of "slower:5%"."""
    match = re.fullmatch(r"slower:(\d+(?:\.\d+)?)%", text)
    if not match:
        raise argparse.ArgumentTypeError(f"give a limit such as slower:5%, not {text!r}")
    return float(match[1]) / 100
