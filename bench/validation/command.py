"""Does the harness tell the truth? Live controls and planted slowdowns, simulation and replay.

    twinbench validate measure [--framework pt,tf,tf_keras] [--workloads small,text] [--pairs 20]
                               [--minutes N] [--resume FOLDER]
    twinbench validate simulate results/latest/validation.json | docs
    twinbench validate replay docs ...
    twinbench validate company [--kinds cores,disk] [--minutes N]
    twinbench validate leaks [--framework pt,tf] [--processes 10]
    twinbench validate tax [--framework pt,tf] [--only gradient_clipping] [--processes 8]
    twinbench validate mutations [--only WORDS | --drawn N [--of bench/report]] [--minutes N]

`measure` plays a run that ends early: pairs of the same work twice, in workers of different
parents, and beside them contenders that work longer by 2%, 5%, 10% or half, who leave at the look
that decides them; train steps of three kinds and predictions take turns. Nobody who stays may be
told apart, nor change when others leave. It saves after each block of a match, ends with --minutes
or Ctrl-C, and --resume goes on where it stood. `simulate` resamples the noise of that, or of a
record: how often an interval covers the truth, a verdict is wrong, a difference is found; of a
record, of how much accuracy, too. `replay` judges the comparisons of records as if their runs had
ended early, or played fewer rounds. `company` plays pairs beside neighbours that disturb them:
never may a verdict be wrong. `leaks` keeps memory in steps and asks whether the watch calls that a
leak. `tax` holds rows that have nothing to do against the plain step, and that against hand-written
code, both in one process. `mutations` plants faults in a copy of the checkout, one after the other,
and runs the tests that have to notice.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import exp
from pathlib import Path

import numpy as np

from bench.analysis import verdicts
from bench.analysis.bounds import LOOKS
from bench.analysis.fit import block_times, fit_of
from bench.analysis.reading import load, results_file
from bench.analysis.sequential import DECIDED, Pair, judge
from bench.harness import machine
from bench.harness.folders import new_folder, replace_file
from bench.harness.matches import Match, parent_key, start_order
from bench.harness.plan import EFFORT, FRAMEWORKS, Case, Prepared, Variant, Work, Workload
from bench.harness.processes import Processes
from bench.harness.progress import clock
from bench.harness.rows import plain
from bench.harness.run import SEED
from bench.report import parsers
from bench.validation import attacked, disturbances, leaks, mutations, overhead, replay, simulate
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


def prepare(impl, work: Work) -> Prepared:
    """The plain step and predictions; planted ones take `slowdown` of their own time longer."""
    row, slowdown = plain(impl, work), work.settings.get("slowdown")
    if not slowdown:
        return row
    return replace(row, step=_longer(row.step, slowdown), predict=_longer(row.predict, slowdown))


def _longer(call: Callable, share: float) -> Callable:
    def longer(*arrays):
        start = time.perf_counter()
        result = call(*arrays)
        end = time.perf_counter()
        until = end + share * (end - start)
        while time.perf_counter() < until:
            pass
        return result

    return longer


def took_effect(impl, work: Work, prepared: Prepared, batch) -> tuple[dict, str | None]:
    """Nothing is claimed."""
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
    """What is compared in a match, by name."""
    chain = {f"same{n + 1}": Pair(f"same{n + 1}", f"same{n}") for n in range(CONTROLS)}
    slower = {
        f"{name}_{n}": Pair(f"{name}_{n}", f"same{2 * n}")
        for name, copies in COPIES.items()
        for n in range(copies)
    }
    return chain | slower


def staying(blocks: list[dict[str, float]]) -> set[str]:
    """Who plays on: the chain, and of the planted who was not decided at the last look."""
    asked = pairs()
    everyone = {name for pair in asked.values() for name in (pair.top, pair.bottom)}
    looked = [look for look in LOOKS if look <= len(blocks)]
    if not looked:
        return everyone
    found = judge(fit_of(blocks[: looked[-1]]), list(asked.values()), LOOKS)
    decided = {n for n, one in zip(asked, found, strict=True) if one and one.verdict in DECIDED}
    return everyone - {name for name in decided if not name.startswith("same")}


def measure(path: Path, found: dict, results: Path, minutes: float | None) -> bool:
    """Play what is left of `found`, which is written to `path` as it goes; False where time ended.

    `minutes`: no block is begun that would end after them.
    """
    threads, start, left, longest = machine.usable_threads(), time.monotonic(), _left(found), 0.0
    with Processes(path.parent / "logs") as processes:
        for done, (block, side, numbers) in enumerate(left, 1):
            begun = time.monotonic()
            if minutes and begun - start + longest > 60 * minutes:
                return False
            _start_parents(processes, side, threads)
            for number in numbers:
                own = found["matches"][number]
                own["blocks"].append(_play(processes, own, number, threads, results))
                replace_file(path, json.dumps(found, indent=1))
            processes.stop_parents()
            elapsed = time.monotonic() - start
            longest = max(longest, time.monotonic() - begun)
            print(
                f"{side}: block {block + 1} of {LOOKS[-1]} · {clock(elapsed)} elapsed, "
                f"about {clock(elapsed / done * (len(left) - done))} left",
                file=sys.stderr,
                flush=True,
            )
    return True


def _left(found: dict) -> list[tuple[int, str, list[int]]]:
    """The blocks still to be played: each with a side and the numbers of its matches."""
    every = [
        (
            block,
            framework,
            [
                number
                for number, match in enumerate(found["matches"])
                if match["framework"] == framework and len(match["blocks"]) <= block
            ],
        )
        for block in range(LOOKS[-1])
        for framework in dict.fromkeys(match["framework"] for match in found["matches"])
    ]
    return [each for each in every if each[2]]


def _start_parents(processes: Processes, side: str, threads: int) -> None:
    failures = processes.start_parents(parent_key(case, threads) for case in contenders(side))
    if failures:
        raise SystemExit(f"{side}: {next(iter(failures.values()))}")


def _play(processes, match: dict, number: int, threads: int, results: Path) -> dict[str, float]:
    """One block of a match: the log time of each who still plays."""
    block, alive = len(match["blocks"]), staying(match["blocks"])
    every = contenders(match["framework"], match["workload"])
    cases = [case for case in every if case.variant.name in alive]
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
    sampled, failed = {}, []
    for case in cases:
        one = played.get(case.id)
        if one and one.status == "OK":
            sampled[case.variant.name] = one.samples
        else:
            failed.append(f"{case.id}: {one.reason if one else 'there was no room for it'}")
    if not sampled:
        raise SystemExit(failed[0])
    match.setdefault("failed", []).extend(failed)
    for each in failed:
        print(f"left out of a block: {each}", file=sys.stderr)
    return block_times(sampled)


# What was found ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Judged:
    """What came of a pair. `side`: of `SIDES`. `kind`: "control", or what was planted."""

    side: str
    workload: str
    kind: str
    said: verdicts.Ratio

    @property
    def verdict(self) -> str:
        """Its verdict, in words."""
        return self.said.verdict or "without verdict"


def judged(found: dict, looks: tuple[int, ...] = LOOKS) -> list[Judged]:
    """What came of each pair in a run that ends at the last of these looks."""
    every = []
    for match in found["matches"]:
        if not match["blocks"]:
            continue
        asked = pairs()
        results = judge(fit_of(match["blocks"][: looks[-1]]), list(asked.values()), looks)
        for name, one in zip(asked, results, strict=True):
            if one is not None:  # nobody is left of a pair of which one failed
                kind = "control" if name.startswith("same") else name.partition("_")[0]
                every.append(Judged(match["framework"], match["workload"], kind, one))
    return every


def by_kind(found: dict) -> dict[tuple[str, str], dict[str, list[int]]]:
    """Side and kind -> verdict -> the blocks that each pair with it took."""
    counts: dict[tuple[str, str], dict[str, list[int]]] = {}
    for one in judged(found):
        counts.setdefault((one.side, one.kind), {}).setdefault(one.verdict, []).append(one.said.n)
    return dict(sorted(counts.items()))


def summary(found: dict) -> str:
    """A line for each pair, then how often each verdict was reached, and what leaving moved."""
    lines = []
    for one in judged(found):
        said = one.said
        low, high = said.ci or (said.ratio, said.ratio)
        lines.append(
            f"{one.side} {one.workload} {one.kind:8} {said.ratio:.3f} [{low:.3f}, {high:.3f}] "
            f"sd {said.sd or 0:.3f} {said.n} blocks {one.verdict}"
        )
    for (side, kind), own in by_kind(found).items():
        said = ", ".join(f"{len(each)} {verdict}" for verdict, each in own.items())
        blocks = float(np.mean([n for each in own.values() for n in each]))
        lines.append(f"{side} {kind}: {said}; {blocks:.1f} blocks on average")
    return "\n".join([*lines, *moved(found), *failures(found)])


def failures(found: dict) -> list[str]:
    """Who could not be measured in a block."""
    every = [each for match in found["matches"] for each in match.get("failed", ())]
    return [f"left out of a block: {each}" for each in every]


def moved(found: dict) -> list[str]:
    """How the ratios of who stayed changed when others left, with 95% intervals."""
    lines = []
    for kind, words in (("same", "equal work"), ("slow5", "5% planted"), ("slow10", "10% planted")):
        changes = [
            change
            for match in found["matches"]
            for name, pair in pairs().items()
            if name.startswith(kind)
            for change in _change(match["blocks"], pair)
        ]
        if len(changes) > 1:
            one = verdicts.t_interval(changes)
            mean, low, high = (100 * (exp(value) - 1) for value in (one.mean, one.low, one.high))
            lines.append(
                f"{words}: ratios of {one.n} pairs moved by {mean:+.2f}% ({low:+.2f}–{high:+.2f}) "
                "when others had left"
            )
    return lines


def _change(blocks: list[dict[str, float]], pair: Pair) -> list[float]:
    """The pair's log ratio after the first who left, less that before; nothing without both."""
    before, after = (  # nobody leaves before the first look
        [b[pair.top] - b[pair.bottom] for b in part if pair.top in b and pair.bottom in b]
        for part in (blocks[: LOOKS[0]], blocks[LOOKS[0] :])
    )
    return [float(np.mean(after) - np.mean(before))] if before and after else []


