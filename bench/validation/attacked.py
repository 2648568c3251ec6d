"""The results of attacks on the harness, as a page: docs/attacked.md.


    twinbench validate mutations --publish
    twinbench validate mutations --drawn 100 --of bench/analysis --publish
    twinbench validate disturbances --runs 3 --publish
    twinbench validate leaks --publish
    twinbench validate simulate docs --publish

Each replaces its previous result in docs/attacked.json, and makes the page.
"""

from __future__ import annotations

import json
from collections import Counter
from datetime import UTC, datetime

from scipy import stats

from bench.harness import machine
from bench.harness.folders import replace_file
from bench.harness.processes import ROOT
from bench.record import FRAMEWORKS
from bench.report.names import called
from bench.report.tables import markdown_table
from bench.report.technique_tables import Table, of_figures, of_words
from shared.growth import LEAK

RECORD, PAGE = ROOT / "docs" / "attacked.json", ROOT / "docs" / "attacked.md"
PUBLISHED = ROOT / "docs" / "results.json"
KILLED = "killed"

_HEAD = """# The harness, attacked

These commands try to make the harness lie. [numbers.md](numbers.md#check-it-yourself) explains
them. Anyone can run them. [attacked.json](attacked.json) has every outcome.
"""

_PLANTED = """## Planted faults

`twinbench validate mutations` plants a fault in a copy of the checkout and runs the tests that must
notice it. {noticed} of {tried} were noticed{cut} ({made}).
"""

_DRAWN = """## Random faults

`twinbench validate mutations --drawn N --of FOLDER` replaces random operators and numbers and runs
the folder's tests. Some replacements change nothing, so no test can notice them.
"""

_DISTURBANCES = """## Disturbed runs

`twinbench validate disturbances` times two pairs of known ratio (equal work, and 10% more) while
another program disturbs them. In {runs} runs on {cpu}, {threads} cores ({made}), {wrong} of
{count} verdicts were wrong. *Inconclusive* means that the run can't tell.
"""

_LEAKS = """## Planted leaks

`twinbench validate leaks` makes a step keep memory in every round and asks `watch_memory`, with its
defaults, whether it leaks ({made}, {cpu}). It promises to find 0.25 MB a round and more.
"""

_DIFFERENCES = """## Simulated differences

`twinbench validate simulate docs` draws {runs} default runs for each row, with a known true ratio
and the noise of the published record. *Slower* and *faster* include slightly slower and faster.
"""

_LOSSES = """## Simulated losses of accuracy

The same command draws {runs} rows for each true loss, trained with {seeds} seeds that scatter as
in the published record. Losses are in margins of the task, one point for most. *Kept* means that
the interval stays within the margin, which is wrong for a loss of a margin or more. *Shown to be
worse* means that the whole interval says so.
"""


def keep(section: str, outcome: dict, part: str | None = None) -> None:
    """Replace the result of an attack, and make the page.

    part: the field by which rows are replaced: others are kept if they are from the same machine.
    """
    if not outcome["rows"]:
        return
    record = json.loads(RECORD.read_text("utf-8")) if RECORD.exists() else {}
    before = record.get(section, {})
    if part and all(before.get(name) == outcome[name] for name in ("cpu", "threads")):
        again = {row[part] for row in outcome["rows"]}
        stay = [row for row in before["rows"] if row[part] not in again]
        outcome = outcome | {"rows": stay + outcome["rows"]}
    record[section] = {"made": datetime.now(UTC).date().isoformat(), **outcome}
    record = dict(sorted(record.items()))  # so that the page is that of the file
    text = page(record)
    replace_file(RECORD, json.dumps(record, indent=1) + "\n")
    replace_file(PAGE, text)


def on_this_machine() -> dict:
    """The machine, for results that depend on it."""
    threads = machine.usable_threads()
    return {"cpu": machine.describe(threads).cpu, "threads": threads}


def page(record: dict) -> str:
    """The page, from docs/attacked.json only."""
    parts = [_HEAD]
    if planted := record.get("planted"):
        parts += [_planted(planted), markdown_table(_faults(planted["rows"]))]
    if drawn := {name: part for name, part in record.items() if name.startswith("drawn ")}:
        parts += [_DRAWN, markdown_table(_scores(drawn))]
    if disturbances := record.get("disturbances"):
        parts += [_disturbances(disturbances), markdown_table(_disturbed(disturbances["rows"]))]
    if leaks := record.get("leaks"):
        parts += [_LEAKS.format(**leaks), markdown_table(_called_leaks(leaks["rows"]))]
    if differences := record.get("differences"):
        parts += [_DIFFERENCES.format(**differences), markdown_table(_told(differences["rows"]))]
    if losses := record.get("losses"):
        parts += [_LOSSES.format(**losses), markdown_table(_shown(losses["rows"]))]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _missed(faults: dict) -> list[dict]:
    return [row for row in faults["rows"] if row["status"] != KILLED]


