"""The results of `twinbench validate measure`, as a page: docs/validation.md.


    python -m bench.validation.controls_page results/latest/validation.json
    python -m bench.validation.controls_page --page

The first keeps the pairs of that run in docs/validation.json; both make the page from it.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np
from scipy import stats

from bench.analysis.bounds import LOOKS
from bench.analysis.verdicts import Interval, t_interval
from bench.harness.folders import replace_file
from bench.harness.processes import ROOT
from bench.record import FRAMEWORKS
from bench.report import parsers
from bench.report.formatting import MISSING, number
from bench.report.names import called
from bench.report.tables import markdown_table
from bench.report.technique_tables import Table, of_figures, of_words
from bench.validation.controls import (
    CONTROLS,
    COPIES,
    PLANTED,
    SIDES,
    WORKLOADS,
    Judged,
    failures,
    judged,
    moved,
)

RECORD, PAGE = ROOT / "docs" / "validation.json", ROOT / "docs" / "validation.md"
KINDS = {"control": "equal work"} | {
    name: f"{share:.0%} longer, planted" for name, share in PLANTED.items() if name in COPIES
}
FOUND = ("slower", "slightly slower")
FALSE = (*FOUND, "faster", "slightly faster")  # of equal work

TITLES = {
    side: FRAMEWORKS[name] if side == name else f"{FRAMEWORKS[name]}, {flavour}"
    for side, (name, flavour) in SIDES.items()
}

_HEAD = """# Equal work, and planted differences

`twinbench validate measure` times equal work against itself, and against work that takes longer by
a known share, as a run of the suite would. Measured on {machine}. A planted difference is a pause
after each step. Threads may go to sleep in it, so a step takes still longer: see the average ratio.
"""

_STAYED = """\
Pairs that looked small at the first look stay longer, and so look larger after it.
"""


_PARENTS = """\
## Workers of two parents