def noise_of(found: dict) -> dict[str, list[float]]:
    """The log ratios of equal work by framework, block by block."""
    noise: dict[str, list[float]] = {}
    for match in found["matches"]:
        noise.setdefault(match["framework"], []).extend(
            block[pair.top] - block[pair.bottom]
            for name, pair in pairs().items()
            if name.startswith("same")
            for block in match["blocks"]
            if pair.top in block and pair.bottom in block
        )
    return noise


def main(arguments: list[str] | None = None) -> int:
    """Run one of the commands; return the exit status."""
    parser = parsers.described("twinbench validate", __doc__)
    choice = parser.add_subparsers(dest="command", required=True)
    live = choice.add_parser("measure", help="play live pairs")
    live.add_argument("--framework", default="pt,tf", help=f"of {', '.join(SIDES)}")
    live.add_argument("--workloads", default=",".join(WORKLOADS), help="of these, in turn")
    live.add_argument("--pairs", type=int, default=20, help="of equal work, in each framework")
    live.add_argument("--resume", type=Path, metavar="FOLDER", help="go on where it ended")
    again = choice.add_parser("simulate", help="resample the noise of what was measured")
    again.add_argument("path", type=Path, help="a validation.json, or a record or its folder")
    again.add_argument("--publish", action="store_true", help="make docs/attacked.md, of docs")
    past = choice.add_parser("replay", help="judge records as if their runs had ended early")
    past.add_argument("path", type=Path, nargs="+", help="a record, or its folder")
    bad = choice.add_parser("company", help="play pairs in bad company")
    bad.add_argument("--kinds", metavar="A,B", help=f"of {', '.join(disturbances.kinds())}")
    bad.add_argument("--runs", type=int, default=1, help="of each kind and framework")
    grown = choice.add_parser("leaks", help="how small a leak is found")
    grown.add_argument("--processes", type=int, default=10, help="of each framework")
    costs = choice.add_parser("tax", help="what the suite's code costs where it does nothing")
    costs.add_argument("--only", default="", metavar="TECHNIQUE", help="one technique's")
    costs.add_argument("--processes", type=int, default=8, help="of each framework")
    costs.add_argument("--publish", action="store_true", help="make docs/tax.md of it")
    planted = choice.add_parser("mutations", help="plant faults: do the tests notice?")
    planted.add_argument("--only", default="", metavar="WORDS", help="faults whose name has these")
    planted.add_argument("--drawn", type=int, metavar="N", help="draw N others in their place")
    planted.add_argument("--of", default="bench/analysis", help="from the files of this folder")
    planted.add_argument("--seed", type=int, default=0, help="which are drawn")
    for each in (bad, grown, costs):
        each.add_argument("--framework", default="pt,tf", help="pt, tf or both")
    for each in (live, bad, grown, costs):
        each.add_argument("--results", type=Path, default=Path("results"))
    for each in (live, bad, planted):
        each.add_argument("--minutes", type=float, metavar="N", help="end after so many")
    for each in (bad, grown, planted):
        each.add_argument("--publish", action="store_true", help="make docs/attacked.md of it")
    given = parser.parse_args(arguments)
    run = {"measure": _measure, "simulate": _simulate, "replay": _replay}
    run |= {"company": _company, "leaks": _leaks, "tax": _tax, "mutations": _mutations}
    try:
        return run[given.command](parser, given)
    except KeyboardInterrupt:
        return 130


