"""Runtimes that need no framework: ONNX Runtime, OpenVINO, LiteRT and ExecuTorch run a file.

Here stands what a program that only predicts needs; the files come from
`pt_impl/deployment/export.py` and `tf_impl/deployment/export.py`. A runtime is imported when a file
is loaded into it, so only those in use must be installed. Copy this file to where it predicts: it
needs NumPy and the runtime (and onnx, for the check of ONNX files that `check=False` leaves out).

Every loader returns `predict(x) -> output`:

- x: a NumPy array, or, where the model has several inputs, a tuple of arrays in the order of
  `predict.inputs` or a dict of arrays by these names. What converts to an array without a copy (a
  tensor on the CPU) is taken too.
- output: an array, or a tuple of arrays where the model has several outputs that are told apart by
  their places (output_0, output_1, ...), or a dict of them by their names.
- Threads may call `predict` at the same time. ONNX Runtime and OpenVINO then compute side by side,
  LiteRT and ExecuTorch one prediction after the other.
- `predict.metadata`: strings by name, which the file carries.
- `predict.threads`: the threads that the runtime reports, None where it reports nothing.
- `predict.precision`: in which floating-point numbers it computes, as the runtime reports or, where
  it has no other, knows.

Errors are the same everywhere: FileNotFoundError; ModuleNotFoundError that names the package of a
runtime that is missing; ValueError for a file that is damaged or of another kind and, in `predict`,
for a number, dtype or shape of inputs that does not fit. No loader executes code from the file.
A changed weight goes unnoticed: none of these formats has a checksum. Compare the file's own where
it comes from afar.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import threading
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from unittest import mock

import numpy as np

# In files of LiteRT and ExecuTorch: members of a zip archive behind the model, as LiteRT's
# makers do it.
METADATA, SIGNATURE = "metadata.json", "signature.json"
_ONNX_DTYPES = {"float": "float32", "double": "float64"}  # the others are called as in NumPy
_LACKS = re.compile(r"'tf\.(\w+)' op is neither a custom op nor a flex op")
_OPENVINO = {"float32": "f32", "bfloat16": "bf16"}
# ExecuTorch's scalar types by their numbers.
_EXECUTORCH = {0: "uint8", 1: "int8", 2: "int16", 3: "int32", 4: "int64", 5: "float16"}
_EXECUTORCH |= {6: "float32", 7: "float64", 11: "bool"}

Wanted = list[tuple[str, str, list]]  # name, dtype and shape of each input; what is no int is open


def load_onnx(path, *, threads: int, check: bool = True) -> Callable:
    """Load an ONNX file into ONNX Runtime on the CPU; `threads` are those of one operator.

    check: let ONNX's own checker see the file first, which takes the package onnx; without it only
    ONNX Runtime's parser judges.
    """
    runtime = package("onnxruntime", "onnxruntime")
    if check:
        check_onnx(path)
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    return _onnx_predict(runtime, path, options, ["CPUExecutionProvider"])


def load_tensorrt(path, *, threads: int, precision: str = "float32") -> Callable:
    """Load an ONNX file into TensorRT on an NVIDIA GPU, through ONNX Runtime's provider.

    threads: of operators that stay on the CPU. precision: "float32" or "float16". The first
    prediction of a shape builds TensorRT's engine, which takes seconds to minutes. Raises
    NotImplementedError where this ONNX Runtime has no such provider or the provider does not start,
    ValueError for another precision. Never tried: this project had no such machine.
    """
    if precision not in ("float32", "float16"):
        raise ValueError(f"unknown precision {precision!r}: float32 or float16")
    runtime = package("onnxruntime", "onnxruntime-gpu")
    name = "TensorrtExecutionProvider"
    if name not in runtime.get_available_providers():
        raise NotImplementedError(
            "this ONNX Runtime has no TensorRT: it needs an NVIDIA GPU, TensorRT and the package "
            "onnxruntime-gpu in place of onnxruntime"
        )
    check_onnx(path)
    provider = (name, {"trt_fp16_enable": precision == "float16"})
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    predict = _onnx_predict(runtime, path, options, [provider])
    if name not in predict.providers:  # it falls back to the CPU by itself
        raise NotImplementedError("ONNX Runtime could not start TensorRT: see its log")
    predict.precision = precision
    return predict


def _onnx_predict(runtime: ModuleType, path, options, providers: list) -> Callable:
    check_exists(path)
    try:
        session = runtime.InferenceSession(str(path), options, providers=providers)
    except Exception as error:  # its errors share no class
        raise ValueError(f"ONNX Runtime can't load {path}: {one_line(error)}") from error
    wanted = [(i.name, _onnx_dtype(i.type), i.shape) for i in session.get_inputs()]
    predict = predictor(
        wanted,
        [output.name for output in session.get_outputs()],
        lambda arrays: session.run(
            None, {i[0]: array for i, array in zip(wanted, arrays, strict=True)}
        ),
    )
    predict.metadata = session.get_modelmeta().custom_metadata_map
    predict.threads = session.get_session_options().intra_op_num_threads
    predict.precision = "float32"  # its CPU kernels have no half precision on x86
    predict.providers = session.get_providers()
    return predict


def _onnx_dtype(written: str) -> str:
    """The dtype in "tensor(float)"."""
    inside = written.removeprefix("tensor(").removesuffix(")")
    return _ONNX_DTYPES.get(inside, inside)


def check_onnx(path) -> None:
    """Raise ValueError unless `path` is a sound ONNX model: all of it there, every operator known.

    Shapes and dtypes between operators are checked too.
    """
    onnx = package("onnx", "onnx")
    check_exists(path)
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except Exception as error:  # of the checker, of shape inference and of protobuf
        raise ValueError(f"{path} is not a valid ONNX model: {one_line(error)}") from error


def load_openvino(path, *, threads: int, precision: str = "float32") -> Callable:
    """Load an OpenVINO model (.xml, with its .bin beside it) on the CPU.

    precision: "float32" or "bfloat16", of products and convolutions. OpenVINO takes bfloat16
    unasked where the CPU has it, so that it is always set here, and read back. Raises ValueError
    for another precision, NotImplementedError where the CPU does not have it.
    """
    if precision not in _OPENVINO:
        raise ValueError(f"unknown precision {precision!r}: {' or '.join(_OPENVINO)}")
    openvino = openvino_package()
    check_exists(path)
    settings = {
        "INFERENCE_PRECISION_HINT": _OPENVINO[precision],
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1,  # one prediction after the other, each on all threads
    }
    try:
        model = openvino.Core().read_model(str(path))
        compiled = openvino.Core().compile_model(model, "CPU", settings)
    except RuntimeError as error:
        raise ValueError(f"OpenVINO can't load {path}: {one_line(error)}") from error
    found = compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
    if found != _OPENVINO[precision]:
        raise NotImplementedError(f"OpenVINO computes in {found} on this CPU, not in {precision}")
    wanted = [
        (i.any_name, i.element_type.to_dtype().name, _open_sizes(i.partial_shape))
        for i in compiled.inputs
    ]
    local = threading.local()  # a request computes one prediction at a time

    def infer(arrays: dict) -> tuple:
        if not hasattr(local, "request"):
            local.request = compiled.create_infer_request()
        return local.request.infer(arrays, share_inputs=True).to_tuple()

    names = [output.any_name if output.names else f"output_{place}"
             for place, output in enumerate(compiled.outputs)]  # fmt: skip
    predict = predictor(wanted, names, infer)
    predict.metadata = _openvino_metadata(model)
    predict.threads = compiled.get_property("INFERENCE_NUM_THREADS")
    predict.precision = precision
    return predict


def _open_sizes(shape) -> list:
    return [size.get_length() if size.is_static else None for size in shape]


def _openvino_metadata(model) -> dict[str, str]:
    if not model.has_rt_info(["metadata"]):
        return {}
    names = model.get_rt_info(["metadata"]).value
    return {name: model.get_rt_info(["metadata", name]).astype(str) for name in names}


def openvino_package() -> ModuleType:
    """OpenVINO, which reports nothing to its makers: by itself it does when it is imported."""
    sys.modules.setdefault("openvino_telemetry", None)
    return package("openvino", "openvino")


@contextmanager
def openvino_on_python_3_13() -> Iterator[None]:
    """OpenVINO (2026.4) imports TensorFlow by `exec` and deletes the name by another, which fails.

    It has that module already.
    """
    from openvino.frontend.tensorflow import utils

    with mock.patch.object(utils, "exec", create=True, return_value=None):
        yield


def load_litert(path, *, threads: int) -> Callable:
    """Load a LiteRT file (.tflite) on the CPU: XNNPACK's kernels where it has them."""
    interpreter = package("ai_edge_litert.interpreter", "ai-edge-litert")
    check_exists(path)
    try:
        model = interpreter.Interpreter(model_path=str(path), num_threads=threads)
        metadata, signature = _behind_the_model(path)
    except Exception as error:  # damage may raise anything in zipfile
        raise ValueError(f"LiteRT can't load {path}: {one_line(error)}") from error
    inputs, outputs = model.get_input_details(), model.get_output_details()
    given = signature.get("inputs", [detail["name"] for detail in inputs])
    made = signature.get("outputs", [detail["name"] for detail in outputs])
    wanted = []
    opened = signature.get("open_axes", [[] for _ in inputs])
    for name, detail, axes in zip(given, inputs, opened, strict=True):
        sizes = [None if size < 0 else int(size) for size in detail["shape_signature"]]
        sizes = [None if axis in axes else size for axis, size in enumerate(sizes)]
        wanted.append((name, np.dtype(detail["dtype"]).name, sizes))
    shapes: list = []

    def run(arrays: list[np.ndarray]) -> list[np.ndarray]:
        if shapes != [array.shape for array in arrays]:  # the graph is laid out for one size
            for detail, array in zip(inputs, arrays, strict=True):
                model.resize_tensor_input(detail["index"], array.shape)
            try:
                model.allocate_tensors()
            except RuntimeError as error:
                sizes = ", ".join(str(array.shape) for array in arrays)
                reason = "an operator in it holds the sizes of its example"
                raise ValueError(
                    f"LiteRT can't resize the inputs of the file to {sizes}: {reason}"
                ) from error
            shapes[:] = [array.shape for array in arrays]
        for detail, array in zip(inputs, arrays, strict=True):
            model.set_tensor(detail["index"], array)
        model.invoke()
        return [model.get_tensor(detail["index"]) for detail in outputs]

    predict = predictor(wanted, made, one_at_a_time(run))
    predict.metadata, predict.threads = metadata, None
    predict.precision = "float32"
    return predict


