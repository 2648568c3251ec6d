"""Activation checkpointing: every block of a transformer recomputed, or every other one."""

from __future__ import annotations

from dataclasses import replace

from bench.harness.helpers import plain
from bench.harness.plan import (
    TRAIN_STEP,
    Measure,
    Prepared,
    Technique,
    UserModel,
    Variant,
    Work,
    Workload,
    row,
)

# Of a transformer block, the second run repeats qkv, attention, projection and up, but not the last
# product, whose result no gradient needs. TensorFlow's attention counts as two products, and
# PyTorch's profiler counts the last one, which is entered and left.
LEAST_PRODUCTS_A_BLOCK = 4
# Of attention: two products forward and four backward, which fused are one operator each.
MORE_PRODUCTS_UNFUSED = 4

UNSUPPORTED = {
    "tf": {
        "apply_checkpointing(save_products)": "tf.recompute_grad recomputes all of a block: it "
        "can't keep the products within it",
        "apply_checkpointing(offload)": "TensorFlow keeps what a block needs only on the device",
        "make_attention_step": "TensorFlow has one attention: two products, which keep the scores",
    }
}

TECHNIQUE = Technique(
    family="train_step",
    name="activation_checkpointing",
    title="Activation checkpointing (gradient checkpointing)",
    remedies=("memory size",),
    user_model=UserModel(TRAIN_STEP, ("baseline", "checkpointed")),
    variants=(
        Variant("baseline", role="baseline", title="all activations kept", program="plain"),
        # `every`: each block is recomputed, each second one, or (0) none.
        Variant("checkpointed", {"every": 1}, title="each block recomputed"),
        row(
            "scores_kept",
            "no block recomputed, scores of attention kept",
            frameworks=("pt",),
            measured=Measure(tasks=("text-gpt-10m",)),
            attention="math",
        ),
        Variant("every_other_block", {"every": 2}, effort="ordinary", title="every other block"),
        Variant("neutral", {"every": 0}, effort="full", title="no block recomputed"),
    ),
    workloads=(
        Workload("text-gpt-10m", "compute"),
        Workload("text-bert-10m", "compute", effort="ordinary"),
        # Twelve layers of less width: activations outweigh all else by far.
        Workload("text-gpt-dropout", "compute", effort="ordinary", timed=False),
        Workload("text-gpt", "compute", effort="full"),
        Workload("text-gpt-deep", "compute", effort="full", timed=False),
        Workload("text-gpt-deep", "small", effort="full"),
        Workload("text-gpt-dropout", "small", effort="full"),
    ),
    differs_by_design=(
        "PyTorch replaces the forward method of a block's module, and resets its random "
        "generators for the second run. Keras's model is flat: a block is a sub-model over the "
        "same layers, whose second run gets the seeds and statistics of the first.",
    ),
    notes=(
        "Memory is measured with the installed allocator: glibc keeps part of what recomputation "
        "frees.",
        "scores_kept is the baseline without PyTorch's fused attention, which recomputes scores: "
        "what it needs more is what the fused kernel saves.",
        "neutral is the cost if there is nothing to do: it runs the plain step's operators.",
        "text-gpt-dropout is trained with dropout, which PyTorch's fused attention on a CPU does "
        "not support. So the scores of each layer are kept, as always in TensorFlow. "
        "text-gpt-deep is the same without dropout. The frameworks draw different masks, so with "
        "dropout they can't be compared step by step.",
    ),
)


def prepare(impl, work: Work) -> Prepared:
    """The baseline step of a model with the chosen blocks recomputed."""
    model = impl.kit.models.build(work.task.model, work.weights)
    if not work.settings:
        return plain(impl, work, model)
    if kernel := work.settings.get("attention"):
        plainly = plain(impl, work, model)
        make = impl.train_step.activation_checkpointing.make_attention_step
        return replace(plainly, step=make(plainly.step, kernel=kernel))
    blocks = ", ".join(_recomputed(impl, work))
    trained = impl.train_step.activation_checkpointing.apply_checkpointing(model, blocks=blocks)
    predict = impl.kit.training.make_predict(model)
    return replace(plain(impl, work, trained), predict=predict, model=model)


def _recomputed(impl, work: Work) -> list[str]:
    """Names of the blocks that the variant recomputes; a user's file says them of its model."""
    if work.task.model.from_file and work.settings:
        if not impl.blocks:
            raise NotImplementedError(
                "set blocks in the file, such as blocks = 'layer1.*, layer2.*'"
            )
        return [name.strip() for name in impl.blocks.split(",")]
    every = work.settings.get("every", 0)
    return [f"block{index}" for index in range(0, work.task.model.layers, every)] if every else []


def took_effect(impl, work: Work, prepared: Prepared, batch) -> tuple[dict, str | None]:
    """A step has the products of the plain one and those of each recomputed block again."""
    dtypes = impl.kit.runtime.operator_dtypes(prepared.step, *batch)
    if not work.settings:  # it is the plain one
        return {"operator_dtypes": dtypes, "repeated_products": 0}, None
    usual = impl.kit.runtime.operator_dtypes(plain(impl, work).step, *batch)
    counts = [sum(sum(kind.values()) for kind in d.values()) for d in (dtypes, usual)]
    repeated = counts[0] - counts[1]  # matrix products and convolutions
    least = 1 if work.task.model.from_file else LEAST_PRODUCTS_A_BLOCK
    expected = least * len(_recomputed(impl, work))
    if "attention" in work.settings:
        expected = MORE_PRODUCTS_UNFUSED * work.task.model.layers
    applied = repeated >= expected if expected else repeated == 0
    return (
        {"operator_dtypes": dtypes, "repeated_products": repeated},
        None if applied else f"repeated {repeated} products, not {expected} or more",
    )
