"""Does the harness tell the truth? Live A/A controls, planted slowdowns, and a simulation of both.

    twinbench validate measure [--framework pt,tf] [--pairs 10] [--blocks 8]
    twinbench validate simulate results/latest/validation.json

`measure` plays baselines of one framework against each other: a control pair is the same work
twice, in workers of different parents; in a planted pair one of the two works a tenth longer.
`simulate` resamples the recorded noise between processes and asks how often an interval covers
the truth and how often a table of 40 rows says something false.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from math import exp
from pathlib import Path

import numpy as np

from bench.analysis import verdicts
from bench.analysis.fit import block_times
from bench.harness import machine
from bench.harness.folders import new_folder
from bench.harness.matches import Match, parent_key, start_order
from bench.harness.plan import EFFORT, FRAMEWORKS, Case, Prepared, Variant, Work, Workload
from bench.harness.processes import Processes
from bench.harness.progress import clock
from bench.harness.run import SEED
from shared import datasets

PLANTED = 0.10
PAIRS_A_MATCH = 2
TABLE_ROWS = 40
DRAWS = 20_000


def prepare(impl, work: Work) -> Prepared:
    """The baseline step; a planted one works `slowdown` of each step's own time longer."""
    model = impl.kit.models.build(work.task.model, work.weights)
    optimizer = impl.kit.training.make_optimizer(model, work.task.recipe)
    step = impl.kit.training.make_train_step(model, optimizer, impl.kit.training.cross_entropy)
    predict = impl.kit.training.make_predict(model)
    if "slowdown" not in work.settings:
        return Prepared(step, predict, model, optimizer)

    def slower(x, y):
        start = time.perf_counter()
        loss = step(x, y)
        end = time.perf_counter()
        until = end + work.settings["slowdown"] * (end - start)
        while time.perf_counter() < until:
            pass
        return loss

    return Prepared(slower, predict, model, optimizer)


def took_effect(impl, work: Work, prepared: Prepared, batch) -> tuple[dict, str | None]:
    """Nothing is claimed."""
    return {}, None


def contenders(framework: str, batch: str) -> list[Case]:
    """Two baselines, their two controls from another parent, and two planted slower ones."""
    flavour = FRAMEWORKS[framework].flavours[0]
    variants = []
    for number in range(PAIRS_A_MATCH):
        variants += [
            Variant(f"a{number}"),
            Variant(f"b{number}", role="control"),
            Variant(f"slow{number}", {"slowdown": PLANTED}, role="control"),
        ]
    workload = Workload("digits-cnn", batch)
    return [
        Case("harness", "validate", __name__, framework, flavour, v, workload) for v in variants
    ]


def measure(frameworks: list[str], pairs: int, blocks: int, results: Path) -> Path:
    """Play the pairs of each framework and write `validation.json` after every block."""
    folder = new_folder(results)
    path = folder / "validation.json"
    threads = machine.usable_threads()
    found = {"environment": machine.describe(threads), "planted": PLANTED, "pairs": []}
    with Processes(folder / "logs") as processes:
        for framework in frameworks:
            _measure(processes, framework, pairs, blocks, threads, results, found, path)
    print(summary(found))
    return path


def _measure(processes, framework, pairs, blocks, threads, results, found, path) -> None:
    """One framework's pairs, a fresh set of parents for each block."""
    count = -(-pairs // PAIRS_A_MATCH)
    matches = [contenders(framework, ("small", "compute")[n % 2]) for n in range(count)]
    data = datasets.materialise(matches[0][0].task.dataset, results / "data")
    rows = []
    for number in range(pairs):
        for kind, stem in (("control", "b"), ("planted", "slow")):
            match, place = divmod(number, PAIRS_A_MATCH)
            rows.append(
                {
                    "framework": framework,
                    "kind": kind,
                    "match": match,
                    "names": [f"{stem}{place}", f"a{place}"],
                    "batch_size": matches[match][0].workload.batch_size,
                    "log_ratios": [],
                }
            )
    found["pairs"] += rows
    start = time.monotonic()
    for block in range(blocks):
        keys = {parent_key(case, threads): None for case in matches[0]}
        failures = processes.start_parents(list(keys))
        if failures:
            raise SystemExit(f"{framework}: {next(iter(failures.values()))}")
        for number, match in enumerate(matches):
            played = Match(
                processes,
                start_order(match, number, block),
                data={"digits-cnn": str(data)},
                threads=threads,
                seed=SEED + block,
                evidence=False,
                number=number,
                side_by_side=min(threads, 4) if processes.forks else 1,
            ).play(EFFORT["default"].rounds)
            for case_id, result in played.items():
                if result.status != "OK":
                    raise SystemExit(f"{case_id}: {result.status}: {result.reason}")
            times = block_times({c.variant.name: played[c.id].samples for c in match})
            for row in rows:
                if row["match"] == number:
                    ours, theirs = (times[name] for name in row["names"])
                    row["log_ratios"].append(ours - theirs)
        processes.stop_parents()
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(found, indent=1), encoding="utf-8")
        os.replace(partial, path)
        elapsed = time.monotonic() - start
        left = elapsed / (block + 1) * (blocks - block - 1)
        print(
            f"{framework}: block {block + 1} of {blocks} · {clock(elapsed)} elapsed, "
            f"about {clock(left)} left",
            file=sys.stderr,
            flush=True,
        )


