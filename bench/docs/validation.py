"""What `twinbench validate measure` found, as a page: docs/validation.md.

    python -m bench.docs.validation results/latest/validation.json
    python -m bench.docs.validation --page

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
from bench.analysis.reading import FRAMEWORKS
from bench.analysis.verdicts import Interval, t_interval
from bench.harness.folders import replace_file
from bench.harness.processes import ROOT
from bench.report import parsers
from bench.report.blocks import Table, of_figures, of_words
from bench.report.figures import MISSING, number
from bench.report.tables import markdown_table
from bench.validation.command import (
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

_HEAD = """# Equal work, and differences that were planted

`twinbench validate measure` plays the same work against itself in processes of their own, and
against work that takes longer by a known share, as a run of the suite would, with the same looks
and the same company. Measured on {machine}.
What is planted waits for its share after each step; threads of the framework may go to sleep
meanwhile, so that a step takes longer yet: the ratios on average say by how much.
"""

_STAYED = """\
Of equal work all stay: there is seen what leaving does. Of what was planted those stay who were not
decided at the first look, since they had looked small; that alone makes them look larger after it.
"""


_PARENTS = """\
## Workers of two parents

In a block all workers are forked from two parents, and each pair has one of either. What the
workers of a parent have in common, such as where its libraries lie in memory, is drawn anew in each
block, and all pairs of the block show it alike: pairs of one kind of work are not told apart one
by one. Equal work, mean of the block, second parent's workers over the first's, 95% intervals:
"""


def page(found: dict) -> str:
    """The page, from the record alone."""
    environment = found["environment"]
    kind = ", ".join([environment["cpu"], *environment["isa"][-1:]])
    machine = f"{kind}, {environment['threads']} cores"
    whole, early = judged(found), judged(found, LOOKS[:2])
    lines = [_HEAD.format(machine=machine), markdown_table(_verdicts(whole, early)).strip(), ""]
    lines += [
        markdown_table(_workloads(whole)).strip(),
        "",
        *_errors(whole, LOOKS),
        *_errors(early, LOOKS[:2]),
    ]
    lines += [f"- {line[0].upper()}{line[1:]}." for line in moved(found)]
    lines += [f"- {line[0].upper()}{line[1:]}." for line in failures(found)]
    lines += ["", _STAYED] if lines[-1] else []
    lines += ["", _PARENTS, *_second_parents(found)]
    return "\n".join(lines).rstrip() + "\n"


def _errors(every: list[Judged], looks: tuple[int, ...]) -> list[str]:
    """How often equal work was told apart, and an interval left the truth out, which is 1."""
    equal = [one for one in every if one.kind == "control" and one.said.ci]
    if not equal:
        return []
    blocks, bounds = max(one.said.n for one in equal), ", ".join(map(str, looks))
    usual = ", as by default" if looks == LOOKS[:2] else ""
    told = _share(sum(one.verdict in FALSE for one in equal), len(equal))
    left_out = _share(sum(not one.said.ci[0] <= 1 <= one.said.ci[1] for one in equal), len(equal))
    return [
        f"- Equal work in runs of at most {blocks} blocks, with looks at {bounds}{usual}: told "
        f"apart in {told} pairs; the interval leaves 1 out in {left_out}."
    ]


def _share(count: int, of: int) -> str:
    """A count with the 95% interval of its share (Clopper and Pearson, 1934)."""
    bounds = stats.binomtest(count, of).proportion_ci(method="exact")
    return f"{count} of {of} ({bounds.low:.1%}–{bounds.high:.1%})"


def _verdicts(whole: list[Judged], early: list[Judged]) -> Table:
    rows = []
    for side, kind in sorted({(one.side, one.kind) for one in whole}):
        own, short = (
            [one for one in every if (one.side, one.kind) == (side, kind)]
            for every in (whole, early)
        )
        wanted = FALSE if kind == "control" else FOUND
        told, sooner = (sum(one.verdict in wanted for one in every) for every in (own, short))
        counts = Counter(one.verdict for one in own)
        rows.append(
            [
                TITLES[side],
                KINDS[kind],
                f"{told} {'told apart' if kind == 'control' else 'found'} of {len(own)}",
                ", ".join(f"{count} {verdict}" for verdict, count in counts.items()),
                f"{np.exp(np.mean([np.log(one.said.ratio) for one in own])):.3f}",
                number(float(np.mean([one.said.n for one in own]))),
                f"{sooner} of {len(short)}",
            ]
        )
    titles = ["framework", "pairs", "wrong or found", "verdicts", "ratio on average"]
    titles += ["blocks on average", f"wrong or found in {LOOKS[1]} blocks, as by default"]
    return Table("", of_words(*titles), rows)


def _workloads(every: list[Judged]) -> Table:
    """How many pairs of a workload were told apart, by what was planted."""
    kinds = [kind for kind in KINDS if any(one.kind == kind for one in every)]
    rows = []
    for workload in dict.fromkeys(one.workload for one in every):
        row = [_named(workload)]
        for kind in kinds:
            own = [one for one in every if (one.workload, one.kind) == (workload, kind)]
            wanted = FALSE if kind == "control" else FOUND
            told = sum(one.verdict in wanted for one in own)
            row.append(f"{told} of {len(own)}" if own else MISSING)
        rows.append(row)
    heads = [f"{KINDS[kind]}:\ntold apart" for kind in kinds]
    return Table("", [*of_words("workload"), *of_figures(*heads)], rows)


def _second_parents(found: dict) -> list[str]:
    """A line for each kind of work, and how many leave 1 out."""
    every = _parents(found)
    rows = []
    for side, workload, one in every:
        value, low, high = (f"{np.exp(part):.3f}" for part in (one.mean, one.low, one.high))
        rows.append([TITLES[side], _named(workload), f"{value} ({low}–{high})", str(one.n)])
    table = Table("", of_words("framework", "workload", "second parent ÷ first", "blocks"), rows)
    out = sum(not one.low <= 0 <= one.high for *_, one in every)
    chance = 1 - stats.binom.cdf(out - 1, len(every), 0.05)
    said = (
        f"{out} of {len(every)} intervals leave 1 out; where parents are alike, so many or more do "
        f"in {chance:.0%} of such measurements."
    )
    return [markdown_table(table).strip(), "", said]


def _parents(found: dict) -> list[tuple[str, str, Interval]]:
    """The log of what the second parent's workers took over the first's, by side and workload."""
    kinds: dict[tuple[str, str], dict[int, list[float]]] = {}
    for match in found["matches"]:
        blocks = kinds.setdefault((match["framework"], match["workload"]), {})
        for block, times in enumerate(match["blocks"]):
            equal = [times[f"same{n}"] for n in range(CONTROLS + 1) if f"same{n}" in times]
            if len(equal) == CONTROLS + 1:  # they take turns
                apart = float(np.mean(equal[1::2]) - np.mean(equal[::2]))
                blocks.setdefault(block, []).append(apart)
    means = {kind: [float(np.mean(each)) for each in own.values()] for kind, own in kinds.items()}
    return [(*kind, t_interval(own)) for kind, own in sorted(means.items()) if len(own) > 1]


def _named(workload: str) -> str:
    one = WORKLOADS[workload]
    work = "predictions" if one.mode == "predict" else "train step"
    return f"{one.task}, batch {one.batch_size}, {work}"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = parsers.described("python -m bench.docs.validation", __doc__)
    parser.add_argument("file", nargs="?", type=Path, metavar="validation.json")
    parser.add_argument("--page", action="store_true", help="only make the page anew")
    given = parser.parse_args(arguments)
    if given.page == bool(given.file):
        parser.error("give a validation.json, or --page")
    if given.file:
        replace_file(RECORD, given.file.read_text("utf-8"))
    replace_file(PAGE, page(json.loads(RECORD.read_text("utf-8"))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
