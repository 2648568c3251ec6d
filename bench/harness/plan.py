"""What a benchmark file declares.

A `bench_<technique>.py` holds one `Technique` and functions that run in a worker. What is timed,
trained or has its first call measured needs these two:

    prepare(impl, work) -> Prepared          build the step that is timed
    took_effect(impl, work, prepared, batch) -> (evidence, reason or None)

`impl` is the side's package: `impl.kit.training`, `impl.compression.pruning`. Where a step's time
and memory do not say it all, or nothing is timed, there is another, which runs once a case in a
process of its own (`Technique.probes`):

    probe(impl, work, batches) -> {name: {"value": float, "unit": str, "samples": list or None}}

`batches` are none where the task's data is a folder of images: `work.data`.

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
    """One side: its kit's package, the module whose import is slow, and how to get it."""

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

    `blocks`: of a match at most. `looks`: the numbers of blocks after which those leave about whom
    nothing is left to decide; without any, all stay. `seeds`: those of a case, at most;
    `seed_looks`: the numbers of them after which those are trained no further whose accuracy is
    decided. `train_s`: seconds for training a case with all its seeds, times its
    workload's `training`; what does not fit is left out and said. None: no limit. `repetitions`:
    samples of a probe's figure. `first_pass_alone`: nothing is trained, and no first call or
    memory measured of what is timed.
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
        """The number of blocks from which on what is timed has its intervals."""
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
    """What is measured of a row, where its workload asks for it.

    `time`: it plays matches; not where another row does the same work. `cold`: its first call and
    memory, in a fresh process. `accuracy`: it is trained; not where another row computes the same
    at a lower price. `modes`: of the workloads in which it has a row. `tasks`: likewise; none: all.
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
    """One row. `settings` go to the technique as keyword arguments.

    `role`: "baseline" (what its framework's other rows are compared with), "variant", "control" (a
    second baseline from another parent, for the noise floor) or "bound" (what there is to be
    reached, by means that nobody has who needs the technique: shown, never advised).
    `effort` is the lowest that measures it: "default" is a headline, "ordinary" what is shown as
    well of a technique that is asked for by name. `program`: what it runs, where others of its work
    run the same: those of one framework, flavour, allocator and environment are measured once.
    `requires`: "cuda" or "compiler".
    `allocator`: "tuned" or "as installed"; None is the tuned one in matches and the installed one
    where memory and probes are measured. `environment`: variables of its processes.
    `loss_tolerance`: the relative difference of the certificate's losses that twins may show
    where the arithmetic differs by design; None is the task's own parity bar. `changes`: "math",
    where its losses are not those of its baseline, so that their certificates are not held against
    each other, only those of twins; "weights", where nor are the weights that it starts from, such
    as fewer. `stands_for`: the name that `prepare` is given instead of its own. `title`: its name
    in plain words; without one the name with spaces. `later`: its settings are decided by what the
    other rows have shown (`bench.analysis.stacks`), and then it is measured. `price`: its cost
    beside a setting; None is what its technique says. `stacking`: the settings of
    `train_step.stacking` that are the same change, so that a stack can hold it. `against`: the
    variant of the technique that its time, memory and size are compared with; None is the baseline,
    to which its accuracy is held in any case. `runtimes`: by framework what runs its predictions,
    where those are unlike programs.
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
        """Its title, with what runs its predictions in a framework: int8, LiteRT."""
        words = self.title or self.name.replace("_", " ")
        runtime = self.runtimes.get(framework) if mode == "predict" else None
        return f"{words}, {runtime}" if runtime else words


def row(name: str, title: str, effort: str = "default", **given: Any) -> Variant:
    """A variant from keywords: those that are no fields of it are its settings."""
    own = {one.name: given.pop(one.name) for one in fields(Variant) if one.name in given}
    return Variant(name, given, title=title, effort=effort, **own)


warm = partial(row, measured=WARM)  # a row that has no first call and no memory
other_math = partial(row, changes="math")  # one whose losses are not those of its baseline


