"""Fine-tuning: what a step, its memory and the accuracy are where most of a model stays frozen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness.examples import examples
from bench.harness.helpers import plain
from bench.harness.plan import Measure, Prepared, Technique, Variant, Work, Workload, other_math
from bench.harness.stages import Stages
from shared import datasets
from shared.layer_search import distance
from shared.specs import parameter_shapes
from shared.user_model import arrays

# Fixed before anything was measured.
LORA = {"rank": 8, "alpha": 16.0}
EPOCHS = {"digits-to-photos": (12, 12), "text-gpt": (2, 1)}  # before the new data, and on it
SAME = 1e-5  # relative: what is computed once, and what is computed again

DIGITS, TEXT = Measure(tasks=("digits-to-photos",)), Measure(tasks=("text-gpt",))
TECHNIQUE = Technique(
    family="adaptation",
    name="fine_tuning",
    effort="ordinary",
    title="Fine-tuning: all layers, the head over a frozen backbone, LoRA",
    variants=(
        Variant("all", role="baseline", title="all layers"),
        other_math("frozen", "head, backbone frozen", measured=DIGITS, train="head"),
        other_math("stored", "head, features stored", measured=DIGITS, train="stored"),
        other_math("lora", "LoRA, rank 8", measured=TEXT, train="lora", **LORA),
    ),
    workloads=(
        Workload("digits-to-photos", "compute", accuracy=True, training=2.0),
        Workload("text-gpt", "compute", accuracy=True),
    ),
    differs_by_design=(
        "BatchNorm with frozen weights goes on updating its statistics in PyTorch until eval(); "
        "in Keras trainable = False stops that. Both run the backbone in evaluation mode.",
        "LoRA is a parametrization of nn.Linear in PyTorch, and Keras's built-in in TensorFlow. "
        "Adapters start from the same numbers.",
    ),
    notes=(
        "Each row starts from plain training on the old data: digits on black, or text of Python's "
        "standard library. The new data are the same digits over photos, with labels, and the text "
        "with upper and lower case swapped. Accuracy is on new data of the test split. Epochs on "
        "the old and on the new data: "
        + ", ".join(f"{name} {old} and {new}" for name, (old, new) in EPOCHS.items())
        + ". The rate is the recipe's for every row, and was tuned for none.",
        "stored computes the features of all new images in its first step, so only its first call "
        "has that cost. LoRA is in every dense layer, and is merged before its accuracy is "
        "measured.",
    ),
)


@dataclass(frozen=True)
class Learner:
    """One row's step on new data, `step(x, y, numbers)`, and what it trains."""

    step: Callable
    optimizer: Any


def prepare(impl, work: Work) -> Prepared:
    """A step on the new data, which comes as targets: new x, new y, sample numbers, old y."""
    row = plain(impl, work)
    learner = _learner(impl, work, row)

    def targets(x, y):
        new = _new_data(impl, work, x, y)
        numbers, _ = impl.kit.data.to_device(np.arange(len(y)), np.arange(len(y)))
        return *new, numbers, y

    return replace(
        row,
        step=lambda x, y: learner.step(*y[:3]),
        predict=_predict(impl, work, row.model),
        optimizer=learner.optimizer,
        targets=targets,
        train=lambda stages: _train(impl, work, stages),
    )


def _learner(impl, work: Work, row: Prepared) -> Learner:
    """The row's way to train `row.model`."""
    technique, training = impl.adaptation.fine_tuning, impl.kit.training
    kind, loss_fn = work.settings.get("train"), training.loss_of(work.task)
    if kind is None:
        return Learner(lambda x, y, numbers: row.step(x, y), row.optimizer)
    if kind == "lora":
        technique.apply_lora(row.model, **{name: work.settings[name] for name in LORA})
        optimizer = training.make_optimizer(row.model, work.task.recipe)
        step = training.make_train_step(row.model, optimizer, loss_fn)
        return Learner(lambda x, y, numbers: step(x, y), optimizer)
    features, head = impl.kit.models.split_head(row.model)
    optimizer = training.make_optimizer(head, work.task.recipe)
    if kind == "head":
        step = technique.make_train_step(features, head, optimizer, loss_fn)
        return Learner(lambda x, y, numbers: step(x, y), optimizer)
    made = []

    def stored(x, y, numbers):
        if not made:
            images, _ = impl.kit.data.to_device(*datasets.load(Path(work.data), "target"))
            kept = technique.store_features(features, images)
            made.append(technique.make_stored_train_step(kept, head, optimizer, loss_fn))
        return made[0](numbers, y)

    return Learner(stored, optimizer)


