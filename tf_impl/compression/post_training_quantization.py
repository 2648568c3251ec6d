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

Copy with it: `shared/archives.py`, `shared/atomic.py`, `shared/onnx_quantization.py`,
`tf_impl/kit/programs.py`.
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
SAME, MOST_APART = 1e-4, 0.5  # relative L2 of a file's outputs: in float32, in integers
_LOOPS = {"While", "StatelessWhile"}


def keep_float32(model: tf.keras.Model, calibration, path) -> Path:
    """Write the model as it is, in float32, for `load_quantized`; else as `quantize_static_int8`.

    One sample of calibration data is enough: it is compared, and its shape and dtype are read.
    """
    return _convert(model, calibration, path, lambda converter: None, SAME)


def quantize_static_int8(
    model: tf.keras.Model, calibration, path, *, activation_bits: int = 8
) -> Path:
    """Write `path`: operators over int8, weights and activations; inputs and outputs are float.

    calibration: a tensor, or a tuple, list or dict of tensors as `fit` takes them; samples along
    the first axis, such as a few hundred of the training split. The model takes any number of them;
    it returns tensors, also in tuples, lists and dicts, of which the file makes one tuple, dicts in
    the order of their sorted keys. The model is left as it is. activation_bits: 8, or 16 where 8
    lose too much: biases have 64 bits then, and what LiteRT has no such kernel for stays float32.
    The file is one of LiteRT (.tflite); before it is there, it is read again and compared with the
    model. Returns the path.

    A model with an LSTM or another loop gets a file for one sample, which `load_quantized` runs
    once for each: the converter takes loops for a known number of them alone.

    Raises ValueError for calibration data that is empty, not finite, or that the model does not
    take, and for a model without variables; NotImplementedError for a model that the converter
    refuses or that has no layer to quantize; RuntimeError where outputs are more than a relative
    `MOST_APART` off the model's. In all cases nothing is written.
    Source: `tf.lite.TFLiteConverter`, with `TFLITE_BUILTINS_INT8` alone; with 16 bits
    `EXPERIMENTAL_TFLITE_BUILTINS_ACTIVATIONS_INT16_WEIGHTS_INT8` and `TFLITE_BUILTINS`.
    """
    if activation_bits not in (8, 16):
        raise ValueError(f"activation_bits must be 8 or 16, not {activation_bits!r}")
    kinds = tf.lite.OpsSet
    operators = [kinds.TFLITE_BUILTINS_INT8]
    if activation_bits == 16:
        wide = kinds.EXPERIMENTAL_TFLITE_BUILTINS_ACTIVATIONS_INT16_WEIGHTS_INT8
        operators = [wide, kinds.TFLITE_BUILTINS]

    def settings(converter):
        converter.optimizations = [tf.lite.Optimize.DEFAULT]
        converter.representative_dataset = lambda: map(list, _samples(calibration))
        converter.target_spec.supported_ops = operators

    return _convert(model, calibration, path, settings, MOST_APART)


def quantize_dynamic_int8(model: tf.keras.Model, calibration, path) -> Path:
    """Write `path`: int8 weights; activations get their scale at each call.

    Kernels of fewer than 1,024 weights stay in float32: the converter leaves them. Else as
    `quantize_static_int8`; one sample of calibration data is enough: it is compared, and its shape
    and dtype are read.
    """

    def settings(converter):
        converter.optimizations = [tf.lite.Optimize.DEFAULT]

    return _convert(model, calibration, path, settings, MOST_APART)


def keep_onnxruntime_float32(model: tf.keras.Model, calibration, path) -> Path:
    """Write the model as it is to an ONNX file for `load_onnxruntime`; else as `keep_float32`."""
    before, part = tf.config.functions_run_eagerly(), Path(f"{path}.part")
    # Functions within the model become a part of its graph: Keras has one for grouped convolutions.
    tf.config.run_functions_eagerly(True)
    try:
        function = programs.trace(model, calibration).get_concrete_function()
    finally:
        tf.config.run_functions_eagerly(before)
    onnx.save(_onnx(function), part)
    return _keep(part, path, load_onnxruntime, model, calibration, SAME)


