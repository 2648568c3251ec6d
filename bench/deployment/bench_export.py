"""Export: predictions in ONNX Runtime, OpenVINO, LiteRT and ExecuTorch, and in the framework."""

from __future__ import annotations

from bench.harness.helpers import need_cpu
from bench.harness.plan import (
    PREDICTIONS,
    Prepared,
    Price,
    Technique,
    UserModel,
    Variant,
    Work,
    Workload,
)
from bench.probes import serving
from bench.probes.serving import HALF_LOSSES, IN_PLACE, Route, row
from shared import operators
from shared.user_model import arrays

ROUTES = {
    "in place": Route(make="{impl}.kit.training:make_predict"),
    "onnx": Route(
        export="{impl}.deployment.export:export_onnx",
        load="shared.runtimes:load_onnx",
        file="model.onnx",
    ),
    "openvino": Route(
        export="{impl}.deployment.export:export_openvino",
        load="shared.runtimes:load_openvino",
        file="model.xml",
    ),
    "litert": Route(
        export="{impl}.deployment.export:export_litert",
        load="shared.runtimes:load_litert",
        file="model.tflite",
    ),
    "executorch": Route(
        export="{impl}.deployment.export:export_executorch",
        load="shared.runtimes:load_executorch",
        file="model.pte",
    ),
    "tensorrt": Route(
        export="{impl}.deployment.export:export_onnx",
        load="shared.runtimes:load_tensorrt",
        file="model.onnx",
    ),
}
UNSUPPORTED = {
    "pt": {"export_litert(precision)": "litert-torch leaves quantization to other packages"},
    "tf": {"export_executorch": "ExecuTorch takes programs of torch.export"},
}
INT8_LOSSES = 1e-1  # relative: those in int8, each from its own ranges
INTEGER_LAYERS = {  # counts them in a file: shared/operators.py
    "onnx": operators.onnx_integer_layers,
    "openvino": operators.openvino_integer_layers,
    "litert": operators.litert_integer_layers,
}
CPU_ROUTES = (*INTEGER_LAYERS, "executorch")  # as their packages are installed here
# ONNX's own checker saw the file when it was written; its import would count in every start.
UNCHECKED = {"load": {"check": False}}


def _int8(title: str, route: str, **more) -> Variant:
    more |= {"loss_tolerance": INT8_LOSSES, "changes": "math", "effort": "ordinary"}
    more |= {"price": Price(calibration=True)}
    settings = {"export": {"precision": "int8"}} | more.pop("settings", {})
    return row(f"{route}_int8", title, route, settings=settings, **more)


