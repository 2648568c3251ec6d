"""The record of a run, `results.json`: its types are its schema.

What was measured stands beside what `bench.analysis` derives of it: fields marked "derived" are
None or empty until then. Sizes are in bytes and times in seconds. A type that is not as stated, a
number out of range or a missing field is one clear line, see `decode`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct, field

SCHEMA_VERSION = 3
MOST_LOOKS = 10
FRAMEWORKS = {"pt": "PyTorch", "tf": "TensorFlow"}
DIFFERENT = "not comparable"  # the verdict
INFERENCE = ", inference"  # ends the title of a task whose predictions are measured

LARGEST = 1e100  # beyond it nothing was measured, and arithmetic overflows
Number = Annotated[float, Meta(ge=-LARGEST, le=LARGEST)]
Positive = Annotated[float, Meta(gt=0, le=LARGEST)]
Sample = Annotated[float, Meta(gt=1e-10, le=1e5)]  # seconds a step
Ratio = Annotated[float, Meta(gt=0, le=1e9)]
Count = Annotated[int, Meta(gt=0)]
Whole = Annotated[int, Meta(ge=0)]
Look = Annotated[int, Meta(gt=1, le=1000)]
Interval = tuple[Number, Number]
RatioBounds = tuple[Positive, Positive]  # of two blocks that are far apart they are far out


Work = tuple[str, int, str]  # a task, a batch size and a mode


def _task_title(task: str, mode: str) -> str:
    return task + (INFERENCE if mode == "predict" else "")


def _framework_title(framework: str | None, flavour: str | None) -> str:
    title = FRAMEWORKS.get(framework) or str(framework)
    return f"{title} (tf_keras)" if flavour == "tf_keras" else title


class Base(Struct, frozen=True, kw_only=True, eq=False):
    """What the types of a record have in common: immutable, compared by identity."""

    def but(self, **changes: Any):
        """A copy with other values."""
        return msgspec.structs.replace(self, **changes)


class Timing(Base, frozen=True, kw_only=True, eq=False):
    """First calls and steps. `step_s`: samples by match and block; the rest is derived."""

    step_s: dict[str, dict[str, list[Sample]]] = {}
    cold_first_call_s: Positive | None = None
    warm_first_call_s: Positive | None = None
    median_s: Positive | None = None
    ci_s: tuple[Positive, Positive] | None = None

    @property
    def block_count(self) -> int:
        """How many blocks there are samples of; those of several matches count once."""
        return len({block for blocks in self.step_s.values() for block in blocks})


class Memory(Base, frozen=True, kw_only=True, eq=False):
    """Peaks of a process of its own, medians over the cold starts; derived.

    `device_peak`: of a GPU, by its framework's allocator. `samples`: what each cold start had.
    """

    import_bytes: Number | None = None
    build_bytes: Number | None = None
    first_step_peak_bytes: Number | None = None
    steady_peak_bytes: Number | None = None
    parameters_bytes: Number | None = None
    gradients_bytes: Number | None = None
    optimizer_bytes: Number | None = None
    rest_bytes: Number | None = None
    above_import_bytes: Number | None = None
    above_import_ci: Interval | None = None
    device_peak: dict[str, Number | None] | None = None
    samples: dict[str, list[Number | None]] = {}

    @property
    def device_peak_bytes(self) -> float | None:
        """The peak of a GPU, which its allocator counts."""
        return (self.device_peak or {}).get("allocated")

    @property
    def above_import(self) -> float | None:
        """The peak of the steady state above what the process took after its imports, in bytes."""
        if self.steady_peak_bytes is None or self.import_bytes is None:
            return None
        return self.steady_peak_bytes - self.import_bytes

    @property
    def peak_bytes(self) -> float | None:
        """The peak to compare: the GPU's; on a CPU that of the process above its imports."""
        on_device = self.device_peak_bytes
        return self.above_import if on_device is None else on_device


class AccuracyDifference(Base, frozen=True, kw_only=True, eq=False):
    """How far the metric is from that of the baseline, seed by seed."""

    mean: Number | None = None
    ci: Interval | None = None
    verdict: str | None = None


class Accuracy(Base, frozen=True, kw_only=True, eq=False):
    """The metric of a trained row over its seeds. `mean`, `ci` and `difference` are derived."""

    metric: str | None = None
    per_seed: list[Number | None] = []
    mean: Number | None = None
    ci: Interval | None = None
    difference: AccuracyDifference | None = None


