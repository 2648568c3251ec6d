"""How long the parts of a run take and how much memory they need, by earlier runs.

The plan asks per case. First come records of this class of machine in the results folder. Then
comes the published record, with seconds scaled by the speed of both machines. Then comes what the
row took at other work, what others of its technique took in its framework, or a usual value on two
cores.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from bench.analysis.machine_class import product, same_class
from bench.analysis.reading import load
from bench.harness.plan import ROUNDS, Case
from bench.record import Case as RecordedCase
from bench.record import Environment, Record

NEWEST = 5  # records that are read
DOCS = Path(__file__).resolve().parents[2] / "docs"
PUBLISHED, OF_A_GPU = DOCS / "results.json", DOCS / "gpu" / "results.json"
# Seconds on two cores. Of a block, each contender's start and its rounds; of training, a seed's.
USUAL_S = {"block": 1.9, "cold": 2.5, "probe": 8.0, "training": 0.8, "check": 15.0}
USUAL_BYTES = 700 << 20
ISOLATED = ("cold", "probe", "training", "check")
BEGINNING = ("start", "build", "first_call", "first_steps", "warm")


@dataclass
class Durations:
    """Seconds by part and case, and bytes by case; `rounds`: of the run to be planned.

    `measured_as`: case -> the case that was measured for it, which runs the same program.
    `baselines`: as what the baselines of a framework at a piece of work were measured.
    `describe_s`: time to ask the frameworks; `parents_s`: time to start a pass's parents. `lender`:
    the machine that all seconds are from, if none of this class was measured; `lent`: the cases
    that it measured; `lacking`: instructions that it has and this machine lacks.
    """

    rounds: int = ROUNDS
    seconds: dict[str, dict[str, float]] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)
    measured_as: dict[str, str] = field(default_factory=dict)
    baselines: dict[tuple[str, str], set[str]] = field(default_factory=dict)
    describe_s: float = 10.0
    parents_s: float = 8.0
    lender: Environment | None = None
    lent: frozenset[str] = frozenset()
    lacking: tuple[str, ...] = ()

    def of(self, part: str, case: Case) -> float:
        """The seconds of a part for a case: "block", "cold", "probe", or "training" of a seed."""
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
        took = [known[n] for n in self.baselines.get((work, side), ()) if n in known]
        return median(took) if took else None

    def _elsewhere(self, part: str, took: float, here: float | None, there: list[str]) -> float:
        """What a row takes here that `took` so long there: beyond its baseline, as much.

        A compiler takes its time with any model.
        """
        plain = self._baseline(part, *there)
        if here is None or plain is None:
            return took
        return here + took - plain if took > plain else here * took / plain

    def of_match(self, cases: list[Case]) -> float:
        """The seconds of a block of a match."""
        return sum(self.of("block", case) for case in cases)

    def of_pass(self, matches: list[list[Case]]) -> float:
        """The seconds of a block of each of these matches, with the parents that they share."""
        return self.parents_s * bool(matches) + sum(map(self.of_match, matches))

    def note_match(self, cases: list[Case], seconds: float) -> None:
        """Note what a block of a match took; it predicts the next one better than other runs do."""
        expected = {case.id: self.of("block", case) for case in cases}
        factor = seconds / sum(expected.values())
        took = {name: factor * value for name, value in expected.items()}
        self.seconds["block"] = self.seconds.get("block", {}) | took

    def memory(self, case: Case) -> int:
        """The most memory that a contender needs, in bytes."""
        return self.bytes.get(case.id, max([USUAL_BYTES, *self._near(case)]))

    def follow(self, here: Environment) -> None:
        """Scale another machine's times when the speed of this one is known."""
        if self.lender is None:
            return
        factor = _slower(here, self.lender)
        for known in self.seconds.values():
            known.update({name: factor * known[name] for name in self.lent & known.keys()})
        self.lender = None

    def note_same(self, case_id: str, measured: str, role: str) -> None:
        """Note as which case a case is measured: itself, or another that runs the same program."""
        _, work, side, _ = case_id.split("/")
        if case_id != measured:
            self.measured_as.setdefault(case_id, measured)
        if role == "baseline":
            self.baselines.setdefault((work, side), set()).add(measured)

    def note_alone(self, cases: list[Case]) -> None:
        """Note that only these cases are planned: without others, each trains for itself."""
        planned, known = {case.id for case in cases}, self.seconds.get("training", {})
        for case in cases:
            same = self.measured_as.get(case.id)
            if same in known and same not in planned:
                known[case.id] = max(known.get(case.id, 0.0), known[same])

    def note_bytes(self, case_id: str, size: int | None) -> None:
        """Note the memory of a contender in a block; the largest counts."""
        if size:
            self.bytes[case_id] = max(size, self.bytes.get(case_id, 0))

    def _near(self, case: Case) -> list[int]:
        task = case.id.split("/")[1]
        return [size for name, size in self.bytes.items() if name.split("/")[1] == task]


