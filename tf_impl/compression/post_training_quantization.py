"""Post-training quantization: a trained model in 8-bit integers, for a CPU, without training.

What it changes: the numbers that a trained model computes with. A float tensor becomes integers and
a scale, q = round(x / scale) + zero point (Jacob et al., 2018, "Quantization and Training of Neural
Networks for Efficient Integer-Arithmetic-Only Inference", section 2).

- static: weights and activations; the ranges of activations come from calibration data
- dynamic: weights; each activation is quantized when it is there, by its own range

Each function writes one file, which `load_quantized` or, for ONNX, `load_onnxruntime` reads; none
of them executes code from it. `keep_float32` and `keep_onnxruntime_float32` write the model as it
is for the same runtimes: what the others are to be compared with.

Its twin: `pt_impl/compression/post_training_quantization.py`.

Where the frameworks differ and why:
- The runtime here is LiteRT, which interprets a file that TensorFlow's converter has written; there
  it is TorchInductor, which compiles. Both frameworks can go to ONNX Runtime.
- Activations are signed here and unsigned there; weights have a scale for each output on both.
- Dynamic quantization covers convolutions here, but no kernel of fewer than 1,024 weights; there
  linear layers of any size and nothing else.
- The interpreter has threads of its own; another batch size makes it plan its memory anew.
- Nothing notices a weight that was changed in a file: LiteRT's format has no checksum.

When it helps and when it hurts: on a CPU with units for int8 (VNNI, AMX), static int8 is two to
four times as fast where convolutions and matrix products dominate; without them it can be slower.
Files shrink to a quarter. It hurts where few values are far larger than the rest, and where
calibration data is not like what comes later: compare accuracy before it is deployed.

Run it alone: `python -m tf_impl.compression.post_training_quantization` prints time, size and
agreement.
"""

import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import tensorflow as tf
import tf2onnx
from ai_edge_litert.interpreter import Interpreter
from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

from shared import onnx_quantization
from tf_impl.kit import programs

OPSET = 18  # of ONNX: the newest that tf2onnx writes


def keep_float32(model: tf.keras.Model, calibration, path) -> Path:
    """Write the model as it is, in float32, for `load_quantized`; else as `quantize_static_int8`.

    One sample of calibration data is enough: only its shape and dtype are read.
    """
    return _convert(_converter(model, calibration), path)


def quantize_static_int8(model: tf.keras.Model, calibration, path) -> Path:
    """Write `path`: every operator over int8, weights and activations; inputs and output are float.

    calibration: a tensor, or a tuple of the model's positional arguments, or a list that is its
    one argument, tensors all; samples along the first axis, such as a few hundred of the training
    split. The model takes any number of them and returns one tensor; it is left as it is. The file
    is one of LiteRT (.tflite). Returns the path.

    Raises ValueError for calibration data that is empty, not finite, or that the model does not
    take, and for a model without variables; NotImplementedError for a model that the converter
    refuses or that has no layer to quantize. In all cases nothing is written.
    Source: `tf.lite.TFLiteConverter`, with `TFLITE_BUILTINS_INT8` alone.
    """
    converter = _converter(model, calibration)
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    converter.representative_dataset = lambda: map(list, _samples(calibration))
    converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS_INT8]
    return _convert(converter, path)


def quantize_dynamic_int8(model: tf.keras.Model, calibration, path) -> Path:
    """Write `path`: int8 weights; activations get their scale at each call.

    Kernels of fewer than 1,024 weights stay in float32: the converter leaves them. Else as
    `quantize_static_int8`; one sample of calibration data is enough: only its shape and dtype are
    read.
    """
    converter = _converter(model, calibration)
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    return _convert(converter, path)


def keep_onnxruntime_float32(model: tf.keras.Model, calibration, path) -> Path:
    """Write the model as it is to an ONNX file for `load_onnxruntime`; else as `keep_float32`."""
    function = programs.trace(model, calibration)
    try:
        found, _ = tf2onnx.convert.from_function(
            function, input_signature=function.input_signature, opset=OPSET
        )
    except Exception as error:
        raise NotImplementedError(f"tf2onnx cannot export it: {_line(error)}") from error
    onnx.save(found, path)
    return Path(path)


def quantize_onnxruntime_int8(model: tf.keras.Model, calibration, path) -> Path:
    """Write an ONNX file for `load_onnxruntime`: static int8, quantized by ONNX Runtime's own tool.

    Else as `quantize_static_int8`. Source: `onnxruntime.quantization.quantize_static` (QDQ).
    """
    with tempfile.TemporaryDirectory() as folder:
        whole = keep_onnxruntime_float32(model, calibration, Path(folder) / "whole.onnx")
        onnx_quantization.quantize(whole, Path(path), _samples(calibration))
    return Path(path)


