"""Compilation: eager, captured graphs, torch.compile and XLA, of train steps and of predictions."""

from __future__ import annotations

from functools import partial

from bench.harness.examples import zeros
from bench.harness.helpers import kit_module, not_timed
from bench.harness.plan import (
    PREDICTIONS,
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

STEPS_PER_EXECUTION = 10

# The function of the technique that makes a variant's step (`_train_step`) or prediction
# (`_predict`), and what one call must run.
EAGER, CAPTURED, COMPILED, MODEL = "eager", "captured", "compiled", "model"
MADE_BY = {
    "eager": ("eager", EAGER),
    "graph_only": ("graph", CAPTURED),
    "compiled": ("compiled", COMPILED),
    "reduce_overhead": ("compiled", COMPILED),
    "max_autotune": ("compiled", COMPILED),
    "fullgraph": ("fullgraph", COMPILED),
    "model_alone": ("compiled_model", MODEL),
    "torchscript_trace": ("eager", EAGER),  # of a model that TorchScript made
    "torchscript_script": ("eager", EAGER),
}
BASELINE = {"pt_impl": EAGER, "tf_impl": CAPTURED}
# What autograd does between compiled graphs: the loss's own gradient, and putting gradients away.
BOOKKEEPING = {"clone", "copy_", "detach", "new_empty_strided", "ones_like"}

UNSUPPORTED = {
    "tf": {
        "compile_function(mode)": "XLA has no modes: these are torch.compile's",
        "apply_compile(mode)": "XLA has no modes: these are torch.compile's",
        "compiled_train_step(mode)": "XLA has no modes: these are torch.compile's",
        "compiled_model_train_step(mode)": "XLA has no modes: these are torch.compile's",
        "compiled_predict(mode)": "XLA has no modes: these are torch.compile's",
        "compile_optimizer": "XLA compiles the update with the step",
        "fullgraph_train_step": "XLA compiles everything or raises: see compiled",
    },
}

# Only PyTorch's compiler needs a C++ compiler.
_torch_compile = partial(row, frameworks=("pt",), requires="compiler")
_xla = partial(row, frameworks=("tf",), price=Price(compiled=True))

TECHNIQUE = Technique(
    family="train_step",
    name="compilation",
    title="Compilation",
    remedies=("overhead", "arithmetic", "memory bandwidth"),
    user_model=UserModel(TRAIN_STEP + PREDICTIONS, ("baseline", "compiled")),
    variants=(
        Variant("baseline", role="baseline", title="default: eager, or one graph", program="plain"),
        _torch_compile("compiled", "torch.compile", stacking={"compiled": True}),
        _xla("compiled", "XLA", stacking={"compiled": True}),
        Variant("eager", frameworks=("tf",), effort="ordinary", title="eager, no tf.function"),
        _torch_compile("model_alone", "torch.compile of the model alone", "ordinary"),
        _xla("model_alone", "XLA for the model alone", "ordinary"),
        _torch_compile("fullgraph", "torch.compile, one graph or none", "full"),
        _torch_compile(
            "reduce_overhead", "torch.compile, reduce-overhead", "full", mode="reduce-overhead"
        ),
        _torch_compile("max_autotune", "torch.compile, max-autotune", "full", mode="max-autotune"),
        row(
            "graph_only",
            "graph, eager's kernels",
            "full",
            frameworks=("pt",),
            price=Price(compiled=True),
        ),
        row("torchscript_trace", "TorchScript, traced", "full", frameworks=("pt",)),
        row("torchscript_script", "TorchScript, scripted", "full", frameworks=("pt",)),
        Variant("fit", frameworks=("tf",), effort="ordinary", title="Keras's fit"),
        Variant(
            "fit_steps_per_execution",
            {"steps_per_execution": STEPS_PER_EXECUTION},
            frameworks=("tf",),
            effort="ordinary",
            title=f"Keras's fit, {STEPS_PER_EXECUTION} batches a call",
        ),
    ),
    workloads=(
        # First, as its first call is measured most often: so few steps repay a compiler latest.
        Workload("digits-cnn", "compute"),
        Workload("photos-resnet18", "compute"),
        Workload("text-gpt-10m", "compute"),
        Workload("text-bert-10m", "compute", effort="ordinary"),
        Workload("digits-cnn", "compute", effort="ordinary", mode="predict"),
        Workload("digits-cnn", "small", effort="ordinary"),
        Workload("text-gpt", "compute", effort="full"),
        Workload("digits-resnet20", "compute", effort="full"),
    ),
    differs_by_design=(
        "baseline is eager in PyTorch and one tf.function without XLA in TensorFlow, as each is "
        "used by default. eager is TensorFlow without tf.function; graph_only is PyTorch's "
        "graphs with eager's kernels (the backend aot_eager).",
        "compiled is the whole step in both. XLA makes one program of it; torch.compile makes "
        "one graph for forward and loss, one for backward and one for the update.",
        "fullgraph is only in PyTorch, because XLA always compiles everything or raises.",
        "PyTorch has no fit. Keras 3's fit with its defaults uses XLA on machines with a GPU and "
        f"not on those without; fit_steps_per_execution trains on {STEPS_PER_EXECUTION} batches "
        "per call.",
    ),
    notes=(
        "First calls compile a program that is in no cache. SGD compiles its update again in the "
        "second step, which the first call does not show.",
        "reduce_overhead turns on only CUDA graphs: on a CPU it is the same as compiled, and its "
        "ratio to compiled should be 1.",
        "torchscript_trace and torchscript_script are legacy: deprecated in PyTorch.",
        "Every row computes the same mathematics, so all losses must agree within the task's "
        "bar. Compiled, PyTorch's Adam corrects its bias in float32 instead of Python's float64.",
    ),
    cold_starts=2,
)


def prepare(impl, work: Work) -> Prepared:
    """The baseline, Keras's own loop, or what the technique makes of the model."""
    model = impl.kit.models.build(work.task.model, work.weights)
    optimizer = impl.kit.training.make_optimizer(model, work.task.recipe)
    if work.mode == "predict":
        impl.kit.runtime.to_evaluation(model)
        return Prepared(not_timed, _prediction(impl, work, model), model, optimizer)
    predict, loss = impl.kit.training.make_predict(model), impl.kit.training.cross_entropy
    loop = None
    if work.variant == "baseline":
        step = impl.kit.training.make_train_step(model, optimizer, loss)
    elif work.variant in MADE_BY:
        make = getattr(impl.train_step.compilation, f"{MADE_BY[work.variant][0]}_train_step")
        trained = _torchscript(impl, work, model)
        step = make(trained, optimizer, loss, **work.settings)
        _mark(step, trained, model)
    else:
        fitting = kit_module(impl, "fitting")
        loop = fitting.fit_loop(model, optimizer, loss, **work.settings)

        def step(x, y):
            return loop([(x, y)])[1]

    return Prepared(step, predict, model, optimizer, loop)


def _prediction(impl, work: Work, model):
    """What the variant predicts with; a variant that is about steps alone has nothing."""
    if work.variant == "baseline":
        return impl.kit.training.make_predict(model)
    name = MADE_BY.get(work.variant, ("fit",))[0]
    make = getattr(impl.train_step.compilation, f"{name}_predict", None)
    if make is None:
        raise NotImplementedError(f"{work.variant} changes train steps only: see compiled")
    used = _torchscript(impl, work, model)
    predict = make(used, **work.settings)
    _mark(predict, used, model)
    return predict


def _torchscript(impl, work: Work, model):
    """What TorchScript makes of the model, in its rows; else the model."""
    if not work.variant.startswith("torchscript"):
        return model
    torchscript = kit_module(impl, "torchscript")
    if work.variant == "torchscript_script":
        return torchscript.scripted_model(model)
    x, _ = impl.kit.data.to_device(*zeros(work, work.batch_size))
    return torchscript.traced_model(model, x)


def _mark(function, used, model) -> None:
    """Remember, for the evidence, what `function` runs in the model's place."""
    if used is not model:
        function.torchscript = type(used).__name__


def took_effect(impl, work: Work, prepared: Prepared, batch) -> tuple[dict, str | None]:
    """One call ran compiled graphs, captured ones or none, as its variant says.

    torch.compile leaves to eager what it can't compile, such as an LSTM: the evidence names that.
    """
    if prepared.loop:
        return _fit_took_effect(work, prepared, batch)
    predicts = work.mode == "predict"
    function, inputs = (prepared.predict, batch[:1]) if predicts else (prepared.step, batch)
    operators = kit_module(impl, "operators")
    evidence = operators.executed_graphs(function, *inputs)
    if work.variant in ("reduce_overhead", "max_autotune"):
        evidence["cuda_graphs"] = "cuda" in impl.kit.runtime.device()  # nobody else has them
    if hasattr(function, "torchscript"):
        evidence["torchscript"] = function.torchscript
    graphs, compiled = evidence["graphs"], evidence["compiled"]
    evidence["not_compiled"] = sorted(evidence["outside"].keys() - BOOKKEEPING) if compiled else []
    expected = BASELINE[impl.__name__]
    if work.variant != "baseline":
        expected = MADE_BY[work.variant][1]
    applied = {
        EAGER: graphs == 0,
        CAPTURED: graphs > 0 and compiled == 0,
        COMPILED: compiled > 0,
        MODEL: compiled == 2,  # forward and backward
    }[expected]
    ran = f"{graphs} graphs, {compiled} compiled"
    return evidence, None if applied else f"{expected} was asked for, but a call ran {ran}"


def _fit_took_effect(work: Work, prepared: Prepared, batch) -> tuple[dict, str | None]:
    """Each call of Keras's graph trained on as many batches as were asked for."""
    wanted = work.settings.get("steps_per_execution", 1)
    before = int(prepared.optimizer.iterations)
    prepared.loop([batch] * (wanted + 1))
    evidence = {
        "steps": int(prepared.optimizer.iterations) - before,
        "calls": prepared.loop.calls(),
        "jit_compile": bool(prepared.model.jit_compile),
    }
    if evidence["steps"] == wanted * evidence["calls"]:
        return evidence, None
    return evidence, f"ran {evidence['steps']} steps in {evidence['calls']} calls"
