"""Early stopping: when a training ends, and what its best weights are worth."""

from __future__ import annotations

from bench.harness.plan import TRAINED, Technique, Variant, Workload, other_math
from bench.recipes.bench_averaging import HELD_OUT, PATIENCE, prepare, took_effect

__all__ = ["TECHNIQUE", "prepare", "took_effect"]  # averages are kept by the same training

TECHNIQUE = Technique(
    family="recipes",
    name="early_stopping",
    effort="ordinary",
    title="Early stopping",
    variants=(
        Variant("last", role="baseline", measured=TRAINED, title="last weights"),
        other_math("early_stopping", "early stopping", measured=TRAINED, kept=["stop"]),
    ),
    workloads=(
        Workload("digits-few", "compute", accuracy=True, timed=False),
        Workload("digits-cnn", "compute", "ordinary", accuracy=True, timed=False),
    ),
    composed_of=("recipes.averaging",),
    notes=(
        f"Early stopping looks at {HELD_OUT} samples that it holds out of the training split; the "
        f"baseline trains on them. It ends after {PATIENCE} epochs without improvement.",
    ),
)
