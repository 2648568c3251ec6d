"""Augmentation: accuracy with few labels, and what a step costs with it."""

from __future__ import annotations

import numpy as np

from bench.harness.plan import Measure, Prepared, Technique, Variant, Work, Workload
from bench.harness.stages import Stages

NO_COLD = Measure(cold=False)
GEOMETRY = {"rotation": 10.0, "zoom": 0.1, "shift": 0.1}

TECHNIQUE = Technique(
    family="recipes",
    name="augmentation",
    title="Augmentation",
    variants=(
        Variant("none", role="baseline", measured=NO_COLD, program="plain", title="as it is"),
        *(
            Variant(name, policy, measured=NO_COLD, effort=effort, changes="math", title=title)
            for name, policy, effort, title in (
                ("geometry", GEOMETRY, "default", "rotation, zoom and shift"),
                ("mixup", {"mixup": 0.2}, "default", "mixup"),
                ("cutmix", {"cutmix": 1.0}, "default", "cutmix"),
                (
                    "colour",
                    {"brightness": 0.2, "contrast": 0.2},
                    "ordinary",
                    "brightness, contrast",
                ),
                ("flip", {"flip_horizontal": 0.5}, "ordinary", "horizontal flips"),
                (
                    "geometry_mixup",
                    GEOMETRY | {"mixup": 0.2},
                    "ordinary",
                    "rotation, zoom, shift and mixup",
                ),
            )
        ),
    ),
    workloads=(Workload("digits-few", "compute", accuracy=True),),
    differs_by_design=(
        "Each framework draws random numbers of its own, so that twins do not see the same images.",
    ),
    notes=(
        "On the device, a whole batch at once, within the step that is timed. Geometry: up to "
        f"{GEOMETRY['rotation']:g} degrees, {GEOMETRY['zoom']:.0%} of zoom and of shift. A flipped "
        "digit is none: that row shows a change that does not leave the label true.",
        "Every row takes the same steps; mixed labels need more of them.",
    ),
)


def prepare(impl, work: Work) -> Prepared:
    """The plain step, over augmented batches."""
    model = impl.kit.models.build(work.task.model, work.weights)
    predict = impl.kit.training.make_predict(model)
    optimizer = impl.kit.training.make_optimizer(model, work.task.recipe)
    augmentation, loss_fn = impl.recipes.augmentation, impl.kit.training.cross_entropy
    if work.settings:
        loss_fn = augmentation.make_mixed_loss(impl.kit.training.sample_cross_entropy)
    step = impl.kit.training.make_train_step(model, optimizer, loss_fn)
    if work.settings:
        policy = augmentation.Policy(**work.settings)
        generator = impl.kit.runtime.make_generator(seed=0)
        step = augmentation.make_augmenting_step(step, policy, generator)

    def train(stages: Stages) -> None:
        if work.settings:
            stages.watch(step, predict)
        else:
            stages.watch_plain(model)

    return Prepared(step, predict, model, optimizer, train=train)


def took_effect(impl, work: Work, prepared: Prepared, batch) -> tuple[dict, str | None]:
    """The images that the step sees are not those of the batch."""
    if not work.settings:
        return {}, None
    policy = impl.recipes.augmentation.Policy(**work.settings)
    generator = impl.kit.runtime.make_generator(seed=0)
    seen, _ = impl.recipes.augmentation.augment(policy, *batch, generator)
    before, after = (np.asarray(x.cpu() if hasattr(x, "cpu") else x) for x in (batch[0], seen))
    share = float((before != after).reshape(len(before), -1).any(axis=1).mean())
    return {"images_changed": share}, None if share else "no image was changed"


def bench_augmentation(case, replay):
    """Replay one measured case."""
    replay(case)
