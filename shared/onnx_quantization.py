"""ONNX Runtime without a framework: quantize a file, open it, count what runs over integers.

Both frameworks meet here: what differs is only the file that their exporter wrote.
"""

from __future__ import annotations

import json
import logging
import math
import platform
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx
import onnxruntime
from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process

# Operators over integers, but those that only convert to them.
_INTEGER = re.compile(r"^(QLinear\w+|QGemm|QAttention|\w*Integer\w*|MatMulNBits)$")


class _Reader(CalibrationDataReader):
    """Hands over batches of calibration data: input name -> array."""

    def __init__(self, batches: Iterator[dict[str, np.ndarray]]) -> None:
        self._batches = batches

    def get_next(self) -> dict[str, np.ndarray] | None:
        """The next batch, or None."""
        return next(self._batches, None)


def quantize(
    source: Path,
    path: Path,
    batches: Iterable[tuple[np.ndarray, ...]],
    *,
    keep_float: tuple = (),
) -> None:
    """Write the float32 model of `source` to `path` with static int8 operators (QDQ).

    Weights are int8 with a scale for each channel, activations uint8 with one for each tensor;
    their ranges are the smallest and largest values of `batches`, which hold the inputs in the
    model's order. On an x86 CPU without VNNI weights get 7 bits, as upstream asks: its kernels
    overflow with 8, and so they do with a file that was made on another CPU. The scores of
    attention stay float32 once they are masked, and so do the sums that layer normalisation reads
    and what scales an input column by column; and layers whose numbers, of `layers`, are in
    `keep_float`. The file's metadata is kept.
    Raises NotImplementedError, and writes nothing, where no weight is quantized or the tool fails.
    Source: `onnxruntime.quantization.quantize_static`.
    """
    given = onnx.load(source, load_external_data=False)
    names = [value.name for value in given.graph.input]
    feeds = (dict(zip(names, batch, strict=True)) for batch in batches)
    with TemporaryDirectory() as folder:
        prepared, quantized = Path(folder) / "prepared.onnx", Path(folder) / "quantized.onnx"
        before = logging.root.manager.disable
        logging.disable(
            max(before, logging.WARNING)
        )  # it asks for the preparation that has just been done
        try:
            quant_pre_process(str(source), str(prepared), skip_symbolic_shape=True)
            graph = onnx.load(prepared).graph
            kept = [node.name for place, node in enumerate(_layers(graph)) if place in keep_float]
            quantize_static(
                str(prepared),
                str(quantized),
                _Reader(feeds),
                nodes_to_exclude=_masked(graph) + _normalised(graph) + _scaling(graph) + kept,
                per_channel=True,
                activation_type=QuantType.QUInt8,
                weight_type=QuantType.QInt8,
                reduce_range=_overflows(),
            )
        except Exception as error:  # they share no class
            line = " ".join(str(error).split())[:300]
            raise NotImplementedError(f"ONNX Runtime cannot quantize it: {line}") from error
        finally:
            logging.disable(before)
        model = onnx.load(quantized)
        if not any(t.data_type == onnx.TensorProto.INT8 for t in model.graph.initializer):
            raise NotImplementedError("the model has no layer that ONNX Runtime quantizes")
        about = {entry.key: entry.value for entry in given.metadata_props}
        onnx.helper.set_model_props(model, about)
        onnx.save(model, path)


def layers(source: Path) -> list[str]:
    """Names of the layers of a float32 file: convolutions and products with a weight, in order."""
    graph = onnx.load(source, load_external_data=False).graph
    return [node.name for node in _layers(graph)]