All workers of a block are forked from two parents, and each pair has one of either. What workers of
a parent share, such as where libraries lie in memory, could make them differ. Equal work, second
parent over the first, means of blocks with 95% intervals:
"""


def page(measurement: dict) -> str:
    """The page, from docs/validation.json only."""
    environment = measurement["environment"]
    kind = ", ".join([environment["cpu"], *environment["isa"][-1:]])
    machine = f"{kind}, {environment['threads']} cores"
    whole, early = judged(measurement), judged(measurement, LOOKS[:1])
    lines = [_HEAD.format(machine=machine), markdown_table(_verdicts(whole, early)).strip(), ""]
    lines += [markdown_table(_workloads(whole)).strip(), ""]
    lines += [*_errors(whole, LOOKS), *_errors(early, LOOKS[:1])]
    changes = [*moved(measurement), *failures(measurement)]
    lines += [f"- {change[0].upper()}{change[1:]}." for change in changes]
    lines += ["", _STAYED] if lines[-1] else []
    lines += ["", _PARENTS, *_second_parents(measurement)]
    return "\n".join(lines).rstrip() + "\n"


def _errors(pairs: list[Judged], looks: tuple[int, ...]) -> list[str]:
    """How often equal work was told apart, and an interval left the truth out, which is 1."""
    equal = [pair for pair in pairs if pair.kind == "control" and pair.result.ci]
    if not equal:
        return []
    blocks = max(pair.result.n for pair in equal)
    several = (
        f", with looks at {', '.join(map(str, looks))}" if len(looks) > 1 else ", as by default"
    )
    told = _share(_told_apart(equal, "control"), len(equal))
    left_out = _share(
        sum(not pair.result.ci[0] <= 1 <= pair.result.ci[1] for pair in equal), len(equal)
    )
    return [
        f"- Equal work in runs of at most {blocks} blocks{several}: told "
        f"apart in {told} pairs; the interval leaves 1 out in {left_out}."
    ]


def _told_apart(pairs: list[Judged], kind: str) -> int:
    """How many pairs of a kind were told apart; of planted ones, those that were found slower."""
    verdicts = FALSE if kind == "control" else FOUND
    return sum(pair.verdict in verdicts for pair in pairs)


def _share(count: int, of: int) -> str:
    """A count with the 95% interval of its share (Clopper and Pearson, 1934)."""
    bounds = stats.binomtest(count, of).proportion_ci(method="exact")
    return f"{count} of {of} ({bounds.low:.1%}–{bounds.high:.1%})"


def _verdicts(whole: list[Judged], early: list[Judged]) -> Table:
    rows = []
    for side, kind in sorted({(pair.side, pair.kind) for pair in whole}):
        pairs, short = (
            [pair for pair in judged_at if (pair.side, pair.kind) == (side, kind)]
            for judged_at in (whole, early)
        )
        counts = Counter(pair.verdict for pair in pairs)
        word = "told apart" if kind == "control" else "found"
        rows.append(
            [
                TITLES[side],
                KINDS[kind],
                f"{_told_apart(pairs, kind)} {word} of {len(pairs)}",
                ", ".join(f"{count} {verdict}" for verdict, count in counts.items()),
                f"{np.exp(np.mean([np.log(pair.result.ratio) for pair in pairs])):.3f}",
                number(float(np.mean([pair.result.n for pair in pairs]))),
                f"{_told_apart(short, kind)} of {len(short)}",
            ]
        )
    titles = ["framework", "pairs", "wrong or found", "verdicts", "ratio on average"]
    titles += ["blocks on average", f"wrong or found in {LOOKS[0]} blocks, as by default"]
    return Table("", of_words(*titles), rows)


def _workloads(pairs: list[Judged]) -> Table:
    """How many pairs of a workload were told apart, by what was planted."""
    kinds = [kind for kind in KINDS if any(pair.kind == kind for pair in pairs)]
    rows = []
    for workload in dict.fromkeys(pair.workload for pair in pairs):
        row = [_named(workload)]
        for kind in kinds:
            of_kind = [pair for pair in pairs if (pair.workload, pair.kind) == (workload, kind)]
            told = f"{_told_apart(of_kind, kind)} of {len(of_kind)}"
            row.append(told if of_kind else MISSING)
        rows.append(row)
    heads = [f"{KINDS[kind]}:\ntold apart" for kind in kinds]
    return Table("", [*of_words("workload"), *of_figures(*heads)], rows)


def _second_parents(measurement: dict) -> list[str]:
    """A line for each kind of work, and how many leave 1 out."""
    intervals = _parents(measurement)
    rows = []
    for side, workload, interval in intervals:
        value, low, high = (
            f"{np.exp(part):.3f}" for part in (interval.mean, interval.low, interval.high)
        )
        rows.append([TITLES[side], _named(workload), f"{value} ({low}–{high})", str(interval.n)])
    table = Table("", of_words("framework", "workload", "second parent ÷ first", "blocks"), rows)
    out = sum(not interval.low <= 0 <= interval.high for *_, interval in intervals)
    chance = 1 - stats.binom.cdf(out - 1, len(intervals), 0.05)
    summary = (
        f"{out} of {len(intervals)} intervals leave 1 out; where parents are alike, so many or "
        f"more do in {chance:.0%} of such measurements."
    )
    return [markdown_table(table).strip(), "", summary]


def _parents(measurement: dict) -> list[tuple[str, str, Interval]]:
    """The log of what the second parent's workers took over the first's, by side and workload."""
    differences: dict[tuple[str, str], dict[int, list[float]]] = {}
    for match in measurement["matches"]:
        blocks = differences.setdefault((match["framework"], match["workload"]), {})
        for block, times in enumerate(match["blocks"]):
            equal = [times[f"same{n}"] for n in range(CONTROLS + 1) if f"same{n}" in times]
            if len(equal) == CONTROLS + 1:  # they take turns
                difference = float(np.mean(equal[1::2]) - np.mean(equal[::2]))
                blocks.setdefault(block, []).append(difference)
    means = {
        kind: [float(np.mean(values)) for values in blocks.values()]
        for kind, blocks in differences.items()
    }
    return [
        (*kind, t_interval(values)) for kind, values in sorted(means.items()) if len(values) > 1
    ]


def _named(workload: str) -> str:
    work = WORKLOADS[workload]
    mode = "predictions" if work.mode == "predict" else "train step"
    return f"{called(work.task)}, batch {work.batch_size}, {mode}"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = parsers.described("python -m bench.validation.controls_page", __doc__)
    parser.add_argument("file", nargs="?", type=Path, metavar="validation.json")
    parser.add_argument("--page", action="store_true", help="only make the page again")
    given = parser.parse_args(arguments)
    if given.page == bool(given.file):
        parser.error("give a validation.json, or --page")
    if given.file:
        replace_file(RECORD, given.file.read_text("utf-8"))
    replace_file(PAGE, page(json.loads(RECORD.read_text("utf-8"))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
