"""The baselines themselves: what our train step costs over hand-written code, and as installed.

Users have no tuned allocator, so every run shows one row of each framework as it is installed.
"""

from __future__ import annotations

from dataclasses import replace

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
UNSUPPORTED = {
    "pt": {"make_fit_loop": "PyTorch has no fit: its users write the loop (hand_written)"}
}

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
        "fit takes its batches from a tf.data pipeline over resident tensors, keeps the loss as a "
        "metric and reads it on the host after each batch; the other rows are given their batches. "
        "PyTorch has no fit.",
    ),
    notes=(
        "as_installed runs without the allocator settings that every other row has; its ratio is "
        "what these settings are worth.",
    ),
)


def prepare(impl, work: Work) -> Prepared:
    """The kit's step, or the same step written out by hand, or the framework's own trainer."""
    if work.variant == "fit" and impl.__name__ == "pt_impl":
        raise NotImplementedError(UNSUPPORTED["pt"]["make_fit_loop"])
    model = impl.kit.models.build(work.task.model, work.weights)
    optimizer = impl.kit.training.make_optimizer(model, work.task.recipe)
    loop = None
    if work.variant == "fit":
        loop = impl.train_step.baseline.make_fit_loop(model, optimizer)

        def step(x, y):
            return loop([(x, y)])[1]

    elif work.variant == "hand_written":
        step = impl.train_step.baseline.make_hand_written_step(model, optimizer)
    else:
        step = impl.kit.training.make_train_step(model, optimizer, impl.kit.training.cross_entropy)
    return Prepared(step, impl.kit.training.make_predict(model), model, optimizer, loop)


def took_effect(impl, work: Work, prepared: Prepared, batch) -> tuple[dict, str | None]:
    """Everything ran in float32."""
    dtypes = impl.kit.runtime.operator_dtypes(prepared.step, *batch)
    ran = {dtype for operators in dtypes.values() for dtype in operators}
    reason = None if ran == {"float32"} else f"ran in {', '.join(sorted(ran))}, not float32"
    return {"operator_dtypes": dtypes}, reason