def _new_data(impl, work: Work, x, y) -> tuple:
    """As many samples of the new data: the target domain, or the text in swapped case."""
    if work.task.dataset.kind == "domains":
        return impl.kit.data.to_device(*examples(work, len(y), "target"))
    return impl.kit.data.to_device(*(datasets.SWAPPED[arrays(part)] for part in (x, y)))


def _predict(impl, work: Work, model) -> Callable:
    """Predictions for the test split: of text, logits of the swapped text, swapped back."""
    predict = impl.kit.training.make_predict(model)
    if work.task.dataset.kind == "domains":
        return predict

    def swapped(x):
        new, _ = impl.kit.data.to_device(*[datasets.SWAPPED[arrays(x)]] * 2)
        logits = arrays(predict(new))[..., datasets.SWAPPED]
        return impl.kit.data.to_device(logits, logits)[0]

    return swapped


def _train(impl, work: Work, stages: Stages) -> Callable:
    """Train on the old data, which all rows share, then the row's way on the new data."""
    before, after = EPOCHS[work.task.name]

    def old(weights):
        row = plain(impl, replace(work, weights=weights))
        return lambda x, y: row.step(x, y[3]), lambda: row.model

    trained = stages.shared("old data", old, epochs=before)
    row = prepare(impl, replace(work, weights=trained))
    stages.fit(row.step, after)
    if work.settings.get("train") == "lora":
        impl.adaptation.fine_tuning.merge_lora(row.model)
    return row.predict


def took_effect(impl, work: Work, prepared: Prepared, batch) -> tuple[dict, str | None]:
    """The backbone stays bit for bit, the head moves; stored features give the same loss.

    Of LoRA: no weight moves but by the adapters, and merged weights predict the same.
    """
    kind, kit = work.settings.get("train"), impl.kit
    row = prepare(impl, work)
    loss = kit.runtime.to_float(row.step(*batch))
    if kind == "lora":
        return _lora_took_effect(impl, work, row, batch)
    weights, before = kit.models.export_weights(row.model), work.weights
    moved = {name for name in weights if not np.array_equal(weights[name], before[name])}
    backbone = sorted(name for name in moved if not name.startswith("head."))
    evidence = {"moved": len(moved), "moved_in_the_backbone": len(backbone), "first_loss": loss}
    if kind is None:
        return evidence, None if backbone else "the backbone did not move"
    if backbone:
        return evidence, f"the backbone moved: {', '.join(backbone[:3])}"
    if "head.kernel" not in moved:
        return evidence, "the head did not move"
    if kind == "stored":
        again = replace(work, settings={"train": "head"})
        computed = kit.runtime.to_float(prepare(impl, again).step(*batch))
        evidence["first_loss_of_computed_features"] = computed
        if abs(loss - computed) > SAME * abs(computed):
            return evidence, "stored features are others than those that are computed"
    return evidence, None


def _lora_took_effect(impl, work: Work, row: Prepared, batch) -> tuple[dict, str | None]:
    models, x = impl.kit.models, batch[0]
    predict = impl.kit.training.make_predict(row.model)
    trained, adapted = models.parameter_count(row.model), arrays(predict(x))
    impl.adaptation.fine_tuning.merge_lora(row.model)
    merged = arrays(impl.kit.training.make_predict(row.model)(x))
    plainly = arrays(plain(impl, work).predict(x))
    everything = sum(int(np.prod(s)) for s in parameter_shapes(work.task.model).values())
    evidence = {
        "trained_share": trained / everything,
        "moved_apart": distance(plainly, adapted),
        "merged_apart": distance(merged, adapted),
    }
    if not evidence["moved_apart"] > SAME:
        return evidence, "a step with adapters changed no prediction"
    if not evidence["merged_apart"] < SAME:
        return evidence, "merged weights predict something else"
    return evidence, None if trained < everything else "as much is trained as without adapters"
