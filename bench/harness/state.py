"""What a run has measured so far: `state.json`, from which `--resume` goes on.

results.json has what is published. To go on, a run also needs its matches, the cases that left, and
its options with paths of this machine. That is in this file, which is written before the record:
all that the record shows is in the state.
"""

from __future__ import annotations

import hashlib
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import psutil
from msgspec import Struct

from bench.harness.answers import ColdStart
from bench.harness.folders import replace_file
from bench.harness.isolated_measurements import Trained
from bench.harness.matches import Played
from bench.harness.plan import Case
from bench.record import Conditions, Environment, Fidelity, LossCheck, Metric, Pass

FILE = "state.json"
VERSION = 4
MEASURED_BY = (
    "shared",
    "pt_impl",
    "tf_impl",
    "bench/harness",
    "bench/probes",
    "bench/*/bench_*.py",
)
# What may differ when a run is taken up: figures, which `machine_class` judges, not conditions, and
# what sets no two machines of a class apart.
VOLATILE = ("load", "peak_flops", "first_compile_s", "products", "bandwidth", "chain", "disturbed")
VOLATILE += ("os", "memory_bytes", "products_at_end")


class Asked(Struct, frozen=True, kw_only=True):
    """The options of a run by name, and the ids of the selected cases."""

    options: dict[str, Any] = {}
    selected: list[str] = []


class ProcessId(Struct, frozen=True, kw_only=True, eq=True):
    """A process by its number and start time, because numbers are reused."""

    id: int
    started: float


class CaseState(Struct, kw_only=True):
    """Everything measured of one case.

    `evidence`: of a probe. `imports`: the modules that the case's code imports. `seconds`: of its
    measurements in new processes, by part.
    """

    blocks: list[Played] = []
    cold_starts: list[ColdStart] = []
    probed: dict[str, Metric] = {}
    evidence: dict[str, Any] | None = None
    trained: Trained | None = None
    loss_check: LossCheck | None = None
    fidelity: Fidelity | None = None
    imports: list[str] | None = None
    seconds: dict[str, float] = {}
    status: str = "OK"
    reason: str | None = None

    @property
    def seeds(self) -> int:
        """The number of seeds it was trained with."""
        return len(self.trained.per_seed) if self.trained else 0

    @property
    def training_is_over(self) -> bool:
        """Whether it is trained with no more seeds."""
        return self.trained is not None and self.trained.is_over

    def fail(self, status: str, reason: str | None) -> None:
        """Note why the case has no figures; the first reason is kept."""
        if self.status == "OK":
            self.status, self.reason = status, reason

    def spend(self, part: str, seconds: float) -> None:
        """Add the time of a part."""
        self.seconds[part] = self.seconds.get(part, 0.0) + seconds


class RunState(Struct, kw_only=True):
    """The options of a run, its machine, and everything measured so far.

    `code`: a hash of the source that measures. `passes`: the numbers of the matches of each pass;
    pass n plays block n. `left`: ids of the cases that left. `settled`: settings of rows that
    depend on others. `conditions`: of each finished block. `watched`: each pass, with the machine's
    speed before and after.
    """

    state_version: int = VERSION
    asked: Asked
    process: ProcessId
    code: str
    command: str
    effort: str
    started: str
    environment: Environment
    resumed: list[str] = []
    finished: bool = False
    ended: str | None = None
    seconds: dict[str, float | None] = {}
    settled: dict[str, dict[str, Any]] = {}
    cases: dict[str, CaseState] = {}
    matches: list[list[str]] = []
    passes: list[list[int]] = []
    left: set[str] = set()
    conditions: list[Conditions] = []
    watched: list[Pass] = []

    @property
    def played(self) -> set[tuple[int, int]]:
        """The finished blocks: (match, block)."""
        return {(found.match, found.block) for found in self.conditions}

    @property
    def described(self) -> bool:
        """Whether the frameworks were described; nothing is measured before."""
        return self.environment.peak_flops is not None

    def add_match(self, cases: list[Case]) -> int:
        """Add a match, and return its number."""
        self.matches.append([case.id for case in cases])
        return len(self.matches) - 1

    def add_block(self, played: dict[str, Played], conditions: Conditions) -> None:
        """Keep the results of a block for each case, and its conditions."""
        for name, result in played.items():
            case = self.cases[name]
            case.blocks.append(result)
            if result.modules is not None:
                case.imports = result.modules
            if result.status != "OK":
                case.fail(result.status, result.reason)
        self.conditions.append(conditions)
        if self.watched and self.watched[-1].number == conditions.block:
            current = self.watched[-1]
            self.watched[-1] = current.but(matches=[*current.matches, conditions.match])

    def begin_pass(
        self, number: int, speed: float, device: float | None, again: bool = False
    ) -> None:
        """Note that a pass begins, and the speed of machine and GPU."""
        begun = Pass(number=number, began=_now(), before=speed, device_before=device, again=again)
        self.watched.append(begun)

    def end_pass(self, speed: float, device: float | None) -> Pass:
        """Note that a pass has ended, and the speeds; returns the pass."""
        self.watched[-1] = self.watched[-1].but(after=speed, device_after=device)
        return self.watched[-1]

    def drop_pass(self) -> None:
        """Drop the blocks of the last pass."""
        last = self.watched[-1]
        gone = {(match, last.number) for match in last.matches}
        for case in self.cases.values():
            case.blocks = [b for b in case.blocks if (b.match, b.block) not in gone]
        self.conditions = [c for c in self.conditions if (c.match, c.block) not in gone]
        self.watched[-1] = last.but(matches=[])

    def spend(self, part: str, seconds: float) -> None:
        """Add the time of a part of the run."""
        self.seconds[part] = (self.seconds.get(part) or 0.0) + seconds


