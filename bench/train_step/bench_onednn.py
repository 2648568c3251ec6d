"""oneDNN on a CPU: what it gains over what the framework computes with otherwise."""

from __future__ import annotations

from dataclasses import replace

from bench.harness.helpers import kit_module, need_cpu, plain
from bench.harness.plan import (
    FRAMEWORKS,
    TRAIN_STEP,
    Prepared,
    Technique,
    UserModel,
    Variant,
    Work,
    Workload,
    row,
)
from shared import onednn

ON, OFF = {onednn.VARIABLE: "1"}, {onednn.VARIABLE: "0"}
SWITCHED_ON = row("with_onednn", "with oneDNN", environment=ON, enabled=True)

TECHNIQUE = Technique(
    family="train_step",
    name="onednn",
    title="oneDNN: the library that computes on a CPU",
    remedies=("arithmetic",),
    # PyTorch has it on wherever it has it.
    user_model=UserModel(TRAIN_STEP, ("default", replace(SWITCHED_ON, frameworks=("tf",)))),
    variants=(
        Variant("default", role="baseline", title="the framework's own choice", program="plain"),
        SWITCHED_ON,
        row("without_onednn", "without oneDNN", "ordinary", environment=OFF, enabled=False),
    ),
    workloads=(
        Workload("photos-resnet18", "compute"),
        Workload("photos-resnet18", "compute", effort="ordinary", mode="predict"),
        Workload("text-gpt-10m", "compute", effort="ordinary"),
        Workload("digits-cnn", "compute", effort="ordinary"),
    ),
    differs_by_design=(
        "PyTorch switches within a process. TensorFlow reads a variable when it is imported, so "
        "its rows run in processes with that variable.",
    ),
    notes=(
        "PyTorch has oneDNN on by default, TensorFlow only on some processors, by their "
        "instructions. A row that is the default equals the baseline, and is UNSUPPORTED.",
    ),
)


def prepare(impl, work: Work) -> Prepared:
    """The plain step and prediction, with oneDNN or without."""
    prepared = plain(impl, work)
    if not work.settings:
        return prepared
    need_cpu(impl)
    enabled, side = work.settings["enabled"], impl.__name__.removesuffix("_impl")
    if enabled == (side == "pt" or onednn.is_default()):
        framework, state = FRAMEWORKS[side].title, "on" if enabled else "off"
        raise NotImplementedError(f"{framework} has oneDNN {state} by default: see the baseline")
    switched = impl.train_step.onednn.with_onednn
    step, predict = (switched(one, enabled=enabled) for one in (prepared.step, prepared.predict))
    return replace(prepared, step=step, predict=predict)


def took_effect(impl, work: Work, prepared: Prepared, batch) -> tuple[dict, str | None]:
    """Operators of oneDNN ran, or none did."""

    def call():
        return prepared.predict(batch[0]) if work.mode == "predict" else prepared.step(*batch)

    operators = kit_module(impl, "operators")
    calls = operators.onednn_operators(call)
    enabled = work.settings.get("enabled")
    reason = None
    if enabled is not None and bool(calls) != enabled:
        reason = f"{calls} operators of oneDNN ran"
    return {"onednn_operators": calls}, reason
