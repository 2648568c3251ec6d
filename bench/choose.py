"""What to use for one aim, from the rows of a run: which framework, with which technique.

    twinbench choose results/latest --goal train-speed [--task T] [--steps N]
        [--max-accuracy-drop P] [--memory-budget SIZE]

Goals: train-speed and latency (time of a train step, of a prediction; with --steps the time of so
many, first call included), memory (peak above import), cold-start (first call in a new process),
size (of the artifact on disk). What the run cannot tell from the best stands beside it.

Step times are compared through ratios that were measured within rounds: a case to its framework's
baseline, and baseline to baseline between the frameworks. Techniques are put side by side where
their baselines did the same work, which their certificates prove.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass
from math import exp, hypot, log
from pathlib import Path
from typing import Any

from scipy import stats

from bench.analysis.record import DIFFERENT, above_import, framework_title, load, title_of, work_of
from bench.analysis.stats import DELTA
from bench.analysis.values import at, is_number, is_pair
from bench.report.figures import number, plus_minus
from bench.report.text import hanging, plain, wrap

# goal -> what is compared, its unit, the unit's size
GOALS = {
    "train-speed": ("time of a train step", "ms", 1e-3),
    "latency": ("time of a prediction", "ms", 1e-3),
    "memory": ("peak memory above import", "MB", 1e6),
    "cold-start": ("first call in a new process", "s", 1.0),
    "size": ("size on disk", "MB", 1e6),
}
SINGLE = 0.10  # values that were measured once count as equal within this

Record = dict[str, Any]


@dataclass(frozen=True)
class Candidate:
    """A case and its figure for the goal, in base units, with the bounds of its interval."""

    case: dict
    value: float
    low: float
    high: float

    @property
    def name(self) -> str:
        """Framework, variant and technique; baselines are the same in all techniques."""
        if self.case["role"] == "baseline":
            return f"{framework_title(self.case)} baseline"
        return f"{title_of(self.case)} ({self.case['technique']})"


@dataclass(frozen=True)
class Advice:
    """For one piece of work: the best, what cannot be told from it, the rest, and who is out."""

    work: str
    best: Candidate
    equal: list[Candidate]
    rest: list[Candidate]
    left_out: list[tuple[str, str]]


@dataclass(frozen=True)
class Limits:
    """What a choice must keep to. Drops in points of the metric, budgets in bytes."""

    accuracy_drop: float | None = None
    memory: float | None = None
    steps: int | None = None


# Which cases do the same work --------------------------------------------------------------------


def works(record: Record) -> dict[str, list[dict]]:
    """Cases by the work that they do, as their baselines certify it.

    Cases that are not OK, controls, and those whose baseline is missing are left out.
    """
    found: list[tuple[dict, list[dict]]] = []  # a baseline, and the cases that do its work
    for case in record["cases"]:
        base = _baseline(record, case)
        if case["status"] != "OK" or case["role"] == "control" or base is None:
            continue
        same = (cases for other, cases in found if _same_work(record, base, other))
        if cases := next(same, None):
            cases.append(case)
        else:
            found.append((base, [case]))
    named = {}
    for base, cases in found:
        techniques = ", ".join(dict.fromkeys(case["technique"] for case in cases))
        named[f"{work_of(base)}, batch {base['batch_size']} ({techniques})"] = cases
    return named


def _same_work(record: Record, one: dict, other: dict) -> bool:
    """Whether two baselines start from the same weights and see the same first loss."""
    if (work_of(one), one["batch_size"]) != (work_of(other), other["batch_size"]):
        return False
    proofs = [c.get("certificate") for c in (one, other)]
    if None in proofs:  # never timed: no proof beyond the technique's own
        return proofs == [None, None] and one["technique"] == other["technique"]
    same = at(proofs[0], "weights_sha256") == at(proofs[1], "weights_sha256")
    first, second = (proof["losses"][:1] for proof in proofs)
    return same and _agree(record, one["task"], first, second)


def _agree(record: Record, task: str, ours: list, theirs: list) -> bool:
    """Whether there are losses on both sides, and all agree within the task's parity bar."""
    bar = at(record["tasks"], task, "parity")
    if not ours or len(ours) != len(theirs) or not all(map(is_number, [bar, *ours, *theirs])):
        return False
    return all(abs(a - b) <= bar * abs(b) for a, b in zip(ours, theirs, strict=True))


def _baseline(record: Record, case: dict) -> dict | None:
    same = ("technique", "task", "batch_size", "mode", "framework", "flavour")
    for other in record["cases"]:
        if other["role"] == "baseline" and all(at(other, k) == at(case, k) for k in same):
            return other if other["status"] == "OK" else None
    return None


# Figures for a goal ------------------------------------------------------------------------------


