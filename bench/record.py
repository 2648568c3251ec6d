"""The record of a run, `results.json`: these types are its schema.

The record has what was measured and what `bench.analysis` derives from it. Fields marked "derived"
are None or empty until then. Sizes are in bytes, times in seconds. `decode` reports a wrong type, a
number out of range or a missing field in one line.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct, field

T = TypeVar("T")
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
    """Base class of the record's types: immutable, compared by identity."""

    def but(self, **changes: Any):
        """A copy with some fields changed."""
        return msgspec.structs.replace(self, **changes)


class Timing(Base, frozen=True, kw_only=True, eq=False):
    """First calls and steps. `step_s`: samples by match and block. The rest is derived."""

    step_s: dict[str, dict[str, list[Sample]]] = {}
    cold_first_call_s: Positive | None = None
    warm_first_call_s: Positive | None = None
    median_s: Positive | None = None
    ci_s: tuple[Positive, Positive] | None = None

    @property
    def block_count(self) -> int:
        """The number of blocks that have samples. A block of several matches counts once."""
        return len({block for blocks in self.step_s.values() for block in blocks})


class Memory(Base, frozen=True, kw_only=True, eq=False):
    """Peak memory of a new process, as medians over the cold starts; derived.

    `device_peak`: of a GPU, by its framework's allocator. `samples`: those of each cold start.
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
        """The peak memory of a GPU, by its framework's allocator."""
        return (self.device_peak or {}).get("allocated")

    @property
    def above_import(self) -> float | None:
        """The peak memory of the steady state above the memory after the imports, in bytes."""
        if self.steady_peak_bytes is None or self.import_bytes is None:
            return None
        return self.steady_peak_bytes - self.import_bytes

    @property
    def peak_bytes(self) -> float | None:
        """The peak to compare: the GPU's, or on a CPU that of the process above its imports."""
        on_device = self.device_peak_bytes
        return self.above_import if on_device is None else on_device


class AccuracyDifference(Base, frozen=True, kw_only=True, eq=False):
    """The difference of the metric from the baseline's, seed by seed."""

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
    """Predictions of a trained model compared with the same model in float32, on held-out samples.

    `right`: how many samples the float model classifies correctly. `lost`, `gained`: samples that
    only the float model, or only this row, classifies correctly. `flipped`: samples whose class
    differs. `loss_more`, `loss_sd`: mean and standard deviation of the difference of losses, in
    nats; None if a loss is not finite. `loss`, `points` (gained minus lost, in percent of the
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
    """What a worker reports of a block: first call, losses, and the cost of an empty sample."""

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
    """A cold start in a new process: first call, peak memory by phase, and its parts."""

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
    """What a row needs besides a setting, as its benchmark file declares.

    `epochs`: of training. `teacher`: one has to be trained first. `calibration`: a few batches set
    ranges. `compiled`: a compiler runs before the first step.
    """

    epochs: int = 0
    teacher: bool = False
    calibration: bool = False
    compiled: bool = False


class Case(Base, frozen=True, kw_only=True, eq=False):
    """A row: a variant of a technique in a framework, at a task, batch size and mode.

    `program`: the id of the case that was measured for it, which runs the same program. `against`:
    the variant that its figures are compared with, if that is not the baseline.
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
        """Task, batch size and mode: only cases with the same work are compared."""
        return (self.task, self.batch_size, self.mode)

    @property
    def task_title(self) -> str:
        """The task, with "predictions" if these are timed."""
        return _task_title(self.task, self.mode)

    @property
    def side(self) -> tuple[str, str | None]:
        """The framework and its flavour."""
        return (self.framework, self.flavour)

    @property
    def program_id(self) -> str:
        """The id of the case whose measurements it shows; usually this case."""
        return self.program or self.id

    @property
    def has_times(self) -> bool:
        """Whether it has step times."""
        return self.status == "OK" and any(self.timing.step_s.values())

    @property
    def is_legacy(self) -> bool:
        """Whether it ran with tf_keras instead of Keras 3."""
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
        """Its peak memory to compare, see `Memory`."""
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
    """The ratio of the times of two cases, with interval and verdict; derived.

    `kind`: "baseline" compares with the baseline or `Case.against` in the same framework,
    "framework" with the same variant in the other framework, "control" with the same work.
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
        """The task, with "predictions" if these are timed."""
        return _task_title(self.task, self.mode)


class Why(Base, frozen=True, kw_only=True, eq=False):
    """Why the steps of two cases take different times, as `twinbench why` measured it.

    seconds: by how much a step of `numerator` is longer; `ci`: its interval. kinds: the seconds of
    both by kind of work, which add up to their steps. causes: those that the sentence names.
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
    """How small a difference a run can tell, and what the harness costs; derived."""

    controls: list[Control] = []
    median_half_width: Number | None = None
    p90_half_width: Number | None = None
    ratios: int = 0
    empty_sample_share: dict[str, Number] = {}
    shortest_sample_s: Number | None = None


