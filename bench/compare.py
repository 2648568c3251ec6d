"""What changed from one run to another, beyond the noise of both; or many runs in one table.

    twinbench compare OLD NEW [--all] [--format terminal|markdown] [--fail-if slower:5%]
    twinbench compare A B C ... [--all] [--format terminal|markdown]

Two runs hours apart cannot be compared by their seconds: the machine's speed drifts. What each run
measured within itself can: the ratio of a variant to its own baseline, and of twin to twin. Peaks
of memory were taken once a run, so only large changes are shown, and none is judged.

Of three and more runs (machines, versions) each ratio has a line with a column a run. Those are
shown that some run has beyond the noise of it and of the first; with --all every one.

With --fail-if the exit status is 1 where a ratio of step times rose by more than the given share:
its 95% interval lies wholly beyond it. And where a row that was measured failed, or is not shown to
do the same work any more. A row of other settings, such as a stack of what else was faster, is
another program: it is named, and not compared.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.analysis.accuracy import difference
from bench.analysis.reading import (
    DIFFERENT,
    FRAMEWORKS,
    framework_title,
    load,
    peak,
    title_of,
    work_of,
)
from bench.analysis.values import at, is_number
from bench.analysis.verdicts import Ratio, compare_runs
from bench.report import parsers
from bench.report.blocks import Table, of_figures, of_words
from bench.report.content import machine_words, run_line
from bench.report.figures import MISSING, compact, interval, number, plus_minus, ratio, scaled
from bench.report.svg_shapes import letters
from bench.report.tables import grid, markdown_table
from bench.report.text import plain, wrap

# verdicts that say that something did
CHANGED = ("faster", "slower", "slightly faster", "slightly slower", "better", "worse")
NOT_MEASURED = "not measured"
WIDTH = 80  # of the terminal
MEMORY_CHANGE = 0.10  # share by which a peak differs at least, to be shown
MACHINE = (
    *("cpu", "isa", "isa_limits", "physical_cores", "threads"),
    *("memory_bytes", "gpu", "governor", "os"),
)
SETTINGS = ("allocator", "onednn", "compiler", "seeds")

Record = dict[str, Any]


def conditions(old: Record, new: Record) -> dict[str, tuple[str, str]]:
    """What the runs do not have in common: name -> (old, new); empty if all is alike."""
    stated = [_stated(record) for record in (old, new)]
    names = dict.fromkeys(name for each in stated for name in each)
    found = {name: tuple(each.get(name, MISSING) for each in stated) for name in names}
    return {name: values for name, values in found.items() if values[0] != values[1]}


def _stated(record: Record) -> dict[str, str]:
    """Machine, versions and settings of a run, in words."""
    environment = record["environment"]
    found = {name: compact(environment.get(name)) for name in (*MACHINE, *SETTINGS)}
    for side, versions in (environment.get("packages") or {}).items():
        owner = f"{FRAMEWORKS[side]}: " if side in FRAMEWORKS else ""
        found |= {f"{owner}{name}": compact(version) for name, version in versions.items()}
    return found


# Tables ------------------------------------------------------------------------------------------


def tables(old: Record, new: Record, *, every: bool = False) -> list[Table]:
    """What differs between the runs: conditions, cases, ratios, accuracy and memory.

    With `every` also what did not change, and each case that one run alone has. Raises ValueError
    where nothing was measured in both.
    """
    cases = [{case["id"]: case for case in record["cases"]} for record in (old, new)]
    both = [(cases[0][name], cases[1][name]) for name in cases[0] if name in cases[1]]
    if not both:
        raise ValueError("the two runs have no case in common")
    same = [pair for pair in both if len(set(map(_settings, pair))) == 1]
    found = [
        _conditions(conditions(old, new)),
        _statuses(*cases, every),
        _ratios(_common(old, new), cases[1], every),
        _accuracies(same, new["tasks"], every),
        _memory(same),
    ]
    return [table for table in found if table.rows]


# Many runs ---------------------------------------------------------------------------------------


def many(runs: list[Record], *, every: bool = False) -> list[Table]:
    """What differs between the runs, and each ratio of step time in all of them.

    ValueError where no ratio stands in two of them.
    """
    names = letters(len(runs))
    stated = [_stated(run) for run in runs]
    rows = [
        [name, *values]
        for name in dict.fromkeys(name for each in stated for name in each)
        if len(set(values := [each.get(name, MISSING) for each in stated])) > 1
    ]
    columns = of_words("what", *names)
    return [Table("Not the same in all runs", columns, rows), _all_ratios(runs, names, every)]


def _all_ratios(runs: list[Record], names: list[str], every: bool) -> Table:
    """A line a ratio, a column a run; beside a ratio that changed against the first its verdict."""
    found = [_ratios_of(run) for run in runs]
    cases = {case["id"]: case for run in runs for case in run["cases"]}
    keys = dict.fromkeys(key for each in found for key in each)
    several = [key for key in keys if sum(key in each for each in found) > 1]
    if not several:
        raise ValueError("the runs have no ratio in common")
    rows = []
    for key in several:
        lines = [each.get(key) for each in found]
        first = next(line for line in lines if line)
        cells, changed = [], False
        for line in lines:
            verdict = None if line in (None, first) else _moved(first, line)
            changed |= verdict in CHANGED
            cells.append(_cell(line, verdict))
        if changed or every:
            rows.append([_pair(first, cases), *cells])
    columns = [*of_words("ratio of"), *of_figures(*names)]
    title = f"Ratios of step time: {len(several)} in two runs or more"
    return Table(title, columns, rows or [["none changed", *[""] * len(names)]])


def _ratios_of(run: Record) -> dict[tuple, dict]:
    """By what is divided by what, with the settings of both: with others it is another program."""
    settings = {case["id"]: _settings(case) for case in run["cases"]}
    return {
        (c["kind"], *((c[side], settings[c[side]]) for side in ("numerator", "denominator"))): c
        for c in run["comparisons"]
        if c["kind"] != "control" and {c["numerator"], c["denominator"]} <= settings.keys()
    }


def _settings(case: dict | None) -> str:
    return compact(at(case, "settings"))


def _moved(first: dict, line: dict) -> str | None:
    """Whether a ratio changed against another run's; nothing where either has no interval."""
    if not all(map(_has_noise, (first, line))):
        return None
    change = _change(first, line)
    return change.verdict if change else DIFFERENT


