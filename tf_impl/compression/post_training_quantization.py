"""Post-training quantization: a trained model in 8-bit integers, for a CPU, without training.

What it changes: the numbers that a trained model computes with. A float tensor becomes integers and
a scale, q = round(x / scale) + zero point (Jacob et al., 2018, "Quantization and Training of Neural
Networks for Efficient Integer-Arithmetic-Only Inference", section 2).

- static: weights and activations; the ranges of activations come from calibration data
- dynamic: weights; each activation is quantized when it is there, by its own range

The `apply_` functions return the quantized model, the others write it to a file, which
`load_quantized` or, for ONNX, `load_onnxruntime` reads; neither executes code from it.
`keep_float32` and `keep_onnxruntime_float32` write the model as it is for the same runtimes: what
the others are to be compared with.

Its twin: `pt_impl/compression/post_training_quantization.py`.

Where the frameworks differ and why:
- The runtime here is LiteRT, which interprets a file that TensorFlow's converter has written; there
  it is TorchInductor, which compiles. Both frameworks can go to ONNX Runtime.
- Activations are signed here and unsigned there; weights have a scale for each output on both.
- Dynamic quantization covers convolutions here, but no kernel of fewer than 1,024 weights; there
  linear layers of any size and nothing else.
- LiteRT would put an input on one grid before `Normalization` brings its columns to one size, and
  lose the narrow ones: what scales an input column by column is kept in float32. There everything
  between layers is.
- The interpreter has threads of its own; another batch size makes it plan its memory anew.
- Nothing notices a weight that was changed in a file: LiteRT's format has no checksum.

When it helps and when it hurts: on a CPU with units for int8 (VNNI, AMX), static int8 is two to
four times as fast where convolutions and matrix products dominate; without them it can be slower.
Files shrink to a quarter. It hurts where few values are far larger than the rest, and where
calibration data is not like what comes later: compare accuracy before it is deployed.

Run it alone: `python -m tf_impl.compression.post_training_quantization` prints time, size and
agreement.

Copy with it: `shared/onnx_quantization.py`, `tf_impl/kit/comparing.py`, `tf_impl/kit/tracing.py`.
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import tensorflow as tf
from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

from tf_impl.kit import comparing, tracing

OPSET = 18  # of ONNX: the newest that tf2onnx writes
SAME, MOST_APART = 1e-4, 0.5  # relative L2 of a file's outputs: in float32, in integers
COARSEST = 16  # step of the scores of a softmax: 255 of them are 4,000, which no score is
_LOOPS = {"While", "StatelessWhile"}
_SCALES = {"ADD", "SUB", "MUL", "DIV"}  # LiteRT's names


def keep_float32(model: tf.keras.Model, calibration, path) -> Path:
    """Write the model as it is, in float32, for `load_quantized`; else as `quantize_static_int8`.

    One sample of calibration data is enough: it is compared, and its shape and dtype are read.
    """
    converter, _ = _converter(model, calibration)
    return _write(_converted(converter), model, calibration, path, SAME)


def apply_static_int8(model: tf.keras.Model, calibration, *, activation_bits: int = 8) -> Callable:
    """Return the model over int8 weights and activations: `predict(x)`, as of `load_quantized`.

    It is what the file of `quantize_static_int8` holds, which raises the same.
    """
    return _interpreted(_static_int8(model, calibration, activation_bits))


def apply_dynamic_int8(model: tf.keras.Model, calibration) -> Callable:
    """Return the model with the weights of `quantize_dynamic_int8`, as `apply_static_int8` does."""
    return _interpreted(_dynamic_int8(model, calibration))


def quantize_static_int8(
    model: tf.keras.Model, calibration, path, *, activation_bits: int = 8
) -> Path:
    """Write `path`: operators over int8, weights and activations; inputs and outputs are float.

    The file is one of LiteRT (.tflite); before it is there, it is read again and compared with the
    model, which is left as it is. A model with an LSTM or another loop gets a file for one sample,
    which `load_quantized` runs once for each: the converter takes loops for a known number of them
    alone.

    Args:
        model: takes any number of samples; returns tensors, also in tuples, lists and dicts, of
            which the file makes one tuple, dicts in the order of their sorted keys.
        calibration: a tensor, or a tuple, list or dict of tensors as `fit` takes them; samples
            along the first axis, such as a few hundred of the training split.
        activation_bits: 8, or 16 where 8 lose too much: biases have 64 bits then, and what LiteRT
            has no such kernel for stays float32.

    Returns the path.
    Raises, and writes nothing, ValueError for calibration data that is empty, not finite, or that
    the model does not take, and for a model without variables; NotImplementedError for a model that
    the converter refuses, that has no layer to quantize or that masks the scores of attention;
    RuntimeError where outputs are more than a relative `MOST_APART` off the model's.
    Source: `tf.lite.TFLiteConverter`, with `TFLITE_BUILTINS_INT8` alone; with 16 bits
    `EXPERIMENTAL_TFLITE_BUILTINS_ACTIVATIONS_INT16_WEIGHTS_INT8` and `TFLITE_BUILTINS`.
    """
    content = _static_int8(model, calibration, activation_bits)
    return _write(content, model, calibration, path, MOST_APART)


def quantize_dynamic_int8(model: tf.keras.Model, calibration, path) -> Path:
    """Write `path`: int8 weights; activations get their scale at each call.

    Kernels of fewer than 1,024 weights stay in float32: the converter leaves them. Else as
    `quantize_static_int8`; one sample of calibration data is enough: it is compared, and its shape
    and dtype are read.
    """
    content = _dynamic_int8(model, calibration)
    return _write(content, model, calibration, path, MOST_APART)


def keep_onnxruntime_float32(model: tf.keras.Model, calibration, path) -> Path:
    """Write the model as it is to an ONNX file for `load_onnxruntime`; else as `keep_float32`."""
    import onnx

    before, part = tf.config.functions_run_eagerly(), Path(f"{path}.part")
    # Functions within the model become a part of its graph: Keras has one for grouped convolutions.
    tf.config.run_functions_eagerly(True)
    try:
        function = tracing.trace(model, calibration).get_concrete_function()
    finally:
        tf.config.run_functions_eagerly(before)
    onnx.save(_onnx(function), part)
    return _keep(part, path, load_onnxruntime, model, calibration, SAME)


def quantize_onnxruntime_int8(model: tf.keras.Model, calibration, path) -> Path:
    """Write an ONNX file for `load_onnxruntime`: static int8, quantized by ONNX Runtime's own tool.

    Else as `quantize_static_int8`. Source: `onnxruntime.quantization.quantize_static` (QDQ).
    """
    from shared import onnx_quantization

    part = Path(f"{path}.part")
    with tempfile.TemporaryDirectory() as folder:
        whole = keep_onnxruntime_float32(model, calibration, Path(folder) / "whole.onnx")
        onnx_quantization.quantize(whole, part, _samples(calibration))
    return _keep(part, path, load_onnxruntime, model, calibration, MOST_APART)


def load_quantized(path, *, threads: int = 0) -> Callable:
    """Return `predict(x) -> output` over a LiteRT file, on the CPU, one call at a time.

    x: as the calibration data. `predict.threads` is the number of its threads.

    Args:
        threads: of the interpreter's own pool; 0: as many as TensorFlow has.

    Raises FileNotFoundError, and ValueError for a file that is damaged or something else.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        # Its bytes: a file that is mapped could be written over.
        return _interpreted(Path(path).read_bytes(), threads=threads)
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"{path} is no whole LiteRT file: {_line(error)}") from None


