"""What a benchmark file declares.

A `bench_<technique>.py` has one `Technique`, and functions that run in a worker. A row that is
timed, trained, or has its first call measured needs these two:

    prepare(impl, work) -> Prepared          build the step that is timed
    took_effect(impl, work, prepared, batch) -> (evidence, reason or None)

`impl` is the framework's package: `impl.kit.training`, `impl.compression.pruning`. If time and
memory of a step are not all, or nothing is timed, there is a third, which runs once per case in a
new process (`Technique.probes`):

    probe(impl, work, batches) -> {name: {"value": float, "unit": str, "samples": list or None}}

`batches` is empty if the task's data is a folder of images: `work.data`.

Nothing here imports a framework.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import Struct

from bench.record import Price
from shared.specs import TASKS, Task

EFFORTS = ("quick", "default", "ordinary", "full")
SEED = 2026
ROUNDS = 30  # of a block at most
FREE = Price()  # a row that a setting gives
LOOKS = (3, 5, 8)  # numbers of blocks
SEED_LOOKS = (4, 6, 8)  # numbers of seeds
OWN_RUNTIMES = {"pt": "TorchInductor", "tf": "LiteRT"}  # that read files of int8 and float32


@dataclass(frozen=True)
class Framework:
    """A framework: its kit's package, the module whose import is slow, and how to install it."""

    title: str
    package: str
    module: str
    install: str
    flavours: tuple[str | None, ...] = (None,)
    preload: tuple[str, ...] = ()


FRAMEWORKS = {
    # An optimizer's first step imports torch._dynamo, which takes as long as torch itself.
    "pt": Framework(
        "PyTorch", "pt_impl", "torch", "pip install -e '.[torch]'", preload=("torch._dynamo",)
    ),
    "tf": Framework(
        "TensorFlow",
        "tf_impl",
        "tensorflow",
        "pip install -e '.[tensorflow]'",
        flavours=("keras3", "tf_keras"),
    ),
}


@dataclass(frozen=True)
class Effort:
    """How much a run measures, fixed before it starts.

    `blocks`: the most of a match. `looks`: numbers of blocks after which decided cases leave;
    without any, all stay. `seeds`: the most of a case; `seed_looks`: numbers of seeds after which
    cases whose accuracy is decided are trained no further. `train_s`: seconds for training a case
    with all its seeds, times its workload's `training`; seeds beyond that are left out, and
    reported. None: no limit. `repetitions`: samples of a probe's figure. `first_pass_alone`:
    nothing is trained, and timed cases have no first call or memory.
    """

    blocks: int
    rounds: int = ROUNDS
    seeds: int = 8
    train_s: float | None = None
    repetitions: int = 3
    looks: tuple[int, ...] = ()
    seed_looks: tuple[int, ...] = ()
    first_pass_alone: bool = False

    @property
    def first_look(self) -> int:
        """The number of blocks after which timed cases have intervals."""
        return (self.looks or LOOKS)[0]


EFFORT = {
    "quick": Effort(blocks=1, repetitions=1, first_pass_alone=True),
    # It has the intervals of one look, at its end: two more blocks decide few of what is open.
    "default": Effort(blocks=LOOKS[0], seeds=4, train_s=60),
    "ordinary": Effort(blocks=LOOKS[-1], train_s=60, looks=LOOKS, seed_looks=SEED_LOOKS),
    "full": Effort(blocks=LOOKS[-1], repetitions=7, looks=LOOKS, seed_looks=SEED_LOOKS),
}


@dataclass(frozen=True)
class Measure:
    """What is measured of a row, if its workload asks for it.

    `time`: its steps are timed; not if another row does the same work. `cold`: first call and
    memory, in a new process. `accuracy`: it is trained; not if another row computes the same at
    lower cost. `modes`, `tasks`: of the workloads in which it has a row; none: all.
    """

    time: bool = True
    cold: bool = True
    accuracy: bool = True
    modes: tuple[str, ...] = ("train", "predict")
    tasks: tuple[str, ...] = ()


WARM = Measure(cold=False)
TRAINED = Measure(time=False, cold=False)


