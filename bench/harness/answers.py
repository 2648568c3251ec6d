"""The types of a worker's answers, by operation; the harness checks each answer against its type.

Sizes are in bytes, times in seconds. None is a number that is not finite.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from bench import record
from bench.record import Artifact, Fidelity, Metric, Number, Speed

Losses = list[Number | None]


class Answer(Struct, frozen=True, kw_only=True):
    """Base class of answers: immutable."""


class Configured(Answer, frozen=True, kw_only=True):
    """The settings that took effect. `keeps_freed_memory`: of the C allocator."""

    threads: dict[str, int | None]
    keeps_freed_memory: bool | None


class Described(Answer, frozen=True, kw_only=True):
    """A framework's versions, device, and best matrix products of each dtype in FLOP/s.

    onednn: whether its operators on the CPU are oneDNN's; None if it has none.
    """

    versions: dict[str, str | None]
    device: str
    device_info: dict[str, Any] | None
    python: str
    products: dict[str, Speed]
    keeps_freed_memory: bool | None
    onednn: bool


class Built(Answer, frozen=True, kw_only=True):
    """A case is ready. `wrote`: whether it wrote the file of its predictions."""

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
    """How many steps make a sample, and the harness's cost per sample."""

    steps: int
    empty_s: float


class Sample(Answer, frozen=True, kw_only=True):
    """One sample: seconds and joules per step, and what the process did while it waited.

    `late_s`: how long after its end the result came, per step. `took_s`: from request to answer,
    noted by the harness.
    """

    seconds: float
    steps: int
    late_s: float
    energy_j: Number | None
    waiting_cpu_s: float
    waited_s: float
    took_s: float = 0.0


class Proof(Answer, frozen=True, kw_only=True):
    """The evidence that a technique took effect, or the reason why it did not."""

    evidence: dict[str, Any] | None = None
    not_applied: str | None = None


class Finished(Proof, frozen=True, kw_only=True):
    """The end of a block: traces after warm-up and now, peak memory, imported modules."""

    traces_before: int | None
    traces: int | None
    peak_bytes: Number | None
    modules: list[str] | None = None


class Compiled(Answer, frozen=True, kw_only=True):
    """The time of a first program's compilation."""

    seconds: float


class ColdStart(Proof, frozen=True, kw_only=True):
    """A cold start, see `bench.record.ColdStart`, and the modules the case imported.

    `wrote`: whether it wrote the file of its predictions.
    """

    first_call_s: float
    memory: dict[str, Number | None]
    parts: dict[str, Number]
    device_peak: dict[str, Number | None] | None
    artifact: Artifact | None = None
    modules: list[str]
    wrote: bool

    def as_record(self) -> record.ColdStart:
        """The part of it that the record keeps."""
        names = record.ColdStart.__struct_fields__
        return record.ColdStart(**{name: getattr(self, name) for name in names})


class Probed(Answer, frozen=True, kw_only=True):
    """The figures of a probe, and its evidence. `paused`: it waits for its next turn."""

    metrics: dict[str, Metric] = {}
    evidence: dict[str, Any] | None = None
    paused: bool = False


class TrainedSeed(Proof, frozen=True, kw_only=True):
    """A training with one seed. `no_figure`: why a user's file returned no metric."""

    value: Number | None = None
    artifact: Artifact | None = None
    epochs: int = 0
    metrics: dict[str, Metric] = {}
    no_figure: str | None = None


class CheckedLoss(Answer, frozen=True, kw_only=True):
    """A short training with one seed: the loss of the first batch, and of held-out samples."""

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
