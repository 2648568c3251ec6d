"""The record of a run: everything that was measured, in `results.json`.

`results.json` is rewritten whole and atomically after every block, so that an interrupted run
keeps what it has finished. What is derived of it, `bench/analysis` derives when it is written.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from bench.analysis.analyse import analyse
from bench.analysis.reading import as_lines
from bench.analysis.schema import SCHEMA_VERSION
from bench.harness.folders import replace_file
from bench.harness.isolated_measurements import Trained
from bench.harness.matches import Played
from bench.harness.plan import Case, Effort, Technique
from shared.specs import TASKS, forward_flops, train_step_flops

OF_BLOCK = ("first_call_s", "losses", "weights_sha256", "empty_s", "steps", "shortest_s", "seconds")
OF_BLOCK += ("peak_bytes", "energy_j")


@dataclass
class Entry:
    """Everything found of one case.

    `cold`: an answer for each cold start. `evidence`: of a probe. `imports`: the modules that the
    case's own code imports. `seconds`: what was measured apart took, by part.
    """

    case: Case
    blocks: dict[tuple[int, int], Played] = field(default_factory=dict)  # (match, block)
    cold: list[dict] = field(default_factory=list)
    probed: dict = field(default_factory=dict)
    evidence: dict | None = None
    trained: Trained | None = None
    imports: list[str] | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    status: str = "OK"
    reason: str | None = None

    def fail(self, status: str, reason: str | None) -> None:
        """Note why the case has no figures; the first reason stands."""
        if self.status == "OK":
            self.status, self.reason = status, reason

    def spend(self, part: str, seconds: float) -> None:
        """Note what a part took."""
        self.seconds[part] = self.seconds.get(part, 0.0) + seconds


class Record:
    """A run's findings and the file that holds them.

    `shown`: the case whose measurements a case shows, where that is another. `passes`: the numbers
    of the matches that each pass plays; pass n plays block n. `left`: the ids of those who left.
    """

    def __init__(
        self, folder: Path, *, command: str, effort: str, amount: Effort, environment: dict
    ) -> None:
        self.folder = folder
        self.path = folder / "results.json"
        self.top = {
            "schema_version": SCHEMA_VERSION,
            "command": command,
            "effort": effort,
            "rounds": amount.rounds,
            "looks": list(amount.looks) or None,
            "seed_looks": list(amount.seed_looks) or None,
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "resumed": [],
            "finished": False,
            "ended": None,
            "environment": environment,
            "seconds": {"total": 0.0, "first_table": None, "intervals": None},
        }
        self.techniques: dict[str, Technique] = {}
        self.entries: dict[str, Entry] = {}
        self.shown: dict[str, str] = {}
        self.matches: list[list[Case]] = []
        self.passes: list[list[int]] = []
        self.left: set[str] = set()
        self.conditions: dict[tuple[int, int], dict] = {}

    def add(self, technique: Technique, cases: list[Case]) -> None:
        """Make room for the cases of a technique, in the order of the tables."""
        self.techniques[technique.name] = technique
        for case in cases:
            self.entries[case.id] = Entry(case)

    def add_match(self, cases: list[Case]) -> int:
        """Number a match."""
        self.matches.append(cases)
        return len(self.matches) - 1

    def add_block(
        self, match: int, block: int, found: dict[str, Played], conditions: dict | None = None
    ) -> None:
        """Keep what a block found, and then under which conditions: with them it is whole."""
        for case_id, result in found.items():
            entry = self.entries[case_id]
            entry.blocks[match, block] = result
            if result.modules is not None:
                entry.imports = result.modules
            if result.status != "OK":
                entry.fail(result.status, result.reason)
        self.conditions[match, block] = conditions or {}

    def ok(self, case: Case) -> bool:
        """Whether a case, and that whose measurements it shows, can still be measured."""
        names = {case.id, self.shown.get(case.id, case.id)}
        return all(self.entries[name].status == "OK" for name in names)

    def spend(self, part: str, seconds: float) -> None:
        """Note what a part of the run took."""
        self.top["seconds"][part] = self.top["seconds"].get(part, 0.0) + seconds

    def measured(self) -> dict:
        """Everything that was measured, as it stands in the record."""
        return self.top | {
            "techniques": {
                name: {
                    "title": technique.title,
                    "differs_by_design": list(technique.differs_by_design),
                    "notes": list(technique.notes),
                }
                for name, technique in self.techniques.items()
            },
            "tasks": {
                name: {
                    "metric": t.metric,
                    "margin": t.margin,
                    "parity": t.parity,
                    "rounding": t.rounding,
                    "paired": t.paired,
                }
                for name, t in TASKS.items()
            },
            "matches": [[case.id for case in match] for match in self.matches],
            "blocks": [
                {"match": match, "block": block} | found
                for (match, block), found in sorted(self.conditions.items())
            ],
            "cases": [self._case(entry) for entry in self.entries.values()],
        }

    def _case(self, entry: Entry) -> dict:
        """What was measured of a case; what it shows of another's, that one holds."""
        program = self.entries[self.shown.get(entry.case.id, entry.case.id)]
        counts = self.techniques[entry.case.technique].counts
        evidence = _evidence(entry) if program is entry else _evidence_of(program, entry, counts)
        technique = self.techniques[entry.case.technique]
        return _case(entry, technique) | {"program": program.case.id, "evidence": evidence}

    def as_dict(self) -> dict:
        """The whole record as JSON values, with everything that is derived made anew."""
        return analyse(self.measured())

    def write(self) -> dict:
        """Rewrite `results.json` and return what stands in it."""
        found = self.as_dict()
        replace_file(self.path, as_lines(found))
        return found


