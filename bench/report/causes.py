"""Where the differences of a record's headline pairs come from, in words and as tables."""

from __future__ import annotations

from bench.record import Case, Record, Why
from bench.report.formatting import number
from bench.report.technique_tables import Table, of_figures, of_words

CLOSE = 0.05  # of the run's difference, within which the sum of the parts agrees with it


def heading(record: Record, why: Why) -> str:
    """The work that a pair does, and the framework of a pair in one: digits-cnn, batch 64."""
    a, b = _sides(record, why)
    work = f"{a.task_title}, batch {a.batch_size}"
    return work if a.framework != b.framework else f"{work}, {a.framework_title}"


def table(record: Record, why: Why) -> Table:
    """What both spend on each kind of work; above it, what tested the sum and the causes."""
    rows = [[what, *(number(s * 1e3) for s in (a, b, a - b))] for what, (a, b) in why.kinds.items()]
    columns = of_words("kind of work") + of_figures(*(f"{n} [ms]" for n in (*why.names, "more")))
    return Table(". ".join([agreement(record, why), *evidence(why)]), columns, rows)


def evidence(why: Why) -> list[str]:
    """What the experiments showed of each cause that has one."""
    return [f"{one.kind}: {one.status}; {one.evidence}" for one in why.causes if one.evidence]


def agreement(record: Record, why: Why) -> str:
    """How far the sum of the parts is from the difference of the same steps in the record's run.

    The run took these steps at another time and without a profiler, so this tests the sum.
    """
    a, b = _sides(record, why)
    parts = sum(ours - theirs for ours, theirs in why.kinds.values())
    run = a.timing.median_s - b.timing.median_s
    apart = abs(parts - run) / abs(run) if run else float("inf")
    far = f"within {CLOSE:.0%}" if apart <= CLOSE else f"{apart:.0%} away"
    told = f"The parts sum to {number(parts * 1e3)} ms"
    told += f", the run's own steps differ by {number(run * 1e3)} ms"
    return told if why.ci[0] <= 0 <= why.ci[1] else f"{told}: {far}"


def known(record: Record) -> list[Why]:
    """The causes whose pair the record still has, with the times of both."""
    timed = {one.id for one in record.cases if one.timing and one.timing.median_s}
    return [one for one in record.why if {one.numerator, one.denominator} <= timed]


def _sides(record: Record, why: Why) -> tuple[Case, Case]:
    cases = {one.id: one for one in record.cases}
    return cases[why.numerator], cases[why.denominator]