KEPT, LOST, UNTOLD = "kept", "lost", "can't be told"  # verdicts of the two checks below


class LossCheck(Base, frozen=True, kw_only=True, eq=False):
    """Losses in nats of `samples` held-out samples after a short training, seed by seed.

    All rows start from equal weights and see equal batches. `first`: the loss of the first batch,
    before any update. `difference`, to the baseline's, and `verdict` are derived.
    """

    steps: Count
    batch_size: Count
    learning_rate: Positive
    samples: Count
    first: list[Number | None] = []
    per_seed: list[Number | None] = []
    difference: AccuracyDifference | None = None
    verdict: str | None = None


class Fidelity(Base, frozen=True, kw_only=True, eq=False):
    """Predictions of a trained model against the same model's in float32, on held-out samples.

    `right`: how many classes the float model has right; `lost`, `gained`: those that are right in
    it alone, and in the row alone; `flipped`: those that differ, right or wrong. `loss_more`,
    `loss_sd`: the mean and the standard deviation of the differences of the samples' losses, in
    nats; None where a loss is not finite. `loss`, `points` (gained less lost, in percent of the
    samples) and `verdict` are derived.
    """

    samples: Count
    right: Whole
    lost: Whole
    gained: Whole
    flipped: Whole
    loss_more: Number | None = None
    loss_sd: Number | None = None
    loss: AccuracyDifference | None = None
    points: AccuracyDifference | None = None
    verdict: str | None = None


class Metric(Base, frozen=True, kw_only=True, eq=False):
    """Any other figure. Without `ci` it is exact, or was measured once."""

    value: Number | None = None
    unit: str | None = None
    ci: tuple[Number | None, Number | None] | None = None
    samples: list[Number | None] | None = None


class Artifact(Base, frozen=True, kw_only=True, eq=False):
    """The size of what is deployed, as it is and compressed."""

    bytes: int
    compressed_bytes: int


class Block(Base, frozen=True, kw_only=True, eq=False):
    """What a worker said of a block: its first call, losses, and the cost of an empty sample."""

    match: int
    block: int
    losses: list[Number | None] = []
    weights_sha256: str | None = None
    first_call_s: Positive | None = None
    empty_s: Number | None = None
    steps: int | None = None
    shortest_s: Number | None = None
    seconds: dict[str, Number] = {}
    peak_bytes: Number | None = None
    energy_j: list[Number] | None = None


class ColdStart(Base, frozen=True, kw_only=True, eq=False):
    """A new process: its first call, its peaks by phase, and the parts of its memory."""

    first_call_s: Positive | None = None
    memory: dict[str, Number | None] = {}
    parts: dict[str, Number] = {}
    device_peak: dict[str, Number | None] | None = None
    artifact: Artifact | None = None


class Certificate(Base, frozen=True, kw_only=True, eq=False):
    """Losses of the first block and the checksum of its initial weights; derived."""

    losses: list[Number | None] = []
    weights_sha256: str | None = None


class Price(Base, frozen=True, kw_only=True, eq=True):
    """What a row takes that is more than a setting, as its benchmark file declares it.

    `epochs`: of training. `teacher`: which has to be trained first. `calibration`: a few batches
    that set ranges. `compiled`: a compiler that runs before the first step.
    """

    epochs: int = 0
    teacher: bool = False
    calibration: bool = False
    compiled: bool = False


