"""What a report says, apart from how it looks: a record as tables, facts and sentences.

Strings of the record stand here as they are; each renderer neutralises them for its own medium.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from bench.analysis import machine_class, passes
from bench.analysis.certificates import largest_difference
from bench.analysis.pairing import resolved
from bench.analysis.questions import Answer, answers
from bench.analysis.ranking import Work, works
from bench.analysis.reading import task_of, tasks, techniques, view
from bench.analysis.values import MOST_OTHERS, MOST_STOLEN, is_number
from bench.record import (
    DIFFERENT,
    FRAMEWORKS,
    Case,
    Comparison,
    Control,
    Environment,
    NoiseFloor,
    Processor,
    Record,
    Speed,
    TaskFacts,
    TechniqueNotes,
    Why,
)
from bench.report import causes, graphs
from bench.report.formatting import MISSING, compact, number, ratio, scaled
from bench.report.names import parameters, rounded, title
from bench.report.technique_tables import Table, of_figures, of_words, tables
from bench.report.text import plain

Facts = list[tuple[str, str]]


@dataclass(frozen=True)
class TaskPart:
    """The tables of one technique at one task, and why pairs of it are not comparable.

    `graphs`: how the graphs of twins differ that are not equally fast.
    """

    title: str
    tables: list[Table]
    incomparable: Facts
    graphs: list[str]


@dataclass(frozen=True)
class TechniquePart:
    """All that is said of one technique."""

    title: str
    variants: Facts
    tasks: list[TaskPart]
    differs: list[str]
    notes: list[str]
    problems: Facts
    same_work: Facts
    took_effect: Facts


@dataclass(frozen=True)
class Report:
    """A whole report."""

    run: str
    command: str
    warnings: list[str]
    environment: Facts
    noise: Facts
    controls: Table | None
    measured: str
    answers: list[Answer]
    works: list[Work]
    why: list[tuple[str, Why, Table]]  # of what work
    techniques: list[TechniquePart]
    legend: Facts


def build(record: Record) -> Report:
    """Everything that the report says, from the record alone."""
    every = works(record)
    return Report(
        run=run_line(record),
        command=record.command,
        warnings=warnings(record),
        environment=_environment(record.environment),
        noise=[*_noise(record.noise_floor), *_watching(record)],
        controls=_controls(record.noise_floor.controls),
        measured=measured([record]),
        answers=answers(record, every),
        works=every,
        why=[
            (causes.heading(record, one), one, causes.table(record, one))
            for one in causes.known(record)
        ],
        techniques=[_technique(record, name) for name in techniques(record)],
        legend=_legend(record.effort),
    )


# The run and its machine -----------------------------------------------------------------------


def run_line(record: Record) -> str:
    """Effort, blocks and start of the run; of a pooled one the runs, which are its blocks."""
    if of := record.pooled:
        return f"{record.effort} effort · {len(of)} runs pooled · started {of[0]} to {of[-1]}"
    blocks = _blocks(record)
    plural = "" if blocks == 1 else "s"
    return f"{record.effort} effort · {blocks} block{plural} · started {record.started}"


def _blocks(record: Record) -> int:
    """In how many blocks the rows were timed that were in most."""
    return max((case.timing.block_count for case in record.cases), default=0)


SMALL, LARGE = 1e6, 1e7  # parameters: a step is mostly overhead, mostly arithmetic


def measured_on(runs: list[Record]) -> str:
    """The classes of the machines of runs, in a sentence without its end."""
    machines = dict.fromkeys(machine_class.words(run.environment) for run in runs)
    return f"Measured on {' and on '.join(machines)}"


def measured(runs: list[Record]) -> str:
    """What was measured, in a sentence: the classes of machines, and how large the models are."""
    tasks_run = {case.task for run in runs for case in run.cases if case.status == "OK"}
    sizes = parameters(tasks_run)
    models = ""
    if sizes:
        low, high = rounded(sizes[0]), rounded(sizes[-1])
        models = f"; models of {low} to {high} parameters" if low != high else f"; {low} parameters"
        if sizes[0] < SMALL and sizes[-1] >= LARGE:
            models += "; the framework's overhead decides in small ones, arithmetic in large ones"
    return f"{measured_on(runs)}{models}."


def _limits(environment: Environment) -> str:
    """By which variables the instructions that libraries use were limited."""
    return f"limited by {compact(environment.isa_limits)}" if environment.isa_limits else ""


# Why a run is not finished, in words.
ENDED = {
    "minutes": "ENDED IN TIME (--minutes): intervals hold for the blocks that were played, and "
    "--resume narrows them.",
    "interrupted": "INTERRUPTED: intervals hold for the blocks that were played, and --resume "
    "goes on.",
    None: "NOT FINISHED: the run goes on, or was cut short. What it had measured stands here.",
}


def warnings(record: Record) -> list[str]:
    """What a reader must know before any figure."""
    lines = []
    if record.effort == "quick" or _blocks(record) == 1:
        lines.append(
            "PROVISIONAL: one block, no intervals, no verdicts. "
            "It shows that everything runs, and about how fast it is."
        )
    if not record.finished:
        lines.append(ENDED.get(record.ended, ENDED[None]))
    changed = [passes.said(record.passes), machine_class.changed_at_end(record.environment)]
    return lines + list(filter(None, changed)) + _busy(record)


def _busy(record: Record) -> list[str]:
    """What else used the machine while steps were timed; before the run, where none were.

    The load is an average, in which a machine is still busy a minute after it is not.
    """
    watched = [block for block in record.blocks if block.others is not None]
    disturbed = sum(b.others > MOST_OTHERS or (b.stolen or 0) > MOST_STOLEN for b in watched)
    if disturbed:
        return [
            f"BUSY MACHINE: in {disturbed} of {len(watched)} blocks other programs took more than "
            f"{MOST_OTHERS:.0%} of the cores, or the machine's host {MOST_STOLEN:.0%}."
        ]
    load, cores = record.environment.load, record.environment.logical_cores
    if not watched and load is not None and cores is not None and load > cores:
        return [f"BUSY MACHINE: load {load:.1f} on {cores} cores before the run."]
    return []


def _environment(environment: Environment) -> Facts:
    cores = f"{compact(environment.physical_cores)} physical"
    cores += f", {compact(environment.logical_cores)} logical"
    cores += f"; {compact(environment.threads)} threads used"
    packages = environment.packages
    system = f"{compact(environment.os)}, governor {compact(environment.governor)}"
    system += f", load {compact(environment.load)}"
    if environment.compiler is not None:
        system += f", C++ compiler {compact(environment.compiler)}"
    isa = ", ".join(filter(None, (compact(environment.isa), _limits(environment))))
    facts = [
        ("Class", machine_class.words(environment)),
        ("CPU", f"{compact(environment.cpu)} ({isa}){_processor(environment)}"),
        ("Cores", cores),
        ("Memory", f"{number(scaled(environment.memory_bytes, 2**-30))} GiB"),
        *([("GPU", _gpu(environment.gpu))] if environment.gpu else []),
        ("System", system),
        ("Peak", f"best matrix product: {_gflops(environment.peak_flops or {})} GFLOP/s"),
        *_speeds(environment),
        ("PyTorch", compact(packages.get("pt"))),
        ("TensorFlow", compact(packages.get("tf"))),
        ("Benchmark", f"python {compact(environment.python)}, {compact(packages.get('bench'))}"),
        ("Allocator", compact(environment.allocator)),
        ("oneDNN", compact(environment.onednn)),
        ("Seeds", compact(environment.seeds)),
        ("Order", compact(environment.order)),
    ]
    if environment.energy is not None:
        counters = ", ".join(environment.energy)
        facts.append(("Energy", f"counted by {counters}" if counters else MISSING))
    first = environment.first_compile_s or {}  # records of before have it in cold first calls
    return facts + [("First compile", _first_compile(name, took)) for name, took in first.items()]


def _processor(environment: Environment) -> str:
    """What numbers and sizes are known of the processor, and what it runs under."""
    processor = environment.processor or Processor()
    numbers = {n: getattr(processor, n) for n in ("family", "model", "stepping")}
    parts = [f"{name} {value}" for name, value in numbers.items() if value is not None]
    sizes = [f"{n} {size / 2**10:,.0f} KiB" for n, size in processor.caches.items()]
    if environment.hypervisor:
        parts.append(f"hypervisor {compact(environment.hypervisor)}")
    return "".join(f"; {part}" for part in [", ".join(parts), ", ".join(sizes)] if part)


def _speeds(environment: Environment) -> Facts:
    """What each library computes, and what memory moves, on one thread and on all."""
    facts = []
    for name, speeds in environment.products.items():
        each = [f"{dtype} {_both(speed, 1e-9)}" for dtype, speed in speeds.items()]
        title = f"Products, {FRAMEWORKS.get(name, name)}"
        facts.append((title, f"GFLOP/s on one thread and on all: {', '.join(each)}"))
    for title, what, speed in (
        ("Bandwidth", "GB/s", environment.bandwidth),
        ("Chains", "10⁹ dependent additions/s", environment.chain),
    ):
        if speed:
            facts.append((title, f"{what} on one thread and on all: {_both(speed, 1e-9)}"))
    return facts


def _both(speed: Speed, scale: float) -> str:
    return f"{number(scaled(speed.one, scale))} and {number(scaled(speed.all, scale))}"


def _gpu(gpu: dict[str, Any]) -> str:
    """A GPU's name, and what else is known of it."""
    size = compact(gpu.get("memory_bytes"))
    known = [
        ("", gpu.get("name")),
        ("", f"{number(int(size) * 2**-30)} GiB" if size.isdecimal() else None),
        ("compute capability ", gpu.get("compute_capability")),
        ("CUDA ", gpu.get("cuda")),
        ("the driver's CUDA ", gpu.get("driver")),
    ]
    return ", ".join(f"{what}{compact(value)}" for what, value in known if value)


