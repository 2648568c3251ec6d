"""The baselines themselves: what our train step costs over hand-written code, and as installed.

Users have no tuned allocator, so every run shows one row of each framework as it is installed.
"""

from __future__ import annotations

from dataclasses import replace

from bench.harness.helpers import plain
from bench.harness.plan import (
    TRAIN_STEP,
    WARM,
    Prepared,
    Technique,
    UserModel,
    Variant,
    Work,
    Workload,
    warm,
)

LOOPS = replace(WARM, tasks=("digits-cnn",))  # of a large model a loop costs nothing to see
UNSUPPORTED = {"pt": {"make_fit_loop": "PyTorch has no fit: users write the loop (hand_written)"}}

TECHNIQUE = Technique(
    family="train_step",
    name="baseline",
    title="Baselines: what the reference train step costs",
    remedies=("overhead",),
    user_model=UserModel(TRAIN_STEP, ("baseline", "as_installed")),
    variants=(
        Variant("baseline", role="baseline", title="plain step, float32", program="plain"),
        Variant("hand_written", measured=LOOPS, effort="ordinary", title="loop written by hand"),
        Variant("fit", measured=LOOPS, effort="ordinary", title="Keras's fit"),
        warm("as_installed", "allocator as installed", allocator="as installed"),
    ),
    workloads=(
        Workload("digits-cnn", "small"),
        # Large enough that what a step frees goes back to the system, as installed.
        Workload("photos-resnet18", "compute"),
        Workload("digits-cnn", "compute", effort="ordinary"),
    ),
    differs_by_design=(
        "PyTorch: eager, NCHW. TensorFlow: one tf.function over the whole step, not XLA, NHWC.",
        "fit takes its batches from a tf.data pipeline over resident tensors, keeps the loss as "
        "a metric and reads it on the host after each batch; the other rows are given their "
        "batches. PyTorch has no fit.",
    ),
    notes=(
        "as_installed runs without the allocator settings of all other rows; its ratio is what "
        "these settings gain.",
    ),
)


def prepare(impl, work: Work) -> Prepared:
    """The kit's step, or the same step written out by hand, or the framework's own trainer."""
    if work.variant == "fit" and impl.__name__ == "pt_impl":
        raise NotImplementedError(UNSUPPORTED["pt"]["make_fit_loop"])
    row = plain(impl, work)
    if work.variant == "fit":
        loop = impl.train_step.baseline.make_fit_loop(row.model, row.optimizer)
        return replace(row, step=lambda x, y: loop([(x, y)])[1], loop=loop)
    if work.variant == "hand_written":
        make = impl.train_step.baseline.make_hand_written_step
        return replace(row, step=make(row.model, row.optimizer))
    return row


def took_effect(impl, work: Work, prepared: Prepared, batch) -> tuple[dict, str | None]:
    """Everything ran in float32."""
    dtypes = impl.kit.runtime.operator_dtypes(prepared.step, *batch)
    ran = {dtype for operators in dtypes.values() for dtype in operators}
    reason = None if ran == {"float32"} else f"ran in {', '.join(sorted(ran))}, not float32"
    return {"operator_dtypes": dtypes}, reason
