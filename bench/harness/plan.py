"""What a benchmark file declares, and which cases and matches a run measures.

A `bench_<technique>.py` holds one `Technique` and two functions that run in a worker:

    prepare(impl, work) -> Prepared          build the step that is timed
    took_effect(impl, work, prepared, batch) -> (evidence, reason or None)

`impl` is the side's package: `impl.kit.training`, `impl.compression.pruning`. Where a step's time
and memory do not say it all, there is a third, which runs once a case in a process of its own
(`Technique.probes`):

    probe(impl, work, batches) -> {name: {"value": float, "unit": str, "samples": list or None}}

`batches` are none where the task's data is a folder of images: `work.data`.

Nothing here imports a framework.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from shared.specs import TASKS, Task

EFFORTS = ("quick", "default", "full")
MOST_CONTENDERS = 8


@dataclass(frozen=True)
class Framework:
    """One side: its kit's package, the module whose import is slow, and how to get it."""

    title: str
    package: str
    module: str
    install: str
    flavours: tuple[str | None, ...] = (None,)
    preload: tuple[str, ...] = ()


FRAMEWORKS = {
    # An optimizer's first step imports torch._dynamo, which takes as long as torch itself.
    "pt": Framework("PyTorch", "pt_impl", "torch", "pip install torch", preload=("torch._dynamo",)),
    "tf": Framework(
        "TensorFlow",
        "tf_impl",
        "tensorflow",
        "pip install tensorflow tf_keras",
        flavours=("keras3", "tf_keras"),
    ),
}


@dataclass(frozen=True)
class Effort:
    """How much a run measures. The number of blocks is fixed before the run.

    `train_s`: seconds for training a case with all its seeds, times its workload's `training`; what
    does not fit is left out and said. None: no limit.
    """

    blocks: int
    rounds: int
    seeds: int
    train_s: float | None = None


EFFORT = {
    "quick": Effort(blocks=1, rounds=30, seeds=1, train_s=30),
    "default": Effort(blocks=8, rounds=30, seeds=8, train_s=60),
    "full": Effort(blocks=20, rounds=30, seeds=8),
}


@dataclass(frozen=True)
class Measure:
    """What is measured of a row, where its workload asks for it.

    `time`: it plays matches; not where another row does the same work. `cold`: its first call and
    memory, in a fresh process. `accuracy`: it is trained; not where another row computes the same
    at a lower price. `modes`: of the workloads in which it has a row.
    """

    time: bool = True
    cold: bool = True
    accuracy: bool = True
    modes: tuple[str, ...] = ("train", "predict")


WARM = Measure(cold=False)


@dataclass(frozen=True)
class Variant:
    """One row. `settings` go to the technique as keyword arguments.

    `role`: "baseline" (what its framework's other rows are compared with), "variant" or "control"
    (a second baseline from another parent, for the noise floor). `effort` is the lowest that
    measures it. `requires`: "cuda" or "compiler". `allocator`: "tuned" or "as installed"; None is
    the tuned one in matches and the installed one where memory and probes are measured.
    `loss_tolerance`: the relative difference of the certificate's losses that twins may show
    where the arithmetic differs by design; None is the task's own parity bar. `changes`: "math",
    where its losses are not those of its baseline, so that their certificates are not held against
    each other, only those of twins; "weights", where nor are the weights that it starts from, such
    as fewer. `stands_for`: the name that `prepare` is given instead of its own. `title`: its name
    in plain words; without one the name with spaces.
    """

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    role: str = "variant"
    frameworks: tuple[str, ...] = ("pt", "tf")
    flavours: tuple[str | None, ...] = (None, "keras3")
    effort: str = "default"
    requires: str | None = None
    allocator: str | None = None
    loss_tolerance: float | None = None
    changes: str | None = None
    measured: Measure = Measure()
    stands_for: str | None = None
    title: str = ""


def control_of(baseline: Variant) -> Variant:
    """The same work as `baseline` once more, for the noise floor."""
    return replace(
        baseline,
        name="control",
        role="control",
        stands_for=baseline.name,
        measured=replace(baseline.measured, cold=False, accuracy=False),
    )


