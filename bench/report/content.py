"""What a report says, apart from how it looks: a record as tables, facts and sentences.

Strings of the record stand here as they are; each renderer neutralises them for its own medium.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from bench.analysis.advice import Advice, advice
from bench.analysis.certificates import largest_difference
from bench.analysis.decisions import Work, title, works
from bench.analysis.pairing import resolved
from bench.analysis.reading import (
    DIFFERENT,
    FRAMEWORKS,
    block_count,
    framework_title,
    task_of,
    tasks,
    techniques,
    title_of,
    view,
    work_of,
)
from bench.analysis.values import MOST_OTHERS, MOST_STOLEN, at, is_number
from bench.report import graphs
from bench.report.answer import parameters, rounded
from bench.report.blocks import Table, of_figures, of_words, tables
from bench.report.figures import MISSING, compact, number, ratio, scaled
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
    advice: list[Advice]
    works: list[Work]
    techniques: list[TechniquePart]
    legend: Facts


def build(results: dict[str, Any]) -> Report:
    """Everything that the report says, from the record alone."""
    return Report(
        run=run_line(results),
        command=results["command"],
        warnings=warnings(results),
        environment=_environment(results["environment"]),
        noise=_noise(results["noise_floor"]),
        controls=_controls(results["noise_floor"].get("controls") or []),
        measured=measured([results]),
        advice=advice(results),
        works=works(results),
        techniques=[_technique(results, name) for name in techniques(results)],
        legend=_legend(results["effort"]),
    )


# The run and its machine -----------------------------------------------------------------------


def run_line(results: dict[str, Any]) -> str:
    """Effort, blocks and start of the run."""
    blocks = _blocks(results)
    plural = "" if blocks == 1 else "s"
    return f"{results['effort']} effort · {blocks} block{plural} · started {results['started']}"


def _blocks(results: dict[str, Any]) -> int:
    """In how many blocks the rows were timed that were in most."""
    return max(map(block_count, results["cases"]), default=0)


def _listed(value: Any) -> list:
    return value if isinstance(value, list) else []


SMALL, LARGE = 1e6, 1e7  # parameters: a step is mostly overhead, mostly arithmetic
WIDEST = ("amx_bf16", "avx512_bf16", "avx512f", "avx2", "sve", "neon")


def measured(runs: list[dict[str, Any]]) -> str:
    """What was measured, in a sentence: the machines, their devices, how large the models are."""
    machines = dict.fromkeys(machine_words(run["environment"]) for run in runs)
    tasks_run = {case["task"] for run in runs for case in run["cases"] if case["status"] == "OK"}
    sizes = parameters(tasks_run)
    models = ""
    if sizes:
        low, high = rounded(sizes[0]), rounded(sizes[-1])
        models = f", models of {low} to {high} parameters" if low != high else f", {low} parameters"
        if sizes[0] < SMALL and sizes[-1] >= LARGE:
            models += "; small models show overhead, large ones arithmetic: the tables show both"
    return f"Measured on {' and '.join(machines)}{models}."


def machine_words(found: dict[str, Any]) -> str:
    """A machine in words: its CPU with its widest instructions, or its GPU."""
    gpu = compact(at(found, "gpu", "name"))
    device = f"the GPU {gpu}, on" if found.get("gpu") else "a CPU, no GPU:"
    isa = [name for name in _listed(found.get("isa")) if isinstance(name, str)]
    widest = next((name for name in WIDEST if name in isa), "")
    cores = f"{compact(found.get('physical_cores'))} cores"
    parts = filter(None, (widest, cores, _limits(found)))
    return f"{device} {compact(found.get('cpu'))}, {', '.join(parts)}"


def _limits(found: dict[str, Any]) -> str:
    """By which variables the instructions that libraries use were limited."""
    return f"limited by {compact(found['isa_limits'])}" if found.get("isa_limits") else ""


# Why a run is not finished, in words.
ENDED = {
    "minutes": "ENDED IN TIME (--minutes): intervals hold for the blocks that were played, and "
    "--resume narrows them.",
    "interrupted": "INTERRUPTED: intervals hold for the blocks that were played, and --resume "
    "goes on.",
    None: "NOT FINISHED: the run goes on, or was cut short. What it had measured stands here.",
}


def warnings(results: dict[str, Any]) -> list[str]:
    """What a reader must know before any figure."""
    found = []
    if results["effort"] == "quick" or _blocks(results) == 1:
        found.append(
            "PROVISIONAL: one block, no intervals, no verdicts. "
            "It shows that everything runs, and about how fast it is."
        )
    if not results["finished"]:
        found.append(ENDED.get(results.get("ended"), ENDED[None]))
    return found + _busy(results)


def _busy(results: dict[str, Any]) -> list[str]:
    """What else used the machine while steps were timed; before the run, where none were.

    The load is an average, in which a machine is still busy a minute after it is not.
    """
    watched = [b for b in results.get("blocks") or [] if is_number(at(b, "others"))]
    disturbed = sum(
        b["others"] > MOST_OTHERS or (at(b, "stolen") or 0) > MOST_STOLEN for b in watched
    )
    if disturbed:
        return [
            f"BUSY MACHINE: in {disturbed} of {len(watched)} blocks other programs took more than "
            f"{MOST_OTHERS:.0%} of the cores, or the machine's host {MOST_STOLEN:.0%}."
        ]
    load, cores = (results["environment"].get(name) for name in ("load", "logical_cores"))
    if not watched and is_number(load) and is_number(cores) and load > cores:
        return [f"BUSY MACHINE: load {load:.1f} on {cores} cores before the run."]
    return []


def _environment(found: dict[str, Any]) -> Facts:
    cores = f"{compact(found.get('physical_cores'))} physical"
    cores += f", {compact(found.get('logical_cores'))} logical"
    cores += f"; {compact(found.get('threads'))} threads used"
    packages = found.get("packages") or {}
    system = f"{compact(found.get('os'))}, governor {compact(found.get('governor'))}"
    system += f", load {compact(found.get('load'))}"
    system += f", C++ compiler {compact(found['compiler'])}" if "compiler" in found else ""
    isa = ", ".join(filter(None, (compact(found.get("isa")), _limits(found))))
    facts = [
        ("CPU", f"{compact(found.get('cpu'))} ({isa})"),
        ("Cores", cores),
        ("Memory", f"{number(scaled(found.get('memory_bytes'), 2**-30))} GiB"),
        ("GPU", _gpu(found)),
        ("System", system),
        ("Peak", f"best matrix product: {_gflops(found.get('peak_flops'))} GFLOP/s"),
        ("PyTorch", compact(packages.get("pt"))),
        ("TensorFlow", compact(packages.get("tf"))),
        ("Benchmark", f"python {compact(found.get('python'))}, {compact(packages.get('bench'))}"),
        ("Allocator", compact(found.get("allocator"))),
        ("oneDNN", compact(found.get("onednn"))),
        ("Seeds", compact(found.get("seeds"))),
        ("Order", compact(found.get("order"))),
    ]
    facts += [("Energy", _counters(found["energy"]))] if "energy" in found else []
    first = found.get("first_compile_s") or {}  # records of before have it in cold first calls
    facts += [("First compile", _first_compile(name, took)) for name, took in first.items()]
    return facts if found.get("gpu") else [fact for fact in facts if fact[0] != "GPU"]


def _gpu(environment: dict[str, Any]) -> str:
    """A GPU's name, and what else is known of it."""
    found = environment.get("gpu")
    found = found if isinstance(found, dict) else {}
    size, driver = compact(found.get("memory_bytes")), environment.get("driver")
    known = [
        ("", found.get("name")),
        ("", f"{number(int(size) * 2**-30)} GiB" if size.isdigit() else None),
        ("compute capability ", found.get("compute_capability")),
        ("CUDA ", found.get("cuda")),
        ("the driver's CUDA ", found.get("driver")),
        ("driver ", driver),
    ]
    return ", ".join(f"{what}{compact(value)}" for what, value in known if value)


