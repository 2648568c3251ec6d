"""What records say of published claims, for the terminal and as a page."""

from __future__ import annotations

from collections import Counter
from math import isfinite
from typing import Any

from bench.analysis.claims import FAILS, HOLDS, OPEN, VERDICTS, Judged
from bench.analysis.effects import Effect
from bench.analysis.reading import FRAMEWORKS, framework_title
from bench.report.blocks import Table, name_shown, of_words
from bench.report.content import measured, run_line, warnings
from bench.report.figures import number, plus_minus, ratio
from bench.report.tables import escape, markdown_table
from bench.report.text import hanging, plain, wrap

Record = dict[str, Any]
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
COUNTS = {HOLDS: "hold here", FAILS: "do not hold here", OPEN: "can't be tested here"}


# Words -------------------------------------------------------------------------------------------


def read_as(rule: dict) -> str:
    """What is compared, in words: time ÷ its baseline's."""
    name = NAMES.get(rule["figure"], name_shown(rule["figure"]))
    other = f"that of {rule['against']}" if "against" in rule else "its baseline's"
    if rule["read"] == "value":
        return name
    if rule["read"] == "difference":
        return f"points of accuracy more than {other}"
    return f"{name} ÷ {other}" if rule["read"] == "ratio" else f"{other} {name} ÷ its own"


def asked(rule: dict) -> str:
    """The bounds, and of which rows."""
    low, high = (None if rule.get(n) is None else f"{rule[n]:g}" for n in ("at_least", "at_most"))
    bounds = f"{low} to {high}" if low and high else f"at least {low}" if low else f"at most {high}"
    return f"{bounds}, {'in some row' if rule.get('rows') == 'any' else 'in every row'}"


def figure(effect: Effect, rule: dict) -> str:
    """An effect: brackets hold an interval, and nothing else does."""
    bounds = [effect.low, effect.high]
    if rule["read"] == "difference":
        return plus_minus(effect.value, bounds if effect.kind == "interval" else None, signed=True)
    if effect.kind == "interval":
        return ratio(effect.value, bounds)
    text = ratio(effect.value, None)
    if effect.kind == "range":
        return f"{text}, measured {number(effect.low)} to {number(effect.high)}"
    return f"{text}, {'exact' if effect.kind == 'exact' else 'measured once'}"


def here(judged: Judged) -> str:
    """The figure that decides, its row, and how many rows hold; "" where there is no figure."""
    row = judged.shown
    if row is None:
        return ""
    case = row.case
    where = f"{framework_title(case)} {case['variant']}, {case['task']}, batch {case['batch_size']}"
    held, rows = judged.held
    more = f"; {held} of {rows} rows hold" if rows > 1 else ""
    return f"{figure(row.effect, judged.claim['rule'])} ({where}){more}"


def source(claim: dict) -> str:
    """Where it stands: title and year."""
    return f"{claim['source']['title']}, {claim['source']['year']}"


def wording(claim: dict) -> str:
    """What it says: in quotation marks where it is quoted."""
    return f"“{claim['wording']}”" if claim["quoted"] else f"{claim['wording']}."


def title(claim: dict) -> str:
    """The technique, and its framework where it is of one."""
    side = "" if len(claim["frameworks"]) > 1 else f", {FRAMEWORKS[claim['frameworks'][0]]}"
    return f"{claim['technique'].replace('_', ' ')}{side}"


def counts(found: list[Judged]) -> str:
    """105 claims: 20 hold here, 15 do not hold here, 70 can't be tested here."""
    number_of = Counter(each.verdict for each in found)
    parts = [f"{number_of[verdict]} {COUNTS[verdict]}" for verdict in (HOLDS, FAILS, OPEN)]
    return f"{len(found)} published claims: {', '.join(parts)}."


def reasons(found: list[Judged]) -> str:
    """Why claims can't be tested, the commonest reason first."""
    why = Counter(each.why.split(":")[0] for each in found if each.verdict == OPEN)
    return "; ".join(f"{reason} ({count})" for reason, count in why.most_common())


# The terminal ------------------------------------------------------------------------------------


def text(records: list[Record], found: list[Judged], width: int = 80) -> list[str]:
    """Counts first, then each claim that was tested, and of the others a line each."""
    lines = [*wrap(counts(found), width), *wrap(plain(measured(records)), width)]
    lines += [line for warning in _warnings(records) for line in wrap(f"!! {warning}", width)]
    lines += hanging("  open", reasons(found), width, LABEL) if reasons(found) else []
    for verdict in VERDICTS:
        own = [each for each in found if each.verdict == verdict]
        if own:
            heading = f"{verdict[0].upper()}{verdict[1:]} ({len(own)})"
            lines += ["", heading, "-" * len(heading)]
        for each in own:
            lines += _open(each, width) if verdict == OPEN else ["", *_tested(each, width)]
    return lines


