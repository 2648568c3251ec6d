"""What records say of published claims, for the terminal and as a page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import isfinite
from typing import Any

import msgspec
from markupsafe import Markup

from bench.analysis import machine_class
from bench.analysis.claims import (
    BY_SIZE,
    FAILS,
    HOLDS,
    NO_CONDITIONS,
    ON_LARGE,
    ON_SMALL,
    OPEN,
    UNDECIDED,
    UNMEASURED,
    UNTESTED,
    VERDICTS,
    Answer,
    Claim,
    Judged,
    Rule,
)
from bench.analysis.table import Figure
from bench.record import FRAMEWORKS, Record
from bench.report.content import measured, run_line, warnings
from bench.report.formatting import number, plus_minus, ratio
from bench.report.names import called, name_of
from bench.report.tables import escape, render
from bench.report.technique_tables import Table, name_shown, of_words
from bench.report.text import hanging, plain, wrap

LABEL = 9  # cells of a label in the terminal
NAMES = {
    "memory": "peak memory",
    "size": "size on disk",
    "compressed_size": "compressed size",
    "first_call": "first call",
    "samples_per_s": "samples/s",
    "start": "time to the first prediction",
    "peak_a_process": "peak of a process",
    "found": "faults found",
    "plain_unhealthy": "layers with an unhealthy gradient",
}
COUNTS = {
    HOLDS: "hold here",
    FAILS: "do not hold here",
    ON_LARGE: "hold on large models, not on small ones",
    ON_SMALL: "hold on small models, not on large ones",
    UNDECIDED: "were not decided",
    UNMEASURED: "were not measured",
    UNTESTED: "can't be tested here",
}


# Words -------------------------------------------------------------------------------------------


def read_as(rule: Rule) -> str:
    """What is compared, in words: time ÷ its baseline's."""
    name = NAMES.get(rule.figure, name_shown(rule.figure))
    other = f"that of {rule.against}" if rule.against else "its baseline's"
    if rule.read == "value":
        return name
    if rule.read == "difference":
        return f"points of accuracy more than {other}"
    return f"{name} ÷ {other}" if rule.read == "ratio" else f"{other} {name} ÷ its own"


def asked(rule: Rule) -> str:
    """The bounds, and of which rows."""
    low, high = (None if b is None else f"{b:g}" for b in (rule.at_least, rule.at_most))
    bounds = f"{low} to {high}" if low and high else f"at least {low}" if low else f"at most {high}"
    return f"{bounds}, {'in some row' if rule.rows == 'any' else 'in every row'}"


def in_brackets(figure: Figure, rule: Rule) -> str:
    """A figure: brackets hold an interval, and nothing else does."""
    bounds = (figure.low, figure.high)
    if rule.read == "difference":
        return plus_minus(figure.value, bounds if figure.kind == "interval" else None, signed=True)
    if figure.kind == "interval":
        return ratio(figure.value, bounds)
    text = ratio(figure.value, None)
    if figure.kind == "range":
        return f"{text}, measured {number(figure.low)} to {number(figure.high)}"
    return f"{text}, {'exact' if figure.kind == 'exact' else 'measured once'}"


def here(judged: Judged) -> str:
    """The figure that decides, its row, and how many rows hold; "" where there is no figure.

    Where the size of the model decides, a row that holds and one that does not.
    """
    if judged.shown is None:
        return ""
    told = [judged.shown]
    if judged.verdict in BY_SIZE:
        told += [next(row for row in judged.rows if row.verdict == FAILS)]
    held, rows = judged.held
    more = f"; {held} of {rows} rows hold" if rows > 1 else ""
    return "; ".join(_figure_and_row(row, judged.claim.rule) for row in told) + more


def _figure_and_row(row: Answer, rule: Rule) -> str:
    case = row.case
    where = f"{case.framework_title}, {name_of(case, short=True)}, {called(case.task)}"
    where += f", batch {case.batch_size}"
    where += f"; on {row.machine}" if row.machine else ""
    return f"{in_brackets(row.figure, rule)} ({where})"


def source(claim: Claim) -> str:
    """Where it stands: title and year."""
    return f"{claim.source.title}, {claim.source.year}"


def wording(claim: Claim) -> str:
    """What it says, in quotation marks where it is quoted, and under which conditions."""
    words = f"“{claim.wording}”" if claim.quoted else f"{claim.wording.rstrip('.')}."
    return " ".join(filter(None, [words, _conditions(claim)]))


def _conditions(claim: Claim) -> str:
    """The conditions that the source names, "" where it names none."""
    stated = claim.conditions.rstrip(".")
    return "" if stated == NO_CONDITIONS else f"Conditions: {stated}."


def title(claim: Claim) -> str:
    """The technique, and its framework where it is of one."""
    side = "" if len(claim.frameworks) > 1 else f", {FRAMEWORKS[claim.frameworks[0]]}"
    return f"{claim.technique.replace('_', ' ')}{side}"


def counts(judged: list[Judged]) -> str:
    """105 claims: 20 hold here, 15 do not hold here, 70 can't be tested here; others if any."""
    number_of = Counter(each.verdict for each in judged)
    always = (HOLDS, FAILS, UNTESTED)
    parts = [
        f"{number_of[verdict]} {words}"
        for verdict, words in COUNTS.items()
        if number_of[verdict] or verdict in always
    ]
    return f"{len(judged)} published claims: {', '.join(parts)}."