def load_executorch(path, *, threads: int) -> Callable:
    """Load an ExecuTorch file (.pte) on the CPU: XNNPACK's kernels where it was lowered to them.

    threads: of the one pool that all files of the process share. From Python it takes PyTorch,
    whose tensors the package hands over; a device runs the file in C++, without it.
    """
    library = package("executorch.extension.pybindings.portable_lib", "executorch")
    runtime, torch = package("executorch.runtime", "executorch").Runtime, sys.modules["torch"]
    check_exists(path)
    library._unsafe_reset_threadpool(threads)  # there is no public way
    try:
        method = runtime.get().load_program(str(path)).load_method("forward")
        metadata, signature = _behind_the_model(path)
    except Exception as error:
        raise ValueError(f"ExecuTorch can't load {path}: {one_line(error)}") from error
    about = method.metadata
    details = [about.input_tensor_meta(place) for place in range(about.num_inputs())]
    given = signature.get("inputs", [f"input_{place}" for place in range(len(details))])
    made = signature.get("outputs", [f"output_{place}" for place in range(about.num_outputs())])
    opened = signature.get("open_axes", [[] for _ in details])
    wanted = []
    for name, detail, axes in zip(given, details, opened, strict=True):
        sizes = [None if axis in axes else size for axis, size in enumerate(detail.sizes())]
        wanted.append((name, _EXECUTORCH[detail.dtype()], sizes))

    def run(arrays: list[np.ndarray]) -> list[np.ndarray]:
        for array, detail in zip(arrays, details, strict=True):
            if any(size > most for size, most in zip(array.shape, detail.sizes(), strict=True)):
                raise ValueError(f"the file takes at most {detail.sizes()}, not {array.shape}")
        tensors = [torch.from_numpy(np.require(array, requirements="W")) for array in arrays]
        return [tensor.numpy() for tensor in method.execute(tensors)]

    predict = predictor(wanted, made, one_at_a_time(run))
    predict.metadata, predict.threads = metadata, library._threadpool_get_thread_count()
    predict.precision = "float32"
    return predict