class Attempt(Base, frozen=True, kw_only=True, eq=False):
    """One try at the rounds of a block. Shares are of the cores' time."""

    stolen: Number | None = None
    others: Number | None = None
    seconds: Number | None = None


class Conditions(Base, frozen=True, kw_only=True, eq=False):
    """The conditions of a block, and the order in which its contenders started."""

    match: int
    block: int
    order: list[str] = []
    load: Number | None = None
    stolen: Number | None = None
    others: Number | None = None
    tries: list[Attempt] = []
    seconds: dict[str, Number] = {}


class Pass(Base, frozen=True, kw_only=True, eq=False):
    """One block of each of some matches: when they were measured, and the machine's speed then.

    `number`: of the block. A pass that was interrupted, or got further matches, has several
    entries. `again`: the pass was repeated because the machine's speed changed; the first try is
    not kept, and its entry has no matches. `before`, `after`: speed in FLOP/s, see
    `bench.harness.speed`; `device_before`, `device_after`: of the GPU, if there is one.
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
    """The title and notes of a technique."""

    title: str | None = None
    differs_by_design: list[str] = []
    notes: list[str] = []


class TaskFacts(Base, frozen=True, kw_only=True, eq=False):
    """What the analysis needs to know of a task."""

    metric: str | None = None
    margin: Number | None = None
    parity: Number | None = None
    rounding: Number | None = None
    paired: bool = True


class Speed(Base, frozen=True, kw_only=True, eq=False):
    """Operations per second, on one thread and on all threads of the run."""

    one: Number | None = None
    all: Number | None = None


class Processor(Base, frozen=True, kw_only=True, eq=False):
    """A processor as the system describes it. `architecture`: its name; `caches`: bytes of each."""

    vendor: str | None = None
    family: int | None = None
    model: int | None = None
    stepping: int | None = None
    architecture: str | None = None
    caches: dict[str, Number] = {}


class Environment(Base, frozen=True, kw_only=True, eq=False):
    """The machine and the software of a run. `model`: name and checksum of a user's file.

    `cores`: physical cores of the processors in use, as the system reports; `affinity`: the
    processors that the run may use; `quota`: how many it may fill. Measured before the first row:
    `products`, by framework and dtype in FLOP/s; `bandwidth` of memory in bytes/s; `chain`,
    dependent operations per second, see `bench.harness.speed`; `disturbed`, the share of the cores
    that other programs used meanwhile. `products_at_end`: the float32 products at the end of the
    run.
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
    """A run: its options, its machine, and everything that it measured.

    `pooled`: the start times of the runs that it pools; each is one block of its cases. `why`:
    causes that `twinbench why --write` measured for the main ratios.
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
    """The record in `text`. Raises ValueError with one line if that is none."""
    try:
        version = msgspec.json.decode(text, type=_Version).schema_version
    except msgspec.ValidationError:
        raise ValueError("not a record of twinbench: it has no schema_version") from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise ValueError("not JSON, or cut off before its end") from None
    except RecursionError:
        raise ValueError("nested too deeply for a record") from None
    if version > SCHEMA_VERSION:
        raise ValueError(
            f"schema {version} is newer than this twinbench, which reads {SCHEMA_VERSION}: update "
            "twinbench"
        )
    if version < SCHEMA_VERSION:
        raise ValueError(
            f"schema {version} is older than this twinbench, which reads {SCHEMA_VERSION}: measure "
            "again"
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
    """The record as JSON, with one line per entry of a list, so that text search works."""
    parts = []
    for name in record.__struct_fields__:
        value = getattr(record, name)
        if value and isinstance(value, list):
            text = b"[\n" + b",\n".join(map(msgspec.json.encode, value)) + b"\n]"
        else:
            text = msgspec.json.encode(value)
        parts.append(b'"%s": %s' % (name.encode(), text))
    return b"{\n" + b",\n".join(parts) + b"\n}\n"


def load_json(path: Path, kind: type[T], what: str) -> T:
    """The JSON file `path` as a `kind`; ValueError with one line if it is not `what`."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise ValueError(f"{path} can't be read ({error.strerror})") from None
    except msgspec.ValidationError as error:
        raise ValueError(f"{path}: not {what}: {in_words(error)}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise ValueError(f"{path}: not JSON, or cut off before its end") from None


def in_words(error: msgspec.ValidationError) -> str:
    """An error with its place first: "cases 3: timing: ci_s: expected `array`, got `int`"."""
    what, _, path = str(error).partition(" - at `$")
    place = re.sub(r"\[(\d+)\]", r" \1", path.rstrip("`")).replace("[...]", "").strip(". ")
    where = f"{place.replace('.', ': ')}: " if place else ""
    return f"{where}{what[0].lower()}{what[1:]}"


def _check_looks(record: Record) -> None:
    for name in ("looks", "seed_looks"):
        looks = getattr(record, name) or []
        if looks != sorted(set(looks)) or len(looks) > MOST_LOOKS:
            raise ValueError(f"the record: {name} must be at most {MOST_LOOKS} rising numbers")


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