def _named(parser: argparse.ArgumentParser, given: str, what: str, known: Iterable[str]) -> list:
    """Names that are known, comma-separated."""
    names = given.split(",")
    for name in names:
        if name not in known:
            parser.error(f"there is no {what} {name!r}; choose from {', '.join(known)}")
    return names


def _measure(parser: argparse.ArgumentParser, given: argparse.Namespace) -> int:
    sides = _named(parser, given.framework, "framework", SIDES)
    workloads = _named(parser, given.workloads, "workload", WORKLOADS)
    if given.pairs < 1:
        parser.error("--pairs takes 1 or more")
    _check_minutes(parser, given)
    results = given.results.resolve()
    if given.resume:
        folder = given.resume.resolve()
        try:
            found = _read(folder / "validation.json")
        except ValueError as error:
            parser.error(f"--resume: {given.resume} {error}")
    else:
        folder, found = new_folder(results), _begun(sides, workloads, given.pairs)
    path = folder / "validation.json"
    replace_file(path, json.dumps(found, indent=1))  # that there is something to go on with
    try:
        whole = measure(path, found, results, given.minutes)
    except KeyboardInterrupt:
        whole = False
    print("\n".join(filter(None, [summary(found), str(path)])))
    if not whole:
        again = f"twinbench validate measure --resume {folder}"
        print(f"not finished: {again} goes on where it ended", file=sys.stderr)
    return 0 if whole else 2


