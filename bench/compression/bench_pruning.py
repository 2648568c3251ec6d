"""Magnitude pruning while training: what it costs a step, and what it does to accuracy."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

from bench.harness.helpers import plain
from bench.harness.plan import Prepared, Price, Technique, Variant, Work, Workload, other_math
from bench.harness.sizes import model_size
from bench.harness.stages import train_on

UNSUPPORTED = {
    "pt": {"apply_latency_pruning": "PyTorch's pruning does not target a runtime's sparse kernels"}
}
# Beyond the recipe's, as many as it takes digits-cnn to its plateau: 560 steps. Masks are made 42
# times in the first three quarters of them, the rest is recovery.
MORE_EPOCHS = 4
SCHEDULE = {"begin_step": 0, "end_step": 420, "frequency": 10}
# Layers of fewer weights stay dense: of digits-cnn the first, which costs most accuracy, and the
# last. The others make up for them.
MIN_WEIGHTS = 1_000
# TensorFlow Model Optimization's own route, which knows no other Keras.
LEGACY = {"frameworks": ("tf",), "flavours": ("tf_keras",), "effort": "full"}


def _sparsity(percent: int, title: str, name: str = "", **settings) -> Variant:
    """A row that ends with so many percent of zeros in all kernels together."""
    chosen = {"final_sparsity": percent / 100} | SCHEDULE
    chosen |= {} if name else {"min_weights": MIN_WEIGHTS}
    name = name or f"sparsity_{percent}"
    changes = "math" if percent > 0 else None
    return Variant(name, chosen, changes=changes, title=title, **settings)


TECHNIQUE = Technique(
    family="compression",
    name="pruning",
    title="Magnitude pruning while training",
    price=Price(epochs=MORE_EPOCHS),
    user_model="zeros make nothing faster: structured_pruning removes channels",
    variants=(
        Variant("dense", role="baseline", title="dense", program="plain"),
        _sparsity(80, "80% zeros"),
        _sparsity(80, "80% zeros, largest over all layers", "global_80", effort="ordinary"),
        _sparsity(95, "95% zeros", effort="ordinary"),
        _sparsity(80, "80% zeros in every layer", "uniform_80", effort="full"),
        _sparsity(50, "50% zeros", effort="full"),
        _sparsity(90, "90% zeros", effort="full"),
        other_math(
            "every_step_80",
            "80% zeros, masks in every step",
            "full",
            final_sparsity=0.8,
            **SCHEDULE | {"frequency": 1},
        ),
        _sparsity(0, "masks of ones", "neutral", effort="full"),
        Variant("dense", role="baseline", title="dense", program="plain", **LEGACY),
        _sparsity(80, "80% zeros", **LEGACY),
    ),
    workloads=(
        Workload("digits-cnn", "compute", accuracy=True, training=2.0),
        Workload("digits-resnet20", "compute", effort="full", accuracy=True, training=2.0),
    ),
    differs_by_design=(
        "PyTorch (torch.nn.utils.prune) and Keras 3 mask weights and their gradients: a pruned "
        "weight stays pruned. In the tf_keras row TensorFlow Model Optimization masks the "
        "variables in the forward pass: a pruned weight returns where one step takes it beyond "
        "the threshold.",
    ),
    notes=(
        f"Accuracy: every row, dense too, trains for the recipe's epochs and then {MORE_EPOCHS} "
        "more at the same learning rate, with a new optimizer. Pruned rows are pruned in these.",
        f"sparsity rows leave layers of fewer than {MIN_WEIGHTS:,} weights dense. These have 2% "
        "of the weights of digits-cnn and 0.5% of those of digits-resnet20. The other layers are "
        "pruned until the share holds for all layers together. uniform_80 prunes all layers "
        "equally.",
        f"The share of zeros rises from step 0 to {SCHEDULE['end_step']} (cubic schedule, Zhu and "
        f"Gupta, 2017). Masks are made at every {SCHEDULE['frequency']}th step. Ratios are "
        "medians over steps, so they are of a step without that. In every_step_80 each step "
        "makes masks; a tenth of its extra time is their average cost.",
        "Zeros in dense tensors make neither steps nor predictions faster: see sparse inference "
        "and structured pruning.",
    ),
    counts=True,
)


def _prune(impl, work: Work, model, **schedule):
    """The pruned copy of `model` and its `update`, by layer or over all layers."""
    together = work.variant.startswith("global")
    apply = (
        impl.compression.pruning.apply_global_pruning
        if together
        else impl.compression.pruning.apply_pruning
    )
    return apply(model, **work.settings | schedule | {"final_sparsity": share_of_pruned(work)})


def share_of_pruned(work: Work) -> float:
    """The share of zeros in the layers that are pruned, so that all layers have what was asked."""
    least = work.settings.get("min_weights", 0)
    sizes = [value.size for name, value in work.weights.items() if _is_kernel(name)]
    wanted = work.settings["final_sparsity"] * sum(sizes)
    return wanted / sum(size for size in sizes if size >= least)


def prepare(impl, work: Work) -> Prepared:
    """A step of the row, timed from its first one on; training starts with a trained model."""
    timed = work
    if work.settings.get("frequency") == 1:  # masks in every step, however many a match takes
        timed = replace(work, settings=work.settings | {"end_step": 100 * SCHEDULE["end_step"]})
    return replace(_row(impl, timed), train=train_on(impl, work, _row, epochs=MORE_EPOCHS))


def _row(impl, work: Work) -> Prepared:
    """The baseline's step and prediction, over a masked model whose masks are updated first."""
    model = impl.kit.models.build(work.task.model, work.weights)
    if not work.settings:
        return plain(impl, work, model)
    pruned, update = _prune(impl, work, model)
    named = pruned
    if type(model).__module__.startswith("tf_keras"):
        # The same layers and variables under their canonical names; there is no mask yet.
        named = impl.compression.pruning.finalize_pruning(pruned)
    row, numbers = plain(impl, work, pruned), count(1)
    step = row.step

    def pruning_step(x, y):
        update(next(numbers))
        return step(x, y)

    return replace(row, step=pruning_step, model=named)


