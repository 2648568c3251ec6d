"""Which rows of a train step go together: those that were faster, as the settings of one stack.

Gains don't multiply: a stack is measured, not computed.
"""

from __future__ import annotations

FASTER = ("faster", "slightly faster")


def winners(record: dict, framework: str, task: str) -> dict:
    """The settings of all rows of a framework on a task that were shown to be faster."""
    cases, found = {case["id"]: case for case in record["cases"]}, {}
    for each in record["comparisons"]:
        case = cases.get(each["numerator"])
        if each["kind"] != "baseline" or case is None or each["verdict"] not in FASTER:
            continue
        if case["framework"] == framework and case["task"] == task and case["mode"] == "train":
            found |= case.get("stacking") or {}
    return found


def stacked(record: dict, case: dict) -> tuple[dict, str | None]:
    """What a row stacks, by its framework and whether it keeps the mathematics; or why nothing."""
    if not any(comparison["verdict"] for comparison in record["comparisons"]):
        return {}, "one block shows of nothing that it is faster: give it time for several"
    found = winners(record, case["framework"], case["task"])
    exact = {name: value for name, value in found.items() if name != "dtype"}
    if not case["changes_math"]:
        found = exact
    elif found == exact:
        return {}, "nothing that rounds is faster: see the row that keeps the mathematics"
    if len(found) < 2:
        said = f"only {next(iter(found))} was shown to be faster" if found else "nothing was faster"
        return {}, f"{said}: there is nothing to stack"
    return found, None
