"""What a model's file holds and what a runtime makes of it: operators, counted by name.

Of a histogram the sum is the number of nodes. The files are those of `pt_impl/deployment/export.py`
and `tf_impl/deployment/export.py`; errors are those of the loaders in `shared/runtimes.py`.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from shared import runtimes

# Layers with weights, as any of the runtimes calls them.
_LAYER = re.compile(r"conv(?!ert)|gemm|matmul|fully_?connected|qlinear_", re.IGNORECASE)
_BYTES = re.compile(r"\b[iu]8\b", re.IGNORECASE)


def onnx_operators(path, *, optimized: bool = False) -> dict[str, int]:
    """Count the operators of an ONNX file, or those that ONNX Runtime makes of them on this CPU."""
    runtimes.check_onnx(path)
    onnx = runtimes.package("onnx", "onnx")
    with TemporaryDirectory() as folder:
        if optimized:
            runtime = runtimes.package("onnxruntime", "onnxruntime")
            options = runtime.SessionOptions()
            options.log_severity_level = 3  # it warns that what it writes fits only this machine
            options.optimized_model_filepath = f"{folder}/optimized.onnx"
            runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
            path = options.optimized_model_filepath
        nodes = onnx.load(str(path)).graph.node
    return dict(sorted(Counter(node.op_type for node in nodes).items()))


def onnx_integer_layers(path, *x: np.ndarray) -> dict[str, int]:
    """Layers over integers that ONNX Runtime runs for one prediction of the inputs `x`."""
    quantization = runtimes.package("shared.onnx_quantization", "onnxruntime")  # which it needs
    return _layers(quantization.integer_operators(Path(path), x))


def openvino_integer_layers(path, x: np.ndarray) -> dict[str, int]:
    """Layers that OpenVINO runs over 8-bit integers on this CPU, of the graph that it executes.

    The precision is the one in which a kernel runs, not that of the file.
    """
    openvino = runtimes.openvino_package()
    runtimes.check_exists(path)
    counts: Counter = Counter()
    pinned = {"INFERENCE_PRECISION_HINT": "f32"}  # as it is loaded to predict: no silent bfloat16
    try:
        graph = openvino.Core().compile_model(str(path), "CPU", pinned).get_runtime_model()
    except RuntimeError as error:
        raise ValueError(f"OpenVINO can't load {path}: {runtimes.one_line(error)}") from error
    for node in graph.get_ordered_ops():
        about = {key: str(value.value) for key, value in node.get_rt_info().items()}
        if _BYTES.search(about.get("runtimePrecision", "")):
            counts[about["layerType"]] += 1
    return _layers(counts)


def litert_integer_layers(path, x: np.ndarray) -> dict[str, int]:
    """Layers of a LiteRT file with int8 weights: name and dtypes of what goes in -> number."""
    interpreter = runtimes.package("ai_edge_litert.interpreter", "ai-edge-litert")
    runtimes.check_exists(path)
    counts: Counter = Counter()
    try:
        model = interpreter.Interpreter(model_path=str(path))
    except ValueError as error:
        raise ValueError(f"LiteRT can't load {path}: {runtimes.one_line(error)}") from error
    for detail in model._get_ops_details():  # LiteRT has no public list
        dtypes = [np.dtype(kind).name for kind in detail["operand_types"]]
        if dtypes[:2] == ["int8", "int8"]:
            counts[f"{detail['op_name']}({', '.join(dtypes[:2])})"] += 1
    return _layers(counts)


def litert_delegated(path) -> bool:
    """Whether XNNPACK runs all of a LiteRT file, none of it LiteRT's own kernels."""
    interpreter = runtimes.package("ai_edge_litert.interpreter", "ai-edge-litert")
    runtimes.check_exists(path)
    model = interpreter.Interpreter(model_path=str(path))
    model.allocate_tensors()
    parts = [one for one in model._get_ops_details() if one["op_name"] == "DELEGATE"]
    outputs = {one["index"] for one in model.get_output_details()}
    return len(parts) == 1 and outputs <= {*parts[0]["outputs"]}


def executorch_operators(path) -> dict[str, int]:
    """Count the parts of an ExecuTorch file by backend, and the operators left to its kernels."""
    package = "executorch.exir._serialize._program"  # there is no public reader
    program = runtimes.package(package, "executorch")
    runtimes.check_exists(path)
    try:
        plan = program.deserialize_pte_binary(Path(path).read_bytes()).program.execution_plan[0]
    except Exception as error:
        raise ValueError(f"ExecuTorch can't load {path}: {runtimes.one_line(error)}") from error
    counts = Counter(part.id for part in plan.delegates)
    for step in (one.instr_args for chain in plan.chains for one in chain.instructions):
        if hasattr(step, "op_index"):
            counts[plan.operators[step.op_index].name] += 1
    return dict(sorted(counts.items()))


def _layers(found: dict[str, int]) -> dict[str, int]:
    return {name: number for name, number in sorted(found.items()) if _LAYER.search(name)}