def load_onnxruntime(path, *, threads: int = 0) -> Callable:
    """Return `predict(x) -> output` over an ONNX file in ONNX Runtime, on the CPU.

    Else as `load_quantized`.
    """
    from shared import onnx_quantization

    session = onnx_quantization.open_session(path, threads=threads or _threads())

    def predict(x):
        found = tuple(map(tf.constant, onnx_quantization.run(session, _arrays(x))))
        return found[0] if len(found) == 1 else found

    predict.threads = session.get_session_options().intra_op_num_threads
    return predict


def _threads() -> int:
    """As many as TensorFlow has, where 0 stands for one a core."""
    return tf.config.threading.get_intra_op_parallelism_threads() or os.cpu_count()


def _arrays(x) -> tuple[np.ndarray, ...]:
    return tuple(np.asarray(part) for part in tf.nest.flatten(x))


def _samples(x) -> Iterator[tuple[np.ndarray, ...]]:
    """Batches of one."""
    return (tuple(part[None] for part in sample) for sample in zip(*_arrays(x), strict=True))


def _static_int8(model: tf.keras.Model, calibration, activation_bits: int) -> bytes:
    """A LiteRT file with int8 weights, and activations in the ranges of the calibration data."""
    kinds = tf.lite.OpsSet
    operators = {
        8: [kinds.TFLITE_BUILTINS_INT8],
        16: [
            kinds.EXPERIMENTAL_TFLITE_BUILTINS_ACTIVATIONS_INT16_WEIGHTS_INT8,
            kinds.TFLITE_BUILTINS,
        ],
    }
    if activation_bits not in operators:
        raise ValueError(f"activation_bits must be 8 or 16, not {activation_bits!r}")
    converter, has_loops = _converter(model, calibration)
    if has_loops:  # it crashes
        raise NotImplementedError(
            "LiteRT's converter cannot calibrate inside of a loop, such as that of an LSTM: "
            "quantize_dynamic_int8 can, or unroll=True takes the loop away"
        )
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    converter.representative_dataset = lambda: map(list, _samples(calibration))
    converter.target_spec.supported_ops = operators[activation_bits]
    content = _converted(converter)
    scaling = _scaling(content)
    if scaling and activation_bits == 8:  # 16 are enough for columns of any size
        selective = tf.lite.experimental.QuantizationDebugger(
            converter=converter,
            debug_dataset=converter.representative_dataset,
            debug_options=tf.lite.experimental.QuantizationDebugOptions(denylisted_nodes=scaling),
        )
        content = selective.get_nondebug_quantized_model()
    return _checked(content)