def _first_compile(name: str, seconds: float) -> str:
    """What the first program that a machine compiles has to itself."""
    return (
        f"{FRAMEWORKS.get(name, name)} took {number(seconds)} s to compile one operator with "
        "nothing on disk; cold first calls know the machine, and not their program"
    )


def _counters(names: Any) -> str:
    """What counts the machine's energy."""
    return f"counted by {', '.join(map(compact, names))}" if _listed(names) else MISSING


def _gflops(peaks: Any) -> str:
    """Peaks in GFLOP/s, however deep they are nested."""
    if isinstance(peaks, dict):
        return ", ".join(f"{name} {_gflops(peak)}" for name, peak in peaks.items()) or MISSING
    return number(scaled(peaks, 1e-9))


def _noise(found: dict[str, Any]) -> Facts:
    share = found.get("empty_sample_share")
    shares = share if isinstance(share, dict) else {"": share}
    each = ", ".join(
        f"{FRAMEWORKS.get(name, name)} {percent(value)}".strip() for name, value in shares.items()
    )
    shortest = number(scaled(found.get("shortest_sample_s"), 1e3))
    harness = f"adds to a sample: {each or MISSING}; the shortest sample: {shortest} ms"
    return [*_precision(found), ("Harness", harness)]


def _precision(found: dict[str, Any]) -> Facts:
    """How wide the run's intervals are; nothing where there is none."""
    if not is_number(found.get("median_half_width")):
        return []
    count = f"{compact(found['ratios'])} " if is_number(found.get("ratios")) else ""
    median, p90 = percent(found["median_half_width"]), percent(found.get("p90_half_width"))
    return [
        ("Intervals", f"half-width of {count}ratios' intervals: median {median}, 90% below {p90}")
    ]


