"""Checks of data and loss: what they cost, and what they find in planted faults."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from bench.harness.plan import Prepared, Technique, Work, Workload, warm
from bench.harness.rows import figure, once, plain
from shared import datasets

TECHNIQUE = Technique(
    family="recipes",
    name="checks",
    title="Checks of data and loss",
    variants=(
        warm("plain", "without", role="baseline", program="plain"),
        warm("checked", "every step and the data checked", checked=True),
    ),
    workloads=(
        Workload("digits-cnn", "compute"),
        Workload("digits-cnn", "small", effort="ordinary"),
    ),
    notes=(
        "A checked step copies the weights first and waits for its loss. Pass: seconds to go over "
        "the training split once, with the checks or without. Found: of seven planted faults (NaN, "
        "a value out of range, a label out of range, a rare class, a sample in both splits, a loss "
        "over probabilities for a model that gives logits, and what is lost of the gradient on the "
        "way over probabilities).",
    ),
    probes=True,
)


def prepare(impl, work: Work) -> Prepared:
    """The plain step, checked or not."""
    row, loss_fn = plain(impl, work), impl.kit.training.cross_entropy
    if not work.settings:
        return row
    return replace(row, step=impl.recipes.checks.make_checked_step(row.step, row.model, loss_fn))


def took_effect(impl, work: Work, prepared: Prepared, batch) -> tuple[dict, str | None]:
    """A batch with a NaN is refused, and the weights are those of before."""
    if not work.settings:
        return {}, None
    x, y = batch
    before = impl.kit.models.export_weights(prepared.model)
    try:
        prepared.step(x * float("nan"), y)
    except FloatingPointError as error:
        said = str(error)
    else:
        return {}, "a batch of NaN went through"
    after = impl.kit.models.export_weights(prepared.model)
    same = all(np.array_equal(after[name], value) for name, value in before.items())
    return {"said": said}, None if same else "the weights changed in a step that was refused"


def probe(impl, work: Work, batches) -> dict[str, dict]:
    """Seconds of a pass over the data, and what is found of planted faults."""
    x, y = datasets.load(Path(work.data), "train")
    size = work.task.recipe.accuracy_batch_size
    order = list(datasets.batch_order(len(x), size, seed=0, epoch=0))
    split = [impl.kit.data.to_device(x[rows], y[rows]) for rows in order]
    passes = []
    for _ in range(work.repetitions):
        start = time.perf_counter()
        if work.settings:
            impl.recipes.checks.check_data(split, num_classes=10)
        else:
            sum(float(y[0]) for _, y in split)
        passes.append(time.perf_counter() - start)
    found = {"pass": figure("s", passes)}
    if work.settings:
        seen = _faults(impl, work, x[:600], y[:600])
        found["found"] = once("faults", sum(map(bool, seen.values())))
        found["evidence"] = {"faults": seen}
    return found


def _faults(impl, work: Work, x: np.ndarray, y: np.ndarray) -> dict[str, str]:
    """What is said of each planted fault; "" where it was not found."""
    checks = impl.recipes.checks
    low, high = float(x.min()), float(x.max())

    def said(x: np.ndarray, y: np.ndarray) -> str:
        batch = impl.kit.data.to_device(x, y)
        report = checks.check_data([batch], num_classes=10, low=low, high=high)
        return "; ".join(map(str, report.findings))

    def with_value(value: float) -> np.ndarray:
        planted = x.copy()
        planted[7, 3, 3, 0] = value
        return planted

    out_of_range, few = y.copy(), (y != 3) | (np.cumsum(y == 3) <= 1)
    out_of_range[5] = 10
    twice = [impl.kit.data.to_device(part, y[:300]) for part in (x[:300], x[299:599])]
    model = impl.kit.models.build(work.task.model, work.weights)
    wrong = impl.kit.training.probability_cross_entropy
    form = checks.check_loss(model, wrong, *impl.kit.data.to_device(x[:64], y[:64]))
    return {
        "nan": said(with_value(float("nan")), y),
        "value out of range": said(with_value(high + 1), y),
        "label out of range": said(x, out_of_range),
        "rare class": said(x[few], y[few]),
        "in both splits": "; ".join(map(str, checks.check_splits([twice[0]], [twice[1]]).findings)),
        "loss over probabilities": "; ".join(map(str, form.findings)),
        "gradient": _lost(impl),
    }


def _lost(impl) -> str:
    """Where less than half of the gradient is left of a loss that takes the softmax first."""
    training = impl.kit.training
    shares = impl.recipes.checks.gradient_by_margin(
        lambda logits, y: training.probability_cross_entropy(training.softmax(logits), y)
    )
    for margin, share in shares.items():
        if not share > 0.5:
            return f"{share:.2g} is left of that of a sample that is wrong by {margin} in logits"
    return ""
