"""Disturbances: live pairs of known ratio beside a program that disturbs them.


    twinbench validate disturbances [--kinds cores,disk] [--framework pt,tf] [--runs 1]
                                    [--minutes N]

Two workers do the same, a third works 10% longer. Meanwhile another program burns one core or all,
reads memory as fast as it can, takes nearly all memory, or writes to the disk. Or all workers are
paused now and then, as on a laptop that sleeps, or get only one core for a while. Where the system
permits it, they get a quota of half the cores, or the clock is lowered. A run may be unable to
tell. A verdict that is wrong is a fault, and the exit status is 1.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.analysis.bounds import LOOKS
from bench.analysis.fit import block_times, fit_of
from bench.analysis.sequential import Pair, judge
from bench.harness import machine
from bench.harness.matches import Match, parent_key, start_order
from bench.harness.plan import EFFORT, SEED, Case
from bench.harness.processes import ROOT, Processes
from bench.validation.controls import contenders
from bench.validation.pace import paced
from shared import cgroups, datasets

BLOCKS = LOOKS[0]
EVERY_S, STOPPED_S = 3.0, 1.0  # how often workers are stopped, and for how long
PAIRS = {"equal work": Pair("same1", "same0"), "10% more": Pair("slow10_0", "same0")}
# Of each pair the verdicts that are not true.
WRONG = {
    "equal work": ("faster", "slower"),
    "10% more": ("faster", "slightly faster", "equivalent"),
}
CLOCKS = Path("/sys/devices/system/cpu/cpufreq")


@dataclass(frozen=True)
class Disturbed:
    """What a run found about a pair while it was disturbed.

    verdict: None if none was reached. others: the share of the cores that other programs used; None
    if unknown. reason: why there is no figure.
    """

    kind: str
    framework: str
    pair: str
    ratio: float | None
    ci: tuple[float, float] | None
    verdict: str | None
    others: float | None
    reason: str | None = None

    @property
    def wrong(self) -> bool:
        """Whether its verdict is wrong."""
        return self.verdict in WRONG[self.pair]

    def as_row(self) -> dict:
        """As it is kept."""
        kept = ("kind", "framework", "pair", "ratio", "ci", "verdict", "reason", "wrong")
        return {name: getattr(self, name) for name in kept}

    def __str__(self) -> str:
        figure = "-" if self.ratio is None else f"{self.ratio:.3f}"
        figure += f" [{self.ci[0]:.3f}, {self.ci[1]:.3f}]" if self.ci else ""
        taken = "" if self.others is None else f", others had {self.others:.0%} of the cores"
        end = "WRONG" if self.wrong else "right, or it can't tell"
        verdict = self.verdict or self.reason or "no verdict"
        return f"{self.kind:12} {self.framework} {self.pair:10} {figure}: {verdict}{taken}: {end}"


# Neighbours --------------------------------------------------------------------------------------


@contextlib.contextmanager
def neighbours(program: str, count: int) -> Iterator[list[int]]:
    """So many processes that run a program, by their numbers; none is a child of this one."""
    pids, pipe = [], subprocess.PIPE
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            command = [sys.executable, "-m", "bench.validation.neighbours", program]
            process = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe)
            stack.callback(process.communicate)  # which ends its input, and waits for its end
            pids.append(int(process.stdout.readline()))
        yield pids


# What is done to the workers ----------------------------------------------------------------------


@contextlib.contextmanager
def again_and_again(strike: Callable[[threading.Event], None]) -> Iterator[None]:
    """Call `strike` every few seconds, in a thread."""
    ended = threading.Event()

    def loop() -> None:
        while not ended.wait(EVERY_S):
            strike(ended)

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def workers() -> list[psutil.Process]:
    """All processes that this one and its children have started."""
    return psutil.Process().children(recursive=True)


def stop_and_go_on(ended: threading.Event) -> None:
    """Pause all workers for a while."""
    stopped = workers()
    for process in stopped:
        with contextlib.suppress(psutil.Error):
            process.send_signal(signal.SIGSTOP)
    ended.wait(STOPPED_S)
    for process in stopped:
        with contextlib.suppress(psutil.Error):
            process.send_signal(signal.SIGCONT)


def take_cores(ended: threading.Event) -> None:
    """Leave only one core to all threads of all workers, for a while."""
    cores = os.sched_getaffinity(0)
    for wanted in ({min(cores)}, cores):
        for process in workers():
            for task in Path(f"/proc/{process.pid}/task").glob("[0-9]*"):
                with contextlib.suppress(OSError):  # a thread that has ended
                    os.sched_setaffinity(int(task.name), wanted)
        ended.wait(STOPPED_S)


@contextlib.contextmanager
def quotas() -> Iterator[None]:
    """Give all workers half of the cores now and then, in a new cgroup."""
    outer = cgroups.divisible()
    inner = outer / f"twinbench-{os.getpid()}"
    inner.mkdir()

    def throttle(ended: threading.Event) -> None:
        for group in (inner, outer):
            for process in workers():
                with contextlib.suppress(OSError):  # it has ended
                    (group / "cgroup.procs").write_text(str(process.pid))
            ended.wait(STOPPED_S)

    try:
        cgroups.set_quota(inner, machine.usable_threads() / 2)
        with again_and_again(throttle):
            yield
    finally:
        inner.rmdir()


def clocks() -> list[Path]:
    """The limits of the cores' clocks that this process may set; none without root."""
    return [file for file in CLOCKS.glob("*/scaling_max_freq") if os.access(file, os.W_OK)]