def _tested(each: Judged, width: int) -> list[str]:
    claim = each.claim
    lines = wrap(plain(f"{title(claim)}: {claim['figure']} ({source(claim)})"), width)
    said = {
        "  said": f"{wording(claim)} Conditions: {claim['conditions'].rstrip('.')}.",
        "  asked": f"{read_as(claim['rule'])}: {asked(claim['rule'])}",
        "  here": here(each),
    }
    for label, words in said.items():
        lines += hanging(label, plain(words), width, LABEL)
    return lines


def _open(each: Judged, width: int) -> list[str]:
    shown = f"; here {here(each)}" if here(each) else ""
    line = f"{title(each.claim)}: {each.claim['figure']}: {each.why}{shown}"
    return hanging("-", plain(line), width, 2)


# JSON --------------------------------------------------------------------------------------------


def data(records: list[Record], found: list[Judged]) -> dict[str, Any]:
    """The same for other programs: counts, the machine, and each claim with all of its rows."""
    number_of = Counter(each.verdict for each in found)
    return {
        "machine": measured(records),
        "counts": {verdict: number_of[verdict] for verdict in VERDICTS},
        "claims": [
            each.claim
            | {
                "verdict": each.verdict,
                "why": each.why or None,
                "rows": [
                    {
                        "case": row.case["id"],
                        "verdict": row.verdict,
                        "why": row.why or None,
                        "value": row.effect and row.effect.value,
                        "bounds": _bounds(row.effect),
                        "kind": row.effect and row.effect.kind,
                    }
                    for row in each.rows
                ],
            }
            for each in found
        ],
    }


def _bounds(effect: Effect | None) -> list[float | None] | None:
    """Null for a bound that is open, since JSON has no infinity."""
    if not effect or not effect.bounded:
        return None
    return [bound if isfinite(bound) else None for bound in (effect.low, effect.high)]


# The page ----------------------------------------------------------------------------------------

HEAD = "<!-- Made by `twinbench claims {} --write`. Make a new record, then make it again. -->"
HOW = (
    "A claim stands in [bench/claims.json](../bench/claims.json) with its source and a rule: which "
    "rows of a record answer it, by which figure, and within which bounds. Nothing is judged by "
    "hand, and a new record changes this page.",
    "A row holds if its whole interval lies within the bounds, and fails if all of it lies "
    "outside; else the interval is too wide. A claim of every row falls with one row that fails; "
    "a claim of some row (“up to”, “can”, a mean) stands with one that holds.",
    "The bound is what still rounds to the claimed figure: 3.5 for 4x, 1.425 for 43% faster. Where "
    "a claim has no figure, faster is faster by more than 3%, smaller is smaller by more than 3%, "
    "more accurate is what rounds to a tenth of a point, and no accuracy lost is at most one point "
    "less.",
    "Brackets are 95% intervals. Peaks of memory and first calls are mostly of one process a row: "
    "their intervals come from the scatter of those that the same run measured in several. What "
    "one process measured repeatedly has its range. What a run measured once, and repeated "
    "nothing of the kind, decides nothing.",
    "The year is that of publication for a paper, for all else the year in which it was read. "
    "Quotation marks hold the source's words; without them it is a paraphrase.",
)


def page(records: list[Record], found: list[Judged], paths: str) -> str:
    """The page as Markdown; `paths`: of the records, as they were given."""
    parts = [HEAD.format(paths), "# Published claims, and what holds here", counts(found)]
    runs = "; ".join(map(run_line, records))
    plural = "" if len(records) == 1 else "s"
    parts.append(f"{escape(measured(records))} Run{plural}: {escape(runs)}.")
    parts += [f"**{escape(warning)}**" for warning in _warnings(records)]
    for verdict in VERDICTS:
        own = [each for each in found if each.verdict == verdict]
        if own:
            parts.append(f"## {verdict[0].upper()}{verdict[1:]} ({len(own)})")
            parts += [escape(reasons(found)) + "."] if verdict == OPEN else []
            parts.append(markdown_table(_table(own, verdict)))
    parts += ["## How it is judged", *HOW]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _warnings(records: list[Record]) -> list[str]:
    return list(dict.fromkeys(warning for record in records for warning in warnings(record)))


def _table(found: list[Judged], verdict: str) -> Table:
    heads = ["technique", "claim", "source", "asked", "why" if verdict == OPEN else "here"]
    columns = of_words(*heads)
    rows = []
    for each in found:
        claim, shown = each.claim, here(each)
        said = f"{claim['figure']}: {wording(claim)} Conditions: {claim['conditions'].rstrip('.')}."
        last = f"{each.why}; here {shown}" if each.why and shown else each.why or shown
        cells = [title(claim), said, f"{source(claim)}: {claim['source']['where']}"]
        rows.append([*cells, f"{read_as(claim['rule'])}: {asked(claim['rule'])}", last])
    return Table("", columns, rows)