def describe(path, metadata: dict | None, **signature: list) -> None:
    """Write metadata and signature behind the model of a file, where its runtime reads nothing.

    signature: "inputs" and "outputs", their names; "open_axes" of each input, where the file itself
    does not say which of its sizes may be others.
    """
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(METADATA, json.dumps(metadata or {}))
        archive.writestr(SIGNATURE, json.dumps(signature))


def _behind_the_model(path) -> tuple[dict, dict]:
    """The metadata and the signature that a file carries: none where others made it."""
    try:
        with zipfile.ZipFile(path) as archive:
            if damaged := archive.testzip():
                raise ValueError(f"{damaged} in it is damaged")
            known = {METADATA, SIGNATURE} & set(archive.namelist())  # files of before lack one
            found = {name: json.loads(archive.read(name)) for name in known}
    except Exception:
        whole = Path(path).read_bytes()
        if b"PK\x03\x04" in whole and METADATA.encode() in whole:
            raise
        found = {}
    return found.get(METADATA, {}), found.get(SIGNATURE, {})


def predictor(wanted: Wanted, names: list[str], run: Callable) -> Callable:
    """`predict(x)` around `run(arrays)`, whose outputs are called `names`."""
    # As numbers: as text, output_10 comes before output_2.
    places = [re.fullmatch(r"output_(\d+)", name) for name in names]
    by_place = all(places) and sorted(range(len(names)), key=lambda n: int(places[n][1]))

    def predict(x):
        outputs = run(fitting(x, wanted))  # which would resize or convert in silence, or worse
        if len(names) == 1:
            return outputs[0]
        if by_place:
            return tuple(outputs[place] for place in by_place)
        return dict(zip(names, outputs, strict=True))

    predict.inputs = [name for name, _, _ in wanted]
    predict.outputs = [names[place] for place in by_place or range(len(names))]
    return predict