def _planted(faults: dict) -> str:
    tried, there = len(faults["rows"]), faults["of"]
    cut = f", of {there} that there are" if tried < there else ""
    noticed = tried - len(_missed(faults))
    return _PLANTED.format(noticed=noticed, tried=tried, cut=cut, made=faults["made"])


def _faults(rows: list[dict]) -> Table:
    """The faults of each file; those that no test noticed are marked."""
    files: dict[str, list[str]] = {}
    for row in rows:
        mark = "" if row["status"] == KILLED else " (not noticed)"
        files.setdefault(row["file"], []).append(f"{row['name']}{mark}")
    return Table("", of_words("file", "faults"), [[f, "; ".join(s)] for f, s in files.items()])


def _scores(drawn: dict[str, dict]) -> Table:
    cells = []
    for name, faults in drawn.items():
        tried = len(faults["rows"])
        noticed = tried - len(_missed(faults))
        share = stats.binomtest(noticed, tried).proportion_ci(method="exact")
        interval = f"{noticed / tried:.0%} ({share.low:.0%}–{share.high:.0%})"
        cells.append([name.partition(" ")[2], f"{noticed} of {tried}", interval, faults["made"]])
    return Table("", of_words("files of", "noticed", "share of all, 95% interval", "made"), cells)


def _disturbances(outcome: dict) -> str:
    rows = outcome["rows"]
    verdicts = [row for row in rows if row["verdict"]]
    wrong = sum(row["wrong"] for row in verdicts)
    pairs = len({row["pair"] for row in rows})
    counts = {"wrong": wrong, "count": len(verdicts), "runs": len(rows) // pairs}
    return _DISTURBANCES.format(**outcome | counts)


def _disturbed(rows: list[dict]) -> Table:
    """How often each disturbance left a verdict, and how often that was wrong."""
    cells, pairs = [], dict.fromkeys(row["pair"] for row in rows)
    for kind, framework in dict.fromkeys((row["kind"], row["framework"]) for row in rows):
        disturbed = [row for row in rows if (row["kind"], row["framework"]) == (kind, framework)]
        line = [kind, FRAMEWORKS[framework]]
        for pair in pairs:
            of_pair = [row for row in disturbed if row["pair"] == pair]
            counts = Counter(row["verdict"] or row["reason"] or "can't tell" for row in of_pair)
            line.append(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
        cells.append([*line, str(sum(row["wrong"] for row in disturbed))])
    return Table("", of_words("disturbed by", "framework", *pairs, "wrong"), cells)


def _called_leaks(rows: list[dict]) -> Table:
    """How often each size was called a leak."""
    cells, sizes = [], sorted({row["size"] for row in rows})
    for framework in dict.fromkeys(row["framework"] for row in rows):
        line = [FRAMEWORKS[framework]]
        for size in sizes:
            verdicts = [
                row["verdict"]
                for row in rows
                if (row["framework"], row["size"]) == (framework, size)
            ]
            line.append(f"{verdicts.count(LEAK)} of {len(verdicts)}")
        cells.append(line)
    titles = [f"{size:g} MB a round" for size in sizes]
    return Table("", [*of_words("called a leak"), *of_figures(*titles)], cells)


def _told(rows: list[dict]) -> Table:
    """What is said of each true ratio."""
    shares = ("slower", "faster", "equivalent", "covered")
    cells = [
        [
            " ÷ ".join(FRAMEWORKS.get(side, side) for side in row["name"].split(" ÷ ")),
            f"{row['truth']:.2f}",
            *(f"{row[share]:.1%}" for share in shares),
            f"{row['blocks']:.1f}",
        ]
        for row in rows
    ]
    titles = ("true ratio", "slower", "faster", "equivalent", "interval covers it", "blocks")
    return Table("", [*of_words("noise of"), *of_figures(*titles)], cells)


def _shown(rows: list[dict]) -> Table:
    """What is said of each true loss."""
    cells = [
        [
            called(row["task"]),
            f"{row['noise']:.2f}",
            f"{row['lost']:g}",
            *(f"{row[share]:.1%}" for share in ("kept", "worse", "covered")),
        ]
        for row in rows
    ]
    titles = ("seeds scatter by", "true loss", "kept", "shown to be worse", "interval covers it")
    return Table("", [*of_words("task"), *of_figures(*titles)], cells)