def load_quantized(path, *, threads: int = 0) -> Callable:
    """Return `predict(x) -> output` over a LiteRT file, on the CPU, one call at a time.

    x: as the calibration data. threads: of the interpreter's own pool; 0: as many as TensorFlow
    has; `predict.threads` is their number. `predict.operators(x)` counts operators over integers
    by name and dtypes of what goes in, `predict.delegated(x)` says whether XNNPACK runs them all.

    Raises FileNotFoundError, and ValueError for a file that is damaged or something else.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no file {path}")
    threads = threads or _threads()
    try:
        content = Path(path).read_bytes()  # a file that is mapped could be written over
        interpreter = Interpreter(model_content=content, num_threads=threads)
        interpreter.allocate_tensors()
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"{path} is no whole LiteRT file: {_line(error)}") from None
    details = sorted(interpreter.get_input_details(), key=lambda detail: detail["name"])
    places = [detail["index"] for detail in details]
    output, *others = (detail["index"] for detail in interpreter.get_output_details())
    if others:
        raise ValueError(f"{path} has {1 + len(others)} outputs, not one")
    sizes = [tuple(detail["shape"]) for detail in details]

    def predict(x):
        nonlocal sizes
        arrays = _arrays(x)
        if sizes != (now := [array.shape for array in arrays]):
            for place, size in zip(places, now, strict=True):
                interpreter.resize_tensor_input(place, size, strict=True)
            interpreter.allocate_tensors()
            sizes = now
        for place, array in zip(places, arrays, strict=True):
            interpreter.set_tensor(place, array)
        interpreter.invoke()
        return tf.constant(interpreter.get_tensor(output))

    def delegated(x):
        predict(x)
        parts = [d for d in interpreter._get_ops_details() if d["op_name"] == "DELEGATE"]
        return len(parts) == 1 and output in parts[0]["outputs"]

    predict.threads, predict.delegated = threads, delegated
    predict.operators = lambda x: _integer_operators(interpreter)
    return predict


def load_onnxruntime(path, *, threads: int = 0) -> Callable:
    """Return `predict(x) -> output` over an ONNX file in ONNX Runtime, on the CPU.

    Else as `load_quantized`.
    """
    session = onnx_quantization.open_session(path, threads=threads or _threads())

    def predict(x):
        return tf.constant(onnx_quantization.run(session, _arrays(x)))

    predict.threads = session.get_session_options().intra_op_num_threads
    predict.operators = lambda x: onnx_quantization.integer_operators(path, _arrays(x))
    return predict


def _threads() -> int:
    """As many as TensorFlow has, where 0 stands for one a core."""
    return tf.config.threading.get_intra_op_parallelism_threads() or os.cpu_count()


def _arrays(x) -> tuple[np.ndarray, ...]:
    return tuple(np.asarray(part) for part in tf.nest.flatten(x))


def _samples(x) -> Iterator[tuple[np.ndarray, ...]]:
    """Batches of one."""
    return (tuple(part[None] for part in sample) for sample in zip(*_arrays(x), strict=True))


def _converter(model: tf.keras.Model, calibration) -> tf.lite.TFLiteConverter:
    # The converter would keep the variables of Keras 3 as such, and cannot calibrate then.
    function = convert_variables_to_constants_v2(
        programs.trace(model, calibration).get_concrete_function()
    )
    return tf.lite.TFLiteConverter.from_concrete_functions([function])


def _convert(converter: tf.lite.TFLiteConverter, path) -> Path:
    try:
        found = converter.convert()
    except Exception as error:
        raise NotImplementedError(f"LiteRT's converter refuses it: {_line(error)}") from error
    if converter.optimizations and not _integer_operators(Interpreter(model_content=found)):
        raise NotImplementedError("the model has no layer that LiteRT's converter quantizes")
    Path(path).write_bytes(found)
    return Path(path)


def _integer_operators(interpreter: Interpreter) -> dict[str, int]:
    """Operators with int8 weights: name and dtypes of what goes in -> number."""
    found = Counter()
    for detail in interpreter._get_ops_details():  # LiteRT has no public list
        dtypes = [np.dtype(kind).name for kind in detail["operand_types"]]
        if "int8" in dtypes[1:2]:
            found[f"{detail['op_name']}({', '.join(dtypes[:2])})"] += 1
    return dict(found)


def _line(error: Exception) -> str:
    """An error's words as one line."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def main() -> None:
    """Print time, size and accuracy of the trained digits-resnet20 in float32 and in int8."""
    import time
    from statistics import median

    from shared import datasets
    from shared import teacher as trained
    from tf_impl.kit import data, models, training

    model = models.build(trained.TASK.model, trained.load().weights)
    with tempfile.TemporaryDirectory() as name:
        folder = datasets.materialise(trained.TASK.dataset, Path(name))
        x, _ = data.to_device(*datasets.load(folder, "train"))
        test = [part[:1792] for part in data.to_device(*datasets.load(folder, "test"))]
        print("                   ms for 32     KB  accuracy")
        for title, write, load in (
            ("float32", keep_float32, load_quantized),
            ("int8", quantize_static_int8, load_quantized),
            ("ONNX Runtime float32", keep_onnxruntime_float32, load_onnxruntime),
            ("ONNX Runtime int8", quantize_onnxruntime_int8, load_onnxruntime),
        ):
            path, taken = write(model, x[:256], Path(name) / "model"), []
            predict = load(path)
            for _ in range(30):
                start = time.perf_counter()
                predict(test[0][:32])
                taken.append((time.perf_counter() - start) * 1e3)
            accuracy = training.evaluate(predict, *test, metric="accuracy", batch_size=32)
            size = path.stat().st_size / 1e3
            print(f"{title:20}{median(taken):8.2f}{size:7.0f}{accuracy:10.1f}")


if __name__ == "__main__":
    main()
