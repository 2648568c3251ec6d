"""What a run still has to measure, how long that will take, and the plan in words."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from math import inf

from msgspec import structs

from bench.analysis.machine_class import words
from bench.harness import checks
from bench.harness.plan import Case
from bench.harness.progress import clock
from bench.harness.run_plan import Plan
from bench.harness.state import CaseState, RunState

# The share of a pass that is expected to be left after a look: of 180 published comparisons 27%
# were open after 3 blocks, 12% after 5. Baselines and controls play on beside these.
STAYING = {3: 0.35, 5: 0.2}
SEEDS_STAYING = 0.3  # after a look at the seeds


@dataclass(frozen=True)
class Part:
    """A part of a run: how many matches, starts or cases, and its time in seconds.

    `most`: its time if no case is decided before the last look.
    """

    name: str
    count: int
    expected: float
    most: float

    @classmethod
    def sure(cls, name: str, count: int, seconds: float) -> Part:
        """A part that is measured in any case."""
        return cls(name, count, seconds, seconds)


def open_cases(plan: Plan, state: RunState, cases: list[Case] | None = None) -> list[Case]:
    """The cases that can still be measured: neither they nor their programs have failed."""
    failed = {name for name, case in state.cases.items() if case.status != "OK"}
    cases = plan.every if cases is None else cases
    return [case for case in cases if not failed & {case.id, plan.shown[case.id]}]


def seconds_left(plan: Plan, state: RunState) -> tuple[float, float]:
    """Expected seconds of what `state` lacks, and seconds if nothing is decided early."""
    left = parts(plan, state)
    return sum(part.expected for part in left), sum(part.most for part in left)


def whole_s(plan: Plan, state: RunState) -> float:
    """Expected seconds of the whole plan, with the state's first matches."""
    matches = [state.matches[number] for number in state.passes[0]]
    nothing = structs.replace(
        state,
        cases={case.id: CaseState() for case in plan.every},
        matches=matches,
        passes=[list(range(len(matches)))],
        conditions=[],
        left=set(),
    )
    return seconds_left(plan, nothing)[0]


def parts(plan: Plan, state: RunState) -> list[Part]:
    """The parts that `state` lacks, in the usual order."""
    of, cold, probes = plan.durations.of, [], []
    for case in open_cases(plan, state):
        if case.settled:
            done = state.cases[case.id]
            cold += [of("cold", case)] * (plan.cold_starts(case) - len(done.cold_starts))
            probes += [of("probe", case)] * (plan.probed(case) and not done.probed)
    isolated = [
        Part.sure(name, len(prices), bool(prices) * plan.durations.parents_s + sum(prices))
        for name, prices in (("first calls and memory", cold), ("probes", probes))
    ]
    checked = [of("check", case) for case in checks.expected(plan, state)]
    isolated.append(Part.sure("checks", len(checked), sum(checked)))
    seeds, passes, first = _training(plan, state), _passes(plan, state), plan.amount.first_look
    return [*passes[:first], *isolated, *seeds[:1], *passes[first:], *seeds[1:]]


def _passes(plan: Plan, state: RunState) -> list[Part]:
    """The passes: who leaves after a look is not known before."""
    matches = [[plan.by_id[name] for name in match] for match in state.matches]
    of_pass, played, share, parts = plan.durations.of_pass, state.played, 1.0, []
    last = [matches[number] for number in state.passes[-1]]
    for block in range(plan.amount.blocks):
        name = f"pass {block + 1}"
        share = STAYING.get(block, share) if block in plan.amount.looks else share
        if block < len(state.passes):
            lacking = [matches[n] for n in state.passes[block] if (n, block) not in played]
            parts.append(Part.sure(name, len(lacking), of_pass(lacking)))
        else:
            most = of_pass(last)
            parts.append(Part(name, len(last), share * most, most))
    return parts


def _training(plan: Plan, state: RunState) -> list[Part]:
    """The training of each look at the seeds: who is trained further is not known before."""
    cases = [case for case in open_cases(plan, state) if plan.trained(case)]
    cases = [case for case in cases if not state.cases[case.id].training_is_over]
    share, before, parts = 1.0, 0, []
    for seeds in plan.seeds:
        lacking = [(case, seeds - max(before, state.cases[case.id].seeds)) for case in cases]
        prices = [n * plan.durations.of("training", case) for case, n in lacking if n > 0]
        most = sum(prices) + bool(prices) * plan.durations.parents_s
        parts.append(Part(f"training, {seeds} seeds", len(prices), share * most, most))
        share, before = SEEDS_STAYING, seeds
    return parts