def _read(path: Path) -> dict:
    """What was measured before. ValueError where that is not there, or damaged."""
    if not path.is_file():
        raise ValueError(f"holds no {path.name}")
    try:
        found = json.loads(path.read_text("utf-8"))
        for match in found["matches"]:
            contenders(match["framework"], match["workload"])
            if match["blocks"]:
                fit_of(match["blocks"])
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"holds a damaged {path.name}") from None
    return found


def _begun(sides: list[str], workloads: list[str], count: int) -> dict:
    """What is to be measured: so many matches that each framework has `count` control pairs.

    The sides of a framework take turns, and then its workloads.
    """
    matches = []
    for framework in dict.fromkeys(SIDES[side][0] for side in sides):
        own = [side for side in sides if SIDES[side][0] == framework]
        for number in range(-(-count // CONTROLS)):
            workload = workloads[number // len(own) % len(workloads)]
            side = own[number % len(own)]
            matches.append({"framework": side, "workload": workload, "blocks": []})
    return {"environment": machine.describe(machine.usable_threads()), "matches": matches}


def _simulate(parser: argparse.ArgumentParser, given: argparse.Namespace) -> int:
    try:
        file = results_file(given.path)
        found = json.loads(file.read_text(encoding="utf-8"))
        record = load(file) if "schema_version" in found else None
        noise = replay.noise_of(record) if record else noise_of(found)
        lost = replay.accuracy_noise_of(record) if record else {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        parser.error(f"{given.path} is no record, nor a validation.json of `measure`: {error}")
    if not all(len(own) > 1 for own in noise.values()) or not noise:
        parser.error(f"{given.path} holds too few blocks")
    if given.publish and file.resolve() != attacked.PUBLISHED:
        parser.error("--publish is of the published record: `twinbench validate simulate docs`")
    times = {name: simulate.simulate(own, SEED) for name, own in noise.items()}
    for name, played in times.items():
        print(f"{name}: {simulate.summary(noise[name], played)}")
    seeds = EFFORT["default"].seeds
    rows = [row for task, own in lost.items() for row in simulate.losses(task, own, seeds, SEED)]
    print(simulate.losses_summary(rows))
    if given.publish:
        shares = [row for name, played in times.items() for row in simulate.shares(name, played)]
        attacked.keep("differences", {"rows": shares, "runs": simulate.WORKS})
        attacked.keep("losses", {"rows": rows, "seeds": seeds, "runs": simulate.WORKS})
    return 0


def _company(parser: argparse.ArgumentParser, given: argparse.Namespace) -> int:
    known = disturbances.kinds()
    frameworks = _named(parser, given.framework, "framework", FRAMEWORKS)
    chosen = list(known) if given.kinds is None else _named(parser, given.kinds, "kind", known)
    if given.runs < 1:
        parser.error("--runs takes 1 or more")
    if given.publish and set(frameworks) != set(FRAMEWORKS):
        parser.error("--publish is of both frameworks: leave --framework")
    _check_minutes(parser, given)
    results, runs, minutes = given.results.resolve(), given.runs, given.minutes
    keep = _kept(given, "company", attacked.on_this_machine() if given.publish else {}, "kind")
    return disturbances.report(contenders, frameworks, chosen, runs, results, minutes, keep)


def _leaks(parser: argparse.ArgumentParser, given: argparse.Namespace) -> int:
    frameworks = _named(parser, given.framework, "framework", FRAMEWORKS)
    if given.processes < 1:
        parser.error("--processes takes 1 or more")
    if given.publish and set(frameworks) != set(FRAMEWORKS):
        parser.error("--publish is of both frameworks: leave --framework")
    results, publish = given.results.resolve(), given.publish
    return leaks.report(frameworks, given.processes, results, publish=publish)


def _tax(parser: argparse.ArgumentParser, given: argparse.Namespace) -> int:
    frameworks = _named(parser, given.framework, "framework", FRAMEWORKS)
    if given.processes < 2:
        parser.error("--processes takes 2 or more")
    if not all(overhead.pairs(framework, given.only) for framework in frameworks):
        parser.error(f"--only: {given.only!r} is no technique of the train step with such a row")
    results, publish = given.results.resolve(), given.publish
    return overhead.report(frameworks, given.only, given.processes, results, publish=publish)


def _mutations(parser: argparse.ArgumentParser, given: argparse.Namespace) -> int:
    _check_minutes(parser, given)
    try:
        if given.drawn is not None and given.drawn < 1:
            raise ValueError("--drawn takes 1 or more")
        every = mutations.known()
        if given.drawn:
            every = mutations.drawn(given.of, given.drawn, given.seed)
        faults = [fault for fault in every if given.only in fault.name]
        if not faults:
            raise ValueError(f"--only: no fault has {given.only!r} in its name")
        if given.publish and given.only:
            raise ValueError("--publish is of all faults: leave --only away")
        section = f"drawn {given.of}" if given.drawn else "planted"
        about = {"seed": given.seed} if given.drawn else {}
        return mutations.report(faults, given.minutes, _kept(given, section, about))
    except ValueError as error:
        parser.error(str(error))


def _kept(
    given: argparse.Namespace, section: str, about: dict, part: str | None = None
) -> Callable[[dict], None]:
    """What keeps what an attack found, where it is to be published; `part`: see `attacked.keep`."""
    return lambda found: attacked.keep(section, about | found, part) if given.publish else None


def _check_minutes(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    if given.minutes is not None and not 0 < given.minutes < float("inf"):
        parser.error("--minutes takes a time above 0")


def _replay(parser: argparse.ArgumentParser, given: argparse.Namespace) -> int:
    try:
        records = {path: load(path) for path in given.path}
    except ValueError as error:
        parser.error(str(error))
    found = {path.resolve().name: replay.replay(record) for path, record in records.items()}
    found = {name: each for name, each in found.items() if each.early.count}
    if not found:
        parser.error(f"no record has comparisons of {LOOKS[1]} blocks or more")
    print(replay.table(found))
    return 0
