"""Published claims, and whether records confirm them.

`bench/claims.json` has each claim with its source and a rule: rows of a record, a figure, and its
bounds. Nothing is judged by hand. A row holds if its whole interval lies within the bounds, and
fails if all of it lies outside. A claim without conditions is judged separately for large and small
models. A row that several records have counts once, in the first record that has its figure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from bench.analysis.families import families
from bench.analysis.machine_class import same_class, words
from bench.analysis.ranking import is_large
from bench.analysis.table import NOT_MEASURED, ONCE, Figure, Table
from bench.record import Case, Environment, Number, Record, in_words
from shared.choices import unknown

LEDGER = Path(__file__).parents[1] / "claims.json"
HOLDS, FAILS = "holds here", "does not hold here"
ON_LARGE = "holds on large models, not on small ones"
ON_SMALL = "holds on small models, not on large ones"
BY_SIZE = (ON_LARGE, ON_SMALL)
UNDECIDED, UNMEASURED, UNTESTED = "not decided here", "not measured here", "can't be tested here"
OPEN = (UNDECIDED, UNMEASURED, UNTESTED)  # the last is for what a machine lacks
VERDICTS = (FAILS, *BY_SIZE, HOLDS, *OPEN)
TOO_WIDE = "interval too wide"
NO_CONDITIONS = "none given"

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

Text = Annotated[str, Meta(min_length=1)]
Names = Annotated[list[Text], Meta(min_length=1)]


class Source(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a claim was published."""

    title: Text
    kind: Text
    where: Text
    year: int


class Rule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Which rows answer a claim, by which figure, and within which bounds.

    `read`: how the figure is read. `rows`: whether all rows have to hold, or any. `against`: the
    variant to compare with, if not the baseline. `needs`: what a machine must have.
    """

    variants: Names
    figure: Text
    read: Text
    at_least: Number | None = None
    at_most: Number | None = None
    rows: str = "all"
    against: str | None = None
    tasks: Names | None = None
    mode: str | None = None
    needs: str | None = None

    def check(self) -> None:
        """Raise ValueError with one line if the rule can't be judged."""
        _among(self.figure, (*FIGURES, *METRICS), "figure")
        _among(self.read, READINGS, "read")
        if (self.figure == "accuracy") != (self.read == "difference"):
            raise ValueError("read: difference is only for accuracy; give ratio or gain")
        if self.read == "value" and self.figure in FIGURES:
            raise ValueError(f"read: {self.figure} needs a baseline; give ratio or gain")
        if self.at_least is None and self.at_most is None:
            raise ValueError("give at_least, at_most or both")
        if self.low > self.high:
            raise ValueError("at_least is above at_most")
        _among(self.rows, ROWS, "rows")
        _among(self.mode, (None, "train", "predict"), "mode")
        _among(self.needs, (None, *NEEDS), "needs")

    @property
    def low(self) -> float:
        """The lower bound."""
        return -inf if self.at_least is None else self.at_least

    @property
    def high(self) -> float:
        """The upper bound."""
        return inf if self.at_most is None else self.at_most


