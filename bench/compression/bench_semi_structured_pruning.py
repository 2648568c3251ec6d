"""Two zeros in each four weights: what the masks cost a step, and what they do to accuracy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from bench.harness.helpers import plain
from bench.harness.plan import Prepared, Price, Technique, Variant, Work, Workload, row
from bench.harness.stages import train_on

UNSUPPORTED = {"tf": {"compress_two_to_four": "TensorFlow has no kernels for the pattern"}}
MORE_EPOCHS = 4  # beyond the recipe's, as many as it takes digits-cnn to its plateau
# TensorFlow Model Optimization's own route, which knows no other Keras.
LEGACY = {"frameworks": ("tf",), "flavours": ("tf_keras",)}


def _rows(**settings) -> tuple[Variant, Variant]:
    """The dense model, and the one with masks."""
    return (
        Variant("dense", role="baseline", title="dense", program="plain", **settings),
        row("two_to_four", "two zeros in four", changes="weights", masked=True, **settings),
    )


TECHNIQUE = Technique(
    family="compression",
    name="semi_structured_pruning",
    effort="ordinary",
    title="Semi-structured pruning: two zeros in four",
    price=Price(epochs=MORE_EPOCHS),
    variants=(*_rows(effort="default"), *_rows(effort="full", **LEGACY)),
    workloads=(
        Workload("digits-cnn", "compute", accuracy=True, training=2.0),
        Workload("digits-resnet20", "compute", effort="full", accuracy=True, training=2.0),
    ),
    differs_by_design=(
        "PyTorch and Keras 3 mask weights and gradients. In the tf_keras row, TensorFlow Model "
        "Optimization masks the variables in each forward pass.",
    ),
    notes=(
        f"Accuracy: both rows train for the recipe's epochs and then {MORE_EPOCHS} more at the "
        "same learning rate, with a new optimizer. Masks are made in between and kept.",
        "The pattern makes matrix products faster only on GPUs with sparse tensor cores "
        "(PyTorch's `compress_two_to_four`, CUDA), which is not measured.",
    ),
    counts=True,
)


def prepare(impl, work: Work) -> Prepared:
    """A step of the row; training starts with a trained model."""
    return replace(_row(impl, work), train=train_on(impl, work, _row, epochs=MORE_EPOCHS))


def _row(impl, work: Work) -> Prepared:
    """The baseline's step and prediction, over a masked model."""
    model = named = impl.kit.models.build(work.task.model, work.weights)
    if work.settings:
        model = named = impl.compression.semi_structured_pruning.apply_two_to_four(model)
        if type(model).__module__.startswith("tf_keras"):
            # The same layers and variables under their canonical names.
            named = impl.compression.semi_structured_pruning.finalize_two_to_four(model)
    return replace(plain(impl, work, model), model=named)


def took_effect(impl, work: Work, prepared: Prepared, batch) -> tuple[dict, str | None]:
    """After the steps that were timed, no group of four inputs has more than two weights."""
    prepared.predict(batch[0])  # tfmot masks what a step has moved when it is next used
    if work.settings and type(prepared.model).__module__.startswith("keras."):
        # Its masks are beside the variables, until they are multiplied with them.
        impl.compression.semi_structured_pruning.finalize_two_to_four(prepared.model)
    weights = impl.kit.models.export_weights(prepared.model)
    kernels = {name: value for name, value in weights.items() if name.endswith(".kernel")}
    evidence = {"zeros": {name: float((value == 0).mean()) for name, value in kernels.items()}}
    most = {name: most_of_four(value) for name, value in kernels.items()}
    wrong = [f"{name} has {count} of four" for name, count in most.items() if count > 2]
    if work.settings and wrong:
        return evidence, ", ".join(wrong)
    if not work.settings and not wrong:
        return evidence, "the baseline is masked"
    return evidence, None


def most_of_four(kernel: np.ndarray) -> int:
    """The most weights that are not zero in a group of four neighbouring inputs."""
    used = np.moveaxis(kernel != 0, -2, -1)
    used = np.pad(used, [(0, 0)] * (used.ndim - 1) + [(0, -used.shape[-1] % 4)])
    return int(used.reshape(-1, 4).sum(-1).max())
