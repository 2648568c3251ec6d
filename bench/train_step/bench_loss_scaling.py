"""Loss scaling: float16 on CUDA, and the price of scaling where nothing else changes."""

from __future__ import annotations

from bench.harness.helpers import ran_in
from bench.harness.plan import Prepared, Technique, Variant, Work, Workload
from bench.train_step.bench_mixed_precision import in_dtype

FP16_LOSSES = 0.01

TECHNIQUE = Technique(
    family="train_step",
    name="loss_scaling",
    effort="ordinary",
    title="Loss scaling for float16",
    composed_of=("deployment.reduced_precision",),
    user_model="float16 needs a GPU; mixed_precision has bfloat16: see docs/your_model.md",
    variants=(
        Variant("fp32", role="baseline", title="float32", program="plain"),
        Variant(
            "fp16",
            {"dtype": "float16"},
            effort="ordinary",
            requires="cuda",
            loss_tolerance=FP16_LOSSES,
            title="float16 with loss scaling",
        ),
        Variant(
            "scaled_fp32", {"dtype": "float32"}, effort="full", title="float32 with loss scaling"
        ),
    ),
    workloads=(
        Workload("digits-cnn", "compute", accuracy=True),
        Workload("photos-resnet18", "compute", effort="ordinary"),
        Workload("text-gpt-10m", "compute", effort="ordinary"),
        Workload("text-gpt", "compute", effort="full"),
        Workload("digits-detection", "compute", effort="ordinary", accuracy=True),
        Workload("digits-cnn", "small", effort="ordinary"),
        Workload("digits-resnet20", "compute", effort="full", accuracy=True),
    ),
    differs_by_design=(
        "PyTorch's scaler reads a flag from the device to decide whether to skip a step; Keras "
        "decides inside the graph.",
        "PyTorch casts at each operator (torch.autocast); Keras gives each layer a policy.",
    ),
    notes=(
        "float16 needs a GPU; on a CPU its rows are UNSUPPORTED.",
        "scaled_fp32 is the cost of scaling: the plain step's results, and one pass over all "
        "gradients.",
    ),
)


def prepare(impl, work: Work) -> Prepared:
    """The baseline step for fp32, the technique's for all others."""
    return in_dtype(impl, work, impl.train_step.loss_scaling)


def took_effect(impl, work: Work, prepared: Prepared, batch) -> tuple[dict, str | None]:
    """Products ran in the dtype that was asked for, and the loss has a scale."""
    dtype = work.settings.get("dtype", "float32")
    evidence, reason = ran_in(impl, work, prepared.step, batch, dtype)
    if work.settings:
        evidence["loss_scale"] = prepared.step.loss_scale()
        if evidence["loss_scale"] <= 1.0:
            reason = f"the loss's scale is {evidence['loss_scale']}"
    return evidence, reason
