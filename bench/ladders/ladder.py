"""What a ladder is: its rungs, what each is judged by, and how to run it.

A run is a whole training in a new process with given rungs. It is a probe of the harness
(`bench.harness.isolated_measurements.probes`), `probe(impl, work, batches)` in the ladder's module,
whose settings are `rungs` and what `materialise` returns.
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
    """One more technique.

    `judged`: the figure it is for, of `JUDGED`. `changes`: its losses differ by design, from the
    first step on. `loss_tolerance`: the relative difference of losses that the frameworks may show
    from this rung on. `compiles`: the frameworks in which it needs a C++ compiler. `nothing`:
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
    """A published gain in such a training, shown beside the measured one.

    `said`: in the source's figures, before → after. `change`: after ÷ before, or points of quality.
    `figure`: the figure of a run that it is about. `where`: the machine and the source.
    """

    said: str
    change: float
    figure: str
    where: str


@dataclass(frozen=True)
class Ladder:
    """A program and its rungs, in order.

    `module`: where its `probe` is, named like its program. `task`: of the model, its recipe, metric
    and margin; `gpu_task` replaces it on a GPU. `materialise(folder, task) -> (folder of the task's
    arrays, settings of every run)`, called once. `about`: what is trained and what its quality
    means, in a sentence or two. `seconds`: about how long a run takes on two cores. `batch_size`:
    if not that of `task`; on a GPU it is the task's.
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
        """Samples per iteration."""
        return self.batch_size or self.spec.compute_batch

    @property
    def program(self) -> str:
        """The file of its program in either framework."""
        return self.module.rpartition(".")[2]

    @property
    def more_is_better(self) -> bool:
        """Whether a higher quality is better."""
        return self.spec.metric == "accuracy"

    def case(self, rungs: Sequence[str], framework: str, settings: dict) -> Case:
        """A run with these rungs; freed memory is kept, as for timed rows."""
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