# In words -----------------------------------------------------------------------------------------


def describe(
    plan: Plan, left: tuple[float, float], taken_up: bool = False, limit: float | None = None
) -> str:
    """The plan, and what is left of it, in a few lines of at most 80 columns.

    limit: seconds after which the run ends.
    """
    lines = []
    for name, cases in plan.cases.items():
        tasks = dict.fromkeys(f"{c.workload.task} ({c.workload.batch_size})" for c in cases)
        variants = dict.fromkeys(c.variant.name for c in cases)
        lines.append(_hanging(f"{name}: {', '.join(variants)}"))
        lines.append(_hanging(f"    on {', '.join(tasks)}; {_count(len(cases), 'case')}"))
    if plan.left_out:
        names = ", ".join(plan.left_out)
        lines.append(_hanging(f"not in this run, but with --technique or -k: {names}"))
    lines.append(_hanging(_summary(plan, left, taken_up, limit)))
    if plan.lender:
        lines.append(_hanging(_borrowed(plan)))
    if limit:
        whole = left[0] + plan.durations.describe_s
        more = f"; the whole plan takes about {clock(whole)}" * (limit < whole)
        lines.append(f"the run ends after {clock(limit)}{more}")
    return "\n".join(lines)


def table(plan: Plan, state: RunState) -> str:
    """The parts that `state` lacks, as a table."""
    begin = Part.sure("start", 1, plan.durations.describe_s)
    left = [part for part in (begin, *parts(plan, state)) if part.count]
    rows = [("", "count", "about", "at most")]
    rows += [(part.name, str(part.count), clock(part.expected), clock(part.most)) for part in left]
    whole = (sum(part.expected for part in left), sum(part.most for part in left))
    rows.append(("total", "", *map(clock, whole)))
    if plan.lender or whole[0] == whole[1]:
        rows = [(*row[:3], "") for row in rows]
    return "\n".join(f"{a:<26}{b:>6}{c:>14}{d:>22}".rstrip() for a, b, c, d in rows)


def _borrowed(plan: Plan) -> str:
    """Whose times the plan uses, if this class of machine was never measured."""
    lacks = ", ".join(plan.durations.lacking)
    slow = f"; this machine has no {lacks}, so some rows may take far longer" * bool(lacks)
    return f"these times are from another machine ({words(plan.lender)}){slow}"


def _summary(plan: Plan, left: tuple[float, float], taken_up: bool, limit: float | None) -> str:
    matches, amount = plan.matches(), plan.amount
    counts = [_count(len(plan.every), "case"), _count(len(set(plan.shown.values())), "program")]
    counts += [f"timed in {_count(len(matches), 'group')}"] * bool(matches)
    blocks = f"{_count(amount.blocks, 'block')} of {amount.rounds} rounds"
    blocks = f"{amount.looks[0]} to {blocks}" if amount.looks else blocks
    repeated = [blocks] * bool(matches)
    if any(map(plan.trained, plan.every)):
        more = f" to {plan.seeds[-1]}" * (len(plan.seeds) > 1)
        repeated.append(f"{plan.seeds[0]} seeds{more}")
    expected, most = (seconds + plan.durations.describe_s for seconds in left)
    whole = f"about {clock(expected)}"
    if most > 1.05 * expected and plan.lender is None:
        whole += f", at most {clock(most)}"
    shown = _shown_before_the_end(plan, matches, expected, limit or inf)
    time = ", ".join(shown if limit and limit < expected else [*shown, f"all after {whole}"])
    if taken_up:
        time = f"resumed: {whole} left"
    return "; ".join(filter(None, [", ".join(counts), ", ".join(repeated), time]))


def _shown_before_the_end(
    plan: Plan, matches: list[list[Case]], end: float, limit: float
) -> list[str]:
    """When there is something to see of what is timed, before the end."""
    if not matches:
        return []
    begin, of_pass = plan.durations.describe_s, plan.durations.of_pass
    small = [match for match in matches if not match[0].task.blocks] or matches
    first = begin + of_pass(small)
    shown = [f"first table after about {clock(first)}"] if first < limit else []
    first_look = plan.amount.first_look
    timed = begin + first_look * of_pass(matches)
    if 1 < first_look <= plan.amount.blocks and timed < min(end, limit):
        shown.append(f"times with intervals after {clock(timed)}")
    return shown


def _count(number: int, one: str) -> str:
    return f"{number} {one}{'s' * (number != 1)}"


def _hanging(text: str) -> str:
    return textwrap.fill(text, width=80, subsequent_indent="    ")
