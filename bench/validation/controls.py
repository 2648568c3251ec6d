"""Live controls: pairs of equal work, and contenders that work longer by a known share.

A measurement is like a run that ends early. Its matches have a chain of baselines in workers of
different parents, and contenders that work longer by 2%, 5%, 10% or 50%. These leave at the look
that decides them. Three kinds of train steps and predictions take turns.

A measurement is a dict: `environment`, and for each match the `framework` (of `SIDES`), the
`workload` (of `WORKLOADS`), the `blocks` (log times by contender) and the contenders that `failed`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import exp
from pathlib import Path

import msgspec
import numpy as np

from bench.analysis import verdicts
from bench.analysis.bounds import LOOKS
from bench.analysis.fit import block_times, fit_of
from bench.analysis.sequential import DECIDED, Pair, judge
from bench.harness import machine
from bench.harness.folders import replace_file
from bench.harness.helpers import plain
from bench.harness.matches import Match, parent_key, start_order
from bench.harness.plan import EFFORT, FRAMEWORKS, SEED, Case, Prepared, Variant, Work, Workload
from bench.harness.processes import Processes
from bench.validation.pace import paced
from shared import datasets

CONTROLS = 4  # pairs of equal work in a match: a chain, in which the parents take turns
# who leaves, and what it works longer
PLANTED = {"slow2": 0.02, "slow5": 0.05, "slow10": 0.10, "quick": 0.50}
COPIES = {"slow2": 2, "slow5": 2, "slow10": 2, "quick": 1}  # in a match
# name of a side -> framework and flavour; the first flavour goes by the framework's name
SIDES = {
    flavour if number else name: (name, flavour)
    for name, framework in FRAMEWORKS.items()
    for number, flavour in enumerate(framework.flavours)
}
WORKLOADS = {
    "small": Workload("digits-cnn", "small"),
    "compute": Workload("digits-cnn", "compute"),
    "text": Workload("text-gpt", "small"),
    "predictions": Workload("digits-cnn", "compute", mode="predict"),
}


# The contenders, as a technique's rows -----------------------------------------------------------


def prepare(impl, work: Work) -> Prepared:
    """The plain step and predictions; planted ones work longer by `slowdown`."""
    row, slowdown = plain(impl, work), work.settings.get("slowdown")
    if not slowdown:
        return row
    return replace(row, step=_slowed(row.step, slowdown), predict=_slowed(row.predict, slowdown))


def _slowed(call: Callable, share: float) -> Callable:
    def slowed(*arrays):
        start = time.perf_counter()
        result = call(*arrays)
        end = time.perf_counter()
        until = end + share * (end - start)
        while time.perf_counter() < until:
            pass
        return result

    return slowed


def took_effect(impl, work: Work, prepared: Prepared, batch) -> tuple[dict, str | None]:
    """There is nothing to prove."""
    return {}, None


def contenders(side: str, workload: str = "small") -> list[Case]:
    """A chain of baselines, whose parents take turns, and planted slower ones."""
    framework, flavour = SIDES[side]
    roles = ("variant", "control")
    variants = [Variant(f"same{n}", role=roles[n % 2]) for n in range(CONTROLS + 1)]
    variants += [
        Variant(f"{name}_{n}", {"slowdown": PLANTED[name]}, role="control")
        for name, copies in COPIES.items()
        for n in range(copies)
    ]
    return [
        Case("harness", "validate", __name__, framework, flavour, v, WORKLOADS[workload])
        for v in variants
    ]


def pairs() -> dict[str, Pair]:
    """The pairs to compare in a match, by name."""
    chain = {f"same{n + 1}": Pair(f"same{n + 1}", f"same{n}") for n in range(CONTROLS)}
    slower = {
        f"{name}_{n}": Pair(f"{name}_{n}", f"same{2 * n}")
        for name, copies in COPIES.items()
        for n in range(copies)
    }
    return chain | slower


def staying(blocks: list[dict[str, float]]) -> set[str]:
    """The contenders that go on: the chain, and planted ones that the last look did not decide."""
    compared = pairs()
    everyone = {name for pair in compared.values() for name in (pair.top, pair.bottom)}
    passed = [look for look in LOOKS if look <= len(blocks)]
    if not passed:
        return everyone
    results = judge(fit_of(blocks[: passed[-1]]), list(compared.values()), LOOKS)
    return everyone - {
        name
        for name, result in zip(compared, results, strict=True)
        if result and result.verdict in DECIDED and not name.startswith("same")
    }


# Measuring ----------------------------------------------------------------------------------------


def new_measurement(sides: list[str], workloads: list[str], count: int) -> dict:
    """A new measurement with `count` control pairs per framework.

    The flavours of a framework take turns, and then the workloads.
    """
    matches = []
    for framework in dict.fromkeys(SIDES[side][0] for side in sides):
        in_turn = [side for side in sides if SIDES[side][0] == framework]
        for number in range(-(-count // CONTROLS)):
            workload = workloads[number // len(in_turn) % len(workloads)]
            side = in_turn[number % len(in_turn)]
            matches.append({"framework": side, "workload": workload, "blocks": []})
    environment = msgspec.to_builtins(machine.describe(machine.usable_threads()))
    return {"environment": environment, "matches": matches}


def read(path: Path) -> dict:
    """An earlier measurement. Raises ValueError if it is missing or damaged."""
    if not path.is_file():
        raise ValueError(f"has no {path.name}")
    try:
        measurement = json.loads(path.read_text("utf-8"))
        for match in measurement["matches"]:
            contenders(match["framework"], match["workload"])
            if match["blocks"]:
                fit_of(match["blocks"])
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"has a damaged {path.name}") from None
    return measurement


def measure(path: Path, measurement: dict, results: Path, minutes: float | None) -> bool:
    """Play the rest of a measurement; False if time ended before.

    path: the file that is written after each block of a match. minutes: no block starts that would
    end after them.
    """
    threads = machine.usable_threads()
    with Processes(path.parent / "logs") as processes:
        for _, side, numbers in paced(_left(measurement), _named, minutes):
            _start_parents(processes, side, threads)
            for number in numbers:
                match = measurement["matches"][number]
                match["blocks"].append(_play(processes, match, number, threads, results))
                replace_file(path, json.dumps(measurement, indent=1))
            processes.stop_parents()
    return not _left(measurement)


Step = tuple[int, str, list[int]]  # a block that is still to be played, a side, its matches


def _named(step: Step) -> str:
    return f"{step[1]}: block {step[0] + 1} of {LOOKS[-1]}"


def _left(measurement: dict) -> list[Step]:
    matches = measurement["matches"]
    left = []
    for block in range(LOOKS[-1]):
        for side in dict.fromkeys(match["framework"] for match in matches):
            numbers = [
                number
                for number, match in enumerate(matches)
                if match["framework"] == side and len(match["blocks"]) <= block
            ]
            if numbers:
                left.append((block, side, numbers))
    return left


def _start_parents(processes: Processes, side: str, threads: int) -> None:
    failures = processes.start_parents(parent_key(case, threads) for case in contenders(side))
    if failures:
        raise SystemExit(f"{side}: {next(iter(failures.values()))}")


def _play(processes, match: dict, number: int, threads: int, results: Path) -> dict[str, float]:
    """One block of a match: the log time of each who still plays."""
    block, names = len(match["blocks"]), staying(match["blocks"])
    cases = contenders(match["framework"], match["workload"])
    cases = [case for case in cases if case.variant.name in names]
    data = datasets.materialise(cases[0].task.dataset, results / "data")
    played = Match(
        processes,
        start_order(cases, number, block),
        data={cases[0].workload.task: str(data)},
        threads=threads,
        seed=SEED + block,
        evidence=False,
        number=number,
        side_by_side=min(threads, 4) if processes.forks else 1,
    ).play(EFFORT["default"].rounds)
    samples, failed = {}, []
    for case in cases:
        outcome = played.get(case.id)
        if outcome and outcome.status == "OK":
            samples[case.variant.name] = outcome.samples
        else:
            reason = outcome.reason if outcome else "there was no room for it"
            failed.append(f"{case.id}: {reason}")
    if not samples:
        raise SystemExit(failed[0])
    match.setdefault("failed", []).extend(failed)
    for line in failed:
        print(f"left out of a block: {line}", file=sys.stderr)
    return block_times(samples)


# What a measurement says -------------------------------------------------------------------------


@dataclass(frozen=True)
class Judged:
    """The result of a pair. `side`: of `SIDES`. `kind`: "control", or what was planted."""

    side: str
    workload: str
    kind: str
    result: verdicts.Ratio

    @property
    def verdict(self) -> str:
        """Its verdict, in words."""
        return self.result.verdict or "without verdict"


def judged(measurement: dict, looks: tuple[int, ...] = LOOKS) -> list[Judged]:
    """The result of each pair in a run that ends at the last of these looks."""
    outcomes = []
    for match in measurement["matches"]:
        if not match["blocks"]:
            continue
        compared = pairs()
        results = judge(fit_of(match["blocks"][: looks[-1]]), list(compared.values()), looks)
        for name, result in zip(compared, results, strict=True):
            if result is not None:  # nobody is left of a pair of which one failed
                kind = "control" if name.startswith("same") else name.partition("_")[0]
                outcomes.append(Judged(match["framework"], match["workload"], kind, result))
    return outcomes


def summary(measurement: dict) -> str:
    """A line for each pair, then how often each verdict was reached, and what leaving changed."""
    lines, blocks = [], {}
    for pair in judged(measurement):
        result = pair.result
        low, high = result.ci or (result.ratio, result.ratio)
        lines.append(
            f"{pair.side} {pair.workload} {pair.kind:8} {result.ratio:.3f} "
            f"[{low:.3f}, {high:.3f}] sd {result.sd or 0:.3f} {result.n} blocks {pair.verdict}"
        )
        by_verdict = blocks.setdefault((pair.side, pair.kind), {})
        by_verdict.setdefault(pair.verdict, []).append(result.n)
    for (side, kind), by_verdict in sorted(blocks.items()):
        counts = ", ".join(f"{len(of_one)} {verdict}" for verdict, of_one in by_verdict.items())
        mean = float(np.mean([n for of_one in by_verdict.values() for n in of_one]))
        lines.append(f"{side} {kind}: {counts}; {mean:.1f} blocks on average")
    return "\n".join([*lines, *moved(measurement), *failures(measurement)])


def failures(measurement: dict) -> list[str]:
    """The contenders that could not be measured in a block."""
    failed = [line for match in measurement["matches"] for line in match.get("failed", ())]
    return [f"left out of a block: {line}" for line in failed]


def moved(measurement: dict) -> list[str]:
    """How the ratios of those who stayed changed when others left, with 95% intervals."""
    lines = []
    for kind, words in (("same", "equal work"), ("slow5", "5% planted"), ("slow10", "10% planted")):
        changes = [
            change
            for match in measurement["matches"]
            for pair in _of_kind(kind)
            for change in _change(match["blocks"], pair)
        ]
        if len(changes) > 1:
            interval = verdicts.t_interval(changes)
            mean, low, high = (
                100 * (exp(value) - 1) for value in (interval.mean, interval.low, interval.high)
            )
            lines.append(
                f"{words}: ratios of {interval.n} pairs moved by {mean:+.2f}% "
                f"({low:+.2f}–{high:+.2f}) when others had left"
            )
    return lines


def _of_kind(kind: str) -> list[Pair]:
    return [pair for name, pair in pairs().items() if name.startswith(kind)]


def _log_ratios(blocks: list[dict[str, float]], pair: Pair) -> list[float]:
    """The log ratio of a pair in each block that has both."""
    return [b[pair.top] - b[pair.bottom] for b in blocks if pair.top in b and pair.bottom in b]


def _change(blocks: list[dict[str, float]], pair: Pair) -> list[float]:
    """The pair's log ratio after the first who left, less that before; nothing without both."""
    before = _log_ratios(blocks[: LOOKS[0]], pair)  # nobody leaves before the first look
    after = _log_ratios(blocks[LOOKS[0] :], pair)
    return [float(np.mean(after) - np.mean(before))] if before and after else []


def noise_of(measurement: dict) -> dict[str, list[float]]:
    """The log ratios of equal work by framework, block by block."""
    noise: dict[str, list[float]] = {}
    for match in measurement["matches"]:
        ratios = noise.setdefault(match["framework"], [])
        for pair in _of_kind("same"):
            ratios += _log_ratios(match["blocks"], pair)
    return noise