def reasons(judged: list[Judged]) -> str:
    """Why claims are open, the commonest reason first."""
    why = Counter(each.why.split(":")[0] for each in judged if each.verdict in OPEN)
    return "; ".join(f"{reason} ({count})" for reason, count in why.most_common())


def _by_verdict(judged: list[Judged]) -> Iterator[tuple[str, list[Judged]]]:
    """A heading for each verdict, with the claims that have it."""
    for verdict in VERDICTS:
        if some := [each for each in judged if each.verdict == verdict]:
            yield f"{verdict[0].upper()}{verdict[1:]} ({len(some)})", some


# The terminal ------------------------------------------------------------------------------------


def text(records: list[Record], judged: list[Judged], width: int = 80) -> list[str]:
    """Counts first, then each claim that was tested, and of the others a line each."""
    lines = [*wrap(counts(judged), width), *wrap(plain(measured(records)), width)]
    lines += [line for warning in _warnings(records) for line in wrap(f"!! {warning}", width)]
    lines += hanging("  open", reasons(judged), width, LABEL) if reasons(judged) else []
    for heading, some in _by_verdict(judged):
        lines += ["", heading, "-" * len(heading)]
        for each in some:
            lines += _open(each, width) if each.verdict in OPEN else ["", *_tested(each, width)]
    return lines


def _tested(judged: Judged, width: int) -> list[str]:
    claim = judged.claim
    lines = wrap(plain(f"{title(claim)}: {claim.figure} ({source(claim)})"), width)
    texts = {
        "  said": wording(claim),
        "  asked": f"{read_as(claim.rule)}: {asked(claim.rule)}",
        "  here": here(judged),
    }
    for label, words in texts.items():
        lines += hanging(label, plain(words), width, LABEL)
    return lines


def _open(judged: Judged, width: int) -> list[str]:
    shown = f"; here {here(judged)}" if here(judged) else ""
    line = f"{title(judged.claim)}: {judged.claim.figure}: {judged.why}{shown}"
    return hanging("-", plain(line), width, 2)


# JSON --------------------------------------------------------------------------------------------


def data(records: list[Record], judged: list[Judged]) -> dict[str, Any]:
    """The same for other programs: counts, the machine, and each claim with all of its rows."""
    number_of = Counter(each.verdict for each in judged)
    return {
        "machine": measured(records),
        "counts": {verdict: number_of[verdict] for verdict in VERDICTS},
        "claims": [
            msgspec.to_builtins(each.claim)
            | {
                "verdict": each.verdict,
                "why": each.why or None,
                "rows": [
                    {
                        "case": row.case.id,
                        "machine": row.machine or machine_class.words(records[0].environment),
                        "verdict": row.verdict,
                        "why": row.why or None,
                        "value": row.figure and row.figure.value,
                        "bounds": _bounds(row.figure),
                        "kind": row.figure and row.figure.kind,
                    }
                    for row in each.rows
                ],
            }
            for each in judged
        ],
    }


def _bounds(figure: Figure | None) -> list[float | None] | None:
    """Null for a bound that is open, since JSON has no infinity."""
    if figure is None or figure.bounds is None:
        return None
    return [bound if isfinite(bound) else None for bound in figure.bounds]


# The page ----------------------------------------------------------------------------------------


def page(records: list[Record], judged: list[Judged], paths: str) -> str:
    """The page as Markdown; `paths`: of the records, as they were given."""
    return render(
        "claims.md.j2",
        paths=Markup(paths),
        counts=Markup(counts(judged)),
        measured=measured(records),
        runs=list(map(run_line, records)),
        warnings=_warnings(records),
        parts=[
            (Markup(heading), some[0].verdict in OPEN, _table(some), reasons(some), _words(some))
            for heading, some in _by_verdict(judged)
        ],
    )


def _warnings(records: list[Record]) -> list[str]:
    return list(dict.fromkeys(warning for record in records for warning in warnings(record)))


def _table(judged: list[Judged]) -> Table:
    """A line for each claim, with the figure that decides or the reason why it is open."""
    lines = [[_claim(each.claim), _result(each)] for each in judged]
    return Table("", of_words("claim", "here"), lines)


def _words(judged: list[Judged]) -> list[Markup]:
    """The sources' words, of claims that were tested."""
    return [
        Markup(f"{_named(each.claim)} {escape(wording(each.claim))}")
        for each in judged
        if each.verdict not in (UNMEASURED, UNTESTED)
    ]


def _result(judged: Judged) -> str:
    """What was compared, what was asked, and the figure; why it is open."""
    shown, rule = here(judged), judged.claim.rule
    compared = f"{read_as(rule)}: asked {asked(rule)}; here {shown}" if shown else ""
    return "; ".join(filter(None, (judged.why, compared)))


def _named(claim: Claim) -> str:
    return f"**{escape(title(claim))}**: {escape(claim.figure)}."


def _claim(claim: Claim) -> Markup:
    """Its figure, its conditions, and the source: a link where it has one."""
    where, words = claim.source.where, " ".join([_named(claim), escape(_conditions(claim))]).strip()
    if where.startswith("http"):
        return Markup(f"{words} [{escape(source(claim))}]({where})")
    return Markup(f"{words} {escape(f'{source(claim)}: {where}')}")
