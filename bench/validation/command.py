"""Test the benchmark itself, with cases whose answer is known.

    twinbench validate measure --minutes 30
    twinbench validate simulate docs
    twinbench validate reproduce A B C

docs/validation.md has the results.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from bench.analysis.reading import load, results_file
from bench.harness.folders import new_folder, replace_file
from bench.harness.plan import EFFORT, FRAMEWORKS, SEED
from bench.report import parsers
from bench.validation import (
    attacked,
    controls,
    disturbances,
    leaks,
    mutations,
    overhead,
    replay,
    reproduce,
    reproducibility,
    simulate,
)
from shared.choices import unknown


def main(arguments: list[str] | None = None) -> int:
    """Run one of the commands; return the exit status."""
    parser = _parser()
    given = parser.parse_args(arguments)
    try:
        return given.run(given)
    except ValueError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = parsers.described("twinbench validate", __doc__)
    choice = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(run: Callable, what: str, *options: str) -> argparse.ArgumentParser:
        added = choice.add_parser(run.__name__.strip("_"), help=what, description=what)
        added.set_defaults(run=run)
        for option in options:
            _add_common(added, option)
        return added

    live = command(
        _measure,
        "Time pairs of equal work, and pairs whose second does up to half more.",
        "results",
        "minutes",
    )
    live.add_argument("--framework", default="pt,tf", help=f"any of {','.join(controls.SIDES)}")
    live.add_argument(
        "--workloads",
        default=",".join(controls.WORKLOADS),
        metavar="A,B",
        help=f"default: {','.join(controls.WORKLOADS)}",
    )
    live.add_argument("--pairs", type=int, default=20, help="pairs per framework (default: 20)")
    live.add_argument("--resume", type=Path, metavar="FOLDER", help="go on where it ended")
    again = command(
        _simulate,
        "Resample the noise of `measure` or of a record: how often an interval misses the truth, "
        "or a verdict is wrong.",
    )
    again.add_argument("path", type=Path, help="a validation.json, or a record or its folder")
    again.add_argument(
        "--publish", action="store_true", help="make docs/attacked.md again (only of docs)"
    )
    past = command(_replay, "Analyse records as if their runs had been shorter.")
    past.add_argument("path", type=Path, nargs="+", help="a record, or its folder")
    agree = command(_reproduce, "Compare runs on one class of machine.")
    agree.add_argument(
        "runs", metavar="run", nargs="+", help="a record, its folder, or a revision of docs"
    )
    agree.add_argument(
        "--changed",
        metavar="KIND:RUN:COMMIT",
        action="append",
        default=[],
        help="the commit changed how this kind is measured, from this run on; "
        f"kinds: {', '.join(reproduce.KINDS)}",
    )
    kept = agree.add_mutually_exclusive_group()
    kept.add_argument("--publish", action="store_true", help="make docs/reproducibility.md again")
    kept.add_argument("--check", action="store_true", help="exit 1 if that page is outdated")
    bad = command(
        _disturbances,
        "Time pairs while other programs disturb them: no verdict may be wrong.",
        "framework",
        "results",
        "minutes",
    )
    bad.add_argument("--kinds", metavar="A,B", help=f"any of {', '.join(disturbances.kinds())}")
    bad.add_argument("--runs", type=int, default=1, help="runs per kind and framework (default: 1)")
    grown = command(
        _leaks, "Leak memory in steps, and see how small a leak is noticed.", "framework", "results"
    )
    grown.add_argument("--processes", type=int, default=10, help="per framework (default: 10)")
    costs = command(
        _overhead,
        "Time rows that do nothing against the plain step, and that against hand-written code.",
        "framework",
        "results",
    )
    costs.add_argument("--only", default="", metavar="TECHNIQUE", help="only this technique")
    costs.add_argument("--processes", type=int, default=8, help="per framework (default: 8)")
    costs.add_argument("--publish", action="store_true", help="make docs/overhead.md again")
    planted = command(
        _mutations, "Plant faults in a copy of the checkout: tests must fail.", "minutes"
    )
    planted.add_argument(
        "--only", default="", metavar="WORDS", help="faults with WORDS in the name"
    )
    planted.add_argument("--drawn", type=int, metavar="N", help="plant N random faults instead")
    planted.add_argument(
        "--of", default="bench/analysis", help="folder for --drawn (default: bench/analysis)"
    )
    planted.add_argument("--seed", type=int, default=0, help="seed for --drawn (default: 0)")
    for kept in (bad, grown, planted):
        kept.add_argument("--publish", action="store_true", help="make docs/attacked.md again")
    return parser


def _add_common(parser: argparse.ArgumentParser, option: str) -> None:
    """An option that several commands have."""
    if option == "framework":
        parser.add_argument("--framework", default="pt,tf", help="pt, tf or pt,tf (default)")
    elif option == "results":
        parser.add_argument(
            "--results",
            type=Path,
            default=Path("results"),
            metavar="DIR",
            help="folder for results (default: results)",
        )
    else:
        parser.add_argument("--minutes", type=float, metavar="N", help="end after N minutes")


# Checks of options: they raise ValueError ---------------------------------------------------------


def _names(given: str, what: str, known: Iterable[str]) -> list[str]:
    """Names that are known, comma-separated."""
    names = given.split(",")
    for name in names:
        if name not in known:
            raise ValueError(f"{what} {unknown(name, known)}")
    return names


def _frameworks(given: argparse.Namespace, *, all_to_publish: bool = True) -> list[str]:
    names = _names(given.framework, "framework", FRAMEWORKS)
    if all_to_publish and given.publish and set(names) != set(FRAMEWORKS):
        raise ValueError("--publish needs both frameworks: leave out --framework")
    return names


def _check_count(option: str, value: int | None, least: int = 1) -> None:
    if value is not None and value < least:
        raise ValueError(f"--{option}: give {least} or more, not {value}")


def _check_minutes(minutes: float | None) -> None:
    if minutes is not None and not 0 < minutes < float("inf"):
        raise ValueError(f"--minutes: give more than 0, not {minutes:g}")


# The commands -------------------------------------------------------------------------------------


def _measure(given: argparse.Namespace) -> int:
    sides = _names(given.framework, "framework", controls.SIDES)
    workloads = _names(given.workloads, "workload", controls.WORKLOADS)
    _check_count("pairs", given.pairs)
    _check_minutes(given.minutes)
    results = given.results.resolve()
    if given.resume:
        folder = given.resume.resolve()
        try:
            measurement = controls.read(folder / "validation.json")
        except ValueError as error:
            raise ValueError(f"--resume: {given.resume} {error}") from None
    else:
        measurement = controls.new_measurement(sides, workloads, given.pairs)
        folder = new_folder(results)
    path = folder / "validation.json"
    replace_file(path, json.dumps(measurement, indent=1))  # so that --resume has a file
    try:
        whole = controls.measure(path, measurement, results, given.minutes)
    except KeyboardInterrupt:
        whole = False
    print("\n".join(filter(None, [controls.summary(measurement), str(path)])))
    if not whole:
        again = f"twinbench validate measure --resume {shlex.quote(str(folder))}"
        print(f"not finished: {again} goes on where it ended", file=sys.stderr)
    return 0 if whole else 2


def _simulate(given: argparse.Namespace) -> int:
    lost = {}
    try:
        file = results_file(given.path)
        content = json.loads(file.read_text(encoding="utf-8"))
        if "schema_version" in content:
            record = load(file)
            noise, lost = replay.noise_of(record), replay.accuracy_noise_of(record)
        else:
            noise = controls.noise_of(content)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{given.path} is neither a record nor a validation.json of `measure`: {error}"
        ) from None
    if not noise or not all(len(values) > 1 for values in noise.values()):
        raise ValueError(f"{given.path} has too few blocks: 2 of each comparison are needed")
    if given.publish and file.resolve() != attacked.PUBLISHED.resolve():
        raise ValueError("--publish needs the published record: give docs")
    times = {name: simulate.simulate(values, SEED) for name, values in noise.items()}
    for name, outcomes in times.items():
        print(f"{name}: {simulate.summary(noise[name], outcomes)}")
    seeds = EFFORT["default"].seeds
    losses = [
        row for task, values in lost.items() for row in simulate.losses(task, values, seeds, SEED)
    ]
    print(simulate.losses_summary(losses))
    if given.publish:
        differences = [
            row for name, outcomes in times.items() for row in simulate.shares(name, outcomes)
        ]
        attacked.keep("differences", {"rows": differences, "runs": simulate.WORKS})
        attacked.keep("losses", {"rows": losses, "seeds": seeds, "runs": simulate.WORKS})
    return 0


def _replay(given: argparse.Namespace) -> int:
    records = [load(path) for path in given.path]
    if not any(map(replay.noise_of, records)):
        raise ValueError(f"no comparison has {replay.FEWEST} blocks: give a record of a longer run")
    print(replay.table(records))
    return 0


def _reproduce(given: argparse.Namespace) -> int:
    records = dict(map(reproduce.read, given.runs))
    if len(records) < len(given.runs):
        raise ValueError("two runs have the same name: give each run once, in its own folder")
    made = reproduce.reproduced(records, list(map(reproduce.change, given.changed)))
    if given.publish or given.check:
        return reproducibility.put(made, check=given.check)
    print(reproducibility.text(made), end="")
    return 0


def _disturbances(given: argparse.Namespace) -> int:
    known = disturbances.kinds()
    kinds = list(known) if given.kinds is None else _names(given.kinds, "kind", known)
    frameworks = _frameworks(given)
    _check_count("runs", given.runs)
    _check_minutes(given.minutes)
    about = attacked.on_this_machine() if given.publish else {}
    keep = _keep(given, "disturbances", about, "kind")
    results = given.results.resolve()
    return disturbances.report(frameworks, kinds, given.runs, results, given.minutes, keep)


def _leaks(given: argparse.Namespace) -> int:
    frameworks = _frameworks(given)
    _check_count("processes", given.processes)
    results = given.results.resolve()
    return leaks.report(frameworks, given.processes, results, publish=given.publish)


def _overhead(given: argparse.Namespace) -> int:
    frameworks = _frameworks(given, all_to_publish=False)
    _check_count("processes", given.processes, least=2)
    if not all(overhead.pairs(framework, given.only) for framework in frameworks):
        raise ValueError(
            f"--only: technique {given.only!r} has no row that does nothing in a train step"
        )
    results, publish = given.results.resolve(), given.publish
    return overhead.report(frameworks, given.only, given.processes, results, publish=publish)


def _mutations(given: argparse.Namespace) -> int:
    _check_minutes(given.minutes)
    _check_count("drawn", given.drawn)
    faults = mutations.known()
    if given.drawn:
        faults = mutations.drawn(given.of, given.drawn, given.seed)
    faults = [fault for fault in faults if given.only in fault.name]
    if not faults:
        raise ValueError(f"--only: no fault has {given.only!r} in its name")
    if given.publish and given.only:
        raise ValueError("--publish needs all faults: leave out --only")
    section = f"drawn {given.of}" if given.drawn else "planted"
    about = {"seed": given.seed} if given.drawn else {}
    return mutations.report(faults, given.minutes, _keep(given, section, about))


def _keep(
    given: argparse.Namespace, section: str, about: dict, part: str | None = None
) -> Callable[[dict], None]:
    """A function that keeps an outcome if --publish is given; part: see `attacked.keep`."""
    return lambda outcome: attacked.keep(section, about | outcome, part) if given.publish else None
