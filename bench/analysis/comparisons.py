"""The ratios of a record and their verdicts, and what they say of the run's noise.

Compared are cases of one piece of work: each with its framework's baseline ("baseline", "control"
for the same work once more), with its twin ("framework"), and the fastest of both frameworks.
"""

from __future__ import annotations

from statistics import median

import numpy as np

from bench.analysis import certificates, verdicts
from bench.analysis.certificates import same_side
from bench.analysis.fit import Fit, fit

WORK = ("technique", "task", "batch_size", "mode")

Work = tuple[str, str, int, str]
Fits = dict[Work, Fit]


def work_of(case: dict) -> Work:
    """What makes cases comparable: technique, task, batch size and mode."""
    return tuple(case[name] for name in WORK)


def good(case: dict) -> bool:
    """Whether the case has figures of its time."""
    return case["status"] == "OK" and any(case["timing"]["step_s"].values())


def fits(cases: list[dict]) -> Fits:
    """The times of each piece of work."""
    samples: dict[Work, dict] = {}
    for case in filter(good, cases):
        own = {
            int(match): {int(block): found for block, found in blocks.items() if found}
            for match, blocks in case["timing"]["step_s"].items()
        }
        samples.setdefault(work_of(case), {})[case["id"]] = own
    return {work: fit(own) for work, own in samples.items()}


def baseline(case: dict, cases: list[dict]) -> dict | None:
    """What the case is compared with in its own framework; None for that itself."""
    for other in cases:
        same = work_of(other) == work_of(case) and same_side(other, case)
        if same and other["role"] == "baseline":
            return None if other is case else other
    return None


def compare_all(cases: list[dict], tasks: dict, found: Fits) -> list[dict]:
    """Every ratio of a record, once."""
    made = []
    for work, own in found.items():
        contenders = [case for case in cases if work_of(case) == work and good(case)]
        made += filter(None, _of_work(contenders, own))
    _flag_accuracy(made, {case["id"]: case for case in cases}, tasks)
    return made


def _of_work(cases: list[dict], own: Fit) -> list[dict | None]:
    """The ratios of one piece of work: to the own baseline, to the twin, the best pair."""
    made = []
    for case in cases:
        base = baseline(case, cases)
        if base:
            kind = "control" if case["role"] == "control" else "baseline"
            made.append(_comparison(own, kind, case["variant"], case, base))
    for case in cases:
        if case["framework"] == "pt" and case["role"] != "control":
            made += [
                _comparison(own, "framework", case["variant"], case, twin)
                for twin in cases
                if twin["framework"] == "tf" and twin["variant"] == case["variant"]
            ]
    return [*made, _best(cases, own)]


def _best(cases: list[dict], own: Fit) -> dict | None:
    """The fastest of one framework against the fastest of the other, unless they are twins."""
    sides = [
        [c for c in cases if c["framework"] == name and c["role"] != "control"]
        for name in ("pt", "tf")
    ]
    if not all(sides):
        return None
    pt, tf = (min(side, key=lambda case: own.time(case["id"])[0]) for side in sides)
    if pt["variant"] == tf["variant"]:
        return None
    return _comparison(own, "framework", f"best: {pt['variant']} | {tf['variant']}", pt, tf)


def _comparison(own: Fit, kind: str, name: str, top: dict, bottom: dict) -> dict | None:
    ratio = own.ratio(top["id"], bottom["id"])
    if ratio is None:
        return None
    reason = certificates.difference(top, bottom)
    return {
        "technique": top["technique"],
        "variant": name,
        "task": top["task"],
        "batch_size": top["batch_size"],
        "mode": top["mode"],
        "kind": kind,
        "numerator": top["id"],
        "denominator": bottom["id"],
        "ratio": ratio.ratio,
        "ci": ratio.ci and list(ratio.ci),
        "sd": ratio.sd,
        "n": ratio.n,
        "verdict": "not comparable" if reason else ratio.verdict,
        "reason": reason,
    }


# Accuracy ---------------------------------------------------------------------------------------


def accuracy_difference(case: dict, other: dict | None, tasks: dict) -> dict | None:
    """The metric of a case less that of another, by the seeds that both were trained with."""
    ours, theirs = ((each or {}).get("accuracy") or {} for each in (case, other))
    ours, theirs = ours.get("per_seed") or [], theirs.get("per_seed") or []
    seeds, task = min(len(ours), len(theirs)), tasks[case["task"]]
    if not seeds:
        return None
    return verdicts.compare_accuracy(
        ours[:seeds],
        theirs[:seeds],
        margin=task["margin"],
        more_is_better=task["metric"] == "accuracy",
    )


def _flag_accuracy(comparisons: list[dict], cases: dict[str, dict], tasks: dict) -> None:
    """A win in speed that costs more of the metric than its margin is no win for either side.

    It is "faster, less accurate" where the numerator is faster, "slower, more accurate" where
    the denominator is.
    """
    for comparison in comparisons:
        sides = [cases[comparison[side]] for side in ("numerator", "denominator")]
        if comparison["verdict"] in ("slower", "slightly slower"):
            (loser, winner), verdict = sides, "slower, more accurate"
        elif comparison["verdict"] in ("faster", "slightly faster"):
            (winner, loser), verdict = sides, "faster, less accurate"
        else:
            continue
        difference, task = accuracy_difference(winner, loser, tasks), tasks[winner["task"]]
        sign = 1 if task["metric"] == "accuracy" else -1
        if difference and sign * difference["mean"] < -task["margin"]:
            comparison["verdict"] = verdict


# Noise ------------------------------------------------------------------------------------------


def noise_floor(cases: list[dict], comparisons: list[dict]) -> dict:
    """How well this run can tell things apart, and what the harness costs."""
    by_id = {case["id"]: case for case in cases}
    ratios = [c for c in comparisons if c["ci"] and c["kind"] != "control"]
    halves = [(c["ci"][1] / c["ci"][0]) ** 0.5 - 1 for c in ratios]
    empty, shortest = {}, []
    for case in cases:
        for block in case["blocks"]:
            own = case["timing"]["step_s"].get(str(block["match"]), {}).get(str(block["block"]))
            if own:
                shortest.append(block["shortest_s"])
                empty.setdefault(case["framework"], []).append(block["empty_s"] / median(own))
    shown = ("technique", "task", "ratio", "ci", "sd", "verdict")
    return {
        "controls": [
            {name: by_id[c["numerator"]][name] for name in ("framework", "flavour")}
            | {name: c[name] for name in shown}
            for c in comparisons
            if c["kind"] == "control"
        ],
        "median_half_width": median(halves) if halves else None,
        "p90_half_width": float(np.quantile(halves, 0.9)) if halves else None,
        "ratios": len(halves),
        "empty_sample_share": {name: max(values) for name, values in empty.items()},
        "shortest_sample_s": min(shortest, default=None),
    }
