"""Published claims, and what records say of each: it holds here, it does not, or nothing.

A claim stands in `bench/claims.json` with its source and a rule, which names rows of a record, a
figure, and its bounds. Nothing is judged by hand: a row holds if its whole interval lies within the
bounds, and fails if all of it lies outside. A row that several records have counts once, as in the
first that has its figure.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.analysis.decisions import families
from bench.analysis.effects import NOT_MEASURED, ONCE, Effect, Effects
from bench.analysis.values import is_number

LEDGER = Path(__file__).parents[1] / "claims.json"
HOLDS, FAILS, OPEN = "holds here", "does not hold here", "can't be tested here"
VERDICTS = (FAILS, HOLDS, OPEN)
TOO_WIDE = "interval too wide"

FIGURES = ("time", "memory", "size", "compressed_size", "first_call", "accuracy")
METRICS = (
    "samples_per_s", "largest_batch", "efficiency", "data_stall", "start", "load", "save",
    "checkpoint", "peak_a_process", "steps_to_target", "step_flops", "epochs", "macs", "found",
    "plain_unhealthy",
)  # fmt: skip
# How a figure is read: over the baseline's, the baseline's over it, less it, or as it is.
READINGS = ("ratio", "gain", "difference", "value")
ROWS = ("all", "any")
KINDS = ("paper", "documentation", "blog", "forum", "unnamed")
AMX = "amx_bf16"  # as the environment's instruction sets name it
NEEDS = {"cuda": "needs a GPU", "amx": "needs a CPU with AMX"}

# field -> type, and whether it must be there
CLAIM = {
    "id": (str, True),
    "technique": (str, True),
    "frameworks": (list, True),
    "source": (dict, True),
    "wording": (str, True),
    "quoted": (bool, True),
    "figure": (str, True),
    "conditions": (str, True),
    "rule": (dict, True),
}
SOURCE = {"title": (str, True), "kind": (str, True), "where": (str, True), "year": (int, True)}
RULE = {
    "variants": (list, True),
    "figure": (str, True),
    "read": (str, True),
    "at_least": (float, False),
    "at_most": (float, False),
    "rows": (str, False),
    "against": (str, False),
    "tasks": (list, False),
    "mode": (str, False),
    "needs": (str, False),
}


# The ledger --------------------------------------------------------------------------------------


def load_ledger(path: Path = LEDGER) -> list[dict]:
    """The claims, in the order of the file; ValueError, with one line, where it is not sound."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from None
    try:
        check(found)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return found["claims"]


def check(ledger: Any) -> None:
    """Raise ValueError, with one line, unless every claim can be judged and is told apart."""
    if not isinstance(ledger, dict) or not isinstance(ledger.get("claims"), list):
        raise ValueError('no ledger of claims: {"claims": [...]} is one')
    seen = set()
    for number, claim in enumerate(ledger["claims"], 1):
        name = claim.get("id") if isinstance(claim, dict) else None
        what = f"claim {number}" + (f" ({name})" if isinstance(name, str) else "")
        _fields(claim, CLAIM, what)
        _fields(claim["source"], SOURCE, f"{what}: source")
        _fields(claim["rule"], RULE, f"{what}: rule")
        if name in seen:
            raise ValueError(f"{what}: another claim has this id")
        seen.add(name)
        _among(claim["technique"], families(), f"{what}: technique")
        _listed(claim["frameworks"], ("pt", "tf"), f"{what}: frameworks")
        _among(claim["source"]["kind"], KINDS, f"{what}: source: kind")
        _check_rule(claim["rule"], f"{what}: rule")


def _fields(value: Any, shape: dict[str, tuple], what: str) -> None:
    """An object with these fields, of these types, and no others."""
    if not isinstance(value, dict):
        raise ValueError(f"{what}: not an object")
    for name in value:
        _among(name, shape, f"{what}: field")
    for name, (kind, needed) in shape.items():
        if name not in value:
            if needed:
                raise ValueError(f"{what}: {name} is missing")
            continue
        found = value[name]
        fits = is_number(found) if kind is float else isinstance(found, kind)
        if not fits or (kind is int and isinstance(found, bool)) or found == "" or found == []:
            words = {float: "a number", int: "a whole number", str: "a text", list: "a list"}
            words |= {dict: "an object", bool: "true or false"}
            raise ValueError(f"{what}: {name} is not {words[kind]}, or is empty")


def _among(value: Any, known: Any, what: str) -> None:
    if value not in known:
        raise ValueError(f"{what}: {value!r} is none of {', '.join(known)}")


def _listed(values: list, known: Any, what: str) -> None:
    for value in values:
        _among(value, known, what)