def _first_compile(name: str, seconds: float) -> str:
    """What the first program that a machine compiles has to itself."""
    return (
        f"{FRAMEWORKS.get(name, name)} took {number(seconds)} s to compile one operator with "
        "nothing on disk; cold first calls know the machine, and not their program"
    )


def _gflops(peaks: dict[str, float]) -> str:
    """The peak of each dtype in GFLOP/s."""
    return ", ".join(f"{name} {number(scaled(p, 1e-9))}" for name, p in peaks.items()) or MISSING


def _noise(floor: NoiseFloor) -> Facts:
    """How wide the run's intervals are, where there are any, and what the harness costs."""
    facts = []
    if floor.median_half_width is not None:
        median, p90 = percent(floor.median_half_width), percent(floor.p90_half_width)
        said = f"half-width of {floor.ratios} ratios' intervals: median {median}, 90% below {p90}"
        facts.append(("Intervals", said))
    shares = ", ".join(
        f"{FRAMEWORKS.get(name, name)} {percent(share)}"
        for name, share in floor.empty_sample_share.items()
    )
    shortest = number(scaled(floor.shortest_sample_s, 1e3))
    harness = f"adds to a sample: {shares or MISSING}; the shortest sample: {shortest} ms"
    return [*facts, ("Harness", harness)]


