"""Where NaN begins: what it costs to look at every step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from bench.harness.helpers import plain
from bench.harness.plan import Prepared, Technique, Work, Workload, warm

TECHNIQUE = Technique(
    family="recipes",
    name="nonfinite",
    effort="ordinary",
    title="Where NaN begins",
    variants=(
        warm("plain", "without", role="baseline", program="plain"),
        warm("checked", "every step checked", checked=True),
    ),
    workloads=(
        Workload("digits-cnn", "compute"),
        Workload("digits-cnn", "small", effort="ordinary"),
    ),
    notes=("A checked step first copies the weights, and then waits for its loss.",),
)


def prepare(impl, work: Work) -> Prepared:
    """The plain step, checked or not."""
    row, loss_fn = plain(impl, work), impl.kit.training.cross_entropy
    if not work.settings:
        return row
    return replace(row, step=impl.recipes.nonfinite.make_checked_step(row.step, row.model, loss_fn))


def took_effect(impl, work: Work, prepared: Prepared, batch) -> tuple[dict, str | None]:
    """A batch with a NaN is refused, and the weights are those of before."""
    if not work.settings:
        return {}, None
    x, y = batch
    before = impl.kit.models.export_weights(prepared.model)
    try:
        prepared.step(x * float("nan"), y)
    except FloatingPointError as error:
        reason = str(error)
    else:
        return {}, "a batch of NaN went through"
    after = impl.kit.models.export_weights(prepared.model)
    same = all(np.array_equal(after[name], value) for name, value in before.items())
    return {"said": reason}, None if same else "the weights changed in a step that was refused"
