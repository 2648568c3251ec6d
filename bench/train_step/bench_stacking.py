"""Stacking: the ladder of optimizations that users build, each rung on top of those before."""

from __future__ import annotations

import importlib
from functools import partial

from bench.harness.helpers import plain
from bench.harness.plan import (
    TRAIN_STEP,
    Prepared,
    Price,
    Technique,
    UserModel,
    Variant,
    Work,
    Workload,
    row,
)
from bench.train_step.bench_mixed_precision import BF16_LOSSES

CHANNELS_LAST = {"memory_format": "channels_last"}
COMPILED = CHANNELS_LAST | {"compiled": True}
BF16 = COMPILED | {"dtype": "bfloat16"}
FUSED = BF16 | {"fused": True}

ALL_FUSED = "channels_last + compile + bf16 + fused optimizer"
# Only PyTorch's compiler needs a C++ compiler: XLA brings its own.
_pt = partial(row, frameworks=("pt",), requires="compiler")
_tf = partial(row, frameworks=("tf",), price=Price(compiled=True))


def _winners(framework: str, changes: str | None) -> Variant:
    """The row of all that was faster in a framework: with what rounds otherwise, or without."""
    rounds = changes is not None
    return Variant(
        "winners_rounded" if rounds else "winners",
        frameworks=(framework,),
        changes=changes,
        later=True,
        title="all that was faster, stacked" + ", bfloat16 too" * rounds,
    )


# Of a user's own model alone: what is stacked is what was shown to be faster.
OF_A_USER = (
    row("fused", "fused optimizer", frameworks=("pt",), fused=True, stacking={"fused": True}),
    *(_winners(framework, changes) for framework in ("pt", "tf") for changes in (None, "math")),
)

TECHNIQUE = Technique(
    family="train_step",
    name="stacking",
    effort="ordinary",
    title="Stacking: rung upon rung",
    remedies=("overhead", "arithmetic", "memory size"),
    user_model=UserModel(TRAIN_STEP, ("baseline", *OF_A_USER), learns=True),
    variants=(
        Variant("baseline", role="baseline", title="plain step, float32", program="plain"),
        Variant("1_channels_last", CHANNELS_LAST, effort="ordinary", title="channels_last"),
        _pt("2_compiled", "channels_last + compile", **COMPILED),
        _tf("2_compiled", "channels_last + compile", **COMPILED),
        _pt("3_bf16", "channels_last + compile + bf16", loss_tolerance=BF16_LOSSES, **BF16),
        _tf("3_bf16", "channels_last + compile + bf16", loss_tolerance=BF16_LOSSES, **BF16),
        _pt("4_fused", ALL_FUSED, "ordinary", loss_tolerance=BF16_LOSSES, **FUSED),
        _tf("4_fused", ALL_FUSED, "ordinary", loss_tolerance=BF16_LOSSES, **FUSED),
        _pt(
            "5_micro_batches",
            "all of these, 2 micro-batches",
            "full",
            loss_tolerance=BF16_LOSSES,
            changes="math",
            **FUSED,
            micro_batches=2,
        ),
        # TensorFlow climbs from 3_bf16: it has no rung 4.
        _tf(
            "5_micro_batches",
            "channels_last + compile + bf16, 2 micro-batches",
            "full",
            loss_tolerance=BF16_LOSSES,
            changes="math",
            **BF16,
            micro_batches=2,
        ),
        Variant("neutral", {"compiled": False}, effort="full", title="stacking with nothing on it"),
    ),
    workloads=(
        Workload("digits-cnn", "compute"),
        Workload("photos-resnet18", "compute", effort="ordinary"),
        Workload("digits-cnn", "small", effort="full", accuracy=True),
    ),
    differs_by_design=(
        "1_channels_last is TensorFlow's default: its row is the baseline again. PyTorch "
        "converts the model, and each batch within the step.",
        "compiled: PyTorch compiles forward and backward as one region and the update as "
        "another; XLA compiles the whole step to one program.",
        "Keras has no fused optimizer, XLA fuses the update: 4_fused is UNSUPPORTED there, and "
        "5_micro_batches builds on 3_bf16.",
    ),
    notes=(
        "Each rung includes all rungs before it. Evaluation runs in float32, not compiled.",
        "neutral is the cost if there is nothing to do: it runs the plain step's operators.",
        "5_micro_batches cuts a batch in two. BatchNorm then normalises half a batch, which "
        "changes the losses: they are compared only between the frameworks.",
        "PyTorch compiles the update of 2_compiled again at the second step, because SGD has no "
        "momentum before the first. The first call does not include that.",
        "XLA's CPU backend computes bfloat16 in float32 if it has no kernel for it. Then "
        "TensorFlow's rows from 3_bf16 on are UNSUPPORTED.",
    ),
)


