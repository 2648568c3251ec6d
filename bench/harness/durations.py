"""How long parts of a run take, and how much memory: as earlier runs found it.

A plan asks by case. What no earlier record of this machine in the results folder knows, the
published record tells, or else what its row took at other work, or others of its technique in its
framework, or what was usual on two cores.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from bench.analysis.values import is_number
from bench.harness.plan import ROUNDS, Case

NEWEST = 5  # records that are read
PUBLISHED = Path(__file__).resolve().parents[2] / "docs" / "results.json"
# Seconds on two cores. Of a block, each contender's start and its rounds; of training, a seed's.
USUAL_S = {"block": 1.9, "cold": 2.5, "probe": 8.0, "training": 0.8}
USUAL_BYTES = 700 << 20
BEGINNING = ("start", "build", "first_call", "first_steps", "warm")
SAME_MACHINE = ("cpu", "isa", "isa_limits", "logical_cores", "threads", "gpu")


@dataclass
class Durations:
    """Seconds by part and case, and bytes by case; `rounds` are those of the run to be planned.

    `measured_as`: of a case that showed another's figures, as it runs the same program, that one.
    `baselines`: what the baselines of a framework at a piece of work were measured as.
    `describe_s` is what asking the frameworks takes, `parents_s` the parents of a pass. `lacking`:
    the instructions of the CPU that all seconds are of which this one does not have.
    """

    rounds: int = ROUNDS
    seconds: dict[str, dict[str, float]] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)
    measured_as: dict[str, str] = field(default_factory=dict)
    baselines: dict[tuple[str, str], set[str]] = field(default_factory=dict)
    describe_s: float = 10.0
    parents_s: float = 8.0
    lacking: tuple[str, ...] = ()

    def of(self, part: str, case: Case) -> float:
        """What a part takes for a case: "block", "cold", "probe", or "training" of a seed."""
        known = self.seconds.get(part, {})
        for name in (case.id, self.measured_as.get(case.id)):
            if name in known:
                return known[name]
        technique, work, side, variant = case.id.split("/")
        plain = self._baseline(part, work, side)
        if plain and case.variant.role in ("baseline", "control"):
            return plain
        ours = [n.split("/") for n in known if n.startswith(f"{technique}/")]
        sides = [name for name in ours if name[2] == side]
        nearest = [name for name in sides if name[3] == variant] or sides or ours
        if nearest:
            return median(
                self._elsewhere(part, known["/".join(name)], plain, name[1:3]) for name in nearest
            )
        return USUAL_S[part] * (case.workload.training if part == "training" else 1)

    def _baseline(self, part: str, work: str, side: str) -> float | None:
        """What a framework's baseline takes at a piece of work, if it is known.

        Probes differ by technique, and who is the first to be trained trains for others.
        """
        known = self.seconds.get(part, {}) if part in ("block", "cold") else {}
        found = [known[n] for n in self.baselines.get((work, side), ()) if n in known]
        return median(found) if found else None

    def _elsewhere(self, part: str, took: float, here: float | None, there: list[str]) -> float:
        """What a row takes here that `took` so long there: beyond its baseline, as much.

        A compiler takes its time with any model.
        """
        plain = self._baseline(part, *there)
        if here is None or plain is None:
            return took
        return here + took - plain if took > plain else here * took / plain

    def of_match(self, cases: list[Case]) -> float:
        """What a block of a match takes."""
        return sum(self.of("block", case) for case in cases)

    def of_pass(self, matches: list[list[Case]]) -> float:
        """What a block of each of these matches takes, and the parents that they share."""
        return self.parents_s * bool(matches) + sum(map(self.of_match, matches))

    def note_match(self, cases: list[Case], seconds: float) -> None:
        """What a block of a match took, which tells more of the next one than other runs do."""
        expected = {case.id: self.of("block", case) for case in cases}
        factor = seconds / sum(expected.values())
        own = {name: factor * value for name, value in expected.items()}
        self.seconds["block"] = self.seconds.get("block", {}) | own

    def memory(self, case: Case) -> int:
        """What a contender holds at most."""
        return self.bytes.get(case.id, max([USUAL_BYTES, *self._near(case)]))

    def note_same(self, case_id: str, measured: str, role: str) -> None:
        """As what a case was measured: itself, or another that runs the same program."""
        _, work, side, _ = case_id.split("/")
        if case_id != measured:
            self.measured_as.setdefault(case_id, measured)
        if role == "baseline":
            self.baselines.setdefault((work, side), set()).add(measured)

    def note_alone(self, cases: list[Case]) -> None:
        """That these are all that is planned: who shared another's training trains for itself."""
        planned, known = {case.id for case in cases}, self.seconds.get("training", {})
        for case in cases:
            same = self.measured_as.get(case.id)
            if same in known and same not in planned:
                known[case.id] = max(known.get(case.id, 0.0), known[same])

    def note_bytes(self, case_id: str, size: int | None) -> None:
        """What a contender held in a block; the most counts."""
        if size:
            self.bytes[case_id] = max(size, self.bytes.get(case_id, 0))

    def _near(self, case: Case) -> list[int]:
        task = case.id.split("/")[1]
        return [size for name, size in self.bytes.items() if name.split("/")[1] == task]


