"""Stacking: the ladder of optimizations that users build, each rung on top of those before."""

from __future__ import annotations

from bench.harness.plan import Prepared, Technique, Variant, Work, Workload

# bfloat16 keeps 8 significant bits: each operand is rounded by up to 2^-9 = 0.2%, and a loss is
# several layers of that. 5% over ten steps is far above rounding and far below another batch.
BF16_LOSSES = 0.05

CHANNELS_LAST = {"channels_last": True}
COMPILED = CHANNELS_LAST | {"compiled": True}
BF16 = COMPILED | {"dtype": "bfloat16"}
FUSED = BF16 | {"fused": True}

TECHNIQUE = Technique(
    family="train_step",
    name="stacking",
    title="Stacking: rung upon rung",
    variants=(
        Variant("baseline", role="baseline", effort="quick"),
        Variant("1_channels_last", CHANNELS_LAST, effort="quick"),
        # Only PyTorch's compiler needs a C++ compiler: XLA brings its own.
        Variant(
            "2_compiled",
            COMPILED,
            frameworks=("pt",),
            requires="compiler",
        ),
        Variant("2_compiled", COMPILED, frameworks=("tf",)),
        Variant(
            "3_bf16",
            BF16,
            frameworks=("pt",),
            requires="compiler",
            loss_tolerance=BF16_LOSSES,
        ),
        Variant("3_bf16", BF16, frameworks=("tf",), loss_tolerance=BF16_LOSSES),
        Variant(
            "4_fused",
            FUSED,
            effort="full",
            frameworks=("pt",),
            requires="compiler",
            loss_tolerance=BF16_LOSSES,
        ),
        Variant("4_fused", FUSED, effort="full", frameworks=("tf",), loss_tolerance=BF16_LOSSES),
        Variant(
            "5_micro_batches",
            FUSED | {"micro_batches": 2},
            effort="full",
            frameworks=("pt",),
            requires="compiler",
            loss_tolerance=BF16_LOSSES,
            changes="math",
        ),
        # TensorFlow climbs from 3_bf16: it has no rung 4.
        Variant(
            "5_micro_batches",
            BF16 | {"micro_batches": 2},
            effort="full",
            frameworks=("tf",),
            loss_tolerance=BF16_LOSSES,
            changes="math",
        ),
        Variant("neutral", {"channels_last": False}, effort="full"),
    ),
    workloads=(
        Workload("digits-cnn", "compute"),
        Workload("digits-cnn", "small", effort="full", accuracy=True),
        Workload("digits-resnet20", "compute", effort="full"),
    ),
    differs_by_design=(
        "1_channels_last is TensorFlow's default: its row is the baseline again. PyTorch converts "
        "the model, and each batch within the step.",
        "compiled: PyTorch compiles forward and backward as one region and the update as another; "
        "XLA compiles the whole step to one program.",
        "Keras has no fused optimizer, XLA fuses the update: 4_fused is UNSUPPORTED there, and "
        "5_micro_batches stands on 3_bf16.",
    ),
    notes=(
        "Each rung holds all rungs before it. Evaluation runs in float32, not compiled.",
        "5_micro_batches cuts a batch in two. BatchNorm then normalises half a batch, which is "
        "another function of it: its losses are held against its twin's alone.",
        "PyTorch compiles the update of 2_compiled again at the second step, since SGD has no "
        "momentum before the first: its first call does not hold that.",
        "XLA's CPU backend computes bfloat16 in float32 where it has no kernel for it: there "
        "TensorFlow's rows from 3_bf16 on are UNSUPPORTED.",
    ),
    # Eight contenders are one match; other techniques play controls of the same workload.
)


def prepare(impl, work: Work) -> Prepared:
    """The baseline's step, or the technique's with the settings of its rung."""
    recipe = work.task.recipe
    model = impl.kit.models.build(work.task.model, work.weights)
    loss, predict = impl.kit.training.cross_entropy, impl.kit.training.make_predict(model)
    if not work.settings:
        optimizer = impl.kit.training.make_optimizer(model, recipe)
        step = impl.kit.training.make_train_step(model, optimizer, loss)
        return Prepared(step, predict, model, optimizer)
    settings = dict(work.settings)
    optimizer = impl.train_step.stacking.make_optimizer(
        model,
        learning_rate=recipe.learning_rate,
        momentum=recipe.momentum,
        fused=settings.pop("fused", False),
    )
    step = impl.train_step.stacking.make_train_step(model, optimizer, loss, **settings)
    return Prepared(step, predict, model, optimizer)


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
        "fused": pytorch and bool(prepared.optimizer.defaults["fused"]),
    }
    wanted = {
        "dtype": settings.get("dtype", "float32"),
        "compiled": settings.get("compiled", False),
        "channels_last": not pytorch or settings.get("channels_last", False),
        "fused": settings.get("fused", False),
    }
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
    return all(kernel.stride()[1] == 1 for kernel in kernels)


def bench_stacking(case, replay):
    """Replay one measured case."""
    replay(case)