def prepare(impl, work: Work) -> Prepared:
    """The baseline's step, or the technique's with the settings of its rung."""
    if not work.settings:
        return plain(impl, work)
    recipe = work.task.recipe
    model = impl.kit.models.build(work.task.model, work.weights)
    loss, predict = impl.kit.training.cross_entropy, impl.kit.training.make_predict(model)
    settings = dict(work.settings)
    fused = settings.pop("fused", False)
    technique = impl.train_step.stacking
    model = technique.prepare_model(
        model,
        memory_format=settings.get("memory_format", ""),
        recomputed=settings.pop("recomputed", ""),
    )
    if fused:
        optimizer = _fused(impl, model, recipe)
    else:
        optimizer = impl.kit.training.make_optimizer(model, recipe)
    step = technique.make_train_step(model, optimizer, loss, **settings)
    return Prepared(step, predict, model, optimizer)


def _fused(impl, model, recipe):
    """The recipe's SGD as one kernel, which only PyTorch has; of a user's file its optimizer."""
    if hasattr(impl, "fused_optimizer"):
        return impl.fused_optimizer(model, recipe)
    implementations = f"{impl.__name__}.train_step.optimizer_implementations"
    make = getattr(importlib.import_module(implementations), "fused_sgd", None)
    if make is None:
        raise NotImplementedError("Keras has no fused SGD: in a compiled step XLA fuses the update")
    return make(model, learning_rate=recipe.learning_rate, momentum=recipe.momentum)


def took_effect(impl, work: Work, prepared: Prepared, batch) -> tuple[dict, str | None]:
    """Dtypes that ran, and what of the rung can be seen in step, parameters and optimizer.

    Raises NotImplementedError where XLA computes bfloat16 layers in float32.
    """
    dtypes = impl.kit.runtime.operator_dtypes(prepared.step, *batch)
    ran = {dtype for operators in dtypes.values() for dtype in operators}
    settings, pytorch = work.settings, impl.__name__ == "pt_impl"
    seen = {
        "dtype": "+".join(sorted(ran)),
        "compiled": _is_compiled(impl, prepared.step, batch),
        "channels_last": not pytorch or _is_channels_last(prepared.model),
        "fused": pytorch and bool(prepared.optimizer.defaults.get("fused")),
    }
    wanted = {
        "dtype": settings.get("dtype", "float32"),
        "compiled": settings.get("compiled", False),
        "channels_last": not pytorch or settings.get("memory_format") == "channels_last",
        "fused": settings.get("fused", False),
    }
    if work.task.model.from_file:
        if settings.get("dtype") in ran:
            wanted["dtype"] = seen["dtype"]  # not every product of any model has a kernel for it
        # What it brings itself, such as a fused optimizer, stays.
        asked = {name.replace("memory_format", "channels_last") for name in settings}
        wanted |= {name: seen[name] for name in seen.keys() - asked}
    wrong = [f"{name} is {seen[name]}" for name in wanted if seen[name] != wanted[name]]
    if wrong == ["dtype is float32"] and not pytorch and seen["compiled"]:
        raise NotImplementedError("XLA runs bfloat16 layers in float32 on this device")
    return {"operator_dtypes": dtypes} | seen, ", ".join(wrong) or None


def _is_compiled(impl, step, batch) -> bool:
    if impl.__name__ == "pt_impl":
        return impl.kit.runtime.trace_count(step) is not None
    return step.get_concrete_function(*batch).function_def.attr["_XlaMustCompile"].b


def _is_channels_last(model) -> bool:
    """Whether channels are next to each other in every kernel of more than one pixel."""
    kernels = [p for p in model.parameters() if p.ndim == 4 and p.shape[2] * p.shape[3] > 1]
    return bool(kernels) and all(kernel.stride()[1] == 1 for kernel in kernels)