TECHNIQUE = Technique(
    family="deployment",
    name="export",
    title="Export to runtimes that need no framework",
    user_model=UserModel(PREDICTIONS, ("baseline", "onnx", "openvino", "litert")),
    variants=(
        IN_PLACE,
        row("onnx", "ONNX Runtime", "onnx", "default", settings=UNCHECKED),
        row("openvino", "OpenVINO", "openvino", "default"),
        row("litert", "LiteRT", "litert", "default", frameworks=("tf",)),
        row(
            "openvino_bf16",
            "OpenVINO, bfloat16",
            "openvino",
            "ordinary",
            settings={"load": {"precision": "bfloat16"}},
            loss_tolerance=HALF_LOSSES,
            changes="math",
        ),
        row(
            "litert_fp16",
            "LiteRT, float16 weights",
            "litert",
            settings={"export": {"precision": "float16"}},
            frameworks=("tf",),
            loss_tolerance=HALF_LOSSES,
            changes="math",
        ),
        _int8("ONNX Runtime, int8", "onnx", settings=UNCHECKED),
        _int8("OpenVINO, int8", "openvino"),
        _int8("LiteRT, int8", "litert", frameworks=("tf",)),
        row("litert", "LiteRT", "litert", "ordinary", frameworks=("pt",)),
        row("executorch", "ExecuTorch, XNNPACK", "executorch", "ordinary", frameworks=("pt",)),
        row("tensorrt", "TensorRT", "tensorrt"),
    ),
    workloads=(
        Workload("digits-cnn", "single", mode="predict"),
        Workload("photos-resnet18", "single", mode="predict"),
        Workload("digits-cnn", "compute", effort="ordinary", mode="predict"),
        Workload("digits-resnet20", "single", effort="full", mode="predict"),
        Workload("digits-resnet20", "compute", effort="full", mode="predict"),
        Workload("text-gpt", "single", effort="full", mode="predict"),
        Workload("text-gpt", "compute", effort="full", mode="predict"),
        Workload("photos-resnet50", "single", effort="full", mode="predict"),
        Workload("photos-resnet50", "compute", effort="full", mode="predict"),
    ),
    differs_by_design=(
        "onnx is one runtime with the same weights from both sides. The graphs that the "
        "exporters write differ: the table of operators counts them as exported, and as ONNX "
        "Runtime runs them after its optimization.",
        "int8 in ONNX Runtime and OpenVINO is one quantizer on the file of each exporter; LiteRT "
        "uses TensorFlow's.",
        "Files from TensorFlow take images as NHWC, those from PyTorch as NCHW. LiteRT computes "
        "in NHWC, so PyTorch's files for it transpose.",
        "PyTorch needs extra packages for LiteRT and ExecuTorch: see docs/install.md.",
        "baseline is the framework in place: eager in PyTorch, one tf.function in TensorFlow.",
    ),
    notes=(
        "Predictions are timed on all threads in a process that also holds the framework, with "
        "NumPy arrays in and out for the runtimes, and tensors in place. New processes that "
        "import only the runtime measure the rest. start: from the creation of the process to "
        "its first prediction, with files in the page cache. load: reading the model after all "
        "imports. memory: the peak of the whole process at batch 1. latency: the median of "
        "predictions of one sample, with p95, and p99 after a thousand calls. Samples/s are of "
        "batches of 64 on all threads. In a full run each figure is from four processes, and "
        "samples/s are also of smaller batches and on one thread. In a default run the start is "
        "from two processes, the rest from one.",
        "ExecuTorch's Python package imports PyTorch, so start and memory include PyTorch, which "
        "a device would not have. Its file plans memory for 256 samples.",
        "litert-torch (0.10) writes its example's sizes into a file, and LiteRT lays it out "
        "again for others. In digits-cnn, with one channel, a reshape fixes the size: "
        "UNSUPPORTED.",
        "Precision is fixed: OpenVINO would choose bfloat16 where the CPU has it. On x86, ONNX "
        "Runtime's CPU kernels have only float32 and integers. litert_fp16 has float16 weights "
        f"in its file and computes in float32. int8 takes its ranges from {serving.CALIBRATION} "
        "samples of the training split, or all if there are fewer.",
        f"Every export is first compared with its model on up to {serving.CHECKED} test samples: "
        "outputs within 1e-4 of the largest (half precision: 5%, int8: 10%), classes equal in "
        "99.9% (95%, 90%). Files have the weights of the model that the run has trained for "
        "predictions, or else initial weights.",
    ),
    probes=True,
)


def prepare(impl, work: Work) -> Prepared:
    """The framework's predictions, or those of a runtime."""
    if work.settings["route"] in CPU_ROUTES:
        need_cpu(impl)
    return serving.prepare(impl, work, ROUTES[work.settings["route"]])


def took_effect(impl, work: Work, prepared: Prepared, batch) -> tuple[dict, str | None]:
    """Predictions are the model's, and ONNX files say which operators they hold."""
    evidence, reason = serving.took_effect(impl, work, prepared, batch)
    route = work.settings["route"]
    if prepared.artifact is None:
        return evidence, reason
    path = prepared.artifact / ROUTES[route].file
    if route == "onnx":
        stages = {"exported": False, "optimized": True}
        evidence["graph_operators"] = {
            work.task.name: {
                stage: operators.onnx_operators(path, optimized=optimized)
                for stage, optimized in stages.items()
            }
        }
    if route == "litert":
        evidence["xnnpack_runs_all"] = operators.litert_delegated(path)
    if route == "executorch":
        evidence["operators"] = ran = operators.executorch_operators(path)
        reason = reason or (None if ran.get("XnnpackBackend") else "no part of it runs in XNNPACK")
    if "int8" in work.variant:
        x = arrays(batch[0])
        ran = INTEGER_LAYERS[route](path, x)
        evidence["integer_layers"] = ran
        reason = reason or (None if ran else "no layer ran over integers")
    return evidence, reason


def probe(impl, work: Work, batches) -> dict[str, dict]:
    """Start, load, memory, latency, and samples/s by batch size."""
    return serving.probe(impl, work, ROUTES[work.settings["route"]])
