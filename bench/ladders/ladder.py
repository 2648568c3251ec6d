"""What a ladder is: its rungs, each with what it is judged by, and a run of it as a case.

A run is a whole training in a process of its own, with the rungs that it is given. It is a probe
of the harness (`bench.harness.isolated_measurements.probes`), `probe(impl, work, batches)` of the
ladder's module, whose settings are `rungs` and what `materialise` returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.harness.plan import FRAMEWORKS, Case, Variant, Workload
from shared.specs import TASKS, Task

# figure by which a rung is judged -> its name in tables; less is better in all of them
JUDGED = {
    "iteration": "time of an iteration",
    "memory": "peak memory of training",
    "latency": "latency of a prediction",
    "quality": "quality",
}
UNNAMED = "neither is named"


@dataclass(frozen=True)
class Rung:
    """One technique more.

    `judged`: what it is for, of `JUDGED`. `changes`: its losses are another computation's, by
    design, from the first step on. `loss_tolerance`: the relative difference that twins' losses may
    show from this rung on. `compiles`: the frameworks in which it needs a C++ compiler. `nothing`:
    framework -> why the rung changes nothing there, so that it is not run.
    """

    name: str
    title: str
    judged: str
    changes: bool = False
    loss_tolerance: float | None = None
    compiles: tuple[str, ...] = ()
    nothing: dict[str, str] = field(default_factory=dict)


MIXED_PRECISION = Rung(
    "mixed_precision",
    "mixed precision (bfloat16)",
    judged="iteration",
    loss_tolerance=0.05,  # relative, over ten steps: as in the benchmark of stacking
)


@dataclass(frozen=True)
class Published:
    """What somebody gained in such a training, to stand beside what a climb gives.

    `said`: in their own figures, before → after. `change`: after ÷ before, or the points that a
    quality rose by. `figure`: that of a run which it is about.
    `where`: the machine and the source.
    """

    said: str
    change: float
    figure: str
    where: str


@dataclass(frozen=True)
class Ladder:
    """A program and its rungs, in order.

    `module`: where its `probe` is, called as its program. `task`: of the model, its recipe, metric
    and margin; `gpu_task` takes its place on a GPU. `materialise(folder, task) -> (folder of the
    task's arrays, settings of every run)`, called once. `about`: what is trained and what its
    quality says, in a sentence or two. `seconds`: about how long a run takes on two cores.
    `batch_size`: where it is not that of `task`; on a GPU it is the task's.
    """

    name: str
    title: str
    module: str
    task: str
    rungs: tuple[Rung, ...]
    materialise: Callable[[Path, str], tuple[Path, dict]]
    about: str
    gpu_task: str | None = None
    batch_size: int | None = None
    seconds: float = 30.0
    published: tuple[Published, ...] = ()

    @property
    def spec(self) -> Task:
        """The task's spec."""
        return TASKS[self.task]

    @property
    def batch(self) -> int:
        """Samples an iteration."""
        return self.batch_size or self.spec.compute_batch

    @property
    def program(self) -> str:
        """The file of its program in either side."""
        return self.module.rpartition(".")[2]

    @property
    def more_is_better(self) -> bool:
        """Whether a higher quality is the better one."""
        return self.spec.metric == "accuracy"

    def case(self, rungs: Sequence[str], framework: str, settings: dict) -> Case:
        """A run with these rungs; memory that is freed is kept, as in timed rows."""
        compiles = any(framework in r.compiles for r in self.rungs if r.name in rungs)
        variant = Variant(
            "+".join(rungs) or "plain",
            settings | {"rungs": list(rungs), "batch_size": self.batch},
            frameworks=(framework,),
            requires="compiler" if compiles else None,
            allocator="tuned",
        )
        workload = Workload(self.task, "compute", timed=False)
        flavour = FRAMEWORKS[framework].flavours[0]
        return Case("ladders", self.program, self.module, framework, flavour, variant, workload)