class Case(Base, frozen=True, kw_only=True, eq=False):
    """A row: a variant of a technique in a framework, at a task, batch size and mode.

    `program`: the id of the case whose measurements it shows, which may be another's. `against`:
    the variant that its figures are compared with, where that is not the baseline.
    """

    id: str
    technique: str
    framework: str
    variant: str
    role: str
    task: str
    batch_size: int
    status: str
    flavour: str | None = None
    title: str | None = None
    settings: dict[str, Any] = {}
    price: Price | None = None
    stacking: dict[str, Any] | None = None
    against: str | None = None
    remedies: list[str] | None = None
    mode: str = "train"
    timed: bool = True
    changes_math: bool = False
    changes_weights: bool = False
    loss_tolerance: Number = 0.0
    flops: Number | None = None
    reason: str | None = None
    program: str | None = None
    timing: Timing = field(default_factory=Timing)
    blocks: list[Block] = []
    cold_starts: list[ColdStart] = []
    accuracy: Accuracy | None = None
    loss_check: LossCheck | None = None
    fidelity: Fidelity | None = None
    trained_artifacts: list[Artifact] = []
    trained_metrics: list[dict[str, Metric]] = []
    probed: dict[str, Metric] = {}
    evidence: dict[str, Any] | None = None
    process: dict[str, Any] | None = None
    seconds: dict[str, Number] = {}
    memory: Memory | None = None  # this and what follows is derived
    metrics: dict[str, Metric] = {}
    certificate: Certificate | None = None
    artifact_bytes: Number | None = None

    @property
    def work(self) -> Work:
        """What makes cases comparable."""
        return (self.task, self.batch_size, self.mode)

    @property
    def task_title(self) -> str:
        """The task; predictions are other work than train steps."""
        return _task_title(self.task, self.mode)

    @property
    def side(self) -> tuple[str, str | None]:
        """The framework and its flavour."""
        return (self.framework, self.flavour)

    @property
    def program_id(self) -> str:
        """The id of the case whose measurements it shows, which is mostly its own."""
        return self.program or self.id

    @property
    def has_times(self) -> bool:
        """Whether it has figures of its time."""
        return self.status == "OK" and any(self.timing.step_s.values())

    @property
    def is_legacy(self) -> bool:
        """Whether it ran with tf_keras in place of Keras 3."""
        return self.flavour == "tf_keras"

    @property
    def framework_title(self) -> str:
        """PyTorch, TensorFlow or TensorFlow (tf_keras)."""
        return _framework_title(self.framework, self.flavour)

    @property
    def full_title(self) -> str:
        """Framework and variant: TensorFlow (tf_keras) bfloat16."""
        return f"{self.framework_title} {self.variant}"

    @property
    def peak_bytes(self) -> float | None:
        """The peak of its memory to compare, see `Memory`."""
        return self.memory.peak_bytes if self.memory else None

    def value_of(self, metric: str) -> float | None:
        """The value of one of its metrics."""
        known = self.metrics.get(metric)
        return known.value if known else None

    @property
    def losses(self) -> list[float | None]:
        """The losses of its certificate."""
        return self.certificate.losses if self.certificate else []


class Comparison(Base, frozen=True, kw_only=True, eq=False):
    """A ratio of the times of two cases, by their ids, with its interval and verdict; derived.

    `kind`: "baseline" is with what it is compared with in its framework (`Case.against`),
    "framework" with its twin, "control" with the same work.
    """

    technique: str
    variant: str
    task: str
    batch_size: int
    kind: str
    numerator: str
    denominator: str
    mode: str = "train"
    ratio: Ratio | None = None
    ci: RatioBounds | None = None
    sd: Annotated[float, Meta(le=10)] | None = None
    n: Count | None = None
    freedom: Positive | None = None
    look: Count | None = None
    verdict: str | None = None
    reason: str | None = None

    @property
    def task_title(self) -> str:
        """The task; predictions are other work than train steps."""
        return _task_title(self.task, self.mode)


class Why(Base, frozen=True, kw_only=True, eq=False):
    """Where the difference of two cases' steps comes from, as `twinbench why` measured it.

    seconds: what a step of `numerator` takes more, `ci` its interval. kinds: by kind of work, the
    seconds of both, which sum to their steps. causes: those that the sentence names.
    """

    numerator: str
    denominator: str
    sentence: str
    seconds: Number
    ci: Interval
    names: tuple[str, str]
    kinds: dict[str, tuple[Number, Number]]
    causes: list[NamedCause] = []


class NamedCause(Base, frozen=True, kw_only=True, eq=False):
    """A part of a difference. status: "measured", "tested" by an experiment, or "a guess"."""

    kind: str
    seconds: Number
    words: str
    status: str
    evidence: str = ""


class Control(Base, frozen=True, kw_only=True, eq=False):
    """The same work measured against itself."""

    framework: str | None = None
    flavour: str | None = None
    technique: str | None = None
    task: str | None = None
    ratio: Ratio | None = None
    ci: RatioBounds | None = None
    sd: Number | None = None
    verdict: str | None = None

    @property
    def framework_title(self) -> str:
        """PyTorch, TensorFlow or TensorFlow (tf_keras)."""
        return _framework_title(self.framework, self.flavour)