def new(cases: list[Case], **fields: Any) -> RunState:
    """The state of a run of these cases before it begins."""
    return RunState(
        **fields,
        process=this_process(),
        started=_now(),
        seconds={"total": 0.0, "first_table": None, "intervals": None},
        cases={case.id: CaseState() for case in cases},
    )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def save(state: RunState, folder: Path) -> None:
    """Write `state` into the folder of its run."""
    replace_file(folder / FILE, msgspec.json.encode(state).decode())


class _Version(Struct):
    state_version: int


def load(folder: Path, started: str) -> RunState:
    """The state of the run in `folder` whose record says when it `started`.

    Raises ValueError with one line if there is none, or if it can't be used.
    """
    try:
        text = (folder / FILE).read_bytes()
        version = msgspec.json.decode(text, type=_Version).state_version
    except FileNotFoundError:
        raise ValueError(f"no {FILE} beside results.json: the run can't go on") from None
    except (OSError, ValueError, RecursionError):
        raise ValueError(f"{FILE} is cut off, or not of twinbench") from None
    if version != VERSION:
        raise ValueError(
            f"{FILE} has version {version}, but this twinbench reads {VERSION}: start a new run"
        )
    try:
        state = msgspec.json.decode(text, type=RunState)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{FILE} is damaged: {error}") from None
    known = set(range(len(state.matches)))
    if not all(state.cases.keys() >= set(match) for match in state.matches):
        raise ValueError(f"{FILE} is damaged: a case of a match is missing")
    if not state.passes or not all(known >= set(numbers) for numbers in state.passes):
        raise ValueError(f"{FILE} is damaged: a match of a pass is missing")
    if state.started != started:
        raise ValueError(f"{FILE} and results.json belong to different runs")
    if is_alive(state.process):
        raise ValueError(f"process {state.process.id} is still measuring it")
    return state


def claim(folder: Path, started: str) -> None:
    """Note that this process measures the run in `folder`. ValueError if another one does."""
    state = load(folder, started)
    state.process = this_process()
    save(state, folder)


# The same conditions ------------------------------------------------------------------------------


def code(*more: str) -> str:
    """A hash of all source that measures, and of that in `more` folders."""
    root = Path(__file__).resolve().parents[2]
    whole = hashlib.sha256()
    for place in (*MEASURED_BY, *more):
        paths = (root / place).rglob("*.py") if (root / place).is_dir() else root.glob(place)
        for path in sorted(paths):
            whole.update(f"{path.relative_to(root).as_posix()}\n".encode())
            whole.update(path.read_bytes())
    return whole.hexdigest()


def differences(before: dict, now: dict) -> list[str]:
    """How two environments differ, in words."""
    ours, theirs = _flat(before), _flat(now)
    return [
        f"{name} was {ours.get(name, 'unknown')}, is {theirs.get(name, 'unknown')}"
        for name in dict.fromkeys([*ours, *theirs])
        if ours.get(name) != theirs.get(name)
    ]


def _flat(value: dict, above: str = "") -> dict[str, Any]:
    """The leaves of nested dicts that are known: "packages tf keras" -> "3.15.1"."""
    leaves = {}
    for name, item in value.items():
        if item in (None, []) or (name in VOLATILE and not above):
            continue
        if isinstance(item, dict):
            leaves |= _flat(item, f"{above}{name} ")
        else:
            leaves[f"{above}{name}"] = item
    return leaves


def this_process() -> ProcessId:
    """The id of this process."""
    return ProcessId(id=os.getpid(), started=_started(psutil.Process()))


def is_alive(process: ProcessId) -> bool:
    """Whether a process is alive, and not another one with its number."""
    try:
        living = psutil.Process(process.id)
        dead = living.status() == psutil.STATUS_ZOMBIE
        return _started(living) == process.started and not dead
    except psutil.Error:
        return False


def _started(process: psutil.Process) -> float:
    """When it began: on Linux in ticks since the boot, which no change of the clock moves."""
    try:
        line = Path(f"/proc/{process.pid}/stat").read_text("utf-8", errors="replace")
        return float(line.rpartition(")")[2].split()[19])
    except (OSError, IndexError):
        return process.create_time()