def lower_clocks(ended: threading.Event) -> None:
    """Let all cores run at their lowest clock, for a while."""
    before = {file: file.read_text() for file in clocks()}
    try:
        for file in before:
            file.write_text(file.with_name("cpuinfo_min_freq").read_text())
        ended.wait(STOPPED_S)
    finally:
        for file, highest in before.items():
            file.write_text(highest)


def kinds() -> dict[str, Callable]:
    """Every disturbance that this system permits, by name: a context manager."""
    cores = machine.usable_threads()
    permitted = {
        "nobody": contextlib.nullcontext,
        "one core": lambda: neighbours("burn", 1),
        "cores": lambda: neighbours("burn", cores),
        "bursts": lambda: neighbours("bursts", cores),
        "bandwidth": lambda: neighbours("bandwidth", 1),
        "disk": lambda: neighbours("disk", 1),
        "memory": lambda: neighbours("memory", 1),
    }
    if hasattr(signal, "SIGSTOP"):
        permitted["stopped"] = lambda: again_and_again(stop_and_go_on)
    if hasattr(os, "sched_setaffinity") and cores > 1:
        permitted["cores taken"] = lambda: again_and_again(take_cores)
    if cgroups.divisible():
        permitted["quota"] = quotas
    if clocks():
        permitted["clock"] = lambda: again_and_again(lower_clocks)
    return permitted


# Runs ---------------------------------------------------------------------------------------------


def disturbed(
    processes: Processes, cases: list[Case], kind: str, results: Path, seed: int
) -> list[Disturbed]:
    """Play blocks of these contenders while they are disturbed; returns the result of each pair."""
    framework, threads = cases[0].framework, machine.usable_threads()
    data = {"digits-cnn": str(datasets.materialise(cases[0].task.dataset, results / "data"))}
    blocks, others, why = [], [], None
    with kinds()[kind]():
        for block in range(BLOCKS):
            failures = processes.start_parents(parent_key(case, threads) for case in cases)
            if failures:
                why = str(next(iter(failures.values())))
                break
            match = Match(
                processes,
                start_order(cases, seed, block),
                data=data,
                threads=threads,
                seed=SEED + block,
                evidence=False,
                number=seed,
            )
            played = match.play(EFFORT["default"].rounds)
            others.append(match.conditions().others)
            failed = [p for p in played.values() if p.status != "OK"]
            if failed or len(played) < len(cases):
                why = failed[0].reason if failed else "there was no room for all"
                break
            blocks.append(block_times({c.variant.name: played[c.id].samples for c in cases}))
    known = [share for share in others if share is not None]
    return judged(kind, framework, blocks, why, max(known, default=None))


def judged(
    kind: str,
    framework: str,
    blocks: list[dict[str, float]],
    why: str | None = None,
    others: float | None = None,
) -> list[Disturbed]:
    """The result of each pair; only `why` if a block is missing."""
    if why:
        reason = f"could not be measured: {why}"
        return [
            Disturbed(kind, framework, name, None, None, None, others, reason) for name in PAIRS
        ]
    results = judge(fit_of(blocks), list(PAIRS.values()), LOOKS)
    return [
        Disturbed(kind, framework, name, result.ratio, result.ci, result.verdict, others)
        for name, result in zip(PAIRS, results, strict=True)
    ]


def report(
    frameworks: list[str],
    chosen: list[str],
    runs: int,
    results: Path,
    minutes: float | None,
    keep: Callable[[dict], None] = lambda outcome: None,
) -> int:
    """Print the result of each disturbed run; exit status 1 if a verdict was wrong.

    keep: called with the results.
    """
    pairs, done = [], 0
    names = {name for pair in PAIRS.values() for name in (pair.top, pair.bottom)}
    todo = [(r, k, f) for r in range(runs) for k in chosen for f in frameworks]
    with tempfile.TemporaryDirectory() as logs, Processes(Path(logs)) as processes:
        for number, kind, framework in paced(todo, lambda run: f"{run[1]}, {run[2]}", minutes):
            cases = [case for case in contenders(framework) if case.variant.name in names]
            for pair in disturbed(processes, cases, kind, results, number):
                pairs.append(pair)
                print(pair, flush=True)
            done += 1
    wrong = sum(pair.wrong for pair in pairs)
    decided = sum(pair.verdict is not None for pair in pairs)
    keep({"rows": [pair.as_row() for pair in pairs]})
    print(f"{len(pairs)} disturbed pairs: {decided} with a verdict, {wrong} of them wrong")
    return 1 if wrong else 0 if done == len(todo) else 2