@dataclass(frozen=True)
class Workload:
    """A task at its "small" or "compute" batch size or "single" samples, measured from `effort` on.

    `mode`: "train" times train steps, "predict" predictions in evaluation mode. `accuracy`: the
    variants are trained to the plateau with paired seeds, from `trained_from` on. `training`: how
    many times as long that takes as training for a recipe's epochs; the time it is given grows with
    it. `timed`: without it there is no match, only what is measured in processes of their own
    (first call, memory, probe). `samples`: of a batch, where it is not the task's.
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
        """Samples a step."""
        if self.samples:
            return self.samples
        task = TASKS[self.task]
        return {"single": 1, "small": task.small_batch, "compute": task.compute_batch}[self.batch]

    def at(self, effort: str) -> Workload:
        """What is measured of it at an effort: without accuracy, where it is too low for that."""
        trains = EFFORTS.index(self.trained_from) <= EFFORTS.index(effort)
        return replace(self, accuracy=self.accuracy and trains)


@dataclass(frozen=True)
class UserModel:
    """What of a technique is measured of a user's own model (`twinbench try`).

    `works`: pairs of batch and mode, as in `Workload`. `rows`: names of variants, or variants that
    are measured of a user's model alone. `learns`: what is learned changes, so it is trained and
    evaluated where the file has `evaluate`. `timed`: as in `Workload`.
    """

    works: tuple[tuple[str, str], ...]
    rows: tuple[str | Variant, ...]
    learns: bool = False
    timed: bool = True

    def of(self, variants: tuple[Variant, ...]) -> list[Variant]:
        """The variants that are measured, the technique's own first."""
        more = [one for one in self.rows if isinstance(one, Variant)]
        return [one for one in variants if one.name in self.rows] + more


TRAIN_STEP = (("compute", "train"),)
PREDICTIONS = (("single", "predict"), ("compute", "predict"))


@dataclass(frozen=True)
class Technique:
    """A technique's rows, tasks and words for the report.

    At the first timed workload each framework's baseline also plays against itself (A/A), unless
    that of another technique of the run does so with more company. `cold_starts`: how many times
    the first call is timed in a process of its own; with more than one the report has a table of
    first calls and break-even, and where no technique of a run asks for more, its first baselines
    are repeated all the same. `probes`: the bench file has a function `probe`. `counts`: whether
    rows tell parameters, zeros and MACs of their models, see `sizes.model_size`. `composed_of`:
    techniques of other files that its rows use, too, such as "train_step.gradient_clipping".
    `price`: what its rows take, where they do not say it themselves. `remedies`: the bottlenecks
    that it addresses (`bench.analysis.questions`). `user_model`: what is measured of a user's own
    model, or the reason why nothing is; "" is the reason of its family. `effort`: the lowest of a
    run in which it comes unasked; who names it gets it at any.
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
        """Whether something of it is measured of a user's own model."""
        return isinstance(self.user_model, UserModel)

    def price_of(self, variant: Variant) -> Price:
        """What a row takes: a baseline nothing, what needs a compiler at least its run."""
        if variant.role == "baseline":
            return FREE
        price = self.price if variant.price is None else variant.price
        return price.but(compiled=price.compiled or variant.requires == "compiler")


@dataclass(frozen=True)
class Case:
    """A variant of a technique in one framework at one workload: a row's half.

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
        """The task's spec."""
        return TASKS[self.workload.task]

    @property
    def settled(self) -> bool:
        """Whether it is known what it runs."""
        return not self.variant.later or bool(self.variant.settings)

    @property
    def timed(self) -> bool:
        """Whether it plays matches."""
        return self.workload.timed and self.variant.measured.time

    @property
    def proved_in_training(self) -> bool:
        """Whether its training is all that is measured of it."""
        return not self.timed and not self.variant.measured.cold

    @property
    def work(self) -> tuple[str, int, str]:
        """Task, batch size and mode: what makes cases comparable."""
        return self.workload.task, self.workload.batch_size, self.workload.mode

    @property
    def side(self) -> tuple[str, str | None]:
        """Framework and flavour: whose baseline it is compared with."""
        return self.framework, self.flavour

    @property
    def is_baseline(self) -> bool:
        """Whether it is what others are compared with."""
        return self.variant.role == "baseline"

    def message(self) -> CaseMessage:
        """What a worker needs to know."""
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
    """A case as it travels to a worker. `variant`: the name that `prepare` is given."""

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
    """What `prepare` is given in a worker.

    `memory_budget`: bytes, or None if none was set. `repetitions`: how often a probe measures what
    it gives a median of. `data`: the folder of the task's data.
    `folder`: an empty one for what the variant writes; it is deleted when the run ends. `files`:
    where all workers of the case find the file of its predictions, see `folders.written_once`.
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

    `model` and `optimizer` are counted for the split of memory. Where the framework owns the loop,
    `loop(batches) -> (seconds, loss)` times the steps after its first batch itself. Where the step
    learns from more than labels, `targets(x, y)` gives the tuple that takes the place of y: it is
    called once for the resident batches, and once for the training of all seeds. Where predictions
    are those of a file or folder that would be deployed, `write(path)` makes it from the model as
    it is, built or trained, and `read(path) -> predict` loads it into its runtime: another process
    may have written it. The worker then puts what it reads in the place of `predict`, and the path
    in that of `artifact`, whose size counts. Where training has stages, `train(stages)` does it
    all: see `stages.Stages`. It returns the predictions of what it has trained, or None where they
    are those of `predict` or `read`.
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