def summary(found: dict) -> str:
    """A line for each pair, then counts of verdicts."""
    lines, counts = [], {}
    for row in found["pairs"]:
        judged = verdicts.compare(row["log_ratios"])
        low, high = judged.ci or (judged.ratio, judged.ratio)
        lines.append(
            f"{row['framework']} {row['kind']:8} batch {row['batch_size']:<3} "
            f"{judged.ratio:.3f} [{low:.3f}, {high:.3f}] sd {judged.sd or 0:.3f} "
            f"{judged.verdict or '-'}"
        )
        key = (row["framework"], row["kind"], judged.verdict)
        counts[key] = counts.get(key, 0) + 1
    for (framework, kind, verdict), count in sorted(counts.items(), key=str):
        lines.append(f"{framework} {kind}: {count} {verdict or 'without verdict'}")
    return "\n".join(lines)


def simulate(found: dict, blocks: int = EFFORT["default"].blocks) -> str:
    """Resample the controls' recorded block noise: coverage, and false verdicts in a table."""
    random = np.random.default_rng(SEED)
    lines = []
    for framework in dict.fromkeys(row["framework"] for row in found["pairs"]):
        rows = [r for r in found["pairs"] if (r["framework"], r["kind"]) == (framework, "control")]
        noise = np.concatenate([row["log_ratios"] for row in rows])
        noise = noise - noise.mean()  # in the simulated world the truth is a ratio of one
        covered = wrong = slight = detected = 0
        for _ in range(DRAWS):
            drawn = random.choice(noise, blocks).tolist()
            judged = verdicts.compare(drawn)
            covered += judged.ci[0] <= 1.0 <= judged.ci[1]
            wrong += judged.verdict in ("faster", "slower")
            slight += judged.verdict in ("slightly faster", "slightly slower")
            slower = verdicts.compare([value + np.log1p(found["planted"]) for value in drawn])
            detected += slower.verdict == "slower"
        table = 1 - (1 - wrong / DRAWS) ** TABLE_ROWS
        lines.append(
            f"{framework}: noise sd {exp(noise.std()) - 1:.3f} of {len(noise)} blocks; "
            f"coverage {covered / DRAWS:.1%}; a false verdict in {TABLE_ROWS} rows {table:.1%}, "
            f'"slightly" in {slight / DRAWS:.1%} of rows; '
            f"planted {found['planted']:.0%} found {detected / DRAWS:.1%}"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Run one of the two commands; return the exit status."""
    parser = argparse.ArgumentParser(prog="twinbench validate", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    live = commands.add_parser("measure", help="play live pairs")
    live.add_argument("--framework", default="pt,tf", help="pt, tf or both")
    live.add_argument("--pairs", type=int, default=10, help="pairs of each kind and framework")
    live.add_argument("--blocks", type=int, default=EFFORT["default"].blocks)
    live.add_argument("--results", type=Path, default=Path("results"))
    again = commands.add_parser("simulate", help="resample the noise of a measured file")
    again.add_argument("path", type=Path)
    given = parser.parse_args(arguments)
    if given.command == "simulate":
        try:
            found = json.loads(given.path.read_text(encoding="utf-8"))
            print(simulate(found))
        except (OSError, ValueError, KeyError, TypeError) as error:
            parser.error(f"{given.path} is not a validation.json of `measure`: {error}")
        return 0
    frameworks = given.framework.split(",")
    for name in frameworks:
        if name not in FRAMEWORKS:
            parser.error(f"there is no framework {name!r}; choose from {', '.join(FRAMEWORKS)}")
    if given.pairs < 1 or given.blocks < 1:
        parser.error("--pairs and --blocks take 1 or more")
    path = measure(frameworks, given.pairs, given.blocks, given.results.resolve())
    print(path)
    return 0