def percent(share: Any) -> str:
    """A share in percent with two significant digits."""
    return f"{scaled(share, 100):.2g}%" if is_number(share) else MISSING


def _controls(controls: list[dict]) -> Table | None:
    rows = [
        [
            framework_title(control),
            compact(control.get("task")),
            ratio(control.get("ratio"), control.get("ci")),
            percent(control.get("sd")),
            plain(control.get("verdict") or MISSING),
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


def _technique(results: dict[str, Any], name: str) -> TechniquePart:
    about = results["techniques"].get(name) or {}
    cases = [case for case in results["cases"] if case["technique"] == name]
    parts = [_task(results, name, task) for task in tasks(results, name)]
    return TechniquePart(
        title=about.get("title") or name,
        variants=_variants(cases),
        tasks=parts,
        differs=about.get("differs_by_design") or [],
        notes=[*(about.get("notes") or []), *_shared(cases, results["cases"])],
        problems=_problems(cases),
        same_work=_same_work(results, name),
        took_effect=_took_effect(cases),
    )


def _variants(cases: list[dict]) -> Facts:
    """What each variant is called in plain words, where that says more than its name."""
    found = {case["variant"]: title(case) for case in cases if case["role"] != "control"}
    return [(name, words) for name, words in found.items() if words not in name.replace("_", " ")]


def _shared(cases: list[dict], every: list[dict]) -> list[str]:
    """Which rows show the figures of another technique's, whose program is the same."""
    by_id = {case["id"]: case for case in every}
    found = {
        (case["variant"], other["technique"], other["variant"])
        for case in cases
        if (other := by_id.get(case.get("program"))) and other is not case
    }
    return [
        f"{own} is the same program as {variant} of {technique}, and was measured once: times, "
        "first call and memory are that row's."
        for own, technique, variant in sorted(found)
    ]


def _task(results: dict[str, Any], technique: str, task: str) -> TaskPart:
    found = view(results, technique, task)
    reasons = _grouped(
        (found.pair(c), c["reason"], c) for c in found.comparisons if c.get("reason")
    )
    made = tables(found, results["tasks"].get(task_of(task)) or {})
    made += filter(None, [graphs.table(found)])
    return TaskPart(task, made, reasons, graphs.differences(found))


def _problems(cases: list[dict]) -> Facts:
    """Each case that is not OK, or lacks a figure, with its reason."""
    return _grouped(
        (f"{_status(case)}: {title_of(case)}", case.get("reason") or "no reason given", case)
        for case in cases
        if case["status"] != "OK" or case.get("reason")
    )


def _status(case: dict) -> str:
    return "IN PART" if case["status"] == "OK" else case["status"]


def _grouped(found: Iterable[tuple[str, str, dict]]) -> Facts:
    """Facts of (label, text, where), each once, followed by all the places where it holds."""
    places: dict[tuple[str, str], dict[str, list[str]]] = {}
    for label, text, where in found:
        batches = places.setdefault((label, text), {}).setdefault(work_of(where), [])
        batches.append(str(where["batch_size"]))
    return [
        (label, f"{text} ({'; '.join(f'{t} batch {_list(b)}' for t, b in by_task.items())})")
        for (label, text), by_task in places.items()
    ]


def _list(words: list[str]) -> str:
    return ", ".join(dict.fromkeys(words))


def _same_work(results: dict[str, Any], technique: str) -> Facts:
    """For each variant, how many pairs of twins carry a matching certificate."""
    views = [view(results, technique, task) for task in tasks(results, technique)]
    cases = {case["id"]: case for case in resolved(results["cases"])}
    pairs: dict[str, list[dict]] = {}
    for found in views:
        for row in (row for rows in found.rows.values() for row in rows):
            if comparison := found.twins(row):
                pairs.setdefault(comparison["variant"], []).append(comparison)
    return [(variant, _certified(found, cases)) for variant, found in pairs.items()]


def _certified(pairs: list[dict], cases: dict[str, dict]) -> str:
    matched = sum(c.get("verdict") != DIFFERENT and not c.get("reason") for c in pairs)
    sides = [(cases.get(c["numerator"]), cases.get(c["denominator"])) for c in pairs]
    proven = [pair for pair in sides if all(at(case, "blocks") for case in pair)]
    apart = [value for pair in proven if is_number(value := largest_difference(*pair))]
    return f"{matched} of {len(pairs)} pairs match; losses apart by {_most(apart)}"


def _most(values: list[float]) -> str:
    return f"at most {max(values):.1e}" if values and max(values) else "0" if values else MISSING


def _took_effect(cases: list[dict]) -> Facts:
    """The proof that each variant happened, over all tasks and batch sizes, but for its graphs."""
    found: dict[str, list[dict]] = {}
    for case in cases:
        if case.get("evidence") and case["role"] != "control":
            found.setdefault(title_of(case), []).append(graphs.without(case["evidence"]))
    return [(title, compact(_inner(merge(proofs)))) for title, proofs in found.items()]


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