def _has_noise(comparison: dict | None) -> bool:
    """Whether a ratio has what its change is judged by."""
    return all(is_number(at(comparison, name)) for name in ("ratio", "sd", "n"))


def _cell(line: dict | None, verdict: str | None) -> str:
    if line is None:
        return MISSING
    if line.get("verdict") == DIFFERENT or not is_number(line.get("ratio")):
        return DIFFERENT
    figure = ratio(line["ratio"], line.get("ci"))
    return f"{figure}\n{verdict}" if verdict in CHANGED else figure


def _conditions(differing: dict[str, tuple[str, str]]) -> Table:
    columns = of_words("what", "old", "new")
    rows = [[name, *values] for name, values in differing.items()]
    return Table("Not the same in both runs", columns, rows)


def _statuses(old: dict[str, dict], new: dict[str, dict], every: bool) -> Table:
    """Cases that ended otherwise, or were measured in one run alone (counted, or with `every`)."""
    columns = of_words("case", "old", "new")
    rows, alone = [], Counter()
    for name in dict.fromkeys([*old, *new]):
        ended = tuple(at(cases.get(name), "status") or NOT_MEASURED for cases in (old, new))
        if NOT_MEASURED in ended and not every:
            alone[ended] += 1
        elif ended[0] != ended[1]:
            rows.append([name, *ended])
        elif len(set(its := [_settings(cases.get(name)) for cases in (old, new)])) > 1:
            rows.append([name, *map(", ".join, zip(ended, its, strict=True))])
    rows += [[f"{count} cases", *ended] for ended, count in alone.items()]
    return Table("Cases that ended otherwise", columns, rows)