def _check_rule(rule: dict, what: str) -> None:
    _among(rule["figure"], (*FIGURES, *METRICS), f"{what}: figure")
    _among(rule["read"], READINGS, f"{what}: read")
    if (rule["figure"] == "accuracy") != (rule["read"] == "difference"):
        raise ValueError(f"{what}: a difference is read of accuracy, and of nothing else")
    if rule["read"] == "value" and rule["figure"] in FIGURES:
        raise ValueError(f"{what}: {rule['figure']} is read against a baseline; give ratio or gain")
    if "at_least" not in rule and "at_most" not in rule:
        raise ValueError(f"{what}: no bound: give at_least, at_most or both")
    if rule.get("at_least", float("-inf")) > rule.get("at_most", float("inf")):
        raise ValueError(f"{what}: at_least is above at_most")
    for name, known in (("rows", ROWS), ("mode", ("train", "predict")), ("needs", NEEDS)):
        if name in rule:
            _among(rule[name], known, f"{what}: {name}")


# Verdicts ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A row that answers a claim: its case, its figure, and its verdict with the reason."""

    case: dict
    effect: Effect | None
    verdict: str
    why: str = ""


@dataclass(frozen=True)
class Judged:
    """A claim, its verdict, the reason where it is open, and the rows, what decides first."""

    claim: dict
    verdict: str
    why: str
    rows: list[Row]

    @property
    def shown(self) -> Row | None:
        """The row that decides, or that has a figure at least."""
        return next((row for row in self.rows if row.effect), None)

    @property
    def held(self) -> tuple[int, int]:
        """How many rows hold, of those that were judged."""
        counts = Counter(row.verdict for row in self.rows)
        return counts[HOLDS], counts[HOLDS] + counts[FAILS]


def judge(records: list[dict], claims: list[dict]) -> list[Judged]:
    """Each claim by the records alone."""
    effects = [Effects(record) for record in records]
    return [_judged(claim, effects) for claim in claims]


def _judged(claim: dict, records: list[Effects]) -> Judged:
    rule = claim["rule"]
    lacking = [_missing(rule.get("needs"), effects.record["environment"]) for effects in records]
    found: dict[str, Row] = {}
    for effects, missing in zip(records, lacking, strict=True):
        for row in (_row(case, rule, effects) for case in _cases(claim, effects.record)):
            known = found.get(row.case["id"])
            if known is None or known.effect is None:
                found[row.case["id"]] = replace(row, verdict=OPEN, why=missing) if missing else row
    rows = list(found.values())
    verdict, why = (OPEN, lacking[0]) if all(lacking) else _verdict(rule, rows)
    order = (verdict, *VERDICTS)
    return Judged(claim, verdict, why, sorted(rows, key=lambda row: _rank(row, rule, order)))


def _missing(need: str | None, environment: dict) -> str | None:
    """What the machine lacks for a claim to be tested."""
    isa = environment.get("isa")
    has = {"cuda": bool(environment.get("gpu")), "amx": isinstance(isa, list) and AMX in isa}
    return None if need is None or has[need] else NEEDS[need]


def _cases(claim: dict, record: dict) -> Iterator[dict]:
    """The rows that the rule names, measured or not."""
    rule = claim["rule"]
    for case in record["cases"]:
        if (
            case["technique"] == claim["technique"]
            and case["variant"] in rule["variants"]
            and case["framework"] in claim["frameworks"]
            and case["role"] != "control"
            and case["task"] in rule.get("tasks", [case["task"]])
            and case.get("mode", "train") == rule.get("mode", case.get("mode", "train"))
        ):
            yield case


def _row(case: dict, rule: dict, effects: Effects) -> Row:
    if case["status"] != "OK":
        return Row(case, None, OPEN, f"{case['status'].lower()}: {case.get('reason') or '—'}")
    if rule["read"] == "value":
        found, why = effects.value(case, rule["figure"])
    else:
        found, why = effects.of(case, rule["figure"], rule.get("against"))
    if found is None:
        return Row(case, None, OPEN, why)
    found = found.turned() if rule["read"] == "gain" else found
    if not found.bounded:
        return Row(case, found, OPEN, ONCE)
    low, high = rule.get("at_least", float("-inf")), rule.get("at_most", float("inf"))
    if low <= found.low and found.high <= high:
        return Row(case, found, HOLDS)
    if found.high < low or found.low > high:
        return Row(case, found, FAILS)
    return Row(case, found, OPEN, TOO_WIDE)


def _verdict(rule: dict, rows: list[Row]) -> tuple[str, str]:
    """What the rows say together: a claim of all falls with one, one of any stands with one."""
    found = {row.verdict for row in rows}
    decisive = FAILS if rule.get("rows", "all") == "all" else HOLDS
    if decisive in found:
        return decisive, ""
    reasons = list(dict.fromkeys(row.why for row in rows if row.verdict == OPEN))
    if TOO_WIDE in reasons:
        return OPEN, TOO_WIDE
    if judged := found - {OPEN}:  # what was not measured speaks against nobody
        return judged.pop(), ""
    return OPEN, next((why for why in reasons if why != NOT_MEASURED), NOT_MEASURED)


def _rank(row: Row, rule: dict, order: tuple[str, ...]) -> tuple:
    """Rows of the claim's own verdict first, of them the farthest from the claim.

    Where a claim of some rows holds, the one that shows it best.
    """
    if row.effect is None:
        return order.index(row.verdict), 1, 0.0
    above = row.effect.value if "at_least" in rule else -row.effect.value
    best_first = rule.get("rows") == "any"
    return order.index(row.verdict), 0, -above if best_first else above
