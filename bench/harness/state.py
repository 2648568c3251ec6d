"""What a run has found, as it was found: `state.json`, from which an interrupted run is taken up.

results.json holds what was measured. To go on as if it had never stopped, a run needs more: losses
that are not numbers, cases that failed, and what it was asked for, with paths of this machine. So
that stands in a file of its own, which is written before the record: what the record shows, the
state holds.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import psutil

from bench.harness.folders import replace_file
from bench.harness.isolated_measurements import Trained
from bench.harness.matches import Played
from bench.harness.plan import Case
from bench.harness.record import Entry, Record

FILE = "state.json"
VERSION = 3
MEASURED_BY = (
    "shared",
    "pt_impl",
    "tf_impl",
    "bench/harness",
    "bench/probes",
    "bench/*/bench_*.py",
)
# What may differ when a run is taken up: figures, not conditions.
VOLATILE = ("load", "peak_flops", "first_compile_s")

# What a run was asked for: its options by name, and the ids of the cases that were selected.
ASKED = {"options", "selected"}

State = dict[str, Any]


def save(record: Record, *, asked: dict, code: str) -> None:
    """Write what `record` has found, what the run was `asked` for, and by which `code`."""
    found = {
        "state_version": VERSION,
        "asked": asked,
        "process": _this_process(),
        "code": code,
        "top": record.top,
        "cases": list(record.entries),
        "matches": [[case.id for case in match] for match in record.matches],
        "passes": record.passes,
        "left": sorted(record.left),
        "conditions": [[*place, found] for place, found in record.conditions.items()],
        "entries": {name: _packed(entry) for name, entry in record.entries.items()},
    }
    replace_file(record.folder / FILE, json.dumps(found))


def _packed(entry: Entry) -> dict:
    found = {field.name: getattr(entry, field.name) for field in fields(entry)}
    del found["case"]
    blocks = [[*place, vars(block)] for place, block in entry.blocks.items()]
    return found | {"blocks": blocks, "trained": entry.trained and vars(entry.trained)}


def load(folder: Path, started: str) -> State:
    """The state of the run in `folder` whose record says when it `started`.

    Raises ValueError with one clear line where there is none, or where it can't be gone on from.
    """
    path = folder / FILE
    try:
        state = json.loads(path.read_text("utf-8"))
        version = state["state_version"]
    except FileNotFoundError:
        raise ValueError(f"there is no {FILE} beside its results.json to go on from") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(f"{FILE} can't be read: it is cut off, or of another program") from None
    if version != VERSION:
        raise ValueError(
            f"{FILE} is of version {version}; this version of twinbench reads {VERSION}"
        )
    try:
        same, measuring = state["top"]["started"] == started, _is_alive(state["process"])
        whole = isinstance(state["cases"], list) and isinstance(state["code"], str)
        whole = whole and state["asked"].keys() == ASKED
        whole = whole and isinstance(state["asked"]["options"], dict)
        whole = whole and isinstance(state["asked"]["selected"], list)
    except (KeyError, TypeError, AttributeError):
        whole = False
    if not whole:
        raise ValueError(f"{FILE} is damaged") from None
    if not same:
        raise ValueError(f"{FILE} and results.json are not of the same run")
    if measuring:
        raise ValueError(f"process {state['process']['id']} is still measuring it")
    return state


def claim(folder: Path, started: str) -> None:
    """Write that this process measures the run in `folder`. ValueError where another does."""
    found = load(folder, started) | {"process": _this_process()}
    replace_file(folder / FILE, json.dumps(found))


def restore(record: Record, state: State) -> None:
    """Put what `state` holds into a record of the same cases. ValueError if it is damaged."""
    try:
        record.top = state["top"]
        for name, entry in record.entries.items():
            record.entries[name] = _unpacked(entry.case, state["entries"][name])
        for match in state["matches"]:
            record.add_match([record.entries[name].case for name in match])
        record.passes = [[int(number) for number in numbers] for numbers in state["passes"]]
        record.left = set(state["left"])
        for match, block, found in state["conditions"]:
            record.conditions[match, block] = found
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ValueError(f"{FILE} is damaged") from None


def _unpacked(case: Case, packed: dict) -> Entry:
    blocks = {(match, block): Played(**found) for match, block, found in packed["blocks"]}
    trained = packed["trained"] and Trained(**packed["trained"])
    return Entry(case, **packed | {"blocks": blocks, "trained": trained})


def reopen_failed(record: Record) -> None:
    """Forget what failed cases have, so that they are measured again, and in which company.

    A ratio is made of samples that were taken side by side. So each match loses its failed cases
    to a new one, in which they play its blocks and those that follow against those that they are
    compared with: their baseline, their twin, and where a baseline failed, all that have it for
    one. What those were found to be in the first match stands.
    """
    failed = {name for name, entry in record.entries.items() if entry.status == "FAILED"}
    for number, match in enumerate(list(record.matches)):
        again = [case for case in match if case.id in failed]
        rest = [case for case in match if case.id not in failed]
        match[:] = rest
        if again and number in record.passes[0]:  # who plays, plays in one of those
            company = [c for c in rest if any(_compared(c, other) for other in again)]
            company = [c for c in company if record.ok(c)]
            new = record.add_match(again + company)
            for numbers in record.passes:
                numbers.append(new)
    for name in failed:
        record.entries[name] = Entry(record.entries[name].case)


def _compared(one: Case, other: Case) -> bool:
    """Whether the record holds a ratio of the two: variant to baseline, or twin to twin."""
    if one.side == other.side:
        return one.is_baseline or other.is_baseline
    both = one.is_baseline and other.is_baseline
    twins = one.technique == other.technique and one.variant.name == other.variant.name
    return one.framework != other.framework and (twins or both)


# The same conditions ------------------------------------------------------------------------------


def code(*more: str) -> str:
    """A hash of all source that measures, and of that in `more` folders."""
    root = Path(__file__).resolve().parents[2]
    found = hashlib.sha256()
    for place in (*MEASURED_BY, *more):
        paths = (root / place).rglob("*.py") if (root / place).is_dir() else root.glob(place)
        for path in sorted(paths):
            found.update(f"{path.relative_to(root).as_posix()}\n".encode())
            found.update(path.read_bytes())
    return found.hexdigest()


def differences(before: dict, now: dict) -> list[str]:
    """What is not the same in two environments, in words."""
    ours, theirs = (_flat(each) for each in (before, now))
    return [
        f"{name} was {ours.get(name, 'unknown')}, is {theirs.get(name, 'unknown')}"
        for name in dict.fromkeys([*ours, *theirs])
        if ours.get(name) != theirs.get(name)
    ]


def _flat(value: dict, above: str = "") -> dict[str, Any]:
    """The leaves of nested dicts: "packages tf keras" -> "3.15.1"."""
    found = {}
    for name, item in value.items():
        if name in VOLATILE and not above:
            continue
        if isinstance(item, dict):
            found |= _flat(item, f"{above}{name} ")
        else:
            found[f"{above}{name}"] = item
    return found


def _this_process() -> dict:
    return {"id": os.getpid(), "started": _started(psutil.Process())}


def _is_alive(process: dict) -> bool:
    """Whether a process lives; another one may have its number by now."""
    try:
        found = psutil.Process(process["id"])
        dead = found.status() == psutil.STATUS_ZOMBIE
        return _started(found) == process["started"] and not dead
    except psutil.Error:
        return False


def _started(process: psutil.Process) -> float:
    """When it began: on Linux in ticks since the boot, which no change of the clock moves."""
    try:
        line = Path(f"/proc/{process.pid}/stat").read_text("utf-8", errors="replace")
        return float(line.rpartition(")")[2].split()[19])
    except (OSError, IndexError):
        return process.create_time()