def _common(old: Record, new: Record) -> list[tuple[dict, dict]]:
    """The comparisons that both runs made of their cases, but for the controls.

    ValueError where none of them has a deviation in both; those that lack one are left out.
    """
    ours, theirs = _ratios_of(old), _ratios_of(new)
    both = [(ours[key], theirs[key]) for key in ours if key in theirs]
    judged = [pair for pair in both if all(map(_has_noise, pair))]
    if both and not judged:
        raise ValueError("a run of one block has no noise to compare with")
    return judged


def _ratios(common: list[tuple[dict, dict]], cases: dict[str, dict], every: bool) -> Table:
    """Ratios of step time in both runs, and by how much they changed."""
    heads = of_figures("old", "new", "new ÷ old\n(95% interval)")
    columns = [*of_words("ratio of"), *heads, *of_words("the first is")]
    rows, counts = [], Counter()
    for old, new in common:
        change = _change(old, new)
        verdict = change.verdict if change else DIFFERENT
        counts[verdict] += 1
        if every or verdict in CHANGED:
            shown = [number(each["ratio"], places=3) for each in (old, new)] if change else ["", ""]
            moved = f"{change.ratio:.3f} ({interval(change.ci, like=1.0)})" if change else MISSING
            rows.append([_pair(new, cases), *shown, moved, verdict])
    summary = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
    return Table(f"Ratios of step time: {summary}", columns, rows or [["none changed", *[""] * 4]])


def _change(old: dict, new: dict) -> Ratio | None:
    """How a comparison's ratio changed; None where a run held the two for different work."""
    if DIFFERENT in (old.get("verdict"), new.get("verdict")):
        return None
    return compare_runs(*map(_judged, (new, old)))


def _judged(found: dict) -> Ratio:
    freedom = found.get("freedom")  # where a run that ends early shares variances
    return Ratio(found["ratio"], None, found["sd"], found["n"], None, freedom=freedom)


def _pair(comparison: dict, cases: dict[str, dict]) -> str:
    """technique, task, batch: what is divided by what."""
    first, second = (cases[comparison[side]] for side in ("numerator", "denominator"))
    where = f"{comparison['technique']}, {work_of(comparison)} {comparison['batch_size']}"
    if comparison["kind"] == "framework" and first["variant"] == second["variant"]:
        what = f"{first['variant']}, {framework_title(first)} ÷ {framework_title(second)}"
    else:
        same_side = framework_title(first) == framework_title(second)
        what = f"{title_of(first)} ÷ {second['variant'] if same_side else title_of(second)}"
    return f"{where}: {what}"


def _accuracies(both: list[tuple[dict, dict]], tasks: dict, every: bool) -> Table:
    """Accuracies, paired by the seeds that both runs trained: one may have ended at a look."""
    heads = of_figures("old", "new", "difference\n(± half the 95% interval)")
    columns = [*of_words("case"), *heads, *of_words("")]
    rows = []
    for old, new in both:
        found = difference(new, old, tasks)
        if found and (every or found["verdict"] in CHANGED):
            seeds = [each["accuracy"]["per_seed"] for each in (old, new)]
            count = min(map(len, seeds))
            apart = plus_minus(found["mean"], found["ci"], signed=True)
            means = [number(fmean(own[:count]), places=2) for own in seeds]
            rows.append([new["id"], *means, apart, found["verdict"] or MISSING])
    return Table("Accuracy, paired by seed", columns, rows)


def _memory(both: list[tuple[dict, dict]]) -> Table:
    """Peaks that changed by more than `MEMORY_CHANGE`; one value a run."""
    columns = [*of_words("case"), *of_figures("old [MB]", "new [MB]", "new ÷ old")]
    rows = []
    for pair in both:
        old, new = (peak(case.get("memory")) for case in pair)
        if is_number(old) and is_number(new) and old > 0 and abs(new / old - 1) > MEMORY_CHANGE:
            sizes = [number(scaled(size, 1e-6)) for size in (old, new)]
            rows.append([pair[1]["id"], *sizes, number(new / old, places=2)])
    title = (
        f"Peak memory that changed by more than {MEMORY_CHANGE:.0%} (one value a run, no verdict)"
    )
    return Table(title, columns, rows)