def learned(results: Path, environment: dict, rounds: int) -> Durations:
    """What the newest records in `results` of the machine of `environment` tell.

    Of what they do not tell, what the published record does, whatever its machine.
    """
    found, own = Durations(rounds), list(_records(results, environment))
    others = list(filter(None, [_read(PUBLISHED)]))
    if not own:
        theirs = [name for record in others for name in record["environment"].get("isa", ())]
        found.lacking = tuple(name for name in theirs if name not in environment["isa"])
    for record in own + others:
        _learn(found, record)
    for record in own[:1]:
        _learn_starts(found, record)
    return found


def _learn(found: Durations, record: dict) -> None:
    """Add what a record tells of its cases to what newer ones told."""
    for part, seconds in _seconds(record, found.rounds).items():
        found.seconds[part] = seconds | found.seconds.get(part, {})
    for case in record["cases"]:
        found.note_same(case["id"], case["program"], case["role"])
        sizes = [block.get("peak_bytes") or 0 for block in case["blocks"]]
        if case["id"] not in found.bytes:
            found.note_bytes(case["id"], max(sizes, default=0))


def _learn_starts(found: Durations, record: dict) -> None:
    """What asking the frameworks took, and the parents of a pass."""
    passes, seconds = len({block["block"] for block in record["blocks"]}), record["seconds"]
    if _is_time(seconds.get("describe")):
        found.describe_s = seconds["describe"]
    if _is_time(seconds.get("parents")):
        found.parents_s = seconds["parents"] / max(passes, 1)


def _records(results: Path, environment: dict) -> Iterator[dict]:
    """The newest records first; what can't be read, or is of another machine, tells nothing."""
    folders = sorted((path.parent for path in results.glob("*Z*/results.json")), reverse=True)
    read = 0
    for folder in folders:
        record = _read(folder / "results.json")
        its = record and record["environment"]
        # Before a framework was asked, a GPU is not known.
        alike = (name for name in SAME_MACHINE if name in environment)
        if its and all(its.get(name) == environment[name] for name in alike):
            read += 1
            yield record
        if read == NEWEST:
            return


def _read(path: Path) -> dict | None:
    """A record that holds what is asked of it."""
    try:
        record = json.loads(path.read_text("utf-8"))
        if record["schema_version"] == 3 and record["environment"].keys():
            for learn in (_learn, _learn_starts):
                learn(Durations(), record)
            return record
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError):
        pass
    return None


def _seconds(record: dict, rounds: int) -> dict[str, dict[str, float]]:
    """By part and case, in seconds of the run: what overlapped is shared out."""
    parts = (*BEGINNING, "rounds", "cold", "probe", "training")
    scale = {part: _scale(record, part) for part in parts}
    scale["rounds"] *= rounds / record.get("rounds", ROUNDS)
    found: dict[str, dict[str, float]] = {part: {} for part in USUAL_S}
    for case in record["cases"]:
        own, name = case["seconds"], case["id"]
        counts = {
            "cold": len(case["cold_starts"]),
            "probe": int(bool(case["probed"])),
            "training": len((case["accuracy"] or {}).get("per_seed", ())),
        }
        for part, count in counts.items():
            if count and part in own:
                found[part][name] = scale[part] * own[part] / count
        if blocks := len(case["blocks"]):
            parts = (*BEGINNING, "rounds")
            found["block"][name] = sum(scale[p] * own.get(p, 0.0) for p in parts) / blocks
    return {part: {n: s for n, s in own.items() if _is_time(s)} for part, own in found.items()}


def _is_time(seconds: object) -> bool:
    return is_number(seconds) and seconds > 0


def _scale(record: dict, part: str) -> float:
    """What a part took in all, in what it took for each case: less than 1 where they overlapped."""
    own = sum(case["seconds"].get(part, 0.0) for case in record["cases"])
    return record["seconds"].get(part, own) / own if own else 1.0
