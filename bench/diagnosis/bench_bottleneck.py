"""Bottleneck: what holds the plain step of a task back, and what telling it takes."""

from __future__ import annotations

import time

from bench.harness import machine
from bench.harness.helpers import once, plain
from bench.harness.plan import TRAIN_STEP, WARM, Technique, UserModel, Variant, Work, Workload

PARTS = ("waiting", "transfer", "forward", "backward", "optimizer", "overhead", "idle")

TECHNIQUE = Technique(
    family="diagnosis",
    name="bottleneck",
    effort="ordinary",
    title="Bottleneck",
    user_model=UserModel(TRAIN_STEP, ("plain",), timed=False),
    variants=(Variant("plain", role="baseline", measured=WARM, title="the plain step"),),
    workloads=(
        Workload("digits-cnn", "compute", timed=False),
        Workload("digits-cnn", "small", timed=False),
    ),
    notes=("Shares are of the step; for size, of the machine's memory.",),
    probes=True,
)


def probe(impl, work: Work, batches) -> dict[str, dict]:
    """Shares of the step, and the seconds that it takes to tell them."""
    step = plain(impl, work).step
    # A user's file may bring the batches of its own loop.
    batches = getattr(impl, "stream", None) or impl.kit.data.resident_batches(batches)
    watch, start = machine.Watch(), time.perf_counter()
    diagnosis = impl.diagnosis.bottleneck.find_bottleneck(step, batches)
    seconds, others = time.perf_counter() - start, watch.stop().others
    told = {"diagnosing": once("s", seconds)}
    for name, share in diagnosis.shares.items():
        told[name.replace(" ", "_")] = once("share", share)
    parts = {part: diagnosis.breakdown.share(part) for part in PARTS}
    return told | {
        "evidence": {
            "bottleneck": diagnosis.bottleneck,
            "others": others,
            "said": list(diagnosis.evidence),
            "step_s": diagnosis.breakdown.step,
            "parts": parts,
            "operators": [
                {"name": one.name, "calls": one.calls, "seconds": one.seconds}
                for one in diagnosis.breakdown.operators[:10]
            ],
        }
    }
