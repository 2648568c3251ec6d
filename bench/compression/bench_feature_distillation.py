"""Feature distillation: what a regressor and the teacher's features cost, and what they teach."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from bench.harness.plan import Prepared, Technique, Variant, Work, Workload
from shared import teacher
from shared.specs import parameter_shapes

# The student's second convolution and the teacher's last stage: both give 8 x 8 pixels.
LAYERS = {"pt_impl": ("conv1", "stage2"), "tf_impl": ("conv1.bn", "stage2.block2.relu")}
REACHED = ("conv0.", "conv1.")  # what lies in front of the regressor
MOST_APART = 1e-3  # relative: a float32 weight minus its update has lost some digits

TECHNIQUE = Technique(
    family="compression",
    name="feature_distillation",
    title="Feature distillation: digits-resnet20 guides a layer of the student",
    variants=(
        Variant("alone", role="baseline", title="student alone", program="plain"),
        Variant(
            "features",
            {"weight": 1.0},
            changes="math",
            title="teacher's features in every step",
        ),
        Variant(
            "features_strong",
            {"weight": 10.0},
            effort="full",
            changes="math",
            title="teacher's features, weight 10",
        ),
        Variant("neutral", {"weight": 0.0}, effort="full", title="features with no weight"),
    ),
    workloads=(
        Workload("digits-student", "compute"),
        # The teacher runs in every step: minutes a seed on a CPU.
        Workload("digits-student", "small", effort="full", accuracy=True),
    ),
    differs_by_design=(
        "PyTorch catches features with hooks, and ends the teacher's pass with one; TensorFlow has "
        "a model of the teacher's layers up to that which is read.",
        "The regressor is a 1x1 convolution in PyTorch and a dense layer in TensorFlow.",
    ),
    notes=(
        f"The teacher is {teacher.TASK.name}, trained once (twinbench teacher); both "
        "frameworks load the same weights. alone is the same student, seeds and steps without it.",
        "features weighs the mean squared error by 1, features_strong by 10. neutral has the "
        "regressor, whose output nobody reads, and runs no teacher.",
        "Share of peak counts the student's arithmetic alone.",
    ),
    counts=True,
)


def prepare(impl, work: Work) -> Prepared:
    """The baseline step, or the technique's with its regressor and the teacher."""
    student = impl.kit.models.build(work.task.model, work.weights)
    predict, loss_fn = impl.kit.training.make_predict(student), impl.kit.training.cross_entropy
    if not work.settings:
        optimizer = impl.kit.training.make_optimizer(student, work.task.recipe)
        step = impl.kit.training.make_train_step(student, optimizer, loss_fn)
        return Prepared(step, predict, student, optimizer)
    guide = impl.kit.models.build(teacher.TASK.model, teacher.load().weights)
    example = np.zeros((1, *work.task.model.input_shape), np.float32)
    x, _ = impl.kit.data.to_device(example, np.zeros(1, np.int64))
    ours, theirs = LAYERS[impl.__name__]
    taught = impl.compression.feature_distillation.attach_regressor(
        student, guide, x, student_layer=ours, teacher_layer=theirs
    )
    optimizer = impl.kit.training.make_optimizer(taught, work.task.recipe)
    step = impl.compression.feature_distillation.make_train_step(
        taught, guide, optimizer, loss_fn, teacher_layer=theirs, **work.settings
    )
    return Prepared(step, predict, student, optimizer)


def took_effect(impl, work: Work, prepared: Prepared, batch) -> tuple[dict, str | None]:
    """The teacher's features move the layers that lead to the regressor, and no others."""
    labels = _gradient(impl, replace(work, settings={}), batch)
    found = _gradient(impl, work, batch) if work.settings else labels
    difference = {n: found[n] - labels[n] for n in labels}
    reached = {n: value for n, value in difference.items() if n.startswith(REACHED)}
    behind = {n: value for n, value in difference.items() if n not in reached}
    evidence = {
        "norm_of_labels": _norm(labels),
        "norm_of_features": _norm(reached),
        "norm_of_features_behind": _norm(behind),
    }
    least = MOST_APART * _norm(labels)
    if _norm(behind) > least:
        return evidence, "layers behind the regressor were moved by the features"
    if work.settings.get("weight"):
        if not all(_norm({n: value}) > 0 for n, value in reached.items() if "kernel" in n):
            return evidence, "the features have no gradient in a layer that leads to them"
        if not _norm(reached) > least:
            return evidence, "the features' gradient is nothing beside that of the labels"
    elif _norm(reached) > least:
        return evidence, "the features have a gradient, but no weight"
    return evidence, None


def _gradient(impl, work: Work, batch) -> dict[str, np.ndarray]:
    """The gradient of one step: by how much plain descent at rate 1 moves a fresh student."""
    recipe = replace(work.task.recipe, optimizer="sgd", learning_rate=1.0, momentum=0.0)
    prepared = prepare(impl, replace(work, task=replace(work.task, recipe=recipe)))
    prepared.step(*batch)
    after = impl.kit.models.export_weights(prepared.model)
    return {n: work.weights[n] - after[n] for n in parameter_shapes(work.task.model)}


def _norm(tensors: dict[str, np.ndarray]) -> float:
    return float(np.sqrt(sum(np.sum(np.square(value, dtype=float)) for value in tensors.values())))


def bench_feature_distillation(case, replay):
    """Replay one measured case."""
    replay(case)
