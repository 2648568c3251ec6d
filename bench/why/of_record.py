"""Causes of a record's main ratios, measured after its run and kept in it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from bench.analysis.machine_class import differences, same_class
from bench.analysis.questions import answers
from bench.analysis.ranking import PREDICT, TRAIN
from bench.analysis.table import TIME
from bench.harness import machine
from bench.harness.plan import Case as Plan
from bench.harness.plan import Workload
from bench.harness.run_plan import techniques
from bench.record import FRAMEWORKS, Case, NamedCause, Record, Why
from bench.report.advised import named
from bench.report.names import name_of
from bench.why import pairs
from bench.why.causes import Cause, sentence
from bench.why.difference import LEAST, Difference
from bench.why.side import Request
from shared import datasets
from shared.cgroups import usable_threads
from shared.specs import TASKS
from shared.step_events import DELAYED

LEAST_S = 30.0  # that a pair takes
Pair = tuple[Case, Case]


def headline(record: Record) -> list[Pair]:
    """The pairs whose times can be told apart: first across frameworks, then with baselines."""
    timed = [
        answer
        for answer in answers(record)
        if answer.goal.figure == TIME and answer.work.kind in (TRAIN, PREDICT)
    ]
    made = [
        tuple(answer.sides[name].best.case for name in FRAMEWORKS)
        for answer in timed
        if answer.ahead
    ]
    rows = (named(side) for answer in timed for side in answer.sides.values())
    made += [(row.case, row.base) for row in rows if row and row.base]
    own = {(a.id, b.id): (a, b) for a, b in made if not (a.is_legacy or b.is_legacy)}
    return list(own.values())


def check_machine(record: Record) -> None:
    """Raise ValueError if the record is from another class of machine."""
    here = machine.describe(usable_threads())
    theirs = record.environment
    theirs = theirs.but(products={}, peak_flops=None, bandwidth=None, chain=None, gpu=here.gpu)
    if not same_class(theirs, here):
        apart = differences(theirs, here)[0]
        raise ValueError(f"the record is from another class of machine: {apart}")


def with_causes(
    record: Record,
    request: Callable[[Case, str], Request],
    seconds: float,
    say: Callable[[str], None] = pairs.say,
) -> Iterator[Record]:
    """The record after each main pair whose causes fit into so many seconds.

    Causes that it has are kept. A pair whose difference now has another sign gets none.
    """
    end = time.monotonic() + seconds
    known = {(one.numerator, one.denominator): one for one in record.why}
    wanted = headline(record)
    for number, (a, b) in enumerate(wanted, start=1):
        if (a.id, b.id) in known:
            continue
        left = end - time.monotonic()
        if left < LEAST_S:
            say(f"time is over: {len(wanted) - number + 1} of {len(wanted)} pairs are left")
            break
        names = _names(a, b)
        say(f"{number} of {len(wanted)}: {names[0]} and {names[1]}, {a.task}, batch {a.batch_size}")
        try:
            both = request(a, names[0]), request(b, names[1])
            difference, causes = pairs.explained(both, seconds=left, say=lambda _: None)
        except ValueError as error:
            say(str(error))
            continue
        if why_not := _doubt(difference, a, b):
            say(f"left out: {why_not}")
            continue
        known[a.id, b.id] = of_difference(a.id, b.id, difference, causes)
        yield record.but(why=list(known.values()))


def _names(a: Case, b: Case) -> tuple[str, str]:
    if a.framework == b.framework:
        base = b.role == "baseline"
        return name_of(a, short=True), pairs.BASELINE if base else name_of(b, short=True)
    return tuple(
        one.framework_title + (f" {name_of(one, short=True)}" if one.role != "baseline" else "")
        for one in (a, b)
    )


def _doubt(difference: Difference, a: Case, b: Case) -> str:
    """Why a difference says nothing of the record's; "" where it does."""
    ours, theirs = a.timing.median_s, b.timing.median_s
    if difference.is_noise:
        shown = ours and theirs and abs(ours - theirs) >= LEAST * min(ours, theirs)
        return "the run shows a difference, and the rounds now do not" if shown else ""
    if abs(difference.line(DELAYED).more) > abs(difference.seconds) / 2:
        return "other programs had the processors for more than half of the difference"
    if ours and theirs and (ours - theirs) * difference.seconds < 0:
        return "the faster of the two is the slower one now"
    return ""


def of_difference(a: str, b: str, difference: Difference, causes: Iterable[Cause]) -> Why:
    """What the record keeps of a difference. a, b: the ids of the cases."""
    causes = list(causes)
    return Why(
        numerator=a,
        denominator=b,
        sentence=sentence(difference, causes),
        seconds=difference.seconds,
        ci=difference.interval,
        names=(difference.a.name, difference.b.name),
        kinds={line.what: (line.a, line.b) for line in difference.kinds},
        causes=[
            NamedCause(
                kind=one.kind,
                seconds=one.seconds,
                words=one.words,
                status=one.status,
                evidence=one.evidence,
            )
            for one in causes
        ],
    )


def of_a_file(
    record: Record, cases: dict[str, Plan], data: str, seconds: float, say: Callable[[str], None]
) -> Record:
    """The record of a user's file with causes: for both frameworks' best rows, and for the best.

    cases: by id. data: the folder of the prepared file.
    """

    def request(case: Case, name: str) -> Request:
        return pairs.request(cases[case.id], name, data, case.batch_size)

    for changed in with_causes(record, request, seconds, say):
        record = changed
    return record


def of_suite(folder: Path) -> Callable[[Case, str], Request]:
    """A function that makes the request for a case of the suite. folder: where data are."""
    every = techniques()

    def request(case: Case, name: str) -> Request:
        technique = every.get(case.technique)
        variants = [
            one
            for one in (technique.variants if technique else ())
            if one.name == case.variant and case.framework in one.frameworks
        ]
        if not variants:
            raise ValueError(f"this version of twinbench has no {case.id}")
        work = Workload(case.task, "compute", mode=case.mode)
        plan = pairs.case_of(technique, variants[0], case.framework, work)
        if TASKS[case.task].dataset.kind == "photos":
            raise ValueError(f"{case.task} reads image files, which are not profiled")
        data = datasets.materialise(TASKS[case.task].dataset, folder)
        return pairs.request(plan, name, str(data), case.batch_size)

    return request