@dataclass(frozen=True)
class Workload:
    """A task at its "small" or "compute" batch size or "single" samples, measured from `effort` on.

    `mode`: "train" times train steps, "predict" predictions in evaluation mode. `accuracy`: the
    variants are trained to the plateau with paired seeds. `training`: how many times as long that
    takes as training for a recipe's epochs; the time it is given grows with it. `timed`: without it
    there is no match, only what is measured in processes of their own (first call, memory, probe).
    """

    task: str
    batch: str
    effort: str = "default"
    accuracy: bool = False
    training: float = 1.0
    mode: str = "train"
    timed: bool = True

    @property
    def batch_size(self) -> int:
        """Samples a step."""
        task = TASKS[self.task]
        return {"single": 1, "small": task.small_batch, "compute": task.compute_batch}[self.batch]


@dataclass(frozen=True)
class Technique:
    """A technique's rows, tasks and words for the report.

    At the first timed workload each framework's baseline also plays against itself (A/A), unless an
    earlier technique of the run did so there. `cold_starts`: how many times the first call is timed
    in a fresh process; with more than one the report has a table of first calls and break-even.
    `probes`: the bench file has a function `probe`. `counts`: whether
    rows tell parameters, zeros and MACs of their models, see `worker.model_size`.
    """

    family: str
    name: str
    title: str
    variants: tuple[Variant, ...]
    workloads: tuple[Workload, ...]
    differs_by_design: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    cold_starts: int = 1
    probes: bool = False
    counts: bool = False


@dataclass(frozen=True)
class Case:
    """A variant of a technique in one framework at one workload: a row's half."""

    family: str
    technique: str
    module: str
    framework: str
    flavour: str | None
    variant: Variant
    workload: Workload

    @property
    def id(self) -> str:
        """technique/task-batch/framework/variant, unique in a run."""
        side = f"tf-{self.flavour}" if self.flavour == "tf_keras" else self.framework
        mode = "" if self.workload.mode == "train" else f"-{self.workload.mode}"
        return (
            f"{self.technique}/{self.workload.task}-{self.workload.batch_size}{mode}/"
            f"{side}/{self.variant.name}"
        )

    @property
    def task(self) -> Task:
        """The task's spec."""
        return TASKS[self.workload.task]

    @property
    def timed(self) -> bool:
        """Whether it plays matches."""
        return self.workload.timed and self.variant.measured.time

    @property
    def is_baseline(self) -> bool:
        """Whether it is what others are compared with."""
        return self.variant.role == "baseline"

    def message(self) -> dict[str, Any]:
        """What a worker needs to know, as JSON."""
        name = self.variant.stands_for or self.variant.name
        return {
            "module": self.module,
            "family": self.family,
            "technique": self.technique,
            "framework": self.framework,
            "variant": asdict(self.variant) | {"name": name},
            "task": self.workload.task,
            "batch_size": self.workload.batch_size,
            "mode": self.workload.mode,
        }


@dataclass(frozen=True)
class Work:
    """What `prepare` is given in a worker.

    `memory_budget`: bytes, or None if none was set. `data`: the folder of the task's data.
    `folder`: an empty one for what the variant writes; it is deleted when the run ends.
    """

    task: Task
    variant: str
    settings: dict[str, Any]
    batch_size: int
    weights: dict[str, Any]
    mode: str = "train"
    memory_budget: int | None = None
    data: str | None = None
    folder: Path | None = None


@dataclass(frozen=True)
class Prepared:
    """What `prepare` returns: `step(x, y) -> loss`, which is timed, and `predict(x) -> logits`.

    `model` and `optimizer` are counted for the split of memory. Where the framework owns the loop,
    `loop(batches) -> (seconds, loss)` times the steps after its first batch itself. Where the step
    learns from more than labels, `targets(x, y)` gives the tuple that takes the place of y: it is
    called once for the resident batches, and once for the training of all seeds. `artifact`: the
    file or folder that would be deployed, whose size counts. Where predictions are those of a file
    that is made from the model, `deploy() -> (predict, artifact)` makes it from the model as it is:
    it is called once the model is built, or trained, and gives what takes their place. Where
    training has stages, `train(fit)` does it all: `fit(step)` trains for the recipe's epochs,
    `fit(step, epochs)` for others. It returns the predictions of what it has trained, or None where
    they are those of `predict` or `deploy`.
    """

    step: Callable
    predict: Callable
    model: Any
    optimizer: Any
    loop: Callable | None = None
    targets: Callable | None = None
    artifact: Path | None = None
    deploy: Callable | None = None
    train: Callable | None = None