def learned(
    results: Path, environment: Environment, rounds: int, on_gpu: bool = False
) -> Durations:
    """Durations from the newest records in `results` of this class of machine.

    What they lack comes from the published record, scaled to this machine's speed; until that is
    measured, its machine is the `lender`. `on_gpu`: try records of a GPU first.
    """
    durations, of_here = Durations(rounds), list(_records(results, environment))
    published = list(filter(None, map(_read, [OF_A_GPU] * on_gpu + [PUBLISHED])))
    for record in of_here:
        _learn(durations, record)
        environment = record.environment
    for record in of_here[:1]:
        _learn_starts(durations, record)
    for record in published:
        _learn(durations, record, _slower(environment, record.environment))
    if published and not of_here and product(environment, "float32") is None:
        durations.lender = published[0].environment
        durations.lent = frozenset(case.id for case in published[0].cases)
        isa = published[0].environment.isa
        durations.lacking = tuple(name for name in isa if name not in environment.isa)
    return durations


def _slower(here: Environment, there: Environment) -> float:
    """How many times as long work takes here, by the best float32 products of both machines.

    1 where either is not measured, or one of them computes on a GPU.
    """
    ours, theirs = product(here, "float32"), product(there, "float32")
    if not ours or not theirs or bool(here.gpu) != bool(there.gpu):
        return 1.0
    return theirs / ours


def _learn(durations: Durations, record: Record, slower: float = 1.0) -> None:
    """Add what a record tells of its cases to what newer ones told; `slower`: than its machine."""
    for part, took in _seconds(record, durations.rounds).items():
        seconds = {name: slower * each for name, each in took.items()}
        durations.seconds[part] = seconds | durations.seconds.get(part, {})
    for case in record.cases:
        durations.note_same(case.id, case.program_id, case.role)
        sizes = [block.peak_bytes or 0 for block in case.blocks]
        if case.id not in durations.bytes:
            durations.note_bytes(case.id, max(sizes, default=0))


def _learn_starts(durations: Durations, record: Record) -> None:
    """What asking the frameworks took, and the parents of a pass."""
    passes, seconds = len({block.block for block in record.blocks}), record.seconds
    if _is_time(seconds.get("describe")):
        durations.describe_s = seconds["describe"]
    if _is_time(seconds.get("parents")):
        durations.parents_s = seconds["parents"] / max(passes, 1)


def _records(results: Path, environment: Environment) -> Iterator[Record]:
    """The newest records of this class of machine; what can't be read tells nothing.

    Before a run nothing is measured of its machine. Its class is then that of the newest record of
    the same processors; what the run's own blocks take corrects that, see `note_match`.
    """
    folders = sorted((path.parent for path in results.glob("*Z*/results.json")), reverse=True)
    read = 0
    for folder in folders:
        record = _read(folder / "results.json")
        if record and _is_of(record.environment, environment):
            read, environment = read + 1, record.environment
            yield record
        if read == NEWEST:
            return


def _is_of(theirs: Environment, here: Environment) -> bool:
    """Whether a record is of this class of machine, as far as that is known.

    The GPU is not known before a framework is asked.
    """
    return same_class(theirs if here.peak_flops else theirs.but(gpu=here.gpu), here)


def _read(path: Path) -> Record | None:
    """A record that holds what is asked of it."""
    try:
        record = load(path)
        for learn in (_learn, _learn_starts):
            learn(Durations(), record)
    except ValueError:
        return None
    return record


def _seconds(record: Record, rounds: int) -> dict[str, dict[str, float]]:
    """By part and case, in seconds of the run: what overlapped is shared out."""
    in_a_block = (*BEGINNING, "rounds")
    scale = {part: _scale(record, part) for part in (*in_a_block, *ISOLATED)}
    more = rounds / (record.rounds or ROUNDS)
    by_part: dict[str, dict[str, float]] = {part: {} for part in USUAL_S}
    for case in record.cases:
        counts = {
            "cold": len(case.cold_starts),
            "probe": int(bool(case.probed)),
            "check": int(bool(case.loss_check or case.fidelity)),
            "training": len(case.accuracy.per_seed) if case.accuracy else 0,
        }
        took = {
            part: scale[part] * seconds for part, seconds in case.seconds.items() if part in scale
        }
        if "rounds" in took and not _ends_by_time(case, record.rounds or ROUNDS):
            took["rounds"] *= more
        for part, count in counts.items():
            if count and part in took:
                by_part[part][case.id] = took[part] / count
        if blocks := len(case.blocks):
            by_part["block"][case.id] = sum(took.get(part, 0.0) for part in in_a_block) / blocks
    return {
        part: {name: seconds for name, seconds in took.items() if _is_time(seconds)}
        for part, took in by_part.items()
    }


def _ends_by_time(case: RecordedCase, rounds: int) -> bool:
    """Whether none of its blocks had all rounds: where steps are long, a block ends by time."""
    blocks = [samples for match in case.timing.step_s.values() for samples in match.values()]
    return bool(blocks) and max(map(len, blocks)) < 0.8 * rounds


def _is_time(seconds: float | None) -> bool:
    return seconds is not None and seconds > 0


def _scale(record: Record, part: str) -> float:
    """What a part took in all, in what it took for each case: less than 1 where they overlapped."""
    of_cases = sum(case.seconds.get(part, 0.0) for case in record.cases)
    whole = record.seconds.get(part)
    return whole / of_cases if of_cases and whole is not None else 1.0
