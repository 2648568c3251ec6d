"""Structured pruning: what a network with fewer channels saves, and what it still learns."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from bench.harness.examples import examples
from bench.harness.helpers import plain
from bench.harness.plan import (
    PREDICTIONS,
    Prepared,
    Price,
    Technique,
    UserModel,
    Variant,
    Work,
    Workload,
    row,
)
from bench.harness.stages import train_on
from shared.specs import CNNSpec, parameter_count

MORE_EPOCHS = 4  # beyond the recipe's, as many as it takes digits-cnn to its plateau


def _removed(percent: int, effort: str) -> Variant:
    name, title = f"channels_{percent}", f"{percent}% of the channels removed"
    return row(name, title, effort, changes="weights" if percent else None, share=percent / 100)


TECHNIQUE = Technique(
    family="compression",
    name="structured_pruning",
    effort="ordinary",
    title="Structured pruning: channels removed",
    price=Price(epochs=MORE_EPOCHS),
    remedies=("arithmetic",),
    user_model=UserModel(PREDICTIONS[1:], ("dense", "channels_50"), learns=True),
    variants=(
        Variant("dense", role="baseline", title="all channels", program="plain"),
        _removed(50, "default"),
        _removed(80, "ordinary"),
        _removed(90, "full"),
        _removed(95, "full"),
        replace(_removed(0, "full"), name="neutral", title="no channel removed"),
    ),
    workloads=(
        Workload("digits-cnn", "compute", mode="predict", accuracy=True, training=2.0),
        Workload("digits-cnn", "small", effort="full", mode="predict"),
    ),
    differs_by_design=(
        "PyTorch traces the model and keeps its code with smaller modules; TensorFlow clones the "
        "graph with smaller layers. The resulting models have the same shapes.",
    ),
    notes=(
        "channels_50 has half the channels of each convolution, also of the first one.",
        f"Accuracy: every row trains for the recipe's epochs and then {MORE_EPOCHS} more at the "
        "same learning rate, with a new optimizer. Channels are removed in between.",
    ),
    counts=True,
)


def prepare(impl, work: Work) -> Prepared:
    """The row's step and prediction; training starts with a trained model."""
    return replace(_row(impl, work), train=train_on(impl, work, _row, epochs=MORE_EPOCHS))


def _row(impl, work: Work) -> Prepared:
    """The baseline's step and prediction, over the smaller model."""
    model = impl.kit.models.build(work.task.model, work.weights)
    if work.settings:
        ((x, _),) = impl.kit.data.resident_batches([_example(work)])
        model = impl.compression.structured_pruning.remove_channels(model, x, **work.settings)
    return plain(impl, work, model)


def _example(work: Work) -> tuple:
    """Two samples: random ones, or the first of a user's file."""
    if work.task.model.from_file:
        return examples(work, 2)
    x = np.random.default_rng(0).normal(size=(2, *work.task.model.input_shape))
    return x.astype(np.float32), np.zeros(2, int)


def took_effect(impl, work: Work, prepared: Prepared, batch) -> tuple[dict, str | None]:
    """The model has the parameters of a network with so many channels; of a user's file, fewer."""
    if work.task.model.from_file:
        whole, left = (
            impl.kit.models.parameter_count(model)
            for model in (impl.kit.models.build(work.task.model, work.weights), prepared.model)
        )
        evidence = {"parameters": left, "parameters_before": whole}
        applied = left < whole if work.settings else left == whole
        return evidence, None if applied else f"the model has {left} parameters of {whole}"
    spec = smaller(work.task.model, work.settings.get("share", 0.0))
    expected, left = parameter_count(spec), impl.kit.models.parameter_count(prepared.model)
    evidence = {"channels": [filters for filters, _ in spec.convolutions]}
    reason = None if left == expected else f"the model has {left} parameters, not {expected}"
    return evidence, reason


def smaller(spec: CNNSpec, share: float) -> CNNSpec:
    """The spec of the network that is left."""
    kept = tuple((max(round(n * (1 - share)), 1), stride) for n, stride in spec.convolutions)
    return replace(spec, convolutions=kept)
