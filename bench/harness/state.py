"""What a run has found, as it was found: `state.json`, from which an interrupted run is taken up.

results.json holds what is published. To go on as if it had never stopped, a run needs more: what
its matches are, who has left, and what it was asked for, with paths of this machine. So that stands
in a file of its own, which is written before the record: what the record shows, the state holds.
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
    """What a run was asked for: its options by name, and the ids of the cases selected."""

    options: dict[str, Any] = {}
    selected: list[str] = []


class ProcessId(Struct, frozen=True, kw_only=True, eq=True):
    """A process by its number and its start; another one may have the number later."""

    id: int
    started: float


class CaseState(Struct, kw_only=True):
    """Everything found of one case.

    `evidence`: of a probe. `imports`: the modules that the case's own code imports. `seconds`: what
    was measured in processes of its own took, by part.
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
        """With how many seeds it was trained."""
        return len(self.trained.per_seed) if self.trained else 0

    @property
    def training_is_over(self) -> bool:
        """Whether it is trained with no more seeds."""
        return self.trained is not None and self.trained.is_over

    def fail(self, status: str, reason: str | None) -> None:
        """Note why the case has no figures; the first reason stands."""
        if self.status == "OK":
            self.status, self.reason = status, reason

    def spend(self, part: str, seconds: float) -> None:
        """Note what a part took."""
        self.seconds[part] = self.seconds.get(part, 0.0) + seconds


class RunState(Struct, kw_only=True):
    """What a run was asked for, where it runs, and everything that it has found.

    `code`: a hash of the source that measures. `passes`: the numbers of the matches that each pass
    plays; pass n plays block n. `left`: the ids of those who left. `settled`: the settings of rows
    that were decided by others. `conditions`: of each block that was played to its end. `watched`:
    each pass as it was played, with the speed of the machine around it.
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
        """The blocks that were played to their end: (match, block)."""
        return {(found.match, found.block) for found in self.conditions}

    @property
    def described(self) -> bool:
        """Whether the frameworks have been asked, without which nothing is measured."""
        return self.environment.peak_flops is not None

    def add_match(self, cases: list[Case]) -> int:
        """Number a match."""
        self.matches.append([case.id for case in cases])
        return len(self.matches) - 1

    def add_block(self, played: dict[str, Played], conditions: Conditions) -> None:
        """Keep what a block found of each case, and under which conditions."""
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
        """Note when a pass begins, and how fast the machine is then, and its device."""
        begun = Pass(number=number, began=_now(), before=speed, device_before=device, again=again)
        self.watched.append(begun)

    def end_pass(self, speed: float, device: float | None) -> Pass:
        """Note how fast they are when a pass has ended; the pass."""
        self.watched[-1] = self.watched[-1].but(after=speed, device_after=device)
        return self.watched[-1]

    def drop_pass(self) -> None:
        """Forget the blocks that the last pass played."""
        last = self.watched[-1]
        gone = {(match, last.number) for match in last.matches}
        for case in self.cases.values():
            case.blocks = [b for b in case.blocks if (b.match, b.block) not in gone]
        self.conditions = [c for c in self.conditions if (c.match, c.block) not in gone]
        self.watched[-1] = last.but(matches=[])

    def spend(self, part: str, seconds: float) -> None:
        """Note what a part of the run took."""
        self.seconds[part] = (self.seconds.get(part) or 0.0) + seconds


def new(cases: list[Case], **fields: Any) -> RunState:
    """The state of a run of these cases that has not begun."""
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
    """What is not the same in two environments, in words."""
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
    """The process that measures."""
    return ProcessId(id=os.getpid(), started=_started(psutil.Process()))


def is_alive(process: ProcessId) -> bool:
    """Whether a process lives; another one may have its number by now."""
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