def _watching(record: Record) -> Facts:
    """What the run spent on looking whether the machine is still the same."""
    spent, total = record.seconds.get("sentinel"), record.seconds.get("total")
    if not spent or not total:
        return []
    return [("Sentinels", f"{len(record.passes)} passes; {percent(spent / total)} of the run")]


def percent(share: float | None) -> str:
    """A share in percent with two significant digits."""
    return MISSING if share is None else f"{share * 100:.2g}%"


def _controls(controls: list[Control]) -> Table | None:
    rows = [
        [
            control.framework_title,
            compact(control.task),
            ratio(control.ratio, control.ci),
            percent(control.sd),
            plain(control.verdict or MISSING),
        ]
        for control in controls
    ]
    columns = of_words("framework", "task")
    columns += of_figures("ratio\n(95% interval)", "sd between\nblocks")
    columns += of_words("verdict")
    title = "A/A controls: a baseline against itself, so the true ratio is 1"
    return Table(title, columns, rows) if rows else None


def _legend(effort: str) -> Facts:
    facts = [
        ("step", "one training step (forward, loss, gradients, update); its input is in place"),
        ("cold, warm", "first call in a process that has only imported; in one of a match"),
        ("of peak", "the step's arithmetic over the best matrix product of its dtype in this run"),
        ("memory", "peak of the process above what its imports took; MB = 10⁶ bytes"),
        ("ratio", "of step times within the same rounds; below 1 the first named is faster"),
        (MISSING, "not measured, or not there in that framework"),
    ]
    if effort == "quick":
        return facts
    return [
        *facts,
        ("faster, slower", "the 95% interval lies wholly beyond 3%"),
        ("equivalent", "the 90% interval lies within 3% (accuracy: within the margin)"),
        (
            "faster, less accurate",
            "faster, but less accurate by more than the margin (by the mean)",
        ),
        ("slower, more accurate", "the other side is faster, but less accurate by more than that"),
        ("slightly faster, slightly slower", "the 95% interval excludes 1, but not 3%"),
        ("inconclusive", "none of these"),
        (DIFFERENT, "the two sides were not shown to do the same work"),
    ]


# Techniques ------------------------------------------------------------------------------------


def _technique(record: Record, name: str) -> TechniquePart:
    about = record.techniques.get(name) or TechniqueNotes()
    cases = [case for case in record.cases if case.technique == name]
    return TechniquePart(
        title=about.title or name,
        variants=_variants(cases),
        tasks=[_task(record, name, task) for task in tasks(record, name)],
        differs=about.differs_by_design,
        notes=[*about.notes, *_shared(cases, record.cases)],
        problems=_problems(cases),
        same_work=_same_work(record, name),
        took_effect=_took_effect(cases),
    )