class Claim(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A published statement about a technique, and the rule by which it is judged.

    `quoted`: whether `wording` is a quotation.
    """

    id: Text
    technique: Text
    frameworks: Names
    source: Source
    wording: Text
    quoted: bool
    figure: Text
    conditions: Text
    rule: Rule

    @property
    def of_any_size(self) -> bool:
        """Whether it is about models of any size: it names no conditions, and its rule no task."""
        return self.conditions.lower().startswith(NO_CONDITIONS) and not self.rule.tasks


class Ledger(Struct, frozen=True):
    """All claims."""

    claims: list[Claim]


# The ledger --------------------------------------------------------------------------------------


def load_ledger(path: Path = LEDGER) -> list[Claim]:
    """The claims in a file, in its order. ValueError with one line if the file is wrong."""
    try:
        return read_ledger(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path} can't be read ({error.strerror})") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def read_ledger(text: bytes) -> list[Claim]:
    """The claims in JSON text. ValueError if one can't be judged, or two have one id."""
    try:
        claims = msgspec.json.decode(text, type=Ledger).claims
    except msgspec.ValidationError as error:
        raise ValueError(f"not a list of claims: {in_words(error)}") from None
    except msgspec.DecodeError as error:
        raise ValueError(f"not JSON ({error})") from None
    seen = set()
    for number, claim in enumerate(claims):
        try:
            if claim.id in seen:
                raise ValueError("another claim has this id")
            seen.add(claim.id)
            _among(claim.technique, families(), "technique")
            for framework in claim.frameworks:
                _among(framework, ("pt", "tf"), "frameworks")
            _among(claim.source.kind, KINDS, "source: kind")
            claim.rule.check()
        except ValueError as error:
            raise ValueError(f"claims {number} ({claim.id}): {error}") from None
    return claims


def _among(value: Any, known: Any, what: str) -> None:
    if value not in known:
        raise ValueError(f"{what}: {unknown(value, filter(None, known))}")


# Verdicts ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """A row that answers a claim: its case, its figure, and its verdict with the reason.

    `machine`: its class, if that is not the first record's.
    """

    case: Case
    figure: Figure | None
    verdict: str
    why: str = ""
    machine: str = ""

    @property
    def large(self) -> bool:
        """Whether its model is a large one."""
        return bool(is_large(self.case.task))


@dataclass(frozen=True)
class Judged:
    """A claim, its verdict, the reason if it is open, and its rows, the deciding ones first."""

    claim: Claim
    verdict: str
    why: str
    rows: list[Answer]

    @property
    def shown(self) -> Answer | None:
        """The row that decides, or else one that has a figure."""
        return next((row for row in self.rows if row.figure), None)

    @property
    def held(self) -> tuple[int, int]:
        """How many rows hold, of those that were judged."""
        counts = Counter(row.verdict for row in self.rows)
        return counts[HOLDS], counts[HOLDS] + counts[FAILS]


def judge(records: list[Record], claims: list[Claim]) -> list[Judged]:
    """The verdict on each claim by these records."""
    tables = [Table(record) for record in records]
    return [_judged(claim, tables) for claim in claims]


def _judged(claim: Claim, tables: list[Table]) -> Judged:
    rule, first = claim.rule, tables[0].record.environment
    lacking = [_missing(rule.needs, table.record.environment) for table in tables]
    answers: dict[str, Answer] = {}
    for table, missing in zip(tables, lacking, strict=True):
        environment = table.record.environment
        machine = "" if same_class(first, environment) else words(environment)
        for case in _cases(claim, table.record):
            known = answers.get(case.id)
            if known is None or known.figure is None:
                answer = replace(_answer(case, rule, table), machine=machine)
                untested = replace(answer, verdict=UNTESTED, why=missing)
                answers[case.id] = untested if missing else answer
    rows = list(answers.values())
    verdict, why = (UNTESTED, lacking[0]) if all(lacking) else _verdict(rule, rows)
    if claim.of_any_size and not all(lacking):
        large, small = (
            _verdict(rule, [r for r in rows if r.large is big])[0] for big in (True, False)
        )
        verdict, why = _of_sizes(large, small) or (verdict, why)
    first = {ON_LARGE: HOLDS, ON_SMALL: HOLDS}.get(verdict, verdict)
    order = (first, *VERDICTS)
    return Judged(claim, verdict, why, sorted(rows, key=lambda row: _rank(row, rule, order)))


def _missing(need: str | None, environment: Environment) -> str | None:
    """What the machine lacks for a claim to be tested."""
    has = {None: True, "cuda": bool(environment.gpu), "amx": AMX in environment.isa}
    return None if has[need] else NEEDS[need]


def _cases(claim: Claim, record: Record) -> Iterator[Case]:
    """The rows that the rule names, measured or not."""
    rule = claim.rule
    for case in record.cases:
        if (
            case.technique == claim.technique
            and case.variant in rule.variants
            and case.framework in claim.frameworks
            and case.role != "control"
            and case.task in (rule.tasks or [case.task])
            and case.mode == (rule.mode or case.mode)
        ):
            yield case


def _answer(case: Case, rule: Rule, table: Table) -> Answer:
    if case.status != "OK":
        return Answer(case, None, UNMEASURED, f"{case.status.lower()}: {case.reason or '—'}")
    if rule.read == "value":
        figure, why = table.value(case, rule.figure)
    else:
        figure, why = table.against_baseline(case, rule.figure, rule.against)
    if figure is None:
        return Answer(case, None, UNMEASURED, why)
    figure = figure.turned() if rule.read == "gain" else figure
    if figure.bounds is None:
        return Answer(case, figure, UNDECIDED, ONCE)
    if rule.low <= figure.low and figure.high <= rule.high:
        return Answer(case, figure, HOLDS)
    if figure.high < rule.low or figure.low > rule.high:
        return Answer(case, figure, FAILS)
    return Answer(case, figure, UNDECIDED, TOO_WIDE)


def _of_sizes(large: str, small: str) -> tuple[str, str] | None:
    """The verdict of a claim that large and small models answer in different ways."""
    sizes = {(HOLDS, FAILS): ON_LARGE, (FAILS, HOLDS): ON_SMALL}
    verdict = sizes.get((large, small))
    return verdict and (verdict, "")


def _verdict(rule: Rule, rows: list[Answer]) -> tuple[str, str]:
    """What the rows say together: a claim of all falls with one, one of any stands with one."""
    verdicts = {row.verdict for row in rows}
    decisive = FAILS if rule.rows == "all" else HOLDS
    if decisive in verdicts:
        return decisive, ""
    reasons = {v: [row.why for row in rows if row.verdict == v] for v in OPEN}
    if TOO_WIDE in reasons[UNDECIDED]:
        return UNDECIDED, TOO_WIDE
    if judged := verdicts - set(OPEN):  # what was not measured speaks against nobody
        return judged.pop(), ""
    for verdict in OPEN:
        if whys := reasons[verdict]:
            return verdict, next((why for why in whys if why != NOT_MEASURED), NOT_MEASURED)
    return UNMEASURED, NOT_MEASURED


def _rank(row: Answer, rule: Rule, order: tuple[str, ...]) -> tuple:
    """Rows of the claim's own verdict first, of them the farthest from the claim.

    Where a claim of some rows holds, the one that shows it best.
    """
    if row.figure is None:
        return order.index(row.verdict), 1, 0.0
    above = -row.figure.value if rule.at_least is None else row.figure.value
    return order.index(row.verdict), 0, -above if rule.rows == "any" else above