def cases_of(technique: Technique, module: str, effort: str) -> list[Case]:
    """Every case of `technique` at `effort`: frameworks side by side.

    The first timed workload has a control for each framework: the technique's noise floor.
    A quick run takes the first workload, and of it the baselines and the first variant of each
    framework and flavour, without controls.
    """
    level = EFFORTS.index(effort)
    quick = effort == "quick"
    workloads = [w for w in technique.workloads if EFFORTS.index(w.effort) <= level]
    if quick:
        workloads = list(technique.workloads[:1])
    variants = [v for v in technique.variants if EFFORTS.index(v.effort) <= level]
    controls = [control_of(v) for v in variants if v.role == "baseline"]
    if quick:
        controls = []
    timed = [workload for workload in workloads if workload.timed]
    cases = []
    for workload in workloads:
        for variant in variants + (controls if workload in timed[:1] else []):
            if workload.mode not in variant.measured.modes:
                continue
            for name in variant.frameworks:
                for flavour in FRAMEWORKS[name].flavours:
                    if flavour in variant.flavours:
                        case = Case(
                            technique.family,
                            technique.name,
                            module,
                            name,
                            flavour,
                            variant,
                            workload,
                        )
                        cases.append(case)
    return _one_variant_a_side(cases) if quick else cases


def _one_variant_a_side(cases: list[Case]) -> list[Case]:
    """The baselines, and the first other case of each framework and flavour."""
    kept, sides = [], set()
    for case in cases:
        side = (case.framework, case.flavour)
        if case.is_baseline or side not in sides:
            kept.append(case)
        if not case.is_baseline:
            sides.add(side)
    return kept


def with_baselines(selected: list[Case], every: list[Case]) -> list[Case]:
    """`selected` and the baselines that their ratios need, in the order of `every`."""
    wanted = {(c.technique, c.workload, c.framework, c.flavour) for c in selected}
    return [
        case
        for case in every
        if case in selected
        or (
            case.is_baseline
            and (case.technique, case.workload, case.framework, case.flavour) in wanted
        )
    ]


def repeated_controls(cases: Iterable[Case]) -> list[Case]:
    """The controls of workloads that an earlier technique controls: once a run is enough."""
    seen, found = set(), []
    for case in cases:
        work = (case.workload.task, case.workload.batch_size, case.workload.mode)
        key = (case.framework, case.flavour, *work)
        if case.variant.role == "control" and key in seen:
            found.append(case)
        elif case.variant.role == "control":
            seen.add(key)
    return found


def matches(cases: list[Case]) -> list[list[Case]]:
    """Split one technique's timed cases into matches: one workload each, at most eight contenders.

    Where a workload has more, its variants are dealt out and the baselines play in each part.
    Controls play in the first.
    """
    found = []
    timed = [case for case in cases if case.timed]
    for workload in dict.fromkeys(case.workload for case in timed):
        here = [case for case in timed if case.workload == workload]
        baselines = [case for case in here if case.is_baseline]
        rest = [case for case in here if not case.is_baseline]
        rest.sort(key=lambda case: case.variant.role != "control")
        by_name: dict[str, list[Case]] = {}
        for case in rest:
            by_name.setdefault(case.variant.name, []).append(case)
        part = list(baselines)
        for group in by_name.values():
            if len(part) > len(baselines) and len(part) + len(group) > MOST_CONTENDERS:
                found.append(part)
                part = list(baselines)
            part += group
        if part:
            found.append(part)
    return found


def choose(
    cases: Iterable[Case], *, tasks: set[str], variants: set[str], frameworks: set[str]
) -> list[Case]:
    """The cases with one of the given names; an empty set leaves that choice open."""
    return [
        case
        for case in cases
        if (not tasks or case.workload.task in tasks)
        and (not variants or case.variant.name in variants)
        and (not frameworks or case.framework in frameworks)
    ]