def _variants(cases: list[Case]) -> Facts:
    """What each variant is called in plain words, where that says more than its name."""
    titles = {case.variant: title(case) for case in cases if case.role != "control"}
    return [(name, words) for name, words in titles.items() if words not in name.replace("_", " ")]


def _shared(cases: list[Case], every: list[Case]) -> list[str]:
    """Which rows show the figures of another technique's, whose program is the same."""
    by_id = {case.id: case for case in every}
    shown = {
        (case.variant, other.technique, other.variant)
        for case in cases
        if (other := by_id.get(case.program_id)) and other is not case
    }
    return [
        f"{variant} is the same program as {other} of {technique}, and was measured once: times, "
        "first call and memory are that row's."
        for variant, technique, other in sorted(shown)
    ]


def _task(record: Record, technique: str, task: str) -> TaskPart:
    of_task = view(record, technique, task)
    reasons = _grouped((of_task.pair(c), c.reason, c) for c in of_task.comparisons if c.reason)
    made = tables(of_task, record.tasks.get(task_of(task)) or TaskFacts())
    made += filter(None, [graphs.table(of_task)])
    return TaskPart(task, made, reasons, graphs.differences(of_task))


def _problems(cases: list[Case]) -> Facts:
    """Each case that is not OK, or lacks a figure, with its reason."""
    return _grouped(
        (f"{_status(case)}: {case.full_title}", case.reason or "no reason given", case)
        for case in cases
        if case.status != "OK" or case.reason
    )


def _status(case: Case) -> str:
    return "IN PART" if case.status == "OK" else case.status


def _grouped(facts: Iterable[tuple[str, str, Case | Comparison]]) -> Facts:
    """Facts of (label, text, where), each once, followed by all the places where it holds."""
    places: dict[tuple[str, str], dict[str, list[str]]] = {}
    for label, text, where in facts:
        batches = places.setdefault((label, text), {}).setdefault(where.task_title, [])
        batches.append(str(where.batch_size))
    return [
        (label, f"{text} ({'; '.join(f'{t} batch {_list(b)}' for t, b in by_task.items())})")
        for (label, text), by_task in places.items()
    ]


def _list(words: list[str]) -> str:
    return ", ".join(dict.fromkeys(words))


def _same_work(record: Record, technique: str) -> Facts:
    """For each variant, how many pairs of twins carry a matching certificate."""
    cases = {case.id: case for case in resolved(record.cases)}
    pairs: dict[str, list[Comparison]] = {}
    for task in tasks(record, technique):
        of_task = view(record, technique, task)
        for row in (row for rows in of_task.rows.values() for row in rows):
            if comparison := of_task.twins(row):
                pairs.setdefault(comparison.variant, []).append(comparison)
    return [(variant, _certified(twins, cases)) for variant, twins in pairs.items()]


def _certified(pairs: list[Comparison], cases: dict[str, Case]) -> str:
    matched = sum(pair.verdict != DIFFERENT and not pair.reason for pair in pairs)
    sides = [(cases.get(pair.numerator), cases.get(pair.denominator)) for pair in pairs]
    proven = [pair for pair in sides if all(case and case.blocks for case in pair)]
    largest = [value for pair in proven if is_number(value := largest_difference(*pair))]
    return f"{matched} of {len(pairs)} pairs match; losses apart by {_most(largest)}"


def _most(values: list[float]) -> str:
    return f"at most {max(values):.1e}" if values and max(values) else "0" if values else MISSING


def _took_effect(cases: list[Case]) -> Facts:
    """The proof that each variant happened, over all tasks and batch sizes, but for its graphs."""
    proofs: dict[str, list[dict]] = {}
    for case in cases:
        if case.evidence and case.role != "control":
            proofs.setdefault(case.full_title, []).append(graphs.without(case.evidence))
    return [(title, compact(_inner(merge(every)))) for title, every in proofs.items()]


def _inner(proof: Any) -> Any:
    """What a proof of one kind says, without the name of the kind."""
    values = list(proof.values()) if isinstance(proof, dict) else []
    return values[0] if len(values) == 1 and isinstance(values[0], dict) else proof


def merge(values: list[Any]) -> Any:
    """Several proofs as one of the same shape: numbers as a range, words as a list."""
    dicts = [value for value in values if isinstance(value, dict)]
    if dicts:
        keys = dict.fromkeys(key for entry in dicts for key in entry)
        return {key: merge([entry[key] for entry in dicts if key in entry]) for key in keys}
    if all(map(is_number, values)):
        low, high = min(values), max(values)
        return low if low == high else f"{compact(low)}–{compact(high)}"
    return "/".join(dict.fromkeys(map(compact, values)))
