"""The record of a run: what was found, the comparisons made of it, `results.json`.

`results.json` is rewritten whole and atomically after every block, so that an interrupted run
keeps what it has finished.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from dataclasses import dataclass, field
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from statistics import median

import numpy as np

from bench.analysis import stats
from bench.harness.matches import Block
from bench.harness.plan import FRAMEWORKS, Case, Technique
from bench.harness.probes import Trained
from shared.specs import TASKS, forward_flops, train_step_flops

SCHEMA_VERSION = 2  # 1: memory held what PyTorch imports late
MOST_FLIPPED = 100  # a flipped ReLU was seen to move a loss by 4.5e-4, 45 of its tolerances
LIFETIMES = (100, 1_000, 10_000)  # steps whose total time is given beside the first call's


@dataclass
class Entry:
    """Everything found of one case. `cold`: an answer for each cold start."""

    case: Case
    blocks: dict[tuple[int, int], Block] = field(default_factory=dict)  # (match, block)
    cold: list[dict] = field(default_factory=list)
    probed: dict = field(default_factory=dict)
    trained: Trained | None = None
    status: str = "OK"
    reason: str | None = None

    def fail(self, status: str, reason: str | None) -> None:
        """Note why the case has no figures; the first reason stands."""
        if self.status == "OK":
            self.status, self.reason = status, reason

    def lacks(self, match: int, block: int) -> bool:
        """Whether a block of a match of its is still to be measured."""
        return self.status == "OK" and (match, block) not in self.blocks

    def first_match(self) -> list[Block]:
        """The good blocks of the first match that it played in."""
        numbers = sorted({match for match, _ in self.blocks})
        return [b for (m, _), b in sorted(self.blocks.items()) if m == numbers[0] and b.samples]


class Record:
    """A run's findings and the file that holds them."""

    def __init__(self, folder: Path, *, command: str, effort: str, environment: dict) -> None:
        self.folder = folder
        self.path = folder / "results.json"
        self.top = {
            "schema_version": SCHEMA_VERSION,
            "command": command,
            "effort": effort,
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "resumed": [],
            "finished": False,
            "environment": environment,
        }
        self.techniques: dict[str, Technique] = {}
        self.entries: dict[str, Entry] = {}
        self.matches: list[list[Case]] = []

    def add(self, technique: Technique, cases: list[Case]) -> None:
        """Make room for the cases of a technique, in the order of the tables."""
        self.techniques[technique.name] = technique
        for case in cases:
            self.entries[case.id] = Entry(case)

    def add_match(self, cases: list[Case]) -> int:
        """Number a match."""
        self.matches.append(cases)
        return len(self.matches) - 1

    def add_block(self, match: int, block: int, found: dict[str, Block]) -> None:
        """Keep what a block found."""
        for case_id, result in found.items():
            entry = self.entries[case_id]
            entry.blocks[match, block] = result
            if result.status != "OK":
                entry.fail(result.status, result.reason)

    def as_dict(self) -> dict:
        """The whole record as JSON values, with every comparison made anew."""
        comparisons = self._comparisons()
        self._flag_accuracy(comparisons)
        cases = [self._case(entry, comparisons) for entry in self.entries.values()]
        return _finite(
            self.top
            | {
                "noise_floor": self._noise_floor(comparisons),
                "techniques": {
                    name: {
                        "title": technique.title,
                        "differs_by_design": list(technique.differs_by_design),
                        "notes": list(technique.notes),
                    }
                    for name, technique in self.techniques.items()
                },
                "tasks": {
                    name: {"metric": t.metric, "margin": t.margin, "parity": t.parity}
                    for name, t in TASKS.items()
                },
                "cases": cases,
                "comparisons": comparisons,
            }
        )

    def write(self) -> dict:
        """Rewrite `results.json` and return what stands in it."""
        found = self.as_dict()
        replace_file(self.path, json.dumps(found, indent=1, allow_nan=False))
        return found

    # Cases ----------------------------------------------------------------------------------

    def _case(self, entry: Entry, comparisons: list[dict]) -> dict:
        case, blocks = entry.case, entry.first_match() if entry.blocks else []
        shown = blocks[0] if blocks else next(iter(entry.blocks.values()), Block())
        return {
            "id": case.id,
            "technique": case.technique,
            "framework": case.framework,
            "flavour": case.flavour,
            "variant": case.variant.name,
            "role": case.variant.role,
            "settings": case.variant.settings,
            "task": case.workload.task,
            "batch_size": case.workload.batch_size,
            "mode": case.workload.mode,
            "status": entry.status,
            "reason": entry.reason,
            "timing": _timing(entry, blocks),
            "memory": _memory(entry.cold),
            "accuracy": self._accuracy(entry),
            "artifact_bytes": (_artifact(entry) or {}).get("bytes"),
            "metrics": self._metrics(entry, blocks)
            | _sizes(entry)
            | _measured(entry)
            | self._lifetimes(entry, blocks, comparisons)
            | {name: {"ci": None, **metric} for name, metric in entry.probed.items()},
            "certificate": shown.losses
            and {"losses": shown.losses, "weights_sha256": shown.weights_sha256},
            "evidence": _evidence(entry),
            "process": shown.settings,
        }

    def _metrics(self, entry: Entry, blocks: list[Block]) -> dict:
        if not blocks or entry.status != "OK":
            return {}
        case = entry.case
        step, ci = stats.time_interval([block.samples for block in blocks])
        size = case.workload.batch_size
        metrics = {
            "samples_per_s": _metric(size / step, "samples/s", ci and [size / t for t in ci[::-1]])
        }
        peak = self.top["environment"].get("peak_flops", {}).get(_main_dtype(_evidence(entry)))
        if peak:
            count = train_step_flops if case.workload.mode == "train" else forward_flops
            share = count(case.task.model, size) / peak
            metrics["share_of_peak"] = _metric(
                share / step, "1", ci and [share / t for t in ci[::-1]]
            )
        return metrics

    def _lifetimes(self, entry: Entry, blocks: list[Block], comparisons: list[dict]) -> dict:
        """What the first call costs in the long run: totals of N steps, and the break-even.

        Only where the cold start was repeated. The break-even is the number of steps after which
        the slower first call is repaid by faster steps; its interval spans that of the ratio and
        the range of the cold starts, and has no upper end where it may never be.
        """
        if len(entry.cold) < 2 or not blocks or entry.status != "OK":
            return {}
        first = [cold["first_call_s"] for cold in entry.cold]
        step, _ = stats.time_interval([block.samples for block in blocks])
        found = {
            f"total_{count}_steps_s": _metric(median(first) + (count - 1) * step, "s", None)
            for count in LIFETIMES
        }
        found["cold_first_calls_s"] = _metric(median(first), "s", [min(first), max(first)], first)
        base, own = self._baseline(entry), None
        for comparison in comparisons:
            if comparison["kind"] == "baseline" and comparison["numerator"] == entry.case.id:
                own = comparison
        if base and base.cold and own and own["verdict"] != "not comparable":
            usual = median(cold["first_call_s"] for cold in base.cold)
            extra = [median(first) - usual, min(first) - usual, max(first) - usual]
            each, _ = stats.time_interval([block.samples for block in base.first_match()])
            low, high = own["ci"] or (own["ratio"], own["ratio"])
            value, least, most = (
                max(0.0, more) / (each * (1 - ratio)) if ratio < 1 else None
                for more, ratio in zip(extra, (own["ratio"], low, high), strict=True)
            )
            found["break_even_steps"] = _metric(value, "steps", [least, most])
        return found

    def _accuracy(self, entry: Entry) -> dict | None:
        trained, task = entry.trained, entry.case.task
        if trained is None or not trained.per_seed:
            return None
        found = stats.t_interval(trained.per_seed)
        return {
            "metric": task.metric,
            "per_seed": trained.per_seed,
            "mean": found.mean,
            "ci": None if found.low is None else [found.low, found.high],
            "difference": self._accuracy_difference(entry, self._baseline(entry)),
        }

    def _baseline(self, entry: Entry) -> Entry | None:
        case = entry.case
        for other in self.entries.values():
            o = other.case
            same = (o.technique, o.workload, o.framework, o.flavour)
            if o.is_baseline and same == (
                case.technique,
                case.workload,
                case.framework,
                case.flavour,
            ):
                return None if other is entry else other
        return None

    def _accuracy_difference(self, entry: Entry, base: Entry | None) -> dict | None:
        if base is None or entry.trained is None or base.trained is None:
            return None
        ours, theirs = entry.trained.per_seed, base.trained.per_seed
        seeds = min(len(ours), len(theirs))
        if not seeds:
            return None
        task = entry.case.task
        return stats.compare_accuracy(
            ours[:seeds],
            theirs[:seeds],
            margin=task.margin,
            more_is_better=task.metric == "accuracy",
        )

    # Comparisons ----------------------------------------------------------------------------

    def _comparisons(self) -> list[dict]:
        """Each ratio once: baselines that play in several parts of a match are compared in one."""
        found = {}
        for number, match in enumerate(self.matches):
            for c in self._compare(number, match) if match else []:
                found.setdefault((c["kind"], c["numerator"], c["denominator"]), c)
        return list(found.values())

    def _compare(self, number: int, match: list[Case]) -> list[dict]:
        """Every ratio of a match: to the own baseline, to the twin, the controls, the best pair."""
        found = []
        for case in match:
            base = next((o for o in match if o.is_baseline and same_side(o, case)), None)
            if base and base is not case:
                kind = "control" if case.variant.role == "control" else "baseline"
                found.append(self._comparison(number, kind, case.variant.name, case, base))
        for case in match:
            if case.framework != "pt" or case.variant.role == "control":
                continue
            for twin in match:
                if twin.framework == "tf" and twin.variant.name == case.variant.name:
                    found.append(
                        self._comparison(number, "framework", case.variant.name, case, twin)
                    )
        found.append(self._best(number, match))
        return [comparison for comparison in found if comparison]

    def _best(self, number: int, match: list[Case]) -> dict | None:
        """The fastest variant of one framework against the fastest of the other.

        Only where all of a workload's cases play in one match.
        """
        side = (match[0].technique, match[0].workload)
        if sum((m[0].technique, m[0].workload) == side for m in self.matches if m) > 1:
            return None
        fastest = {}
        for case in match:
            entry = self.entries[case.id]
            blocks = [b.samples for (m, _), b in entry.blocks.items() if m == number and b.samples]
            if entry.status == "OK" and blocks and case.variant.role != "control":
                step = stats.time_interval(blocks)[0]
                if case.framework not in fastest or step < fastest[case.framework][0]:
                    fastest[case.framework] = (step, case)
        if set(fastest) != set(FRAMEWORKS):
            return None
        pt, tf = fastest["pt"][1], fastest["tf"][1]
        if pt.variant.name == tf.variant.name:
            return None
        name = f"best: {pt.variant.name} | {tf.variant.name}"
        return self._comparison(number, "framework", name, pt, tf)

    def _comparison(
        self, number: int, kind: str, name: str, top: Case, bottom: Case
    ) -> dict | None:
        ours, theirs = self.entries[top.id], self.entries[bottom.id]
        if ours.status != "OK" or theirs.status != "OK":
            return None
        pairs = [
            (block, theirs.blocks[key])
            for key, block in ours.blocks.items()
            if key[0] == number and key in theirs.blocks
        ]
        if not pairs:
            return None
        ratio = stats.compare([stats.block_log_ratio(a.samples, b.samples) for a, b in pairs])
        reason = _difference(pairs, _tolerance(top, bottom), _same_weights(top, bottom))
        return {
            "technique": top.technique,
            "variant": name,
            "task": top.workload.task,
            "batch_size": top.workload.batch_size,
            "mode": top.workload.mode,
            "kind": kind,
            "numerator": top.id,
            "denominator": bottom.id,
            "ratio": ratio.ratio,
            "ci": ratio.ci and list(ratio.ci),
            "sd": ratio.sd,
            "n": ratio.n,
            "verdict": "not comparable" if reason else ratio.verdict,
            "reason": reason,
        }

    def _flag_accuracy(self, comparisons: list[dict]) -> None:
        """A win in speed that costs more of the metric than its margin is no win for either side.

        It is "faster, less accurate" where the numerator is faster, "slower, more accurate" where
        the denominator is.
        """
        for comparison in comparisons:
            sides = [self.entries[comparison[side]] for side in ("numerator", "denominator")]
            if comparison["verdict"] == "slower":
                (loser, winner), verdict = sides, "slower, more accurate"
            elif comparison["verdict"] == "faster":
                (winner, loser), verdict = sides, "faster, less accurate"
            else:
                continue
            difference = self._accuracy_difference(winner, loser)
            sign = 1 if winner.case.task.metric == "accuracy" else -1
            if difference and sign * difference["mean"] < -winner.case.task.margin:
                comparison["verdict"] = verdict

    def _noise_floor(self, comparisons: list[dict]) -> dict:
        """How well this run can tell things apart, and what the harness costs."""
        halves = [
            (c["ci"][1] / c["ci"][0]) ** 0.5 - 1
            for c in comparisons
            if c["ci"] and c["kind"] != "control"
        ]
        empty, shortest = {}, None
        for entry in self.entries.values():
            for block in entry.blocks.values():
                if block.samples and block.empty_s is not None:
                    empty.setdefault(entry.case.framework, []).append(
                        block.empty_s / median(block.samples)
                    )
                    sample = median(block.samples) * block.steps
                    shortest = sample if shortest is None else min(shortest, sample)
        return {
            "controls": [
                {
                    "framework": self.entries[c["numerator"]].case.framework,
                    "technique": c["technique"],
                    "task": c["task"],
                    "ratio": c["ratio"],
                    "ci": c["ci"],
                    "sd": c["sd"],
                    "verdict": c["verdict"],
                }
                for c in comparisons
                if c["kind"] == "control"
            ],
            "median_half_width": median(halves) if halves else None,
            "p90_half_width": float(np.quantile(halves, 0.9)) if halves else None,
            "ratios": len(halves),
            "empty_sample_share": {name: max(values) for name, values in empty.items()},
            "shortest_sample_s": shortest,
        }


