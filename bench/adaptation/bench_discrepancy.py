"""Domain adaptation by discrepancy: accuracy on the target with one kernel and with several."""

from __future__ import annotations

from bench.adaptation import domains
from bench.harness.plan import Prepared, Technique, Work

TECHNIQUE = Technique(
    family="adaptation",
    name="discrepancy",
    effort="ordinary",
    title="Domain adaptation by discrepancy (MMD)",
    variants=(
        domains.SOURCE_ONLY,
        domains.row("mmd", "MMD with five kernels", weight=1.0),
        domains.row(
            "mmd_one_kernel", "MMD with one kernel", "ordinary", weight=1.0, bandwidths=[1.0]
        ),
        domains.TARGET_LABELS,
    ),
    workloads=domains.WORKLOADS,
    notes=(
        *domains.NOTES,
        "The discrepancy has the weight of the labels' loss; loss fluctuation is of their sum. "
        "The kernels' widths are 1/4 to 4 times the mean squared distance.",
    ),
)


def prepare(impl, work: Work) -> Prepared:
    """The plain step, or that of the aligned model."""
    if "weight" not in work.settings:
        return domains.prepare_plain(impl, work)
    technique, training, spec = impl.adaptation.discrepancy, impl.kit.training, work.task.model
    model = impl.kit.models.build(spec, work.weights)
    aligned = technique.AlignedModel(*impl.kit.models.split_head(model))
    optimizer = training.make_optimizer(aligned, work.task.recipe)
    loss_fn = technique.discrepancy_loss(training.cross_entropy, **work.settings)
    both = training.make_train_step(aligned, optimizer, loss_fn)
    width = domains.features_width(spec)
    ratio = domains.step_flops(spec, work.batch_size, extra_macs=(2 * work.batch_size) ** 2 * width)
    return domains.finish(
        impl, work, lambda x, y: both((x, y[1]), y[0]), model, optimizer, work_ratio=ratio
    )


def took_effect(impl, work: Work, prepared: Prepared, batch) -> tuple[dict, str | None]:
    """Two steps lead elsewhere than with a discrepancy of no weight, or on the source alone."""
    return domains.took_effect(impl, work, prepare, batch, "weight")