def _dynamic_int8(model: tf.keras.Model, calibration) -> bytes:
    """A LiteRT file with int8 weights, and activations that get their ranges as it runs."""
    converter, _ = _converter(model, calibration)
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    return _checked(_converted(converter))


def _converter(model: tf.keras.Model, calibration) -> tuple:
    """LiteRT's converter of a model with its weights as constants, and whether it has loops.

    With a loop it is for one sample: the converter takes loops for a known number of them alone.
    """
    program = tracing.trace(model, calibration)
    traced = program.get_concrete_function()
    has_loops = any(node.type in _LOOPS for node in traced.graph.get_operations())
    if has_loops:
        one = [tf.TensorSpec([1, *s.shape[1:]], s.dtype, s.name) for s in program.input_signature]
        traced = tf.function(program.python_function).get_concrete_function(*one)
    # The converter would keep the variables of Keras 3 as such, and cannot calibrate then.
    frozen = convert_variables_to_constants_v2(traced)
    return tf.lite.TFLiteConverter.from_concrete_functions([frozen]), has_loops


def _converted(converter) -> bytes:
    try:
        return converter.convert()
    except Exception as error:
        reason = tracing.one_line(error)
        raise NotImplementedError(f"LiteRT's converter refuses it: {reason}") from error


def _checked(content: bytes) -> bytes:
    if not _has_integers(content):
        raise NotImplementedError("the model has no layer that LiteRT's converter quantizes")
    _check_scores(content)
    return content


def _has_integers(content: bytes) -> bool:
    """Whether an operator of a LiteRT file has int8 weights."""
    from ai_edge_litert.interpreter import Interpreter

    operators = Interpreter(model_content=content)._get_ops_details()  # there is no public list
    return any(np.dtype("int8") in map(np.dtype, one["operand_types"][1:2]) for one in operators)


def _scaling(content: bytes) -> list[str]:
    """Names of the operators that scale and shift an input, column by column, before all else."""
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(model_content=content)
    tensors = {one["index"]: one for one in interpreter.get_tensor_details()}
    operators = interpreter._get_ops_details()
    made = {place for one in operators for place in one["outputs"]}
    scaled = {one["index"] for one in interpreter.get_input_details()}
    variable, names, by_column = made | scaled, [], False
    for one in operators:
        given = {*one["inputs"]} - {-1}  # which stands for a bias that is not there
        constants = [tensors[place] for place in given - variable]
        if not scaled & given or len(constants) + 1 != len(given):
            continue
        if one["op_name"] in _SCALES:
            names += [tensors[place]["name"] for place in one["outputs"]]
            by_column |= any(np.prod(constant["shape"]) > 1 for constant in constants)
        if one["op_name"] in _SCALES | {"QUANTIZE"}:
            scaled.update(one["outputs"])
    return names if by_column else []


