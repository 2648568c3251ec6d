"""Which cases are one piece of work, what each is compared with, and whose figures it shows."""

from __future__ import annotations

from bench.analysis.certificates import same_side

WORK = ("task", "batch_size", "mode")

Work = tuple[str, int, str]


def work_of(case: dict) -> Work:
    """What makes cases comparable: task, batch size and mode."""
    return tuple(case.get(name) for name in WORK)


def good(case: dict) -> bool:
    """Whether the case has figures of its time."""
    return case["status"] == "OK" and any(case["timing"]["step_s"].values())


def program(case: dict) -> str:
    """The case whose measurements it shows: its own, unless another's program is the same."""
    return case.get("program") or case["id"]


OF_A_PROGRAM = ("timing", "blocks", "cold_starts")
OF_A_PROBE = (*OF_A_PROGRAM, "probed")  # which is all that is measured where nothing is timed


def resolved(cases: list[dict]) -> list[dict]:
    """The cases, with the times and memory of their program where it is another's.

    Its training is no part of a program.
    """
    by_id = {case["id"]: case for case in cases}
    found = []
    for case in cases:
        shown = by_id.get(program(case), case)
        if shown is not case:
            names = OF_A_PROGRAM if shown.get("timed", True) else OF_A_PROBE
            case = case | {name: shown[name] for name in names if name in shown}
            if case["status"] == "OK" and shown["status"] != "OK":
                case |= {"status": shown["status"], "reason": shown.get("reason")}
        found.append(case)
    return found


def baseline(case: dict, cases: list[dict]) -> dict | None:
    """What the case is compared with in its own technique and framework; None for that itself."""
    for other in cases:
        if other["role"] != "baseline" or other["technique"] != case["technique"]:
            continue  # most of them, told by what costs least
        same = work_of(other) == work_of(case) and same_side(other, case)
        if same:
            return None if other["id"] == case["id"] else other
    return None