def took_effect(impl, work: Work, prepared: Prepared, batch) -> tuple[dict, str | None]:
    """Kernels have as many zeros as asked for at the end of a schedule, and some by now.

    The end is that of a fresh model whose schedule has one step.
    """
    prepared.predict(batch[0])  # tfmot masks what a step has moved when it is next used
    if work.settings and type(prepared.model).__module__.startswith("keras."):
        # Its masks are beside the variables, until they are multiplied with them.
        impl.compression.pruning.finalize_pruning(prepared.model)
    now = _zeros(impl.kit.models.export_weights(prepared.model))
    if not work.settings:
        return {"zeros": now}, "the baseline has zeros" if any(now.values()) else None
    model, update = _prune(
        impl,
        work,
        impl.kit.models.build(work.task.model, work.weights),
        **{"begin_step": 0, "end_step": 1, "frequency": 1},
    )
    fresh = plain(impl, work, model)
    update(1)
    fresh.step(*batch)
    weights = impl.kit.models.export_weights(impl.compression.pruning.finalize_pruning(model))
    end = _zeros(weights)
    size = model_size(work.task.model, weights)
    evidence = {"zeros_so_far": now, "zeros_at_the_end": end, "measured": size}
    wanted, least = share_of_pruned(work), work.settings.get("min_weights", 0)
    sizes = {name: weights[name].size for name in end}
    total = sum(sizes.values())
    if work.variant.startswith("global"):
        end, sizes = {"all kernels": sum(end[n] * sizes[n] for n in end) / total}, {}
    wrong = [
        f"{name} has {share:.2%}"
        for name, share in end.items()
        if abs(share - wanted * (sizes.get(name, total) >= least)) > 1 / sizes.get(name, total)
    ]
    if wrong:
        return evidence, f"not {wanted:.0%} of zeros where they should be: {', '.join(wrong)}"
    if wanted and not any(now.values()):
        return evidence, "nothing was pruned in the steps that were timed"
    return evidence, None


def _zeros(weights: dict) -> dict[str, float]:
    """Kernel -> its share of zeros."""
    return {name: float((value == 0).mean()) for name, value in weights.items() if _is_kernel(name)}


def _is_kernel(name: str) -> bool:
    return name.endswith(".kernel")
