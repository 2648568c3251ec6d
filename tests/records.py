"""Typed records for tests: single cases, records with planted effects, and one of a whole run.

Nothing of them was measured. `case`, `comparison` and `record` fill in what a test does not care
about; `planted` plants effects, whose answers are then known; `whole_run` has something of
everything that a report shows.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from math import exp
from typing import Any

import numpy as np
from msgspec import Struct

from bench.analysis.bounds import LOOKS
from bench.analysis.declared import complete
from bench.record import (
    Accuracy,
    AccuracyDifference,
    Block,
    Case,
    Certificate,
    Comparison,
    Control,
    Environment,
    Memory,
    Metric,
    NoiseFloor,
    Record,
    TaskFacts,
    TechniqueNotes,
    Timing,
    decode,
    encode,
)

FLAVOURS = {"pt": None, "tf": "keras3"}
TASKS = {
    "digits-cnn": TaskFacts(metric="accuracy", margin=1.0, parity=1e-5),
    "text-gpt": TaskFacts(metric="bits_per_character", margin=0.05, parity=1e-4),
}
LOSSES = [2.31 - 0.01 * step for step in range(10)]


# Parts -------------------------------------------------------------------------------------------


def case(variant: str = "changed", **fields: Any) -> Case:
    """A case of a made-up technique, OK and never measured but for what `fields` say.

    Its id follows from its other fields, unless it is given. "base" is a baseline.
    """
    framework = fields.get("framework", "pt")
    fields = {
        "technique": "made_up",
        "framework": framework,
        "flavour": FLAVOURS.get(framework),
        "variant": variant,
        "role": "baseline" if variant == "base" else "variant",
        "task": "digits-cnn",
        "batch_size": 64,
        "status": "OK",
    } | fields
    side = "tf-tf_keras" if fields["flavour"] == "tf_keras" else framework
    name = f"{fields['technique']}/{fields['task']}-{fields['batch_size']}/{side}/{variant}"
    return Case(**{"id": name} | fields)


def comparison(
    numerator: Case,
    denominator: Case,
    ratio: float | None = None,
    *bounds: float,
    kind: str = "baseline",
    **fields: Any,
) -> Comparison:
    """A comparison of two cases, over five blocks where it has bounds and else over one."""
    fields = {
        "sd": 0.01 if bounds else None,
        "n": 5 if bounds else 1,
        "verdict": "faster" if bounds else None,
        "variant": numerator.variant,
    } | fields
    return Comparison(
        technique=numerator.technique,
        task=numerator.task,
        batch_size=numerator.batch_size,
        mode=numerator.mode,
        kind=kind,
        numerator=numerator.id,
        denominator=denominator.id,
        ratio=ratio,
        ci=bounds or None,
        **fields,
    )


def record(cases: Iterable[Case] = (), comparisons: Iterable[Comparison] = (), **fields: Any):
    """A finished record of these cases."""
    fields = {
        "schema_version": 3,
        "command": "pytest bench/ --benchmark-only --effort default",
        "effort": "default",
        "started": "2026-11-20T13:50:02Z",
        "finished": True,
        "environment": ENVIRONMENT,
        "techniques": {},
        "tasks": TASKS,
    } | fields
    return Record(cases=list(cases), comparisons=list(comparisons), **fields)


def accuracy(mean: float, *bounds: float, seeds: Iterable[float] = (90.0,)) -> Accuracy:
    """Trained, and so far from the baseline."""
    difference = AccuracyDifference(mean=mean, ci=bounds or None)
    return Accuracy(metric="accuracy", per_seed=list(seeds), difference=difference)


def timed(step_s: float | None = 0.01, **fields: Any) -> Timing:
    """Timed at so many seconds a step, within 1%."""
    ci = None if step_s is None else (step_s * 0.99, step_s * 1.01)
    return Timing(**{"cold_first_call_s": 0.5, "median_s": step_s, "ci_s": ci} | fields)


def memory(peak: float, *more: float, **fields: Any) -> Memory:
    """A peak above the imports; `more`: what other cold starts had."""
    return Memory(
        import_bytes=1e8,
        steady_peak_bytes=1e8 + peak,
        above_import_bytes=peak,
        samples={"above_import_bytes": [peak, *more]},
        **fields,
    )


def patched(value: Any, changes: Any) -> Any:
    """What a value is after `changes`: those in a dict are made within, others take its place.

    An empty dict takes the place of what was there.
    """
    if not changes or not isinstance(changes, dict):
        return changes
    if isinstance(value, Struct):
        return value.but(**{n: patched(getattr(value, n), c) for n, c in changes.items()})
    if isinstance(value, dict):
        return value | {name: patched(value.get(name), c) for name, c in changes.items()}
    return changes


def with_case(of: Record, name: str, **changes: Any) -> Record:
    """The record with a changed case, see `patched`; `name` is how its id ends."""
    case = find_case(of, name)
    return of.but(cases=[patched(c, changes) if c is case else c for c in of.cases])


def with_environment(of: Record, **changes: Any) -> Record:
    """The record of another machine, see `patched`."""
    return of.but(environment=patched(of.environment, changes))


def find_case(of: Record, name: str) -> Case:
    """The case whose id ends so."""
    (only,) = [case for case in of.cases if case.id.endswith(name)]
    return only


def find_comparison(of: Record, first: str, second: str) -> Comparison:
    """The comparison of two cases by the ends of their ids."""
    pairs = (c for c in of.comparisons if c.numerator.endswith(first))
    return next(c for c in pairs if c.denominator.endswith(second))


def with_comparison(of: Record, first: str, second: str, **changes: Any) -> Record:
    """The record with a changed comparison of the two cases whose ids end so."""
    comparison = find_comparison(of, first, second)
    return of.but(comparisons=[c.but(**changes) if c is comparison else c for c in of.comparisons])


def as_read(of: Record) -> Record:
    """The record as it is when it was written and read again."""
    return decode(encode(of))


# Planted effects ---------------------------------------------------------------------------------


def planted(*rows: dict, gpu: dict | None = None, isa: Iterable[str] = (), **fields: Any) -> Record:
    """A record of these rows, each with a baseline of its own technique and framework.

    A row: technique, variant, other fields of a case, and its effects: `time` (ratio, low, high),
    `accuracy` (mean, low, high) with its `seeds`, `memory` or `peaks`, `size` (ratios) and
    `metrics` (its value and the baseline's, each perhaps with bounds).
    """
    cases: dict[str, Case] = {}
    comparisons = []
    for row in rows:
        base = _planted_case(row | {"variant": "base"}, is_base=True)
        case = _planted_case(row, is_base=False)
        cases.setdefault(base.id, base)
        cases[case.id] = case
        if "time" in row and case.status == "OK":
            comparisons.append(comparison(case, base, *row["time"]))
    tasks = TASKS | {case.task: TASKS["digits-cnn"] for case in cases.values()}
    environment = ENVIRONMENT.but(gpu=gpu, isa=list(isa))
    made = record(cases.values(), comparisons, tasks=tasks, environment=environment, **fields)
    return as_read(made.but(cases=list(map(complete, made.cases))))


EFFECTS = ("time", "accuracy", "seeds", "memory", "peaks", "size", "metrics")


def _planted_case(row: dict, *, is_base: bool) -> Case:
    fields = {name: value for name, value in row.items() if name not in EFFECTS}
    if is_base:
        fields |= {"status": "OK", "changes_math": False, "changes_weights": False}
    peaks = row.get("peaks", [row.get("memory", 1.0)])
    ratios = [peak / peaks[0] for peak in peaks] if is_base and "peaks" in row else peaks
    if is_base and "peaks" not in row:
        ratios = [1.0]
    trained = "accuracy" in row and not is_base
    return case(**fields).but(
        timing=timed(0.01 if "time" in row else None),
        memory=memory(*(1e8 * ratio for ratio in ratios)),
        accuracy=accuracy(*row["accuracy"], seeds=row.get("seeds", [90.0])) if trained else None,
        artifact_bytes=1e6 * (1 if is_base else row["size"]) if "size" in row else None,
        metrics={name: _metric(both[is_base]) for name, both in row.get("metrics", {}).items()},
        certificate=Certificate(losses=[2.0, 1.9], weights_sha256="ab"),
    )


def _metric(value: float | list[float] | None) -> Metric:
    """A value, or a value with its bounds."""
    value, *bounds = value if isinstance(value, list) else [value]
    return Metric(value=value, unit="1", ci=tuple(bounds) or None)


# A whole run -------------------------------------------------------------------------------------

# variant -> (step in ms of PyTorch and TensorFlow, accuracy, dtype of products)
VARIANTS = {
    "fp32": (5.23, 6.11, 97.3, "float32"),
    "bf16": (2.94, 3.72, 97.2, "bfloat16"),
    "bf16_fp32_head": (3.01, 3.85, 97.4, "bfloat16"),
    "as_installed": (8.41, 6.34, 97.3, "float32"),
}
STOPPED = (
    ("digits-cnn", 64, "pt", "fp16", "UNSUPPORTED", "needs a CUDA GPU; none was found"),
    ("digits-cnn", 64, "tf", "fp16", "UNSUPPORTED", "needs a CUDA GPU; none was found"),
    ("text-gpt", 16, "pt", "fp16", "UNSUPPORTED", "needs a CUDA GPU; none was found"),
    ("text-gpt", 16, "tf", "compiled", "FAILED", "the worker was killed by SIGKILL"),
    ("text-gpt", 16, "pt", "compiled", "NOT_APPLIED", "no product ran in bfloat16"),
)
NOTES = TechniqueNotes(
    title="Mixed precision",
    differs_by_design=[
        "PyTorch casts per operator (autocast); Keras per layer (dtype policy).",
        "Softmax and BatchNorm statistics stay float32 on both sides.",
    ],
    notes=["bfloat16 has no loss scaling: its exponent is that of float32."],
)
ENVIRONMENT = Environment(
    cpu="Intel(R) Xeon(R) Platinum 8488C",
    isa=["avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16"],
    physical_cores=2,
    logical_cores=4,
    threads=2,
    memory_bytes=25_769_803_776,
    os="Linux-6.1.0-x86_64-with-glibc2.36",
    load=0.31,
    python="3.11.7",
    packages={
        "pt": {"torch": "2.15.0"},
        "tf": {"tensorflow": "2.21.0", "keras": "3.15.1", "tf_keras": "2.21.0"},
        "bench": {"twinbench": "0.1.0", "numpy": "2.4.6"},
    },
    allocator={"MALLOC_MMAP_THRESHOLD_": "4294967296", "keeps_freed_memory": True},
    onednn="1",
    seeds=[0, 1],
    order="random within each round",
    peak_flops={"float32": 1.31e11, "bfloat16": 4.9e11},
)


def whole_run(effort: str = "default") -> Record:
    """A record as a run writes it: two tasks, two frameworks, every status."""
    draw = random.Random(2026)
    blocks = {"quick": 1, "default": 8}[effort]
    cases = [
        _measured(draw, blocks, task, batch, framework, variant)
        for task, batch in (("digits-cnn", 4), ("digits-cnn", 64), ("text-gpt", 16))
        for variant in VARIANTS
        for framework in ("pt", "tf")
    ]
    cases.append(_measured(draw, blocks, "digits-cnn", 64, "tf", "bf16", flavour="tf_keras"))
    for task, batch, framework, variant, status, reason in STOPPED:
        fields = {"technique": "mixed_precision", "task": task, "batch_size": batch}
        cases.append(case(variant, framework=framework, status=status, reason=reason, **fields))
    return as_read(
        record(
            map(complete, cases),
            _comparisons(cases, effort),
            command=f"pytest bench/ --benchmark-only --effort {effort}",
            effort=effort,
            noise_floor=_noise_floor(effort),
            techniques={"mixed_precision": NOTES},
        )
    )


def small_run() -> Record:
    """A run with something of everything, cut down to few cases."""
    run = whole_run()
    run = run.but(cases=[c for c in run.cases if c.batch_size == 64 and "head" not in c.id])
    kept = {case.id for case in run.cases}
    pairs = [c for c in run.comparisons if {c.numerator, c.denominator} <= kept]
    first = Metric(value=18.5, unit="s", ci=(17.0, 19.0), samples=[17.0, 18.5, 19.0])
    even = Metric(value=950.0, unit="steps", ci=(900.0, None))
    plain, bf16 = (find_case(run, f"digits-cnn-64/pt/{name}") for name in ("fp32", "bf16"))
    run = with_case(run, plain.id, metrics=plain.metrics | {"cold_first_calls_s": first})
    run = with_case(
        run,
        bf16.id,
        metrics=bf16.metrics | {"cold_first_calls_s": first, "break_even_steps": even},
        memory=bf16.memory.but(device_peak={"allocated": 10**8, "reserved": 2 * 10**8}),
        artifact_bytes=420_000,
    )
    return run.but(comparisons=pairs)


def _measured(draw, blocks, task, batch, framework, variant, **fields) -> Case:
    pt_ms, tf_ms, percent, dtype = VARIANTS[variant]
    step = (pt_ms if framework == "pt" else tf_ms) * batch**0.8 / 20 / 1e3
    samples = {
        str(block): [step * exp(draw.gauss(0, 0.02)) for _ in range(30)] for block in range(blocks)
    }
    trained = None
    if task == "digits-cnn" and batch == 64 and variant != "as_installed":
        per_seed = [percent + draw.gauss(0, 0.3) for _ in range(blocks)]
        trained = _trained(per_seed, percent, is_base=variant == "fp32")
    above = int(6e7 + 1e6 * batch)
    products = {"convolution": {dtype: 9}, "matmul": {dtype: 3 if batch == 4 else 4}}
    return case(
        variant,
        technique="mixed_precision",
        framework=framework,
        role="baseline" if variant == "fp32" else "variant",
        task=task,
        batch_size=batch,
        timing=Timing(
            cold_first_call_s=0.412 if framework == "pt" else 1.93,
            warm_first_call_s=0.021 if framework == "pt" else 1.24,
            step_s={"0": samples},
            median_s=step,
            ci_s=(step * 0.98, step * 1.02) if blocks > 1 else None,
        ),
        memory=Memory(
            import_bytes=251_000_000,
            build_bytes=263_000_000,
            first_step_peak_bytes=331_000_000,
            steady_peak_bytes=251_000_000 + above,
            parameters_bytes=96_000,
            gradients_bytes=96_000,
            optimizer_bytes=96_000,
            rest_bytes=above - 288_000,
        ),
        accuracy=trained,
        metrics={
            "samples_per_s": Metric(value=batch / step, unit="1/s", samples=[]),
            "share_of_peak": Metric(value=0.18, unit="1", samples=[]),
        },
        blocks=[Block(match=0, block=number, losses=LOSSES) for number in range(blocks)],
        certificate=Certificate(losses=LOSSES, weights_sha256="ab"),
        evidence={"operator_dtypes": products},
        **fields,
    )


def _trained(per_seed: list[float], percent: float, *, is_base: bool) -> Accuracy:
    many = len(per_seed) > 1
    lost = percent - 97.3
    difference = AccuracyDifference(
        mean=lost,
        ci=(lost - 0.3, lost + 0.3) if many else None,
        verdict="equivalent" if many else None,
    )
    return Accuracy(
        metric="accuracy",
        per_seed=per_seed,
        mean=percent,
        ci=(percent - 0.24, percent + 0.24) if many else None,
        difference=None if is_base else difference,
    )


def _comparisons(cases: list[Case], effort: str) -> list[Comparison]:
    by_id = {case.id: case for case in cases}
    pairs = []
    for case in cases:
        if case.status != "OK":
            continue
        base = case.id.rsplit("/", 1)[0].replace("tf-tf_keras", "tf") + "/fp32"
        if case.role == "variant":
            pairs.append(_compared(effort, "baseline", case, by_id[base]))
        if case.framework == "tf":
            twin = case.id.replace("/tf-tf_keras/", "/pt/").replace("/tf/", "/pt/")
            pairs.append(_compared(effort, "framework", by_id[twin], case))
    best = [by_id[f"mixed_precision/digits-cnn-64/{side}"] for side in ("pt/bf16", "tf/fp32")]
    return [*pairs, _compared(effort, "framework", *best).but(variant="best: bf16 | fp32")]


def _compared(effort: str, kind: str, first: Case, second: Case) -> Comparison:
    ratio = first.timing.median_s / second.timing.median_s
    verdict = "faster" if ratio < 0.95 else "slower" if ratio > 1.05 else "equivalent"
    reason = None
    if kind == "framework" and first.variant == "as_installed" and first.task == "text-gpt":
        verdict, reason = "not comparable", "first losses differ: 4.585 and 4.612 at step 3"
    quick = effort == "quick"
    return comparison(
        first,
        second,
        ratio,
        *(() if quick else (ratio * 0.97, ratio * 1.03)),
        kind=kind,
        sd=None if quick else 0.024,
        n=1 if quick else 8,
        verdict=None if quick and not reason else verdict,
        reason=reason,
    )


def _noise_floor(effort: str) -> NoiseFloor:
    quick = effort == "quick"
    control = Control(ratio=1.004, ci=(0.991, 1.017), sd=0.0213, verdict="equivalent")
    places = [(name, task) for name in ("pt", "tf") for task in ("digits-cnn", "text-gpt")]
    return NoiseFloor(
        controls=[] if quick else [control.but(framework=f, task=task) for f, task in places],
        shortest_sample_s=0.0102,
        empty_sample_share={"pt": 1.1e-4, "tf": 1.3e-4},
        median_half_width=None if quick else 0.021,
        p90_half_width=None if quick else 0.044,
        ratios=0 if quick else 28,
    )


# A run that was played ----------------------------------------------------------------------------


def played_run(
    times: dict[tuple[str, ...], float | None],
    blocks: int = 3,
    techniques: dict[str, tuple[str, ...]] | None = None,
    sd: float = 0.0005,
    seed: int = 1,
    **fields: Any,
) -> Record:
    """What a run measured, of which nothing was derived; in one match, at looks.

    `techniques`: their variants, the first of which is the baseline; a control repeats it. `times`:
    by framework and variant, or technique, framework and variant; of others it is 1, and None is
    not measured. `sd`: of a block's log times, which `seed` draws.
    """
    techniques = techniques or {"made_up": ("plain", "quick", "same")}
    cases = [
        case(
            variant,
            technique=technique,
            framework=framework,
            role="control" if variant == "control" else "variant" if place else "baseline",
            batch_size=4,
        )
        for technique, variants in techniques.items()
        for place, variant in enumerate((*variants, "control"))
        for framework in ("pt", "tf")
    ]
    draw, samples = np.random.default_rng(seed), {case.id: {} for case in cases}
    for block in range(blocks):
        for one in cases:
            factor = times.get((one.framework, one.variant), 1.0)
            factor = times.get((one.technique, one.framework, one.variant), factor)
            if factor is not None:
                seconds = 0.01 * factor * exp(draw.normal(0, sd))
                rounds = seconds * np.exp(draw.normal(0, 0.001, 15))
                samples[one.id][str(block)] = rounds.tolist()
    cases = [
        one.but(
            timing=Timing(step_s={"0": samples[one.id]} if samples[one.id] else {}),
            blocks=[
                Block(
                    match=0,
                    block=int(block),
                    losses=LOSSES,
                    weights_sha256="a",
                    empty_s=1e-9,
                    shortest_s=0.01,
                )
                for block in samples[one.id]
            ],
        )
        for one in cases
    ]
    return record(cases, **{"looks": list(LOOKS)} | fields)