class NoiseFloor(Base, frozen=True, kw_only=True, eq=False):
    """How well a run tells things apart, and what the harness costs; derived."""

    controls: list[Control] = []
    median_half_width: Number | None = None
    p90_half_width: Number | None = None
    ratios: int = 0
    empty_sample_share: dict[str, Number] = {}
    shortest_sample_s: Number | None = None


class Attempt(Base, frozen=True, kw_only=True, eq=False):
    """The rounds of a block as they were played once. Shares are of the cores' time."""

    stolen: Number | None = None
    others: Number | None = None
    seconds: Number | None = None


class Conditions(Base, frozen=True, kw_only=True, eq=False):
    """Under which conditions a block was played, and in which order its contenders started."""

    match: int
    block: int
    order: list[str] = []
    load: Number | None = None
    stolen: Number | None = None
    others: Number | None = None
    tries: list[Attempt] = []
    seconds: dict[str, Number] = {}


class Pass(Base, frozen=True, kw_only=True, eq=False):
    """A block of each of some matches: when they were played, and how fast the machine was then.

    `number`: of the block; a pass that was interrupted, or that got further matches, has several
    entries. `again`: they were played once more, since the machine had changed; what they had
    before is not kept, and that entry has no matches. `before`, `after`: FLOP/s of a sentinel, see
    `bench.harness.speed`; `device_before`, `device_after`: of the device, where that is no CPU.
    """

    number: int
    began: str
    matches: list[int] = []
    again: bool = False
    before: Positive | None = None
    after: Positive | None = None
    device_before: Positive | None = None
    device_after: Positive | None = None


class TechniqueNotes(Base, frozen=True, kw_only=True, eq=False):
    """What is said of a technique."""

    title: str | None = None
    differs_by_design: list[str] = []
    notes: list[str] = []


class TaskFacts(Base, frozen=True, kw_only=True, eq=False):
    """What must be known of a task to judge its rows."""

    metric: str | None = None
    margin: Number | None = None
    parity: Number | None = None
    rounding: Number | None = None
    paired: bool = True


class Speed(Base, frozen=True, kw_only=True, eq=False):
    """What the machine does a second: on one thread, and on all that a run uses."""

    one: Number | None = None
    all: Number | None = None


class Processor(Base, frozen=True, kw_only=True, eq=False):
    """A processor as its system tells it. `architecture`: its name; `caches`: bytes of each."""

    vendor: str | None = None
    family: int | None = None
    model: int | None = None
    stepping: int | None = None
    architecture: str | None = None
    caches: dict[str, Number] = {}


class Environment(Base, frozen=True, kw_only=True, eq=False):
    """The machine and the software of a run. `model`: name and checksum of a user's file.

    `cores`: how many cores the processors share that are used, as the system tells; `affinity`: how
    many processors a run may use; `quota`: how many it may fill. Measured, before anything is
    timed: `products`, of each framework and dtype in FLOP/s, `bandwidth` of memory in bytes/s, and
    `chain`, operations that wait for one another, a second, see `bench.harness.speed`. `disturbed`:
    the share of the cores that others took meanwhile. `products_at_end`: those in float32 once more
    when all was measured.
    """

    cpu: str | None = None
    isa: list[str] = []
    isa_limits: dict[str, Any] = {}
    physical_cores: int | None = None
    logical_cores: int | None = None
    threads: int | None = None
    memory_bytes: Number | None = None
    os: str | None = None
    governor: str | None = None
    load: Number | None = None
    python: str | None = None
    onednn: str | None = None
    compiler: bool | None = None
    energy: list[str] | None = None
    packages: dict[str, dict[str, str | None] | None] = {}
    seeds: list[int] = []
    order: str | None = None
    gpu: dict[str, Any] | None = None
    peak_flops: dict[str, Number] | None = None
    processor: Processor | None = None
    cores: int | None = None
    affinity: int | None = None
    quota: Number | None = None
    hypervisor: str | None = None
    products: dict[str, dict[str, Speed]] = {}
    bandwidth: Speed | None = None
    chain: Speed | None = None
    disturbed: Number | None = None
    products_at_end: dict[str, dict[str, Speed]] = {}
    allocator: dict[str, Any] = {}
    devices: dict[str, str] = {}
    first_compile_s: dict[str, Positive] | None = None
    model: dict[str, str] | None = None