def _layers(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    constants = {tensor.name for tensor in graph.initializer}
    constants |= {node.output[0] for node in graph.node if node.op_type == "Constant"}
    kinds = ("Conv", "ConvTranspose", "Gemm", "MatMul")
    return [n for n in graph.node if n.op_type in kinds and n.input[1] in constants]


def _overflows() -> bool:
    """Whether kernels add pairs of 8-bit products in 16 bits: on x86 without VNNI, or unknown."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    try:
        return "vnni" not in Path("/proc/cpuinfo").read_text("utf-8")
    except OSError:
        return True


def _masked(graph: onnx.GraphProto) -> list[str]:
    """Names of nodes that put a mask on scores, and of what reads these: on one grid with -1e9, or
    an infinity, all scores would be one."""
    made = {output: node for node in graph.node for output in node.output}
    names = []
    for node in graph.node:
        masking = made.get(node.input[0]) if node.op_type == "Softmax" else None
        if masking is not None and masking.op_type in ("Add", "Where", "Mul", "Sub"):
            names += [masking.name, node.name]
    return names


def _normalised(graph: onnx.GraphProto) -> list[str]:
    """Names of layer normalisations, of the sums that they read and of those that these read: a
    token whose values are small is as large as others behind them, and so is its error on the grid
    of all tokens."""
    names, read = [], set()
    for node in reversed(graph.node):  # who reads stands behind what it reads
        norm = node.op_type == "LayerNormalization"
        if norm or (node.op_type == "Add" and read & {*node.output}):
            names.append(node.name)
            read |= {*node.input[: 1 if norm else 2]}
    return names


def _scaling(graph: onnx.GraphProto) -> list[str]:
    """Names of nodes that scale and shift an input, column by column, before all else: a grid for
    all columns would lose the narrow ones."""
    constants = {tensor.name: math.prod(tensor.dims) for tensor in graph.initializer}
    scaled = {value.name for value in graph.input} - constants.keys()
    names, by_column = [], False
    for node in graph.node:
        others = [name for name in node.input if name not in scaled]
        known = len(others) + 1 == len(node.input) and constants.keys() >= {*others}
        if known and node.op_type in ("Add", "Sub", "Mul", "Div"):
            names.append(node.name)
            scaled.update(node.output)
            by_column |= any(constants[name] > 1 for name in others)
    return names if by_column else []


def replace(path, batches: Iterable[tuple[np.ndarray, ...]]) -> None:
    """Turn the file at `path` into one in int8, as `quantize` does.

    Raises as that, and removes the file, where that can't be done.
    """
    try:
        quantize(Path(path), Path(path), batches)
    except Exception:
        Path(path).unlink()
        raise


def open_session(path: Path, *, threads: int, profile: str = "") -> onnxruntime.InferenceSession:
    """Open an ONNX file on the CPU, with its own pool of `threads`. Executes no code of it.

    `profile`: start of the name of a file to profile into. Raises FileNotFoundError, and ValueError
    for a file that is cut or something else. A changed weight goes unnoticed: ONNX has no checksum.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no file {path}")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3  # errors
    if profile:
        options.enable_profiling, options.profile_file_prefix = True, profile
    try:
        onnx.checker.check_model(str(path))
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ValueError(f"{path} is not a complete ONNX model: {line}") from None


def run(session: onnxruntime.InferenceSession, inputs: tuple[np.ndarray, ...]) -> list[np.ndarray]:
    """The model's outputs for its inputs, both in their order."""
    names = (value.name for value in session.get_inputs())
    return session.run(None, dict(zip(names, inputs, strict=True)))


def integer_operators(path: Path, inputs: tuple[np.ndarray, ...]) -> dict[str, int]:
    """Operators over integers that one prediction really runs: name -> number.

    From the profile of a session, so after all fusions.
    """
    with TemporaryDirectory() as folder:
        session = open_session(path, threads=1, profile=str(Path(folder) / "profile"))
        run(session, inputs)
        events = json.loads(Path(session.end_profiling()).read_text("utf-8"))
    ran = (e["args"]["op_name"] for e in events if e["name"].endswith("_kernel_time"))
    return dict(Counter(name for name in ran if _INTEGER.match(name)))
