"""Mixed precision: bfloat16 over float32 weights."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from bench.harness.helpers import plain, ran_in
from bench.harness.plan import TRAIN_STEP, Prepared, Technique, UserModel, Variant, Work, Workload

# bfloat16 keeps 8 significant bits: each operand is rounded by up to 2^-9 = 0.2%, and a loss is
# several layers of that. 5% over ten steps is far above rounding and far below another batch.
BF16_LOSSES = 0.05

TECHNIQUE = Technique(
    family="train_step",
    name="mixed_precision",
    title="Mixed precision training (AMP)",
    composed_of=("deployment.reduced_precision",),
    remedies=("arithmetic", "memory bandwidth", "memory size"),
    user_model=UserModel(TRAIN_STEP, ("fp32", "bf16"), learns=True),
    variants=(
        Variant("fp32", role="baseline", title="float32", program="plain"),
        Variant(
            "bf16",
            {"dtype": "bfloat16"},
            loss_tolerance=BF16_LOSSES,
            title="bfloat16",
            stacking={"dtype": "bfloat16"},
        ),
        Variant(
            "bf16_fp32_head",
            {"dtype": "bfloat16", "keep_fp32": "head"},
            effort="ordinary",
            loss_tolerance=BF16_LOSSES,
            title="bfloat16, head in float32",
        ),
        Variant("neutral", {"dtype": "float32"}, effort="full", title="mixed precision in float32"),
    ),
    workloads=(
        Workload("photos-resnet18", "compute"),
        Workload("text-gpt-10m", "compute"),
        Workload("text-bert-10m", "compute"),
        # Small enough to be trained to its plateau.
        Workload("digits-cnn", "compute", accuracy=True),
        Workload("text-gpt", "compute", effort="full"),
        Workload("digits-detection", "compute", effort="ordinary", accuracy=True),
        Workload("digits-cnn", "small", effort="ordinary"),
        Workload("text-gpt", "small", effort="full"),
        Workload("digits-resnet20", "small", effort="full"),
        Workload("digits-resnet20", "compute", effort="full", accuracy=True),
    ),
    differs_by_design=(
        "PyTorch casts at each operator while the model stays float32 (torch.autocast); Keras "
        "gives each layer a policy that computes in bfloat16 over float32 variables.",
        "The head runs in bfloat16 on both sides and its logits enter the loss as float32; Keras "
        "advises a float32 head, which is the row bf16_fp32_head on both sides.",
    ),
    notes=(
        "float16 needs loss scaling: its rows are those of loss_scaling.",
        "neutral is the cost if there is nothing to do: it runs the plain step's operators.",
    ),
)


def prepare(impl, work: Work) -> Prepared:
    """The baseline step for fp32, the technique's for all others."""
    return in_dtype(impl, work, impl.train_step.mixed_precision)


def in_dtype(impl, work: Work, technique) -> Prepared:
    """The step of a technique and predictions in its dtype, or both plain ones."""
    if not work.settings:
        return plain(impl, work)
    row = plain(impl, work, make=partial(technique.make_train_step, **work.settings))
    predict = impl.deployment.reduced_precision.make_predict(row.model, **work.settings)
    return replace(row, predict=predict)


def took_effect(impl, work: Work, prepared: Prepared, batch) -> tuple[dict, str | None]:
    """Matrix products and convolutions ran in the dtype that was asked for."""
    return ran_in(impl, work, prepared.step, batch, work.settings.get("dtype", "float32"))
