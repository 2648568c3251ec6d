"""What changed from one run to another, beyond the noise of both.

    twinbench compare OLD NEW [--all] [--format terminal|markdown] [--fail-if slower:5%]

Two runs hours apart cannot be compared by their seconds: the machine's speed drifts. What each run
measured within itself can: the ratio of a variant to its own baseline, and of twin to twin. Peaks
of memory were taken once a run, so only large changes are shown, and none is judged.

With --fail-if the exit status is 1 where a ratio of step times rose by more than the given share:
its 95% interval lies wholly beyond it, and neither run was too noisy for a verdict.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from bench.analysis.record import (
    DIFFERENT,
    FRAMEWORKS,
    above_import,
    framework_title,
    load,
    title_of,
    work_of,
)
from bench.analysis.stats import Ratio, compare_accuracy, compare_runs
from bench.analysis.values import at, is_number
from bench.report.blocks import Column, Table
from bench.report.content import run_line
from bench.report.figures import MISSING, compact, interval, number, plus_minus, scaled
from bench.report.tables import grid, markdown_table
from bench.report.text import plain, wrap

CHANGED = ("faster", "slower", "better", "worse")  # verdicts that say that something did
NOT_MEASURED = "not measured"
MEMORY_CHANGE = 0.10  # share by which a peak differs at least, to be shown
MACHINE = ("cpu", "isa", "physical_cores", "threads", "memory_bytes", "gpu", "governor", "os")
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
    found = [
        _conditions(conditions(old, new)),
        _statuses(*cases, every),
        _ratios(_common(old, new), cases[1], every),
        _accuracies(both, new["tasks"], every),
        _memory(both),
    ]
    return [table for table in found if table.rows]


def _conditions(differing: dict[str, tuple[str, str]]) -> Table:
    columns = [Column("", head, right=False) for head in ("what", "old", "new")]
    rows = [[name, *values] for name, values in differing.items()]
    return Table("Not the same in both runs", columns, rows)


def _statuses(old: dict[str, dict], new: dict[str, dict], every: bool) -> Table:
    """Cases that ended otherwise, or were measured in one run alone (counted, or with `every`)."""
    columns = [Column("", head, right=False) for head in ("case", "old", "new")]
    rows, alone = [], Counter()
    for name in dict.fromkeys([*old, *new]):
        ended = tuple(at(cases.get(name), "status") or NOT_MEASURED for cases in (old, new))
        if NOT_MEASURED in ended and not every:
            alone[ended] += 1
        elif ended[0] != ended[1]:
            rows.append([name, *ended])
    rows += [[f"{count} cases", *ended] for ended, count in alone.items()]
    return Table("Cases that ended otherwise", columns, rows)


def _common(old: Record, new: Record) -> list[tuple[dict, dict]]:
    """The comparisons that both runs made of their cases, but for the controls."""
    found: list[dict] = []
    for record in (old, new):
        ids = {case["id"] for case in record["cases"]}
        comparisons = [
            c
            for c in record["comparisons"]
            if c["kind"] != "control" and {c["numerator"], c["denominator"]} <= ids
        ]
        found.append({(c["kind"], c["numerator"], c["denominator"]): c for c in comparisons})
    return [(found[0][key], found[1][key]) for key in found[0] if key in found[1]]


def _ratios(common: list[tuple[dict, dict]], cases: dict[str, dict], every: bool) -> Table:
    """Ratios of step time in both runs, and by how much they changed."""
    heads = ("old", "new", "new ÷ old\n(95% interval)")
    columns = [Column("", "ratio of", right=False), *(Column("", head) for head in heads)]
    columns += [Column("", "the first is", right=False)]
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
    if DIFFERENT in (old["verdict"], new["verdict"]):
        return None
    return compare_runs(*(Ratio(c["ratio"], None, c["sd"], c["n"], None) for c in (new, old)))


def _pair(comparison: dict, cases: dict[str, dict]) -> str:
    """technique, task, batch: what is divided by what."""
    first, second = (cases[comparison[side]] for side in ("numerator", "denominator"))
    where = f"{comparison['technique']}, {work_of(comparison)} {comparison['batch_size']}"
    if comparison["kind"] == "framework" and first["variant"] == second["variant"]:
        what = f"{first['variant']}, {framework_title(first)} ÷ {framework_title(second)}"
    else:
        what = f"{title_of(first)} ÷ {second['variant']}"
    return f"{where}: {what}"


def _accuracies(both: list[tuple[dict, dict]], tasks: dict, every: bool) -> Table:
    """Accuracies, paired by seed where both runs trained the same number."""
    columns = [Column("", "case", right=False), Column("", "old"), Column("", "new")]
    columns += [Column("", "difference\n(± half the 95% interval)"), Column("", "", right=False)]
    rows = []
    for old, new in both:
        before, after = old.get("accuracy"), new.get("accuracy")
        if not before or not after or len(before["per_seed"]) != len(after["per_seed"]):
            continue
        task = tasks[new["task"]]
        found = compare_accuracy(
            after["per_seed"],
            before["per_seed"],
            margin=task["margin"],
            more_is_better=task["metric"] == "accuracy",
        )
        if every or found["verdict"] in CHANGED:
            apart = plus_minus(found["mean"], found["ci"], signed=True)
            means = [number(each["mean"], places=2) for each in (before, after)]
            rows.append([new["id"], *means, apart, found["verdict"] or MISSING])
    return Table("Accuracy, paired by seed", columns, rows)


def _memory(both: list[tuple[dict, dict]]) -> Table:
    """Peaks above import that changed by more than `MEMORY_CHANGE`; one value a run."""
    columns = [Column("", "case", right=False), Column("", "old [MB]"), Column("", "new [MB]")]
    columns += [Column("", "new ÷ old")]
    rows = []
    for pair in both:
        old, new = (above_import(case.get("memory")) for case in pair)
        if is_number(old) and is_number(new) and old > 0 and abs(new / old - 1) > MEMORY_CHANGE:
            sizes = [number(scaled(size, 1e-6)) for size in (old, new)]
            rows.append([pair[1]["id"], *sizes, number(new / old, places=2)])
    title = (
        f"Peak memory that changed by more than {MEMORY_CHANGE:.0%} (one value a run, no verdict)"
    )
    return Table(title, columns, rows)


def slower(old: Record, new: Record, share: float) -> list[str]:
    """The ratios that rose by more than `share`, as sentences."""
    cases = {case["id"]: case for case in new["cases"]}
    found = []
    for before, after in _common(old, new):
        change = _change(before, after)
        if change and change.verdict != "noisy" and change.ci[0] > 1 + share:
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
    found += [
        f"NOT FINISHED: the {name} run was cut short."
        for name, record in (("old", old), ("new", new))
        if not record["finished"]
    ]
    return found


def render(old: Record, new: Record, *, every: bool, markdown: bool, width: int = 80) -> str:
    """The whole comparison as text for the terminal, or as Markdown."""
    parts = tables(old, new, every=every)
    if markdown:
        lines = ["# What changed", *sentences(old, new)]
        for table in parts:
            lines += [f"## {table.title}", markdown_table(table).strip("\n")]
        return "\n\n".join(lines) + "\n"
    lines = [line for text in sentences(old, new) for line in wrap(plain(text), width)]
    for table in parts:
        lines += ["", *grid(table, width)]
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status (1: --fail-if holds, 2: an error)."""
    parser = argparse.ArgumentParser(prog="twinbench compare", description=__doc__)
    parser.add_argument("old", type=Path, help="a results.json, or the folder that holds one")
    parser.add_argument("new", type=Path, help="the same of the other run")
    parser.add_argument("--all", action="store_true", help="also what did not change")
    parser.add_argument("--format", choices=("terminal", "markdown"), default="terminal")
    parser.add_argument("--fail-if", type=_limit, metavar="slower:P%", help="exit with status 1 if")
    given = parser.parse_args(arguments)
    sys.stdout.reconfigure(errors="backslashreplace")  # a console without UTF-8 loses no table
    try:
        runs = [load(path) for path in (given.old, given.new)]
        markdown = given.format == "markdown"
        print(render(*runs, every=given.all, markdown=markdown), end="")
    except ValueError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    failures = [] if given.fail_if is None else slower(*runs, given.fail_if)
    print("".join(f"{failure}\n" for failure in failures), end="", file=sys.stderr)
    return 1 if failures else 0


def _limit(text: str) -> float:
    """The share of "slower:5%"."""
    found = re.fullmatch(r"slower:(\d+(?:\.\d+)?)%", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form slower:5%")
    return float(found[1]) / 100
