"""Distillation: what a teacher costs in every step, what stored logits cost, what both teach."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from bench.harness.helpers import gradient, norm, plain
from bench.harness.plan import (
    Measure,
    Prepared,
    Price,
    Technique,
    Variant,
    Work,
    Workload,
    other_math,
    row,
)
from shared import teacher
from shared.specs import TASKS

# Hinton et al. (2015) found temperatures of 2.5 to 4 best for small students (section 3), and a
# low weight on the labels. Fixed here before anything was measured.
HEADLINE = {"temperature": 4.0, "alpha": 0.9}
STUDENT = "digits-student"
MOST_APART = 1e-3  # relative: a float32 weight minus its update has lost some digits

TECHNIQUE = Technique(
    family="compression",
    name="distillation",
    title="Distillation: digits-resnet20 teaches a student of less than a tenth of its size",
    price=Price(epochs=TASKS[STUDENT].recipe.epochs, teacher=True),
    user_model="it needs a teacher, and a file has one model: see docs/your_model.md",
    variants=(
        Variant("alone", role="baseline", title="student alone", program="plain"),
        other_math("stored", "teacher's stored logits", **HEADLINE),
        # What it trains is what `stored` trains: the data is not augmented.
        other_math(
            "taught",
            "teacher in every step",
            "ordinary",
            measured=Measure(accuracy=False),
            **HEADLINE,
        ),
        other_math("stored_t1", "stored logits, T = 1", "ordinary", temperature=1.0, alpha=0.9),
        other_math("stored_t8", "stored logits, T = 8", "ordinary", temperature=8.0, alpha=0.9),
        other_math(
            "stored_half", "stored logits, half of the loss", "full", temperature=4.0, alpha=0.5
        ),
        other_math(
            "stored_no_labels", "stored logits, no labels", "full", temperature=4.0, alpha=1.0
        ),
        row("neutral", "teacher with no weight", "full", temperature=4.0, alpha=0.0),
    ),
    workloads=(Workload(STUDENT, "compute", accuracy=True),),
    differs_by_design=(
        "PyTorch's kl_div is one operator; in TensorFlow the sum over log-probabilities is "
        "written out, because Keras's KLDivergence clips probabilities.",
    ),
    notes=(
        f"The teacher is {teacher.TASK.name}, trained once (twinbench teacher); both frameworks "
        "load the same weights. alone is the same student without a teacher, with the same seeds "
        "and steps.",
        "taught runs the teacher in every step. stored reads logits that were computed before; "
        "that time is not shown. Images are not augmented, so stored learns the same as taught, "
        "and has its accuracy.",
        f"T = {HEADLINE['temperature']:g} and alpha = {HEADLINE['alpha']:g}, except for stored_t1 "
        "and stored_t8 (T), stored_half (alpha 0.5), stored_no_labels (alpha 1) and neutral "
        "(alpha 0).",
        "Share of peak counts only the student's arithmetic.",
    ),
    counts=True,
)


def prepare(impl, work: Work) -> Prepared:
    """The baseline step, or the technique's with a teacher or with its stored logits."""
    row = plain(impl, work)
    if not work.settings:
        return row
    technique, loss_fn = impl.compression.distillation, impl.kit.training.cross_entropy
    guide = impl.kit.models.build(teacher.TASK.model, teacher.load().weights)
    if not work.variant.startswith("stored"):
        make = technique.make_train_step
        return replace(row, step=make(row.model, guide, row.optimizer, loss_fn, **work.settings))

    def targets(x, y):
        return y, technique.store_logits(guide, x)

    make = technique.make_stored_train_step
    step = make(row.model, row.optimizer, loss_fn, **work.settings)
    return replace(row, step=step, targets=targets)


def took_effect(impl, work: Work, prepared: Prepared, batch) -> tuple[dict, str | None]:
    """The gradient is that of the labels and that of the teacher, each by its share.

    Neither is zero, and the two differ: a loss that looks plausible may teach nothing.
    """
    x, y = batch
    alone, y = replace(work, settings={}), y[0] if prepared.targets else y
    labels = gradient(prepare, impl, alone, (x, y))
    evidence = {"norm_of_labels": norm(labels)}
    if not work.settings:
        return evidence, None
    alpha = work.settings["alpha"]
    measured = gradient(prepare, impl, work, batch)
    evidence["norm_of_step"] = norm(measured)
    wanted = labels
    if alpha:
        only = replace(work, settings=work.settings | {"alpha": 1.0})
        soft = gradient(prepare, impl, only, batch)
        evidence["norm_of_teacher"] = norm(soft)
        evidence["teacher_to_labels"] = _apart(soft, labels)
        if not evidence["norm_of_teacher"] > MOST_APART * evidence["norm_of_labels"]:
            return evidence, "the teacher's term has no gradient"
        if not evidence["teacher_to_labels"] > MOST_APART:
            return evidence, "the teacher's gradient is that of the labels"
        wanted = {n: alpha * soft[n] + (1 - alpha) * labels[n] for n in labels}
    evidence["step_to_sum"] = _apart(measured, wanted)
    if not evidence["step_to_sum"] < MOST_APART:
        return evidence, "the step's gradient is not the weighted sum of labels and teacher"
    return evidence, None


def _apart(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> float:
    return norm({n: ours[n] - theirs[n] for n in theirs}) / norm(theirs)