class Record(Base, frozen=True, kw_only=True, eq=False):
    """A run: what it was asked for, where it ran, and everything that it measured.

    `pooled`: when the runs started that it was pooled from; each is a block of its cases. `why`:
    of its headline pairs, where `twinbench why --write` measured it.
    """

    schema_version: int
    command: str
    effort: str
    started: str
    finished: bool
    environment: Environment
    techniques: dict[str, TechniqueNotes]
    tasks: dict[str, TaskFacts]
    cases: list[Case]
    comparisons: list[Comparison]
    why: list[Why] = []
    noise_floor: NoiseFloor = field(default_factory=NoiseFloor)
    rounds: int | None = None
    looks: list[Look] | None = None
    seed_looks: list[Look] | None = None
    resumed: list[str] = []
    ended: str | None = None
    seconds: dict[str, Number | None] = {}
    matches: list[list[str]] = []
    blocks: list[Conditions] = []
    passes: list[Pass] = []
    pooled: list[str] = []


class _Version(Struct):
    schema_version: int


def decode(text: bytes | str) -> Record:
    """The record that `text` holds. Raises ValueError with one line where it holds none."""
    try:
        version = msgspec.json.decode(text, type=_Version).schema_version
    except msgspec.ValidationError:
        raise ValueError("not a record of twinbench (no schema_version)") from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise ValueError("not JSON, or cut off before its end") from None
    except RecursionError:
        raise ValueError("nested too deeply for a record") from None
    if version > SCHEMA_VERSION:
        raise ValueError(
            f"schema {version} is newer than {SCHEMA_VERSION}, the newest that "
            "this version reads: update twinbench"
        )
    if version < SCHEMA_VERSION:
        raise ValueError(
            f"schema {version} is older than {SCHEMA_VERSION}, the only one that this version "
            "reads: measure again"
        )
    try:
        record = msgspec.json.decode(text, type=Record)
    except msgspec.ValidationError as error:
        raise ValueError(f"the record: {in_words(error)}") from None
    except RecursionError:
        raise ValueError("nested too deeply for a record") from None
    _check_looks(record)
    _check_rounds(record)
    _check_predictions(record)
    return record


def encode(record: Record) -> bytes:
    """A record as JSON, with a line for each entry of each list, so that it can be searched."""
    parts = []
    for name in record.__struct_fields__:
        value = getattr(record, name)
        if value and isinstance(value, list):
            text = b"[\n" + b",\n".join(map(msgspec.json.encode, value)) + b"\n]"
        else:
            text = msgspec.json.encode(value)
        parts.append(b'"%s": %s' % (name.encode(), text))
    return b"{\n" + b",\n".join(parts) + b"\n}\n"


def in_words(error: msgspec.ValidationError) -> str:
    """ "cases 3: timing: ci_s: expected `array`, got `int`": the place first."""
    what, _, path = str(error).partition(" - at `$")
    place = re.sub(r"\[(\d+)\]", r" \1", path.rstrip("`")).replace("[...]", "").strip(". ")
    where = f"{place.replace('.', ': ')}: " if place else ""
    return f"{where}{what[0].lower()}{what[1:]}"


def _check_looks(record: Record) -> None:
    for name in ("looks", "seed_looks"):
        looks = getattr(record, name) or []
        if looks != sorted(set(looks)) or len(looks) > MOST_LOOKS:
            raise ValueError(f"the record: {name} are not {MOST_LOOKS} rising numbers at most")


def _check_predictions(record: Record) -> None:
    """What a model has right, loses and gains are shares of the same samples."""
    for number, case in enumerate(record.cases):
        checked = case.fidelity
        if checked and not (
            checked.lost <= checked.right
            and checked.right + checked.gained <= checked.samples
            and checked.lost + checked.gained <= checked.flipped <= checked.samples
        ):
            raise ValueError(
                f"the record: cases {number}: fidelity: it counts more than its samples"
            )


def _check_rounds(record: Record) -> None:
    """Contenders of a block play the same rounds; matches and blocks are numbered."""
    rounds: dict[tuple[str, str], int] = {}
    for number, case in enumerate(record.cases):
        for match, blocks in case.timing.step_s.items():
            for block, samples in blocks.items():
                place = f"the record: cases {number}: timing: step_s: match {match}, block {block}"
                if not match.isdecimal() or not block.isdecimal():
                    raise ValueError(f"{place}: expected numbers")
                if samples and rounds.setdefault((match, block), len(samples)) != len(samples):
                    raise ValueError(f"{place}: it has not as many rounds as others")