def candidates(record: Record, cases: list[dict], goal: str, steps: int | None) -> list[Candidate]:
    """The cases that have a figure for the goal."""
    if goal in ("train-speed", "latency"):
        mode = "train" if goal == "train-speed" else "predict"
        found = _timed(record, [c for c in cases if (c.get("mode") or "train") == mode])
        return found if steps is None else [t for c in found if (t := _total(c, steps))]
    once = {
        "memory": lambda case: above_import(case.get("memory")),
        "cold-start": lambda case: at(case, "timing", "cold_first_call_s"),
        "size": lambda case: case.get("artifact_bytes"),
    }[goal]
    return [Candidate(c, value, *_bounds(c, goal, value)) for c in cases if (value := once(c))]


def _bounds(case: dict, goal: str, value: float) -> tuple[float, float]:
    """The range of repeated cold starts; else what a value measured once may be off by."""
    repeated = at(case, "metrics", "cold_first_calls_s", "ci") if goal == "cold-start" else None
    if is_pair(repeated):
        return tuple(repeated)
    return value * (1 - SINGLE / 2), value * (1 + SINGLE / 2)


def _timed(record: Record, cases: list[dict]) -> list[Candidate]:
    """Step times in seconds, all relative to the baselines of the first framework.

    The unit is the geometric mean of these baselines, so that the machine's drift from one
    technique to the next is in no comparison.
    """
    ids = {case["id"]: case for case in cases}
    usable = [
        comparison
        for comparison in record["comparisons"]
        if {comparison["numerator"], comparison["denominator"]} <= ids.keys()
        and at(comparison, "verdict") != DIFFERENT
        and all(is_number(at(comparison, name)) for name in ("ratio", "n"))
    ]
    if any(at(comparison, "sd") is None for comparison in usable):
        raise ValueError("the run has one block and so no intervals: run it at default effort")
    bases = [c for c in cases if c["role"] == "baseline" and at(c, "timing", "median_s")]
    if not bases:
        return []
    reference = _side(bases[0])
    logs = [log(at(base, "timing", "median_s")) for base in bases if _side(base) == reference]
    unit = sum(logs) / len(logs)
    t = float(stats.t.ppf(0.975, min((c["n"] for c in usable), default=2) - 1))
    found = []
    for case in cases:
        own, between = _own(usable, case), _between(usable, ids, _side(case), reference)
        if own and between:
            middle, half = unit + own[0] + between[0], t * hypot(own[1], between[1])
            found.append(Candidate(case, *map(exp, (middle, middle - half, middle + half))))
    return found


def _side(case: dict) -> tuple[str, str | None]:
    return case["framework"], case.get("flavour")


Estimate = tuple[float, float]  # a log ratio and its standard error


def _own(usable: list[dict], case: dict) -> Estimate | None:
    """A case to its own baseline; None where that was not measured."""
    if case["role"] == "baseline":
        return (0.0, 0.0) if at(case, "timing", "median_s") else None
    found = (c for c in usable if (c["kind"], c["numerator"]) == ("baseline", case["id"]))
    return next(map(_estimate, found), None)


def _between(usable: list[dict], ids: dict, side: tuple, reference: tuple) -> Estimate | None:
    """A side's baselines to the reference's, the mean over all techniques; None without any."""
    if side == reference:
        return 0.0, 0.0
    found = []
    for comparison in usable:
        first, second = (ids[comparison[name]] for name in ("numerator", "denominator"))
        if comparison["kind"] == "framework" and first["role"] == second["role"] == "baseline":
            sign = {(side, reference): 1, (reference, side): -1}.get((_side(first), _side(second)))
            mean, error = _estimate(comparison)
            found += [(sign * mean, error)] if sign else []
    if not found:
        return None
    return sum(mean for mean, _ in found) / len(found), hypot(*(e for _, e in found)) / len(found)


def _estimate(comparison: dict) -> Estimate:
    return log(comparison["ratio"]), comparison["sd"] / comparison["n"] ** 0.5


def _total(candidate: Candidate, steps: int) -> Candidate | None:
    """The time of so many steps in a new process; None where its first call was not measured."""
    first = at(candidate.case, "timing", "cold_first_call_s")
    if first is None:
        return None
    low, high = _bounds(candidate.case, "cold-start", first)
    return Candidate(
        candidate.case,
        first + (steps - 1) * candidate.value,
        low + (steps - 1) * candidate.low,
        high + (steps - 1) * candidate.high,
    )


# Advice ------------------------------------------------------------------------------------------


def advise(record: Record, goal: str, limits: Limits, task: str | None = None) -> list[Advice]:
    """The best case for the goal within the limits, for each piece of work that has the figure.

    Raises ValueError where no case has.
    """
    found = []
    for work, cases in works(record).items():
        if task and cases[0]["task"] != task:
            continue
        # One baseline of each framework: the others are the same work once more.
        every = {c.name: c for c in reversed(candidates(record, cases, goal, limits.steps))}
        reasons = {name: _refused(c.case, record, limits) for name, c in every.items()}
        kept = [c for name, c in every.items() if reasons[name] is None]
        left_out = [(name, reason) for name, reason in reasons.items() if reason]
        if kept:
            best, *others = sorted(kept, key=lambda c: c.value)
            worse = [other for other in others if _worse(other, best)]
            equal = [other for other in others if other not in worse]
            found.append(Advice(work, best, equal, worse, left_out))
    if not found:
        measured = GOALS[goal][0]
        more = "; predictions are timed at --effort full" if goal == "latency" else ""
        limited = (limits.accuracy_drop, limits.memory) != (None, None)
        within = " within the limits" if limited else ""
        raise ValueError(f"no case of this run has a {measured}{within}{more}")
    return found


