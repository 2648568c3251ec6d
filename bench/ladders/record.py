"""The record of a climb, `ladder.json`: every run as it was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct, field

from bench.record import FRAMEWORKS, Base, Environment, Metric, Number, load_json
from shared.choices import unknown

SCHEMA = 1
FILE = "ladder.json"

Rungs = tuple[str, ...]


class Evidence(Base, frozen=True, kw_only=True, eq=False):
    """The losses of the first steps, and the checksum of the initial weights."""

    losses: list[Number | None] = field(default_factory=list)
    weights_sha256: str | None = None


class Run(Base, frozen=True, kw_only=True, eq=False):
    """A whole training of a program. `together`: how many runs took turns with it."""

    stage: str
    block: int
    framework: str
    rungs: Rungs
    status: str
    reason: str | None
    metrics: dict[str, Metric]
    evidence: Evidence | None
    together: int | None = None
    seconds: float = 0.0

    @property
    def program(self) -> str:
        """Its rungs in words."""
        return "+".join(self.rungs) or "plain"

    @property
    def pair(self) -> tuple[str, int, str]:
        """Runs with the same values of these are measured together."""
        return self.stage, self.block, self.framework

    def value(self, figure: str) -> float | None:
        """The value of one of its metrics."""
        known = self.metrics.get(figure)
        return known.value if known else None


class Conditions(Environment, frozen=True, kw_only=True, eq=False):
    """The machine, the code that measured, and the task for its devices."""

    code: str | None = None
    task: str | None = None


class Climbed(Struct, kw_only=True):
    """A climb, finished or not."""

    schema_version: int = SCHEMA
    ladder: str
    command: str
    started: str
    resumed: list[str]
    finished: bool
    frameworks: list[str]
    blocks: Annotated[int, Meta(gt=0)]
    task: str
    environment: Conditions
    runs: list[Run]

    def of(self, framework: str) -> list[Run]:
        """The runs of a framework."""
        return [run for run in self.runs if run.framework == framework]


def load(path: Path) -> Climbed:
    """The record at `path`, or in the folder `path`; ValueError with one line if there is none."""
    file = path / FILE if path.is_dir() else path
    climbed = load_json(file, Climbed, "a record of a ladder")
    if climbed.schema_version != SCHEMA:
        raise ValueError(
            f"{file} has version {climbed.schema_version}, but this twinbench reads {SCHEMA}"
        )
    strange = {*climbed.frameworks, *(run.framework for run in climbed.runs)} - FRAMEWORKS.keys()
    if strange:
        raise ValueError(f"{file}: framework {unknown(min(strange), FRAMEWORKS)}")
    return climbed
