"""Augmentation: accuracy with few labels, and samples/s lost on the host and on the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from math import ceil
from pathlib import Path

from bench.harness.helpers import figure
from bench.harness.plan import WARM, Prepared, Technique, Variant, Work, Workload, other_math
from bench.harness.stages import Stages
from shared import datasets
from shared.user_model import arrays

SHORTEST_S = 0.3  # of a repetition: epochs of a small data set take milliseconds
_row = partial(other_math, measured=WARM)
GEOMETRY = {"rotation": 10.0, "zoom": 0.1, "shift": 0.1}

TECHNIQUE = Technique(
    family="recipes",
    name="augmentation",
    effort="ordinary",
    title="Augmentation",
    variants=(
        Variant("none", role="baseline", measured=WARM, program="plain", title="as it is"),
        _row("geometry", "rotation, zoom and shift", **GEOMETRY),
        _row("mixup", "mixup", "ordinary", mixup=0.2),
        _row("cutmix", "cutmix", "ordinary", cutmix=1.0),
        _row("colour", "brightness, contrast", "ordinary", brightness=0.2, contrast=0.2),
        _row("flip", "horizontal flips", "ordinary", flip_horizontal=0.5),
        _row(
            "geometry_mixup", "rotation, zoom, shift and mixup", "ordinary", **GEOMETRY, mixup=0.2
        ),
    ),
    workloads=(Workload("digits-few", "compute", accuracy=True),),
    differs_by_design=(
        "The frameworks draw different random numbers, so they do not see the same images.",
        "On the host, PyTorch augments in worker processes, one per thread, which must send "
        "batches back; TensorFlow augments in threads of tf.data.",
    ),
    notes=(
        "Step times: on the device, a whole batch at once, within the step. Geometry: up to "
        f"{GEOMETRY['rotation']:g} degrees, and {GEOMETRY['zoom']:.0%} of zoom and of shift. A "
        "flipped digit is no digit: that row shows a change that makes labels wrong.",
        "Every row takes the same number of steps; mixed labels would need more.",
        "In samples/s: an input pipeline (with the row's change), and training from one without "
        "augmentation, with it on the host, and with it on the device. The loss is relative to "
        "the rate without, measured in turns in the same process. On a CPU, host and device "
        "share the cores.",
    ),
    probes=True,
)


def prepare(impl, work: Work) -> Prepared:
    """The plain step, over augmented batches."""
    augmentation = impl.recipes.augmentation
    model, optimizer, step = _build(impl, work, mixing=bool(work.settings))
    predict = impl.kit.training.make_predict(model)
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


def _build(impl, work: Work, *, mixing: bool) -> tuple:
    """Model, optimizer, and the step, whose loss takes mixed labels if `mixing`."""
    model = impl.kit.models.build(work.task.model, work.weights)
    optimizer = impl.kit.training.make_optimizer(model, work.task.recipe)
    loss_fn = impl.kit.training.cross_entropy
    if mixing:
        make = impl.recipes.augmentation.make_mixed_loss
        loss_fn = make(impl.kit.training.sample_cross_entropy)
    return model, optimizer, impl.kit.training.make_train_step(model, optimizer, loss_fn)


def probe(impl, work: Work, batches) -> dict[str, dict]:
    """Samples/s of an input pipeline, and of training from it with augmentation in either place."""
    loader = partial(
        impl.kit.data.host_loader,
        *datasets.load(Path(work.data), "train"),
        batch_size=work.batch_size,
    )
    plain = loader(lambda dataset: dataset)
    ways = {"train_plain": (plain, _build(impl, work, mixing=False)[2])}
    pipeline = plain
    if work.settings:
        policy = impl.recipes.augmentation.Policy(**work.settings)
        augmented_dataset = partial(impl.recipes.augmentation.augmented_dataset, policy=policy)
        pipeline = loader(augmented_dataset)
        ways["train_host"] = (pipeline, _build(impl, work, mixing=True)[2])
        ways["train_device"] = (plain, prepare(impl, work).step)
    ways["pipeline"] = (pipeline, lambda x, y: None)
    rates = _rates(impl, work, ways)
    metrics = {name: figure("samples/s", samples) for name, samples in rates.items()}
    for place in ("host", "device") if work.settings else ():
        pairs = zip(rates[f"train_{place}"], rates["train_plain"], strict=True)
        metrics[f"lost_on_{place}"] = figure("%", [100 * (1 - ours / b) for ours, b in pairs])
    return metrics


def _rates(impl, work: Work, ways: dict[str, tuple[Iterable, Callable]]) -> dict[str, list]:
    """Samples/s of each way to take a loader's batches, in turn, after two epochs of each."""

    def epochs(batches: Iterable, step: Callable, count: int = 1) -> tuple[float, int]:
        """Seconds and samples."""
        start, samples = time.perf_counter(), 0
        for _ in range(count):
            for x, y in batches:
                step(x, y)
                samples += len(x)
        impl.kit.runtime.synchronize()
        return time.perf_counter() - start, samples

    counts, rates = {}, {name: [] for name in ways}
    for name, way in ways.items():
        epochs(*way)  # starts workers, traces graphs
        counts[name] = ceil(SHORTEST_S / epochs(*way)[0])
    for _ in range(work.repetitions):
        for name, way in ways.items():
            seconds, samples = epochs(*way, counts[name])
            rates[name].append(samples / seconds)
    return rates


def took_effect(impl, work: Work, prepared: Prepared, batch) -> tuple[dict, str | None]:
    """The images that the step sees are not those of the batch."""
    if not work.settings:
        return {}, None
    policy = impl.recipes.augmentation.Policy(**work.settings)
    generator = impl.kit.runtime.make_generator(seed=0)
    seen, _ = impl.recipes.augmentation.augment(policy, *batch, generator)
    before, after = arrays((batch[0], seen))
    share = float((before != after).reshape(len(before), -1).any(axis=1).mean())
    return {"images_changed": share}, None if share else "no image was changed"