def _worse(candidate: Candidate, best: Candidate) -> bool:
    """Whether it can be told from the best: intervals apart, and by more than 3%."""
    return candidate.low > best.high and candidate.value > best.value * (1 + DELTA)


def _refused(case: dict, record: Record, limits: Limits) -> str | None:
    """Which limit a case breaks, or cannot be shown to keep."""
    if limits.memory is not None:
        peak = above_import(case.get("memory"))
        if peak is None:
            return "its memory was not measured"
        if peak > limits.memory:
            return f"takes {number(peak / 1e6)} MB"
    if limits.accuracy_drop is not None and case["role"] != "baseline":
        difference = at(case, "accuracy", "difference")
        if at(difference, "mean") is None:
            return None if _exact(record, case) else "its accuracy was not measured here"
        metric = at(record["tasks"], case["task"], "metric")
        sign = 1 if metric == "accuracy" else -1
        if -sign * difference["mean"] > limits.accuracy_drop:
            change = plus_minus(difference["mean"], at(difference, "ci"), signed=True)
            return f"changes the {metric} by {change}"
    return None


def _exact(record: Record, case: dict) -> bool:
    """Whether a case's losses are its baseline's, within the task's parity bar."""
    both = (at(c, "certificate", "losses") or [] for c in (case, _baseline(record, case)))
    return _agree(record, case["task"], *both)


# What is printed ---------------------------------------------------------------------------------


def measure(goal: str, limits: Limits) -> tuple[str, str, float]:
    """What is compared for a goal, its unit, and the unit's size."""
    if limits.steps and goal in ("train-speed", "latency"):
        return f"time of {limits.steps:,} steps, first call included", "s", 1.0
    return GOALS[goal]


def figure_of(candidate: Candidate, goal: str, limits: Limits) -> str:
    """A candidate's figure with its bounds. What all else is compared to has no bounds."""
    _, unit, size = measure(goal, limits)
    text = f"{number(candidate.value / size)} {unit}"
    if candidate.low < candidate.high:
        text += f" ({number(candidate.low / size)}–{number(candidate.high / size)})"
    return text


def render(
    record: Record, goal: str, limits: Limits, task: str | None = None, width: int = 80
) -> str:
    """The advice as text, no line wider than `width` cells."""
    lines = []
    for advice in advise(record, goal, limits, task):
        lines += ["", *wrap(plain(f"{advice.work}: {measure(goal, limits)[0]}"), width)]
        for label, group in (
            ("best", [advice.best]),
            ("no measurable difference", advice.equal),
            ("worse", advice.rest),
        ):
            for candidate in group:
                text = f"{candidate.name}: {figure_of(candidate, goal, limits)}"
                if candidate is not advice.best:
                    text += f", {candidate.value / advice.best.value:.2f} times the best"
                lines += hanging(f"  {label}", plain(text), width, 28)
        for name, reason in advice.left_out:
            lines += hanging("  left out", plain(f"{name}: {reason}"), width, 28)
        lines += hanging("  rests on", plain(advice.best.case["id"]), width, 28)
    return "\n".join(lines[1:]) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status (2: an error)."""
    parser = argparse.ArgumentParser(prog="twinbench choose", description=__doc__)
    parser.add_argument("path", type=Path, help="a results.json, or the folder that holds one")
    parser.add_argument("--goal", required=True, choices=GOALS)
    parser.add_argument("--task", help="only this task")
    parser.add_argument("--steps", type=int, metavar="N", help="the whole time of N steps")
    parser.add_argument("--max-accuracy-drop", type=float, metavar="P", help="points of the metric")
    parser.add_argument("--memory-budget", type=_size, metavar="SIZE", help="for example 2GB")
    given = parser.parse_args(arguments)
    if given.steps is not None and given.steps < 1:
        parser.error(f"--steps: {given.steps} is not a number of steps; give 1 or more")
    limits = Limits(given.max_accuracy_drop, given.memory_budget, given.steps)
    sys.stdout.reconfigure(errors="backslashreplace")  # a console without UTF-8 loses no line
    try:
        record = load(given.path)
        known = {case["task"] for case in record["cases"]}
        if given.task and given.task not in known:
            raise ValueError(f"--task: the run has no {given.task!r}; it has {', '.join(known)}")
        print(render(record, given.goal, limits, given.task), end="")
    except ValueError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    return 0


def _size(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMG]B)", text.strip().upper())
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; give one such as 512MB or 2GB")
    return float(found[1]) * 1000 ** " KMG".index(found[2][0])