def _case(entry: Entry, technique: Technique) -> dict:
    """What was measured of a case, and what must be known of it to compare it."""
    case, variant, trained = entry.case, entry.case.variant, entry.trained
    count = train_step_flops if case.workload.mode == "train" else forward_flops
    places = sorted(entry.blocks.items())
    samples: dict[str, dict[str, list[float]]] = {}
    for (match, block), played in places:
        if played.samples:
            samples.setdefault(str(match), {})[str(block)] = played.samples
    return {
        "id": case.id,
        "technique": case.technique,
        "framework": case.framework,
        "flavour": case.flavour,
        "variant": variant.name,
        "title": variant.title or variant.name.replace("_", " "),
        "role": variant.role,
        "settings": variant.settings,
        "price": asdict(technique.price_of(variant)),
        "stacking": variant.stacking,
        "remedies": list(technique.remedies),
        "task": case.workload.task,
        "batch_size": case.workload.batch_size,
        "mode": case.workload.mode,
        "timed": case.timed,
        "changes_math": variant.changes is not None,
        "changes_weights": variant.changes == "weights",
        "loss_tolerance": max(variant.loss_tolerance or 0.0, case.task.parity),
        "flops": count(case.task.model, case.workload.batch_size),
        "status": entry.status,
        "reason": entry.reason,
        "timing": {"step_s": samples},
        "blocks": [
            {"match": match, "block": block} | {name: getattr(played, name) for name in OF_BLOCK}
            for (match, block), played in places
            if played.losses
        ],
        "cold_starts": [_cold_start(cold) for cold in entry.cold],
        "accuracy": {"metric": case.task.metric, "per_seed": trained.per_seed}
        if trained and trained.per_seed
        else None,
        "trained_artifacts": trained.artifacts if trained else [],
        "trained_metrics": trained.metrics if trained else [],
        "probed": entry.probed,
        "process": next((played.settings for _, played in places), None),
        "seconds": _seconds(entry),
    }


def _cold_start(cold: dict) -> dict:
    names = ("first_call_s", "memory", "parts", "device_peak", "artifact")
    return {name: cold.get(name) for name in names}


def _evidence(entry: Entry) -> dict | None:
    """The proof of a block, of a cold start, of the training or of a probe."""
    found = [b.evidence for b in entry.blocks.values()]
    found += [entry.trained.evidence] if entry.trained else []
    found += [cold.get("evidence") for cold in entry.cold]
    whole = (next(filter(None, found), None) or {}) | (entry.evidence or {})
    return whole or None


def _evidence_of(program: Entry, entry: Entry, counts: bool) -> dict | None:
    """The proof of the program, and that of the case's own probe; sizes where these are asked."""
    found = dict(_evidence(program) or {})
    if not counts:
        found.pop("measured", None)
    return found | (entry.evidence or {}) or None


def _seconds(entry: Entry) -> dict[str, float]:
    """What each part took, over all blocks."""
    found = Counter(entry.seconds)
    for played in entry.blocks.values():
        found.update(played.seconds)
    return dict(found)
