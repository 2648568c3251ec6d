"""Native export: predictions of AOTInductor, TorchScript, SavedModel, and compiled in place."""

from __future__ import annotations

from bench.harness.plan import PREDICTIONS, Prepared, Price, Technique, UserModel, Work, Workload
from bench.probes import serving
from bench.probes.serving import HALF_LOSSES, IN_PLACE, Route, row

ROUTES = {
    "in place": Route(make="{impl}.kit.training:make_predict"),
    "compiled": Route(make="{impl}.deployment.native_export:compiled_predict"),
    "tensorrt": Route(make="{impl}.deployment.native_export:tensorrt_predict"),
    "aotinductor": Route(
        export="{impl}.deployment.native_export:export_package",
        load="{impl}.deployment.native_export:load_package",
        file="model.pt2",
    ),
    "saved_model": Route(
        export="{impl}.deployment.native_export:export_package",
        load="{impl}.deployment.native_export:load_package",
        file="model",
    ),
    "torchscript": Route(
        export="{impl}.deployment.native_export:export_torchscript",
        load="{impl}.deployment.native_export:load_torchscript",
        file="model.pt",
    ),
}
UNSUPPORTED = {
    "tf": {
        "export_torchscript": "TorchScript is only in PyTorch: TensorFlow writes SavedModels",
        "load_torchscript": "TorchScript is only in PyTorch: TensorFlow loads SavedModels",
        "tensorrt_predict": "TensorFlow is built without TensorRT since 2.18: use an ONNX file and"
        " load_tensorrt of shared/runtimes.py",
    }
}
LACKING = {"torchscript": "export_torchscript", "tensorrt": "tensorrt_predict"}  # by route

TECHNIQUE = Technique(
    family="deployment",
    name="native_export",
    effort="ordinary",
    title="Export to the frameworks' own runtimes",
    user_model=UserModel(PREDICTIONS, ("baseline", "aotinductor", "saved_model")),
    variants=(
        IN_PLACE,
        row(
            "aotinductor",
            "AOTInductor package",
            "aotinductor",
            "default",
            frameworks=("pt",),
            requires="compiler",
        ),
        row("saved_model", "SavedModel", "saved_model", "default", frameworks=("tf",)),
        row(
            "compiled",
            "torch.compile in place",
            "compiled",
            "ordinary",
            frameworks=("pt",),
            requires="compiler",
        ),
        row(
            "compiled",
            "XLA in place",
            "compiled",
            "ordinary",
            frameworks=("tf",),
            price=Price(compiled=True),
        ),
        row("torchscript", "TorchScript file", "torchscript", "ordinary"),
        row(
            "saved_model_bf16",
            "SavedModel, bfloat16",
            "saved_model",
            settings={"export": {"precision": "bfloat16"}},
            frameworks=("tf",),
        ),
        row(
            "aotinductor_bf16",
            "AOTInductor package, bfloat16",
            "aotinductor",
            settings={"export": {"precision": "bfloat16"}},
            frameworks=("pt",),
            requires="compiler",
            loss_tolerance=HALF_LOSSES,
            changes="math",
        ),
        row("tensorrt", "TensorRT", "tensorrt"),
    ),
    workloads=(
        Workload("digits-cnn", "single", mode="predict"),
        Workload("photos-resnet18", "single", effort="ordinary", mode="predict"),
        Workload("digits-cnn", "compute", effort="ordinary", mode="predict"),
        Workload("digits-resnet20", "single", effort="full", mode="predict"),
        Workload("digits-resnet20", "compute", effort="full", mode="predict"),
        Workload("text-gpt", "single", effort="full", mode="predict"),
        Workload("text-gpt", "compute", effort="full", mode="predict"),
        Workload("photos-resnet50", "single", effort="full", mode="predict"),
        Workload("photos-resnet50", "compute", effort="full", mode="predict"),
    ),
    differs_by_design=(
        "compiled is torch.compile with frozen weights in PyTorch and XLA in TensorFlow.",
        "aotinductor is machine code for this CPU in a package, saved_model a graph in a folder.",
        "torchscript is only in PyTorch, and deprecated. tensorrt is Torch-TensorRT in PyTorch; "
        "TensorFlow has none any more.",
    ),
    notes=(
        "Measured as in export, whose rows are the runtimes without a framework. Here a new "
        "process imports the framework, and in place it also builds the model.",
        "compiled compiles when it starts: its first start fills torch.compile's cache, later "
        "ones use it.",
    ),
    probes=True,
)


def prepare(impl, work: Work) -> Prepared:
    """The framework's predictions, in place or of a file."""
    route = work.settings["route"]
    if impl.__name__ == "tf_impl" and route in LACKING:
        raise NotImplementedError(UNSUPPORTED["tf"][LACKING[route]])
    return serving.prepare(impl, work, ROUTES[work.settings["route"]])


def took_effect(impl, work: Work, prepared: Prepared, batch) -> tuple[dict, str | None]:
    """Predictions are the model's, and what is compiled was traced."""
    evidence, reason = serving.took_effect(impl, work, prepared, batch)
    if work.settings["route"] == "compiled":
        evidence["graphs"] = impl.kit.runtime.trace_count(prepared.predict)
        reason = reason or (None if evidence["graphs"] else "nothing was compiled")
    return evidence, reason


def probe(impl, work: Work, batches) -> dict[str, dict]:
    """Start, load, memory, latency, and samples/s by batch size."""
    return serving.probe(impl, work, ROUTES[work.settings["route"]])