@dataclass(frozen=True)
class Variant:
    """One row. `settings` are passed to the technique as keyword arguments.

    `role`: "baseline" (the row that others of its framework are compared with), "variant",
    "control" (a second baseline from another parent, for the noise floor) or "bound" (what could be
    reached, by means that a user of the technique does not have: shown, never advised). `effort`:
    the lowest that measures it: "default" is a main row; "ordinary" is also shown if its technique
    is asked for by name. `program`: what it runs; rows of the same work, framework, flavour,
    allocator and environment that run the same are measured once. `requires`: "cuda" or "compiler".
    `allocator`: "tuned" or "as installed"; None is the tuned one in matches and the installed one
    for memory and probes. `environment`: variables of its processes. `loss_tolerance`: the relative
    difference of losses that the two frameworks may show where their arithmetic differs by design;
    None: the task's parity bar. `changes`: "math" if its losses differ from its baseline's, so that
    only those of the two frameworks are compared; "weights" if its initial weights differ, too.
    `stands_for`: the name that `prepare` gets in place of its name. `title`: its name in plain
    words; default: the name with spaces. `later`: its settings depend on what the other rows show
    (`bench.analysis.stacks`), so it is measured last. `price`: what it needs besides a setting;
    None: what its technique says. `stacking`: the settings of `train_step.stacking` for the same
    change. `against`: the variant that its time, memory and size are compared with; None: the
    baseline, with which its accuracy is always compared. `runtimes`: by framework, what runs its
    predictions, if that differs.
    """

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    role: str = "variant"
    frameworks: tuple[str, ...] = ("pt", "tf")
    flavours: tuple[str | None, ...] = (None, "keras3")
    effort: str = "default"
    requires: str | None = None
    allocator: str | None = None
    environment: dict[str, str] = field(default_factory=dict)
    loss_tolerance: float | None = None
    changes: str | None = None
    measured: Measure = Measure()
    stands_for: str | None = None
    program: str | None = None
    title: str = ""
    later: bool = False
    price: Price | None = None
    stacking: dict[str, Any] | None = None
    against: str | None = None
    runtimes: dict[str, str] = field(default_factory=dict)

    def called(self, framework: str, mode: str) -> str:
        """Its title, with the runtime of its predictions in a framework: "int8, LiteRT"."""
        words = self.title or self.name.replace("_", " ")
        runtime = self.runtimes.get(framework) if mode == "predict" else None
        return f"{words}, {runtime}" if runtime else words


def row(name: str, title: str, effort: str = "default", **given: Any) -> Variant:
    """A variant from keywords; those that are no fields of it are its settings."""
    own = {one.name: given.pop(one.name) for one in fields(Variant) if one.name in given}
    return Variant(name, given, title=title, effort=effort, **own)


warm = partial(row, measured=WARM)  # a row that has no first call and no memory
other_math = partial(row, changes="math")  # one whose losses are not those of its baseline


@dataclass(frozen=True)
class Workload:
    """A task at a "small", "compute" or "single" batch size, measured from `effort` on.

    `mode`: "train" times train steps, "predict" times predictions. `accuracy`: the variants are
    trained to the plateau with paired seeds, from effort `trained_from` on. `training`: how many
    times as long that takes as training by the recipe. `timed`: if False there is no match, only
    what new processes measure (first call, memory, probe). `samples`: batch size, if not the
    task's.
    """

    task: str
    batch: str
    effort: str = "default"
    accuracy: bool = False
    trained_from: str = "default"
    training: float = 1.0
    mode: str = "train"
    timed: bool = True
    samples: int | None = None

    @property
    def batch_size(self) -> int:
        """Samples per step."""
        if self.samples:
            return self.samples
        task = TASKS[self.task]
        return {"single": 1, "small": task.small_batch, "compute": task.compute_batch}[self.batch]

    def at(self, effort: str) -> Workload:
        """The workload at an effort: without accuracy if that is too low for it."""
        trains = EFFORTS.index(self.trained_from) <= EFFORTS.index(effort)
        return replace(self, accuracy=self.accuracy and trains)


@dataclass(frozen=True)
class UserModel:
    """What of a technique is measured on a user's model (`twinbench try`).

    `works`: pairs of batch and mode, as in `Workload`. `rows`: names of variants, or variants only
    for a user's model. `learns`: it changes what is learned, so it is trained and evaluated if the
    file has `evaluate`. `timed`: as in `Workload`.
    """

    works: tuple[tuple[str, str], ...]
    rows: tuple[str | Variant, ...]
    learns: bool = False
    timed: bool = True

    def of(self, variants: tuple[Variant, ...]) -> list[Variant]:
        """The variants that are measured, the technique's first."""
        more = [one for one in self.rows if isinstance(one, Variant)]
        return [one for one in variants if one.name in self.rows] + more


TRAIN_STEP = (("compute", "train"),)
PREDICTIONS = (("single", "predict"), ("compute", "predict"))