def same_side(one: Case, other: Case) -> bool:
    """Whether two cases have the same framework and flavour."""
    return (one.framework, one.flavour) == (other.framework, other.flavour)


def _tolerance(one: Case, other: Case) -> float:
    """The relative difference of losses that two certificates may show.

    Any where one of two different variants computes something else by design.
    """
    variants = one.variant, other.variant
    if variants[0].name != variants[1].name and any(v.changes_math for v in variants):
        return float("inf")
    return max(case.variant.loss_tolerance or case.task.parity for case in (one, other))


def _same_weights(one: Case, other: Case) -> bool:
    """Whether two cases must start from equal weights: twins, and rows that change none."""
    own = same_side(one, other) and one.variant.name != other.variant.name
    return not (own and any(case.variant.changes_weights for case in (one, other)))


def _difference(
    pairs: list[tuple[Block, Block]], tolerance: float, same_weights: bool
) -> str | None:
    """Why two cases did not do the same work, from their certificates; None if they did.

    The first loss, from equal weights, agrees in every block. Of the later ones, the median over
    the blocks of the largest difference is held to the tolerance: now and then rounding flips a
    ReLU, which moves the later losses of one block, while different work shows in every block. No
    block may differ by `MOST_FLIPPED` tolerances.
    """
    largest = []
    for ours, theirs in pairs:
        if same_weights and ours.weights_sha256 != theirs.weights_sha256:
            return "initial weights differ"
        apart = [
            (_apart(a, b), step)
            for step, (a, b) in enumerate(zip(ours.losses, theirs.losses, strict=True), start=1)
        ]
        if apart[0][0] > tolerance:
            return _too_far(*apart[0], tolerance)
        largest.append(max(apart))
    largest.sort()
    for difference, step, allowed in (
        (*largest[len(largest) // 2], tolerance),
        (*largest[-1], MOST_FLIPPED * tolerance),
    ):
        if difference > allowed:
            return _too_far(difference, step, allowed)
    return None


def _apart(one: float, other: float) -> float:
    """The relative difference of two losses; infinite where one is not finite."""
    difference = abs(one - other) / max(abs(other), 1e-12)
    return difference if isfinite(difference) else float("inf")


def _too_far(difference: float, step: int, allowed: float) -> str:
    return f"loss of step {step} differs by {difference:.1e}, allowed {allowed:.0e}"


def _timing(entry: Entry, blocks: list[Block]) -> dict:
    good = entry.status == "OK" and bool(blocks)
    step, ci = stats.time_interval([b.samples for b in blocks]) if good else (None, None)
    return {
        "cold_first_call_s": _median_of([cold["first_call_s"] for cold in entry.cold]),
        "warm_first_call_s": _median_of([block.first_call_s for block in blocks]),
        "step_s": [block.samples for block in blocks],
        "median_s": step,
        "ci_s": ci,
    }


def _median_of(values: list[float | None]) -> float | None:
    """The median of what was measured."""
    found = [value for value in values if value is not None]
    return median(found) if found else None


def _memory(cold: list[dict]) -> dict | None:
    """The first cold start's memory."""
    if not cold:
        return None
    found, parts = dict(cold[0]["memory"]), cold[0]["parts"]
    found |= {f"{name}_bytes": size for name, size in parts.items()}
    steady, start = found.get("steady_peak_bytes"), found.get("import_bytes")
    above = None if steady is None or start is None else steady - start
    found["rest_bytes"] = above and above - sum(parts.values())
    found["device_peak"] = cold[0]["device_peak"]
    return found


def _artifact(entry: Entry) -> dict | None:
    """The first cold start's artifact, or the one that a probe found, if the variant has one."""
    if "artifact" in entry.probed:
        sizes = (entry.probed[f"{name}artifact"]["value"] for name in ("", "compressed_"))
        return dict(zip(("bytes", "compressed_bytes"), sizes, strict=True))
    return entry.cold[0].get("artifact") if entry.cold else None


def _sizes(entry: Entry) -> dict:
    """An artifact's size as it is and compressed."""
    found = _artifact(entry)
    if not found:
        return {}
    return {
        "artifact": _metric(found["bytes"], "bytes", None),
        "compressed_artifact": _metric(found["compressed_bytes"], "bytes", None),
    }


def _measured(entry: Entry) -> dict:
    """The figures that the proof holds, such as the size of the row's model."""
    found = (_evidence(entry) or {}).get("measured", {})
    return {name: _metric(figure["value"], figure["unit"], None) for name, figure in found.items()}


def _evidence(entry: Entry) -> dict | None:
    found = [b.evidence for b in entry.blocks.values()]
    found += [cold.get("evidence") for cold in entry.cold]
    return next(filter(None, found), None)


def _main_dtype(evidence: dict | None) -> str | None:
    """The dtype in which most of the products and convolutions ran."""
    counts: dict[str, int] = {}
    for operators in (evidence or {}).get("operator_dtypes", {}).values():
        for dtype, count in operators.items():
            counts[dtype] = counts.get(dtype, 0) + count
    return max(counts, key=counts.get) if counts else None


def _metric(
    value: float | None, unit: str | None, ci: list | None, samples: list[float] | None = None
) -> dict:
    return {"value": value, "unit": unit, "ci": ci, "samples": samples}


def _finite(value):
    """The same JSON value with null for NaN and infinities, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not isfinite(value):
        return None
    return value


def replace_file(path: Path, text: str) -> None:
    """Write `path` at once: it is there whole, as it was before or as it is now."""
    partial = path.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def new_folder(results: Path) -> Path:
    """Make `results/<UTC time>` and point `results/latest` at it."""
    results.mkdir(parents=True, exist_ok=True)
    stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H-%M-%SZ")
    for number in itertools.count(1):
        folder = results / (stamp if number == 1 else f"{stamp}-{number}")
        with contextlib.suppress(FileExistsError):  # another run started in the same second
            folder.mkdir()
            break
    link = results / f".latest-{folder.name}"
    try:
        link.symlink_to(folder.name, target_is_directory=True)
    except OSError:  # no symbolic links here (Windows without the right): a file with the name
        link.write_text(folder.name, encoding="utf-8")
    os.replace(link, results / "latest")
    return folder