def one_at_a_time(run: Callable) -> Callable:
    """`run` of a runtime that computes one prediction at a time: threads wait for one another."""
    lock = threading.Lock()

    def running(arrays):
        with lock:
            return run(arrays)

    return running


def check_same(predict: Callable, samples: list[tuple[list, list]], *, bound: float) -> None:
    """Raise ValueError unless `predict` gives what the model gave.

    samples: of each call the model's inputs and outputs, as lists of arrays in its own order.
    bound: the largest relative L2 distance between two outputs that are called the same.
    """
    for inputs, wanted in samples:
        outputs = predict(tuple(inputs))
        outputs = list(outputs.values()) if isinstance(outputs, dict) else outputs
        outputs = outputs if isinstance(outputs, list | tuple) else (outputs,)
        if len(outputs) != len(wanted):
            raise ValueError(f"it gives {len(outputs)} outputs, the model {len(wanted)}")
        for name, one, other in zip(predict.outputs, outputs, wanted, strict=True):
            if one.shape != other.shape:
                raise ValueError(f"it gives {name} of {one.shape}, the model of {other.shape}")
            distance = _distance(
                *(np.asarray(v, np.result_type(v, np.float64)) for v in (one, other))
            )
            if not distance <= bound:
                raise ValueError(f"its {name} is {distance:.1%} from the model's")


def check_file(
    load: Callable, path, samples: list[tuple], *, bound: float, beyond: Iterable[tuple] = ()
) -> None:
    """Raise NotImplementedError for a file that its runtime does not load or that is another model.

    load: the loader of the runtime. samples, bound: as in `check_same`. beyond: further samples, of
    sizes at which the model's code may branch.
    """
    try:
        predict = load(path, threads=1)
        check_same(predict, samples, bound=bound)
    except Exception as error:
        reason = one_line(error).replace(str(path), "it")
        raise NotImplementedError(
            f"the file does not give what the model gives: {reason}"
        ) from error
    for sample in beyond:
        try:
            check_same(predict, [sample], bound=bound)
        except Exception as error:
            shapes = ", ".join(str(part.shape) for part in sample[0])
            raise NotImplementedError(
                "the model branches on a size that is open: a file gives something else at "
                f"{shapes}"
            ) from error


