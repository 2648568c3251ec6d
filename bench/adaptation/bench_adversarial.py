"""Adversarial domain adaptation: accuracy on the target, the price of a step, restless losses."""

from __future__ import annotations

from bench.adaptation import domains
from bench.harness.plan import Prepared, Technique, Work

HIDDEN = 100  # units of the domain head, as for MNIST in Ganin et al.

TECHNIQUE = Technique(
    family="adaptation",
    name="adversarial",
    effort="ordinary",
    title="Adversarial domain adaptation (DANN)",
    variants=(
        domains.SOURCE_ONLY,
        domains.row("dann", "gradient reversal (DANN)", strength=1.0),
        domains.row("dann_clipped", "DANN, clipped at 0.5", "ordinary", strength=1.0, max_norm=0.5),
        domains.row("dann_clipped_1", "DANN, clipped at 1", "ordinary", strength=1.0, max_norm=1.0),
        domains.TARGET_LABELS,
    ),
    workloads=domains.WORKLOADS,
    notes=(
        *domains.NOTES,
        f"The domain head has a layer of {HIDDEN}. The strength of the reversal rises to 1 over "
        "the training. Loss fluctuation of DANN is of labels and domains together. A step takes "
        "longer mostly because the second domain passes through the features.",
    ),
    composed_of=("train_step.gradient_clipping",),
)


def prepare(impl, work: Work) -> Prepared:
    """The plain step, or that of the adversarial model, with clipping where that is asked for."""
    if "strength" not in work.settings:
        return domains.prepare_plain(impl, work)
    technique, training, spec = impl.adaptation.adversarial, impl.kit.training, work.task.model
    model = impl.kit.models.build(spec, work.weights)
    width = domains.features_width(spec)
    adversary = technique.AdversarialModel(
        *impl.kit.models.split_head(model),
        technique.make_domain_head(width=width, hidden=HIDDEN),
        steps=domains.steps_in_all(work),
        strength=work.settings["strength"],
    )
    optimizer = training.make_optimizer(adversary, work.task.recipe)
    loss_fn = technique.adversarial_loss(training.cross_entropy)
    if "max_norm" in work.settings:
        both = impl.train_step.gradient_clipping.make_train_step(
            adversary, optimizer, loss_fn, max_norm=work.settings["max_norm"]
        )
    else:
        both = training.make_train_step(adversary, optimizer, loss_fn)
    ratio = domains.step_flops(
        spec, work.batch_size, extra_macs=2 * work.batch_size * (width + 1) * HIDDEN
    )
    return domains.finish(
        impl, work, lambda x, y: both((x, y[1]), y[0]), model, optimizer, work_ratio=ratio
    )


def took_effect(impl, work: Work, prepared: Prepared, batch) -> tuple[dict, str | None]:
    """Two steps lead elsewhere than with a reversal of strength 0, or than on the source alone."""
    return domains.took_effect(impl, work, prepare, batch, "strength")
