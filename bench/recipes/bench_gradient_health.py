"""Gradient health: what a look at the gradients costs, and whether sick networks are told."""

from __future__ import annotations

import numpy as np

from bench.harness.helpers import checking, kit_module, plain
from bench.harness.plan import Technique, Work, Workload, warm

TECHNIQUE = Technique(
    family="recipes",
    name="gradient_health",
    effort="ordinary",
    title="Gradient health",
    variants=(
        warm("plain", "a train step", role="baseline"),
        warm("checked", "the gradients of a batch", checked=True),
    ),
    workloads=(Workload("digits-cnn", "compute", timed=False),),
    notes=(
        "Pass: seconds of a plain train step, or to find the norm of each layer's gradient on "
        "the same batch. Found: how many of two unhealthy networks are recognised. They have 30 "
        "dense layers with ReLU, and kernels half or twice as large as in He's scheme, so "
        "gradients vanish or explode.",
    ),
    probes=True,
    composed_of=("kit.examples", "recipes.initialization"),
)


def probe(impl, work: Work, batches) -> dict[str, dict]:
    """Seconds of a step or of the norms of a batch, and what is found of sick networks."""
    row, loss_fn = plain(impl, work), impl.kit.training.cross_entropy
    batch = impl.kit.data.resident_batches(batches[:1])[0]

    def call():
        if work.settings:
            impl.recipes.gradient_health.gradient_norms(row.model, loss_fn, *batch)
        else:
            impl.kit.runtime.to_float(row.step(*batch))

    return checking(work, call, lambda: _faults(impl))


def _faults(impl) -> dict[str, str]:
    """What is said of the first layer that is named of each sick network; "" for none."""
    health, random = impl.recipes.gradient_health, np.random.default_rng(0)
    x, y = random.normal(size=(64, 64)).astype(np.float32), random.integers(0, 10, 64)
    batch, faults = impl.kit.data.to_device(x, y), {}
    for name, gain in (("vanishing", 0.5), ("exploding", 2.0)):
        network = kit_module(impl, "examples").deep_network(layers=30, width=64)
        impl.recipes.initialization.apply_initialization(network, scheme="he_normal", gain=gain)
        norms = health.gradient_norms(network, impl.kit.training.cross_entropy, *batch)
        said = health.find_unhealthy(norms).values()
        faults[name] = next((each for each in said if each.startswith(name)), "")
    return faults
