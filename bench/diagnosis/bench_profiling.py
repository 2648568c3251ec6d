"""Profiling: what the profiler costs a step, and where the step's time goes."""

from __future__ import annotations

from statistics import fmean

from bench.harness.helpers import figure, plain
from bench.harness.plan import Technique, Work, Workload, warm
from shared.profiles import endless, run_steps

STEPS = 20  # of either kind, a repetition
WARM_STEPS = 5
PARTS = ("waiting", "transfer", "forward", "backward", "optimizer", "communication")
PARTS += ("overhead", "idle")

TECHNIQUE = Technique(
    family="diagnosis",
    name="profiling",
    effort="ordinary",
    title="Profiling",
    user_model="`bottleneck` shows where the time goes",
    variants=(
        warm("plain", "without the profiler", role="baseline"),
        warm("profiled", "under the profiler", profiled=True),
    ),
    workloads=(
        Workload("digits-cnn", "compute", timed=False),
        Workload("digits-cnn", "small", effort="ordinary", timed=False),
    ),
    notes=(
        f"In the profiled row, {STEPS} steps without the profiler and {STEPS} with it take turns. "
        "Cost is what the profiler adds to a step there. Parts are of the step without it, and "
        "add up to it.",
    ),
    probes=True,
)


def probe(impl, work: Work, batches) -> dict[str, dict]:
    """Seconds a step, and where they go.

    Raises ValueError where the profiler saw no forward pass, backward pass or update.
    """
    step, batches = plain(impl, work).step, impl.kit.data.resident_batches(batches)
    if not work.settings:
        return {"step": figure("s", _plain(impl, work, step, batches))}
    breakdowns = [
        impl.diagnosis.profiling.profile_steps(step, batches, steps=STEPS)
        for _ in range(work.repetitions)
    ]
    missing = [
        p for p in ("forward", "backward", "optimizer") if min(o.share(p) for o in breakdowns) <= 0
    ]
    if missing:
        raise ValueError(f"the profiler saw no {', '.join(missing)}")
    parts = {part: figure("share", [one.share(part) for one in breakdowns]) for part in PARTS}
    return {
        "step": figure("s", [one.profiled for one in breakdowns]),
        "cost": figure("share", [one.profiler_cost for one in breakdowns]),
        "evidence": {"operators": {one.name: one.calls for one in breakdowns[0].operators[:10]}},
    } | parts


def _plain(impl, work: Work, step, batches: list) -> list[float]:
    """Mean seconds of a step, of each repetition."""
    take = {"batches": endless(batches), "synchronize": impl.kit.runtime.synchronize}
    run_steps(step, count=WARM_STEPS, **take)
    turns = [run_steps(step, count=STEPS, **take) for _ in range(work.repetitions)]
    return [fmean(one.waiting + one.step for one in taken) for taken in turns]
