"""The ratios of a record and their verdicts, and what they say of the run's noise.

Compared are cases of one piece of work, whatever their technique: each with its own technique's
baseline in its framework ("baseline", "control" for the same work once more), with its twin
("framework"), and the fastest rows of both frameworks that keep accuracy.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from statistics import median

import numpy as np

from bench.analysis import accuracy, certificates, sequential, verdicts
from bench.analysis.fit import Fit, Samples, fit
from bench.analysis.pairing import Work, baseline, good, program, work_of
from bench.analysis.verdicts import Ratio
from shared.specs import more_is_better

Fits = dict[Work, Fit]
BEST = "best: "  # begins the name of a comparison of the best of both


def samples(cases: list[dict]) -> dict[Work, Samples]:
    """What was sampled of each piece of work, by program."""
    found: dict[Work, Samples] = {}
    for case in filter(good, cases):
        own = {
            int(match): {int(block): each for block, each in blocks.items() if each}
            for match, blocks in case["timing"]["step_s"].items()
        }
        found.setdefault(work_of(case), {})[program(case)] = own
    return found


def fits(cases: list[dict]) -> Fits:
    """The times of each piece of work, by program."""
    return {work: fit(own) for work, own in samples(cases).items()}


@dataclass(frozen=True)
class Pair:
    """Two cases that are compared, and as what."""

    kind: str
    name: str
    top: dict
    bottom: dict


def compare_all(
    cases: list[dict],
    tasks: dict,
    found: Fits,
    looks: list | None,
    seed_looks: list | None = None,
) -> list[dict]:
    """Every ratio of a record, once.

    `looks`: numbers of blocks, and `seed_looks` of seeds, after which who is decided leaves.
    """
    made = []
    for work, own in found.items():
        contenders = [case for case in cases if work_of(case) == work and good(case)]
        pairs = _pairs(contenders)
        made += _compared(own, pairs, looks)
        best = _best([c for c in contenders if accuracy.of(c, cases, tasks).kept], own)
        if best:  # chosen by its figures, it lends the others no variance
            last = _compared(own, [*pairs, best], looks)[-1:]
            made += [each for each in last if each["variant"] == best.name]
    _flag_accuracy(made, cases, tasks, seed_looks)
    return made


def _pairs(contenders: list[dict]) -> list[Pair]:
    """What is compared of one piece of work: with the own baseline, and with the twin."""
    made = []
    for case in contenders:
        base = baseline(case, contenders)
        if base and program(base) != program(case):
            kind = "control" if case["role"] == "control" else "baseline"
            made.append(Pair(kind, case["variant"], case, base))
    for case in contenders:
        if case["framework"] == "pt" and case["role"] != "control":
            made += [
                Pair("framework", case["variant"], case, twin)
                for twin in contenders
                if twin["framework"] == "tf"
                and (twin["technique"], twin["variant"]) == (case["technique"], case["variant"])
            ]
    return made


def _best(cases: list[dict], own: Fit) -> Pair | None:
    """The fastest of one framework against the fastest of the other, unless they are twins."""
    sides = [
        [c for c in cases if c["framework"] == name and c["role"] != "control"]
        for name in ("pt", "tf")
    ]
    if not all(sides):
        return None
    pt, tf = (min(side, key=lambda case: own.time(program(case))[0]) for side in sides)
    if (pt["technique"], pt["variant"]) == (tf["technique"], tf["variant"]):
        return None
    return Pair("framework", f"{BEST}{pt['variant']} | {tf['variant']}", pt, tf)


def _compared(own: Fit, pairs: list[Pair], looks: list | None) -> list[dict]:
    """The comparisons of one piece of work."""
    asked = [sequential.Pair(program(p.top), program(p.bottom), _kin(p)) for p in pairs]
    judged = zip(pairs, _judged(own, asked, looks), strict=True)
    return [_comparison(pair, ratio) for pair, ratio in judged if ratio]


def _judged(own: Fit, asked: list[sequential.Pair], looks: list | None) -> list[Ratio | None]:
    """The ratio of each pair: at a look, where a run has any, or over all blocks."""
    if looks:
        return sequential.judge(own, asked, tuple(looks))
    return [own.ratio(each.top, each.bottom) for each in asked]


def side_by_side(own: Fit, sides: dict[str, str], looks: list | None) -> dict[tuple, Ratio]:
    """The ratio of each two programs of a piece of work, by their names, both ways round.

    `sides`: the framework of each program.
    """
    names = [name for name in sides if name in own.pooled]
    found = {}
    # Each way by itself: a pair would lend its own variance to itself, turned round.
    for order in (names, names[::-1]):
        asked = [sequential.Pair(a, b, (sides[a], sides[b])) for a, b in combinations(order, 2)]
        ratios = zip(asked, _judged(own, asked, looks), strict=True)
        found |= {(pair.top, pair.bottom): ratio for pair, ratio in ratios if ratio}
    return found


def _kin(pair: Pair) -> tuple:
    """Whose noise is of the same kind: pairs of the same frameworks; controls' of two parents."""
    return (pair.kind == "control", pair.top["framework"], pair.bottom["framework"])


def _comparison(pair: Pair, ratio: verdicts.Ratio) -> dict:
    top, bottom = pair.top, pair.bottom
    reason = certificates.difference(top, bottom)
    return {
        "technique": top["technique"],
        "variant": pair.name,
        "task": top["task"],
        "batch_size": top["batch_size"],
        "mode": top["mode"],
        "kind": pair.kind,
        "numerator": top["id"],
        "denominator": bottom["id"],
        "ratio": ratio.ratio,
        "ci": ratio.ci and list(ratio.ci),
        "sd": ratio.sd,
        "n": ratio.n,
        "freedom": ratio.freedom,
        "look": ratio.look,
        "verdict": "not comparable" if reason else ratio.verdict,
        "reason": reason,
    }


def _flag_accuracy(
    comparisons: list[dict], cases: list[dict], tasks: dict, seed_looks: list | None
) -> None:
    """A win in speed that costs more of the metric than its margin is no win for either side.

    The mean over seeds decides, whatever its interval: what may have lost is no win either.
    It is "faster, less accurate" where the numerator is faster, "slower, more accurate" where
    the denominator is.
    """
    by_id = {case["id"]: case for case in cases}
    for comparison in comparisons:
        sides = [by_id[comparison[side]] for side in ("numerator", "denominator")]
        if comparison["verdict"] in ("slower", "slightly slower"):
            (loser, winner), verdict = sides, "slower, more accurate"
        elif comparison["verdict"] in ("faster", "slightly faster"):
            (winner, loser), verdict = sides, "faster, less accurate"
        else:
            continue
        found = accuracy.difference_at_any(winner, loser, cases, tasks, seed_looks)
        task = tasks[winner["task"]]
        sign = 1 if more_is_better(task["metric"]) else -1
        if found and sign * found["mean"] < -task["margin"]:
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
