"""Checks of a loss: what one costs, and what they find of planted faults."""

from __future__ import annotations

from bench.harness.helpers import checking
from bench.harness.plan import Technique, Work, Workload, warm

TECHNIQUE = Technique(
    family="recipes",
    name="loss_checks",
    effort="ordinary",
    title="Checks of a loss",
    variants=(
        warm("plain", "without", role="baseline"),
        warm("checked", "the loss checked", checked=True),
    ),
    workloads=(Workload("digits-cnn", "compute", timed=False),),
    notes=(
        "Pass: seconds to predict a batch and compute its loss, with or without the check. "
        "Found: of two planted faults (a loss that takes probabilities for a model that returns "
        "logits, and the gradient that is lost by going through probabilities).",
    ),
    probes=True,
)


def probe(impl, work: Work, batches) -> dict[str, dict]:
    """Seconds of a batch's loss or of its check, and what is found of planted faults."""
    training = impl.kit.training
    model = impl.kit.models.build(work.task.model, work.weights)
    predict, loss_fn = training.make_predict(model), training.cross_entropy
    batch = impl.kit.data.resident_batches(batches[:1])[0]

    def call():
        if work.settings:
            impl.recipes.loss_checks.check_loss(model, loss_fn, *batch)
        else:
            impl.kit.runtime.to_float(loss_fn(predict(batch[0]), batch[1]))

    return checking(work, call, lambda: _faults(impl, model, *batch))


def _faults(impl, model, x, y) -> dict[str, str]:
    """What is said of each planted fault; "" where it was not found."""
    wrong = impl.kit.training.probability_cross_entropy
    report = impl.recipes.loss_checks.check_loss(model, wrong, x, y)
    return {
        "loss over probabilities": "; ".join(map(str, report.findings)),
        "gradient": _lost(impl),
    }


def _lost(impl) -> str:
    """Where less than half of the gradient is left of a loss that takes the softmax first."""
    training = impl.kit.training
    shares = impl.recipes.loss_checks.gradient_by_margin(
        lambda logits, y: training.probability_cross_entropy(training.softmax(logits), y)
    )
    for margin, share in shares.items():
        if not share > 0.5:
            return f"{share:.2g} is left of that of a sample that is wrong by {margin} in logits"
    return ""