def slower(old: Record, new: Record, share: float) -> list[str]:
    """The ratios that rose by more than `share`, and what can't be held to it any more: sentences.

    ValueError where the runs have no ratio in common: nothing can be said of any.
    """
    cases = {case["id"]: case for case in new["cases"]}
    found, common = [], _common(old, new)
    if not common:
        raise ValueError("the runs have no ratio of step time in common: none can be held to it")
    were = {(case["id"], _settings(case)): case["status"] for case in old["cases"]}
    for name, case in cases.items():
        if were.get((name, _settings(case))) == "OK" != case["status"]:
            found.append(f"no longer measured: {name}: {case['status']}: {at(case, 'reason')}")
    ours, theirs = _ratios_of(old), _ratios_of(new)
    for key in ours.keys() & theirs.keys():
        if ours[key]["verdict"] != DIFFERENT == theirs[key]["verdict"]:
            found.append(f"no longer the same work: {_pair(theirs[key], cases)}")
    for before, after in common:
        change = _change(before, after)
        if change and change.ci[0] > 1 + share:
            moved = f"{change.ratio:.3f} ({interval(change.ci, like=1.0)})"
            found.append(f"slower by more than {share:.1%}: {_pair(after, cases)}: {moved}")
    return found


# What is printed ---------------------------------------------------------------------------------


def sentences(old: Record, new: Record) -> list[str]:
    """What a reader must know before the tables."""
    found = [f"old: {run_line(old)}", f"new: {run_line(new)}"]
    if differing := conditions(old, new):
        found.append(
            "NOT THE SAME CONDITIONS: whatever changed below may come from what differs "
            f"({', '.join(differing)})."
        )
    return found + _unfinished({"old": old, "new": new})


def _unfinished(runs: dict[str, Record]) -> list[str]:
    return [
        f"NOT FINISHED: the {name} run was cut short."
        for name, record in runs.items()
        if not record["finished"]
    ]


def render(old: Record, new: Record, *, every: bool, markdown: bool) -> str:
    """The whole comparison as text for the terminal, or as Markdown."""
    return _rendered(sentences(old, new), tables(old, new, every=every), markdown)


def render_many(runs: list[Record], *, every: bool, markdown: bool) -> str:
    """The comparison of any number of runs."""
    named = dict(zip(letters(len(runs)), runs, strict=True))
    said = [
        f"{name}: {machine_words(r['environment'])}; {run_line(r)}" for name, r in named.items()
    ]
    return _rendered(said + _unfinished(named), many(runs, every=every), markdown)


def _rendered(said: list[str], parts: list[Table], markdown: bool) -> str:
    if markdown:
        lines = ["# What changed", *said]
        for table in parts:
            lines += [f"## {table.title}", markdown_table(table).strip("\n")]
        return "\n\n".join(lines) + "\n"
    lines = [line for text in said for line in wrap(plain(text), WIDTH)]
    for table in parts:
        lines += ["", *grid(table, WIDTH)]
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status (1: --fail-if holds, 2: an error)."""
    parser = parsers.described("twinbench compare", __doc__)
    parser.add_argument(
        "runs", type=Path, nargs="+", help="two or more: a results.json, or the folder of one"
    )
    parser.add_argument("--all", action="store_true", help="also what did not change")
    parser.add_argument("--format", choices=("terminal", "markdown"), default="terminal")
    parser.add_argument(
        "--fail-if", type=_limit, metavar="slower:P%", help="then exit with status 1"
    )
    given = parser.parse_args(arguments)
    if len(given.runs) < 2 or (len(given.runs) > 2 and given.fail_if is not None):
        parser.error("give two runs, or more without --fail-if")
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
    found = re.fullmatch(r"slower:(\d+(?:\.\d+)?)%", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form slower:5%")
    return float(found[1]) / 100