def quantize_onnxruntime_int8(model: tf.keras.Model, calibration, path) -> Path:
    """Write an ONNX file for `load_onnxruntime`: static int8, quantized by ONNX Runtime's own tool.

    Else as `quantize_static_int8`. Source: `onnxruntime.quantization.quantize_static` (QDQ).
    """
    part = Path(f"{path}.part")
    with tempfile.TemporaryDirectory() as folder:
        whole = keep_onnxruntime_float32(model, calibration, Path(folder) / "whole.onnx")
        onnx_quantization.quantize(whole, part, _samples(calibration))
    return _keep(part, path, load_onnxruntime, model, calibration, MOST_APART)


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
    outputs = [detail["index"] for detail in interpreter.get_output_details()]
    sizes = [tuple(detail["shape"]) for detail in details]
    single = any(detail["shape_signature"][0] == 1 for detail in details)  # of a model with a loop

    def run(arrays):
        nonlocal sizes
        if sizes != (now := [array.shape for array in arrays]):
            for place, size in zip(places, now, strict=True):
                interpreter.resize_tensor_input(place, size, strict=True)
            interpreter.allocate_tensors()
            sizes = now
        for place, array in zip(places, arrays, strict=True):
            interpreter.set_tensor(place, array)
        interpreter.invoke()
        return [interpreter.get_tensor(place) for place in outputs]

    def predict(x):
        if single:
            found = map(np.concatenate, zip(*map(run, _samples(x)), strict=True))
        else:
            found = run(_arrays(x))
        found = tuple(map(tf.constant, found))
        return found[0] if len(found) == 1 else found

    def delegated(x):
        predict(x)
        parts = [d for d in interpreter._get_ops_details() if d["op_name"] == "DELEGATE"]
        return len(parts) == 1 and {*outputs} <= {*parts[0]["outputs"]}

    predict.threads, predict.delegated = threads, delegated
    predict.operators = lambda x: _integer_operators(interpreter)
    return predict


def load_onnxruntime(path, *, threads: int = 0) -> Callable:
    """Return `predict(x) -> output` over an ONNX file in ONNX Runtime, on the CPU.

    Else as `load_quantized`.
    """
    session = onnx_quantization.open_session(path, threads=threads or _threads())

    def predict(x):
        found = tuple(map(tf.constant, onnx_quantization.run(session, _arrays(x))))
        return found[0] if len(found) == 1 else found

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


def _convert(model: tf.keras.Model, calibration, path, settings: Callable, most: float) -> Path:
    """Write what the converter makes with these settings, if it predicts what the model does."""
    program = programs.trace(model, calibration)
    concrete = program.get_concrete_function()
    loops = any(node.type in _LOOPS for node in concrete.graph.get_operations())
    if loops:
        one = [tf.TensorSpec([1, *s.shape[1:]], s.dtype, s.name) for s in program.input_signature]
        concrete = tf.function(program.python_function).get_concrete_function(*one)
    # The converter would keep the variables of Keras 3 as such, and cannot calibrate then.
    frozen = convert_variables_to_constants_v2(concrete)
    converter = tf.lite.TFLiteConverter.from_concrete_functions([frozen])
    settings(converter)
    if loops and converter.representative_dataset:  # it crashes
        raise NotImplementedError(
            "LiteRT's converter cannot calibrate inside of a loop, such as that of an LSTM: "
            "quantize_dynamic_int8 can, or unroll=True takes the loop away"
        )
    try:
        found = converter.convert()
    except Exception as error:
        raise NotImplementedError(f"LiteRT's converter refuses it: {_line(error)}") from error
    if converter.optimizations and not _integer_operators(Interpreter(model_content=found)):
        raise NotImplementedError("the model has no layer that LiteRT's converter quantizes")
    part = Path(f"{path}.part")
    part.write_bytes(found)
    return _keep(part, path, load_quantized, model, calibration, most)


def _onnx(function):
    """The ONNX model of a traced function, with its weights as constants, not as inputs."""
    frozen = convert_variables_to_constants_v2(function, lower_control_flow=False)
    names = [tensor.name for tensor in frozen.inputs], [tensor.name for tensor in frozen.outputs]
    graph = frozen.graph.as_graph_def(add_shapes=True)
    try:
        found, _ = tf2onnx.convert.from_graph_def(
            graph,
            input_names=names[0],
            output_names=names[1],
            opset=OPSET,
            custom_op_handlers={"Erfc": (_erfc, [])},
        )
    except Exception as error:
        raise NotImplementedError(f"tf2onnx cannot export it: {_line(error)}") from error
    return found


def _erfc(context, node, name, arguments) -> None:
    """Exact GELU is written with erfc(x), which ONNX lacks, as 1 - erf(x)."""
    (x,), (y,) = node.input, node.output
    shapes, dtypes = [context.get_shape(y)], [context.get_dtype(y)]
    context.remove_node(node.name)
    erf = context.make_node("Erf", [x], shapes=shapes, dtypes=dtypes).output[0]
    one = context.make_const(f"{name}_one", np.ones((), np.float32)).output[0]
    context.make_node("Sub", [one, erf], outputs=[y], name=name, shapes=shapes, dtypes=dtypes)


def _keep(part: Path, path, load: Callable, model: tf.keras.Model, x, most: float) -> Path:
    """Give the file `part` its name if it predicts for `x` what the model does, nearly."""
    few = tf.nest.map_structure(lambda tensor: tensor[:32], x)
    try:
        apart = programs.apart(load(part)(few), programs.call(model, few))
    except Exception as error:
        part.unlink()
        raise NotImplementedError(f"the runtime cannot run the file: {_line(error)}") from error
    if not apart <= most:
        part.unlink()
        raise RuntimeError(f"outputs of the file are {apart:.2%} off the model's")
    return part.replace(path)


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
