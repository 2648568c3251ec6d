"""Reduced precision: predictions in bfloat16 and float16, from float32 weights."""

from __future__ import annotations

from bench.harness.helpers import not_timed, ran_in
from bench.harness.plan import Prepared, Technique, Variant, Work, Workload, row

# Of the mean of squares that predictions are compared by: as in the files of export.
HALF_LOSSES = 0.05

TECHNIQUE = Technique(
    family="deployment",
    name="reduced_precision",
    effort="ordinary",
    title="Predictions in reduced precision",
    user_model="native_export measures it, by files of a model; this casts in every call",
    variants=(
        Variant("fp32", role="baseline", title="float32", program="plain"),
        row("bf16", "bfloat16", dtype="bfloat16", loss_tolerance=HALF_LOSSES, changes="math"),
        row(
            "fp16",
            "float16",
            "ordinary",
            dtype="float16",
            requires="cuda",
            loss_tolerance=HALF_LOSSES,
            changes="math",
        ),
        row("neutral", "reduced precision in float32", "full", dtype="float32"),
    ),
    workloads=(
        Workload("digits-cnn", "single", mode="predict"),
        Workload("digits-cnn", "compute", effort="ordinary", mode="predict"),
        Workload("photos-resnet18", "single", effort="ordinary", mode="predict"),
        Workload("text-gpt", "compute", effort="full", mode="predict"),
        Workload("photos-resnet50", "compute", effort="full", mode="predict"),
    ),
    differs_by_design=(
        "PyTorch casts at each operator (torch.autocast); Keras gives each layer a policy that "
        "computes in bfloat16 over float32 variables.",
    ),
    notes=(
        "The weights stay float32 and are cast in every call; export and native_export have rows "
        "with bfloat16 files.",
        "neutral shows the cost if there is nothing to do.",
    ),
)


def prepare(impl, work: Work) -> Prepared:
    """The kit's predictions for fp32, the technique's for all others."""
    model = impl.kit.models.build(work.task.model, work.weights)
    if work.settings:
        predict = impl.deployment.reduced_precision.make_predict(model, **work.settings)
    else:
        predict = impl.kit.training.make_predict(model)
    optimizer = impl.kit.training.make_optimizer(model, work.task.recipe)
    return Prepared(not_timed, predict, model, optimizer)


def took_effect(impl, work: Work, prepared: Prepared, batch) -> tuple[dict, str | None]:
    """Matrix products and convolutions ran in the dtype that was asked for."""
    wanted = work.settings.get("dtype", "float32")
    return ran_in(impl, work, lambda x, y: prepared.predict(x), batch, wanted)
