"""Activation checkpointing: every block of a deep transformer recomputed, or every other one."""

from __future__ import annotations

from bench.harness.plan import Prepared, Technique, Variant, Work, Workload

EVERY_OTHER = "block[02468], block1[02468]"
# Of a transformer block, the second run repeats qkv, attention, projection and up, but not the last
# product, whose result no gradient needs. TensorFlow's attention counts as two products, and
# PyTorch's profiler counts the last one, which is entered and left.
LEAST_PRODUCTS_A_BLOCK = 4

TECHNIQUE = Technique(
    name="activation_checkpointing",
    title="Activation checkpointing",
    variants=(
        Variant("baseline", role="baseline", effort="quick"),
        Variant("checkpointed", {"blocks": "block*"}, effort="quick"),
        Variant("every_other_block", {"blocks": EVERY_OTHER}, effort="full"),
        Variant("neutral", {"blocks": ""}, effort="full"),
    ),
    workloads=(
        Workload("text-gpt-deep", "small"),
        Workload("text-gpt-deep", "compute", timed=False),
    ),
    differs_by_design=(
        "PyTorch replaces the forward of a block's module and puts its random generators back for "
        "the second run. Keras's model is flat: a block is a sub-model over the same layers, whose "
        "second run is given the seeds and statistics that the first one found.",
    ),
    notes=(
        "Memory is measured with the allocator as installed: glibc holds on to part of what "
        "recomputation frees.",
    ),
)


def prepare(kit, work: Work) -> Prepared:
    """The baseline step of a model with the chosen blocks recomputed."""
    model = trained = kit.models.build(work.task.model, work.weights)
    if work.settings:
        trained = kit.activation_checkpointing.apply_checkpointing(model, **work.settings)
    optimizer = kit.training.make_optimizer(trained, work.task.recipe)
    step = kit.training.make_train_step(trained, optimizer, kit.training.cross_entropy)
    return Prepared(step, kit.training.make_predict(model), model, optimizer)


def took_effect(kit, work: Work, prepared: Prepared, batch) -> tuple[dict, str | None]:
    """A step has the products of the plain one and those of each recomputed block again."""
    plain = kit.models.build(work.task.model, work.weights)
    optimizer = kit.training.make_optimizer(plain, work.task.recipe)
    step = kit.training.make_train_step(plain, optimizer, kit.training.cross_entropy)
    dtypes = kit.runtime.operator_dtypes(prepared.step, *batch)
    counts = [
        sum(d["matmul"].values()) for d in (dtypes, kit.runtime.operator_dtypes(step, *batch))
    ]
    repeated = counts[0] - counts[1]
    blocks = {"block*": work.task.model.layers, EVERY_OTHER: work.task.model.layers // 2}
    expected = LEAST_PRODUCTS_A_BLOCK * blocks.get(work.settings.get("blocks"), 0)
    applied = repeated >= expected if expected else repeated == 0
    return (
        {"operator_dtypes": dtypes, "repeated_products": repeated},
        None if applied else f"repeated {repeated} products, not {expected} or more",
    )


def bench_activation_checkpointing(case, replay):
    """Replay one measured case."""
    replay(case)