@contextmanager
def draft(path) -> Iterator[Path]:
    """Yield a path to write to; what is there afterwards, and beside it, goes to `path`.

    Nothing does if something is raised. Raises FileNotFoundError where there is no such folder.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"no folder {path.parent}")
    with TemporaryDirectory(dir=path.parent) as folder:
        yield Path(folder, path.name)
        for made in Path(folder).iterdir():
            shutil.move(made, path.with_name(made.name))


@contextmanager
def translating(target: str) -> Iterator[None]:
    """Turn an error of a translation into NotImplementedError with its reason on one line."""
    try:
        yield
    except NotImplementedError:
        raise
    except Exception as error:  # of many classes; it quotes code before it comes to the point
        text = str(error)
        for heading in ("## Exception summary", "Summary:"):  # of torch.onnx, of OpenVINO
            text = text.partition(heading)[2] or text
        if lacking := dict.fromkeys(_LACKS.findall(text)):  # of LiteRT's converter
            kind = " in float64" if "xf64>" in text else ""
            what = f"there is no operator for {', '.join(lacking)}{kind}"
            raise NotImplementedError(f"{target} can't take this: {what}") from error
        line = re.search(r"^\s*\w*Error: (.+)$", text, re.MULTILINE)
        reason = line[1] if line else one_line(Exception(text)) if text else type(error).__name__
        raise NotImplementedError(f"{target} can't take this: {reason}") from error


def _distance(one: np.ndarray, other: np.ndarray) -> float:
    """The relative L2 distance; what is not finite has to be the same in both."""
    finite = np.isfinite(other)
    if not np.array_equal(one[~finite], other[~finite], equal_nan=True):
        return float("inf")
    norm = np.linalg.norm(other[finite])
    distance = np.linalg.norm(one[finite] - other[finite])
    return float(distance / norm if norm else distance)


def calibration_batches(
    inputs: Iterable[np.ndarray], *, size: int
) -> Iterator[tuple[np.ndarray, ...]]:
    """The samples from which the ranges of a quantized model's activations come, in batches.

    inputs: the arrays of a model's inputs, samples along the first axis. The last batch holds what
    is left. Raises ValueError where there are no samples, where the inputs have different numbers
    of them, or where a value is not finite.
    """
    arrays = [np.asarray(part) for part in inputs]
    counts = {array.shape[0] if array.ndim else 0 for array in arrays}
    if len(counts) != 1 or counts == {0}:
        raise ValueError(f"calibration needs samples, as many in each input, not {sorted(counts)}")
    if not all(np.isfinite(array).all() for array in arrays):
        raise ValueError("calibration samples hold values that are not finite")
    places = range(0, counts.pop(), size)
    return (tuple(array[place : place + size] for array in arrays) for place in places)


def package(module: str, name: str, *, where: str = "") -> ModuleType:
    """Import `module`; ModuleNotFoundError that names the package if it is not installed.

    where: the environment into which it can be installed, where that is not this one.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{name} is not installed: pip install {name}{where}") from error


def fitting(x, wanted: Wanted) -> list[np.ndarray]:
    """x as the arrays of a model's inputs; ValueError where number, dtype or a shape differs.

    A dict is taken by the names of the inputs. A view that is not contiguous is copied, and so is
    an array in the other byte order: not every runtime asks for strides, or how bytes lie.
    """
    if isinstance(x, dict):
        names = [name for name, _, _ in wanted]
        if x.keys() != set(names):
            raise ValueError(f"the model takes {', '.join(names)}, not {', '.join(map(str, x))}")
        x = tuple(x[name] for name in names)
    arrays = [_native(part) for part in (x if isinstance(x, tuple | list) else (x,))]
    if len(arrays) != len(wanted):
        names = ", ".join(name for name, _, _ in wanted)
        raise ValueError(f"the model takes {len(wanted)} inputs ({names}), not {len(arrays)}")
    for array, (name, dtype, shape) in zip(arrays, wanted, strict=True):
        is_right = array.dtype.kind in "OSU" if dtype == "string" else array.dtype.name == dtype
        if not is_right or not _fits(array.shape, shape):
            sizes = ", ".join(str(size) if isinstance(size, int) else "any" for size in shape)
            given = ", ".join(map(str, array.shape))
            raise ValueError(
                f"input {name!r} takes {dtype} ({sizes}), not {array.dtype.name} ({given})"
            )
    return arrays


def _native(part) -> np.ndarray:
    array = np.asarray(part, order="C")
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _fits(given: tuple, shape: list) -> bool:
    return len(given) == len(shape) and all(
        own == size or not isinstance(size, int) for own, size in zip(given, shape, strict=True)
    )


def check_exists(path) -> None:
    """Raise FileNotFoundError unless `path` is a file."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"no file {path}")


def one_line(error: BaseException) -> str:
    """What an error says, on one line, of a runtime that tells where in its source it stands."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if not line.startswith(("Exception from", "Check '"))]
    if telling and telling[0].endswith("failed in the TorchScript interpreter."):
        telling = telling[-1:]  # after its calls
    return " ".join((telling or lines or [type(error).__name__])[0].split())
