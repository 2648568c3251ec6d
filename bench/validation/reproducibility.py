"""The result of `twinbench validate reproduce`, in the terminal and as docs/reproducibility.md.

The page is made from docs/reproducibility.json, which has the result and not the runs.
"""

from __future__ import annotations

import sys
from statistics import median

import msgspec
from markupsafe import Markup

from bench.analysis.table import TIME
from bench.harness.processes import ROOT
from bench.record import load_json
from bench.report import tables
from bench.report.replace import write_atomically
from bench.report.technique_tables import Table, of_figures, of_words
from bench.validation.reproduce import KINDS, Agreement, Group, Half, Pair, Reproduced

RECORD, PAGE = ROOT / "docs" / "reproducibility.json", ROOT / "docs" / "reproducibility.md"
PROMISED = 0.93  # of the ratios agree
HEADS = ("ratios", "agree", "same verdict", "lost", "otherwise", "opposite")


def read() -> Reproduced:
    """The content of docs/reproducibility.json; ValueError with one line if it is wrong."""
    return load_json(RECORD, Reproduced, "a result of `twinbench validate reproduce`")


def encode(made: Reproduced) -> str:
    """The record as JSON, with one line per entry."""
    return msgspec.json.format(msgspec.json.encode(made), indent=1).decode() + "\n"


def put(made: Reproduced, *, check: bool) -> int:
    """Write the record and its page; with `check`, only tell whether they are up to date."""
    texts = {RECORD: encode(made), PAGE: page(made)}
    if check:
        others = [str(p) for p, t in texts.items() if not p.exists() or p.read_text("utf-8") != t]
        print(*others or ["as these runs give"], sep="\n", file=sys.stderr)
        return int(bool(others))
    write_atomically(texts)
    print(*texts, sep="\n")
    return 0


def page(made: Reproduced) -> str:
    """The page, from the record only."""
    return tables.render("reproducibility.md.j2", **_facts(made))


def text(made: Reproduced, width: int = 80) -> str:
    """What the terminal shows."""
    facts = _facts(made)
    shown = [facts["runs"], facts["kinds"], facts["sizes"], facts["sides"], facts["apart"]]
    return tables.parts_as_text([headline(made), *(t for t in shown if t.rows)], width)


def headline(made: Reproduced) -> str:
    """The result in two sentences."""
    shares = [pair.of.share for pair in made.pairs if pair.of.ratios]
    counts = [pair.of.ratios for pair in made.pairs]
    opposite = sum(pair.of.opposite for pair in made.pairs)
    several = "s" * (len(made.pairs) > 1)
    none = "no verdict of any pair is opposite"
    said = (
        f"{len(made.runs)} runs on one class of machine, {len(made.pairs)} pair{several} of them: "
        f"of the {min(counts)} to {max(counts)} ratios of times that a pair has, {_range(shares)} "
        f"(median {median(shares):.0%}) differ by no more than their combined 95% intervals; "
        f"{f'{opposite} verdicts are opposite' if opposite else none}."
    )
    apart = [pair.of.share for pair in made.apart if pair.of.ratios]
    if apart:
        said += f" Against runs on another class {_range(apart)} do."
    return said


def _range(shares: list[float]) -> str:
    return f"{min(shares):.0%}–{max(shares):.0%}".replace("%–", "–")


def _facts(made: Reproduced) -> dict:
    below = [group.name for group in (*made.kinds, made.whole) if group.of.share < PROMISED]
    return {
        "made": made,
        "headline": headline(made),
        "promised": f"{PROMISED:.0%}",
        "below": below,
        "runs": _runs(made),
        "pairs": _pairs("Pairs of runs on one class of machine: ratios of times", made.pairs),
        "apart": _pairs("Runs on two classes of machine: ratios of times", made.apart),
        "kinds": _shares("By kind of figure", [*made.kinds, made.whole], noise=True),
        "sides": _shares("By framework", made.sides),
        "sizes": _shares("By size of the model", made.sizes),
        "added": _added(made.deviations),
        "halves": list(map(_half, made.halves)),
        "scarce": _scarce(made.halves),
        "changed": [(KINDS[one.kind][0], one) for one in made.changed],
        "command": Markup(command(made)),
        "record": Markup("[reproducibility.json](reproducibility.json)"),
    }


def _runs(made: Reproduced) -> Table:
    rows = [[r.name, r.started, r.machine, str(r.ratios)] for r in (*made.runs, *made.others)]
    columns = [*of_words("run", "started", "machine"), *of_figures("ratios")]
    return Table("The runs", columns, rows)


def _pairs(title: str, pairs: list[Pair]) -> Table:
    rows = [[pair.a, pair.b, *_counts(pair.of)] for pair in pairs if pair.of.ratios]
    return Table(title, [*of_words("run", "and"), *of_figures(*HEADS)], rows)


def _counts(of: Agreement) -> list[str]:
    verdicts = (of.same, of.lost, of.otherwise, of.opposite)
    return [str(of.ratios), f"{of.share:.1%}", *(f"{n / of.ratios:.1%}" for n in verdicts[:3]),
            str(of.opposite)]  # fmt: skip


def _shares(title: str, groups: list[Group], *, noise: bool = False) -> Table:
    heads = (*HEADS, "sd within a run", "sd from run to run") if noise else HEADS
    rows = []
    for group in groups:
        sds = [f"{100 * group.within:.1f}%", f"{100 * group.between:.1f}%"] if noise else []
        rows.append([group.name, *_counts(group.of), *sds])
    return Table(title, [*of_words("of"), *of_figures(*heads)], rows)


def _added(deviations: dict[str, float]) -> Table:
    """What all runs give, and the analysis adds."""
    rows = []
    for figure, deviation in deviations.items():
        titles = ", ".join(title for title, of in KINDS.values() if of == figure)
        whose = "of a ratio" if figure == TIME else "of each of the two figures"
        rows.append([titles, whose, f"{deviation:.1%}"])
    return Table("", [*of_words("ratios of", "the sd"), *of_figures("from run to run")], rows)


def _half(half: Half) -> tuple[str, Table]:
    """What some runs give, as others judge it."""
    title = f"{', '.join(half.of)} give, and {', '.join(half.by)} judge"
    columns = [*of_words("ratios of"), *of_figures("sd from run to run", "ratios", "agree")]
    rows = [
        [KINDS[k.kind][0], f"{k.deviation:.1%}", str(k.ratios), f"{k.agree / k.ratios:.1%}"]
        for k in half.kinds
    ]
    return title, Table("", columns, rows)


def _scarce(halves: list[Half]) -> list[str]:
    """Where fewer agree than is promised."""
    return [
        f"{KINDS[kind.kind][0]}: {kind.agree / kind.ratios:.1%} of {kind.ratios} ratios"
        for half in halves
        for kind in half.kinds
        if kind.agree < PROMISED * kind.ratios
    ]


def command(made: Reproduced) -> str:
    """The command that makes the page again."""
    changed = "".join(f" --changed {c.kind}:{c.run}:{c.commit}" for c in made.changed)
    names = " ".join(run.name for run in (*made.runs, *made.others))
    return f"twinbench validate reproduce {names}{changed} --publish"
