"""What a worker answers, by operation: each answer has a type, which the harness holds it to.

Sizes are in bytes and times in seconds. What is not a finite number is None.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from bench import record
from bench.record import Artifact, Fidelity, Metric, Number, Speed

Losses = list[Number | None]


class Answer(Struct, frozen=True, kw_only=True):
    """What the answers have in common: they are immutable."""


class Configured(Answer, frozen=True, kw_only=True):
    """The settings that took effect. `keeps_freed_memory`: whether the C allocator does."""

    threads: dict[str, int | None]
    keeps_freed_memory: bool | None


class Described(Answer, frozen=True, kw_only=True):
    """A framework: versions, device, and its best products of each dtype in FLOP/s.

    onednn: whether its operators on the CPU are oneDNN's, where it has them.
    """

    versions: dict[str, str | None]
    device: str
    device_info: dict[str, Any] | None
    python: str
    products: dict[str, Speed]
    keeps_freed_memory: bool | None
    onednn: bool


class Built(Answer, frozen=True, kw_only=True):
    """A case is prepared. `wrote`: whether the file of its predictions was written for that."""

    weights_sha256: str
    wrote: bool


class FirstCall(Answer, frozen=True, kw_only=True):
    """The first call, and its loss."""

    seconds: float
    loss: Number | None


class NextSteps(Answer, frozen=True, kw_only=True):
    """The losses of the steps after the first one."""

    losses: Losses


class Warmed(Answer, frozen=True, kw_only=True):
    """How many steps make a sample, and what the harness adds to each."""

    steps: int
    empty_s: float


class Sample(Answer, frozen=True, kw_only=True):
    """One sample: seconds and joules a step, and what the process did while it waited.

    `late_s`: how long after its end the result came, a step. `took_s`: from question to answer;
    the harness notes it.
    """

    seconds: float
    steps: int
    late_s: float
    energy_j: Number | None
    waiting_cpu_s: float
    waited_s: float
    took_s: float = 0.0


class Proof(Answer, frozen=True, kw_only=True):
    """The evidence that a technique happened, or the reason why it did not."""

    evidence: dict[str, Any] | None = None
    not_applied: str | None = None


class Finished(Proof, frozen=True, kw_only=True):
    """The end of a block: traces after warm-up and now, the peak, what the case imported."""

    traces_before: int | None
    traces: int | None
    peak_bytes: Number | None
    modules: list[str] | None = None


class Compiled(Answer, frozen=True, kw_only=True):
    """What a first program took to compile."""

    seconds: float


class ColdStart(Proof, frozen=True, kw_only=True):
    """A cold start, see `bench.record.ColdStart`, with what the case imported on its way.

    `wrote`: whether the file of its predictions was written.
    """

    first_call_s: float
    memory: dict[str, Number | None]
    parts: dict[str, Number]
    device_peak: dict[str, Number | None] | None
    artifact: Artifact | None = None
    modules: list[str]
    wrote: bool

    def as_record(self) -> record.ColdStart:
        """What of it stands in the record."""
        names = record.ColdStart.__struct_fields__
        return record.ColdStart(**{name: getattr(self, name) for name in names})


class Probed(Answer, frozen=True, kw_only=True):
    """The figures of a probe and its evidence. `paused`: it takes turns, and has more to do."""

    metrics: dict[str, Metric] = {}
    evidence: dict[str, Any] | None = None
    paused: bool = False


class TrainedSeed(Proof, frozen=True, kw_only=True):
    """A training with one seed. `no_figure`: why a user's file gave no metric."""

    value: Number | None = None
    artifact: Artifact | None = None
    epochs: int = 0
    metrics: dict[str, Metric] = {}
    no_figure: str | None = None


class CheckedLoss(Answer, frozen=True, kw_only=True):
    """A short training with one seed: the first batch's loss, and that of held-out samples."""

    first: Number | None
    held_out: Number | None


class Taught(Answer, frozen=True, kw_only=True):
    """A teacher's metric."""

    value: float


# A user's file is checked by its own rules, see `shared.user_model`: `check` and `check_pair`.
OF_OPERATION: dict[str, type] = {
    "configure": Configured,
    "describe": Described,
    "build": Built,
    "first_call": FirstCall,
    "next_steps": NextSteps,
    "warm": Warmed,
    "sample": Sample,
    "finish": Finished,
    "evidence": Proof,
    "first_compile": Compiled,
    "cold_build": Built,
    "memory": ColdStart,
    "probe": Probed,
    "turn": Probed,
    "train": TrainedSeed,
    "teach": Taught,
    "deploy": Taught,
    "check_loss": CheckedLoss,
    "check_predictions": Fidelity,
    "check": dict[str, Any],
    "check_pair": dict[str, Any],
}