@dataclass(frozen=True)
class Technique:
    """A technique's rows, tasks and words for the report.

    At the first timed workload each framework's baseline is also compared with itself (A/A), unless
    another technique of the run does that with more contenders. `cold_starts`: how many new
    processes time the first call; with more than one the report has a table of first calls and
    break-even. If no technique of a run asks for more, its first baselines are repeated all the
    same. `probes`: the bench file has a function `probe`. `counts`: whether rows report parameters,
    zeros and MACs, see `sizes.model_size`. `composed_of`: techniques of other files that its rows
    use, such as "train_step.gradient_clipping". `price`: what its rows need, unless they say it.
    `remedies`: the bottlenecks that it addresses (`bench.analysis.questions`). `user_model`: what
    is measured on a user's model, or the reason why nothing is ("": the reason of its family).
    `effort`: the lowest at which a run includes it unasked; by name it is included at any.
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
    composed_of: tuple[str, ...] = ()
    price: Price = FREE
    remedies: tuple[str, ...] = ()
    user_model: UserModel | str = ""
    effort: str = "default"

    @property
    def is_measured_of_users(self) -> bool:
        """Whether it is measured on a user's model."""
        return isinstance(self.user_model, UserModel)

    def price_of(self, variant: Variant) -> Price:
        """What a row needs: a baseline nothing, a row that needs a compiler at least its run."""
        if variant.role == "baseline":
            return FREE
        price = self.price if variant.price is None else variant.price
        return price.but(compiled=price.compiled or variant.requires == "compiler")


@dataclass(frozen=True)
class Case:
    """A variant of a technique in one framework at one workload.

    `composed_of`: of its technique.
    """

    family: str
    technique: str
    module: str
    framework: str
    flavour: str | None
    variant: Variant
    workload: Workload
    composed_of: tuple[str, ...] = ()

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
        """The task's specification."""
        return TASKS[self.workload.task]

    @property
    def settled(self) -> bool:
        """Whether its settings are known."""
        return not self.variant.later or bool(self.variant.settings)

    @property
    def timed(self) -> bool:
        """Whether its steps are timed."""
        return self.workload.timed and self.variant.measured.time

    @property
    def proved_in_training(self) -> bool:
        """Whether only its training is measured."""
        return not self.timed and not self.variant.measured.cold

    @property
    def work(self) -> tuple[str, int, str]:
        """Task, batch size and mode: only cases with the same work are compared."""
        return self.workload.task, self.workload.batch_size, self.workload.mode

    @property
    def side(self) -> tuple[str, str | None]:
        """Framework and flavour, which also name its baseline."""
        return self.framework, self.flavour

    @property
    def is_baseline(self) -> bool:
        """Whether other rows are compared with it."""
        return self.variant.role == "baseline"

    def message(self) -> CaseMessage:
        """What a worker needs to know of it."""
        return CaseMessage(
            module=self.module,
            family=self.family,
            technique=self.technique,
            composed_of=self.composed_of,
            variant=self.variant.stands_for or self.variant.name,
            settings=self.variant.settings,
            program=self.variant.program,
            task=self.workload.task,
            batch_size=self.workload.batch_size,
            mode=self.workload.mode,
        )


class CaseMessage(Struct, frozen=True, kw_only=True):
    """A case as it is sent to a worker. `variant`: the name that `prepare` gets."""

    module: str
    family: str
    technique: str
    composed_of: tuple[str, ...]
    variant: str
    settings: dict[str, Any]
    program: str | None
    task: str
    batch_size: int
    mode: str


@dataclass(frozen=True)
class Work:
    """What `prepare` gets in a worker.

    `memory_budget`: bytes, or None. `repetitions`: how often a probe measures a figure. `data`: the
    folder of the task's data. `folder`: an empty one for the variant's files, deleted at the end of
    the run. `files`: where all workers of the case find the file of its predictions, see
    `folders.written_once`.
    """

    task: Task
    variant: str
    settings: dict[str, Any]
    batch_size: int
    weights: dict[str, Any]
    mode: str = "train"
    memory_budget: int | None = None
    repetitions: int = 3
    data: str | None = None
    folder: Path | None = None
    files: Path | None = None


@dataclass(frozen=True)
class Prepared:
    """What `prepare` returns: `step(x, y) -> loss`, which is timed, and `predict(x) -> logits`.

    `model` and `optimizer` are counted for the split of memory. If the framework owns the loop,
    `loop(batches) -> (seconds, loss)` times the steps after its first batch. If the step learns
    from more than labels, `targets(x, y)` gives the tuple that replaces y; it is called once for
    the resident batches, and once for the training of all seeds. If predictions are those of a
    deployed file or folder, `write(path)` makes it from the model, and `read(path) -> predict`
    loads it into its runtime, perhaps in another process; `predict` and `artifact` are then set
    from it, and its size counts. If training has stages, `train(stages)` does all of it, see
    `stages.Stages`, and returns the predictions of the trained model, or None if those are of
    `predict` or `read`.
    """

    step: Callable
    predict: Callable
    model: Any
    optimizer: Any
    loop: Callable | None = None
    targets: Callable | None = None
    artifact: Path | None = None
    write: Callable | None = None
    read: Callable | None = None
    train: Callable | None = None
