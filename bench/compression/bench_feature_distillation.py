"""Feature distillation: what a regressor and the teacher's features cost, and what they teach."""

from __future__ import annotations

from dataclasses import replace

from bench.compression import bench_distillation
from bench.compression.bench_distillation import MOST_APART
from bench.harness.examples import zeros
from bench.harness.helpers import gradient, norm, plain
from bench.harness.plan import Prepared, Technique, Variant, Work, Workload, other_math
from shared import teacher

# The student's second convolution and the teacher's last stage: both give 8 x 8 pixels.
LAYERS = {"pt_impl": ("conv1", "stage2"), "tf_impl": ("conv1.bn", "stage2.block2.relu")}
REACHED = ("conv0.", "conv1.")  # what lies in front of the regressor

TECHNIQUE = Technique(
    family="compression",
    name="feature_distillation",
    effort="ordinary",
    title="Feature distillation: digits-resnet20 guides a layer of the student",
    price=bench_distillation.TECHNIQUE.price,
    user_model="it needs a teacher, and a file has one model",
    variants=(
        Variant("alone", role="baseline", title="student alone", program="plain"),
        other_math("features", "teacher's features in every step", weight=1.0),
        other_math("features_strong", "teacher's features, weight 10", "full", weight=10.0),
        Variant("neutral", {"weight": 0.0}, effort="full", title="features with no weight"),
    ),
    workloads=(
        Workload("digits-student", "compute"),
        # The teacher runs in every step: minutes a seed on a CPU.
        Workload("digits-student", "small", effort="full", accuracy=True),
    ),
    differs_by_design=(
        "PyTorch gets features by hooks, and one of them ends the teacher's pass; TensorFlow has "
        "a model of the teacher's layers up to the features.",
        "The regressor is a 1x1 convolution in PyTorch and a dense layer in TensorFlow.",
    ),
    notes=(
        f"The teacher is {teacher.TASK.name}, trained once (twinbench teacher); both frameworks "
        "load the same weights. alone is the same student without a teacher, with the same seeds "
        "and steps.",
        "features gives the mean squared error a weight of 1, features_strong a weight of 10. "
        "neutral has the regressor, whose output is not used, and no teacher.",
        "Share of peak counts only the student's arithmetic.",
    ),
    counts=True,
)


def prepare(impl, work: Work) -> Prepared:
    """The baseline step, or the technique's with its regressor and the teacher."""
    if not work.settings:
        return plain(impl, work)
    student = impl.kit.models.build(work.task.model, work.weights)
    predict, loss_fn = impl.kit.training.make_predict(student), impl.kit.training.cross_entropy
    guide = impl.kit.models.build(teacher.TASK.model, teacher.load().weights)
    x, _ = impl.kit.data.to_device(*zeros(work, 1))
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
    labels = gradient(prepare, impl, replace(work, settings={}), batch)
    found = gradient(prepare, impl, work, batch) if work.settings else labels
    difference = {n: found[n] - labels[n] for n in labels}
    reached = {n: value for n, value in difference.items() if n.startswith(REACHED)}
    behind = {n: value for n, value in difference.items() if n not in reached}
    evidence = {
        "norm_of_labels": norm(labels),
        "norm_of_features": norm(reached),
        "norm_of_features_behind": norm(behind),
    }
    least = MOST_APART * norm(labels)
    if norm(behind) > least:
        return evidence, "layers behind the regressor were moved by the features"
    if work.settings.get("weight"):
        if not all(norm({n: value}) > 0 for n, value in reached.items() if "kernel" in n):
            return evidence, "the features have no gradient in a layer that leads to them"
        if not norm(reached) > least:
            return evidence, "the features' gradient is nothing beside that of the labels"
    elif norm(reached) > least:
        return evidence, "the features have a gradient, but no weight"
    return evidence, None