def _check_scores(content: bytes) -> None:
    """Raise where a mask was quantized with the scores that it is put on."""
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(model_content=content)
    steps = {one["index"]: one["quantization"][0] for one in interpreter.get_tensor_details()}
    for operator in interpreter._get_ops_details():
        step = steps[operator["inputs"][0]] if operator["op_name"] == "SOFTMAX" else 0.0
        if step > COARSEST:
            raise NotImplementedError(
                f"LiteRT would put attention's scores on a grid of {step:.2g} with the -1e9 of "
                "their mask, where all are one: take quantize_dynamic_int8"
            )


def _interpreted(content: bytes, threads: int = 0) -> Callable:
    """`predict(x) -> output` over the content of a LiteRT file."""
    from ai_edge_litert.interpreter import Interpreter

    threads = threads or _threads()
    interpreter = Interpreter(model_content=content, num_threads=threads)
    interpreter.allocate_tensors()
    inputs = sorted(interpreter.get_input_details(), key=lambda detail: detail["name"])
    outputs = interpreter.get_output_details()
    single = any(detail["shape_signature"][0] == 1 for detail in inputs)  # of a model with a loop
    shapes: list = []

    def run(arrays):
        if shapes != [array.shape for array in arrays]:  # memory is laid out for one size
            for detail, array in zip(inputs, arrays, strict=True):
                interpreter.resize_tensor_input(detail["index"], array.shape, strict=True)
            interpreter.allocate_tensors()
            shapes[:] = [array.shape for array in arrays]
        for detail, array in zip(inputs, arrays, strict=True):
            interpreter.set_tensor(detail["index"], array)
        interpreter.invoke()
        return [interpreter.get_tensor(detail["index"]) for detail in outputs]

    def predict(x):
        if single:
            samples = [run(sample) for sample in _samples(x)]
            arrays = [np.concatenate(parts) for parts in zip(*samples, strict=True)]
        else:
            arrays = run(_arrays(x))
        tensors = tuple(map(tf.constant, arrays))
        return tensors[0] if len(tensors) == 1 else tensors

    predict.threads = threads
    return predict


def _write(content: bytes, model: tf.keras.Model, x, path, most: float) -> Path:
    part = Path(f"{path}.part")
    part.write_bytes(content)
    return _keep(part, path, load_quantized, model, x, most)


def _onnx(function):
    """The ONNX model of a traced function, with its weights as constants, not as inputs."""
    import tf2onnx

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
        apart = comparing.apart(load(part)(few), tracing.outputs(model, few))
    except Exception as error:
        part.unlink()
        raise NotImplementedError(f"the runtime cannot run the file: {_line(error)}") from error
    if not apart <= most:
        part.unlink()
        raise RuntimeError(
            f"outputs of the file are {apart:.2%} off the model's, which move by "
            f"{_moved(model, few):.2%} where its inputs alone have 8 bits"
        )
    return part.replace(path)


def _moved(model: tf.keras.Model, x) -> float:
    """How far 8 bits for the inputs move what the model gives: some models amplify all rounding."""
    rounded = tf.nest.map_structure(_to_8_bits, x)
    return comparing.apart(tracing.outputs(model, rounded), tracing.outputs(model, x))


def _to_8_bits(x: tf.Tensor) -> tf.Tensor:
    if not x.dtype.is_floating:
        return x
    span = tf.maximum(tf.reduce_max(x), 0) - tf.minimum(tf.reduce_min(x), 0)
    scale = tf.maximum(span, 1e-12) / 255
    return tf.round(x / scale) * scale


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
            path, times = write(model, x[:256], Path(name) / "model"), []
            predict = load(path)
            for _ in range(30):
                start = time.perf_counter()
                predict(test[0][:32])
                times.append((time.perf_counter() - start) * 1e3)
            accuracy = training.evaluate(predict, *test, metric="accuracy", batch_size=32)
            size = path.stat().st_size / 1e3
            print(f"{title:20}{median(times):8.2f}{size:7.0f}{accuracy:10.1f}")


if __name__ == "__main__":
    main()
