"""Post-training quantization: a trained model in 8-bit integers, for a CPU, without training.

    content = apply_static_int8(model, images[:256])
    pathlib.Path("model.tflite").write_bytes(content)
    interpreter = ai_edge_litert.interpreter.Interpreter(model_content=content)

What it changes: the numbers that a trained model computes with. A float tensor becomes integers and
a scale, q = round(x / scale) + zero point (Jacob et al., 2018, arXiv:1712.05877). Static
quantization takes the ranges of activations from calibration data. Dynamic quantization computes
them at run time. ONNX Runtime's tool is static, too.

Its twin: `pt_impl/compression/post_training_quantization.py`, which says where the frameworks
differ.

When it helps and when it hurts: on a CPU with units for int8 (VNNI, AMX) static int8 is two to four
times as fast if convolutions and matrix products dominate. Without these units it can be slower.
Weights shrink to a quarter. It hurts if a few values are far larger than the rest, or if
calibration data is not like later inputs. Compare accuracy before you deploy.

Run it alone: `python -m tf_impl.compression.post_training_quantization` prints time, size and
accuracy.

Copy with it: `shared/onnx_quantization.py`, `tf_impl/kit/checks/post_training_quantization.py`,
`tf_impl/kit/tracing.py`.
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import tensorflow as tf

from tf_impl.kit.checks import post_training_quantization as checks
from tf_impl.kit.tracing import inlined, litert_function, trace

OPSET = 18  # of ONNX: the newest that tf2onnx writes
SAME, MOST_APART = 1e-4, 0.5  # relative L2 of a file's outputs: in float32, in integers


def apply_static_int8(
    model: tf.keras.Model, calibration, *, activation_bits: int = 8, keep_float: tuple = ()
) -> bytes:
    """Return the content of a LiteRT file over int8, weights and activations; the model is left.

    Inputs and outputs are float32. `kit/int8_files.py` writes it, and runs it with XNNPACK.

    Args:
        model: takes any number of samples; returns tensors, also in tuples, lists and dicts, of
            which the file makes one tuple, dicts in the order of their sorted keys.
        calibration: a tensor, or a tuple, list or dict of tensors as `fit` takes them; samples
            along the first axis, such as a few hundred of the training split.
        activation_bits: 8, or 16 where 8 lose too much: biases have 64 bits then, and what LiteRT
            has no such kernel for stays float32.
        keep_float: numbers of layers, of `int8_layers`, that stay in float32.

    Raises ValueError for calibration data that is empty, not finite, or that the model does not
    take, and for a model without variables; NotImplementedError for a model that the converter
    refuses, that has a loop (an LSTM) or no layer to quantize, or that masks the scores of
    attention.
    Source: `tf.lite.TFLiteConverter`, with `TFLITE_BUILTINS_INT8` only; with 16 bits
    `EXPERIMENTAL_TFLITE_BUILTINS_ACTIVATIONS_INT16_WEIGHTS_INT8` and `TFLITE_BUILTINS`.
    """
    checks.check_post_training_quantization(model, calibration, activation_bits)
    kinds = tf.lite.OpsSet
    operators = [kinds.TFLITE_BUILTINS_INT8]
    if activation_bits == 16:
        operators = [kinds.EXPERIMENTAL_TFLITE_BUILTINS_ACTIVATIONS_INT16_WEIGHTS_INT8]
        operators += [kinds.TFLITE_BUILTINS]
    program = trace(model, calibration)
    function = litert_function(program)
    checks.check_loops(function)
    converter = tf.lite.TFLiteConverter.from_concrete_functions([function], program)
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    converter.representative_dataset = lambda: map(list, _samples(calibration))
    converter.target_spec.supported_ops = operators
    with checks.refusals("LiteRT's converter refuses it"):
        content = converter.convert()
    if activation_bits == 8:  # 16 are enough for columns of any size
        layers = checks.layer_operators(content)
        names = checks.with_feeding(content, [layers[number] for number in keep_float])
        content = _in_float32(converter, content, names)
    checks.check_quantized(content)
    return content


def int8_layers(model: tf.keras.Model, calibration) -> list[str]:
    """Return the names of what layers give in the file, in the order in which they run."""
    return checks.layer_operators(apply_static_int8(model, calibration))


def _in_float32(converter, content: bytes, names: list[str]) -> bytes:
    """Convert anew with operators in float32: of these names, and those that scale the inputs.

    A model that scales its inputs column by column needs float32 there.
    """
    names = names + checks.scaling_operators(content)
    if not names:
        return content
    debugger = tf.lite.experimental.QuantizationDebugger(
        converter=converter,
        debug_dataset=converter.representative_dataset,
        debug_options=tf.lite.experimental.QuantizationDebugOptions(denylisted_nodes=names),
    )
    return debugger.get_nondebug_quantized_model()


def apply_dynamic_int8(model: tf.keras.Model, calibration) -> bytes:
    """Return the content of a LiteRT file with int8 weights; activations get a scale at each call.

    Kernels of fewer than 1,024 weights stay in float32: the converter leaves them. A model with a
    loop, such as an LSTM, gets a file for one sample: the converter takes no other. Else as
    `apply_static_int8`; one sample of calibration data is enough: its shape and dtype are read.
    """
    checks.check_post_training_quantization(model, calibration)
    program = trace(model, calibration)
    converter = tf.lite.TFLiteConverter.from_concrete_functions([litert_function(program)], program)
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    with checks.refusals("LiteRT's converter refuses it"):
        content = converter.convert()
    checks.check_quantized(content)
    return content


def _samples(x) -> Iterator[tuple[np.ndarray, ...]]:
    """Batches of one."""
    return (tuple(part[None] for part in sample) for sample in zip(*_arrays(x), strict=True))


def _arrays(x) -> tuple[np.ndarray, ...]:
    return tuple(np.asarray(part) for part in tf.nest.flatten(x))


def keep_onnxruntime_float32(model: tf.keras.Model, calibration, path) -> Path:
    """Write the model as it is, in float32, to an ONNX file for `load_onnxruntime`.

    One sample of calibration data is enough: it is compared, and its shape and dtype are read.
    Before the file is there, it is read again and compared with the model.

    Raises as `apply_static_int8`; NotImplementedError, too, where tf2onnx cannot export it, and
    RuntimeError where outputs are more than a relative `SAME` off the model's.
    """
    import tf2onnx

    part = Path(f"{path}.part")
    with inlined():  # Keras has a function within the model for grouped convolutions
        program = trace(model, calibration)
        graph, inputs, outputs = checks.frozen(program)
        with checks.refusals("tf2onnx cannot export it"):
            tf2onnx.convert.from_graph_def(
                graph,
                input_names=inputs,
                output_names=outputs,
                opset=OPSET,
                custom_op_handlers={"Erfc": (_erfc, [])},
                output_path=str(part),
            )
    return checks.keep_if_near(part, path, load_onnxruntime, model, calibration, SAME)


def _erfc(context, node, name, arguments) -> None:
    """Exact GELU is written with erfc(x), which ONNX lacks, as 1 - erf(x)."""
    (x,), (y,) = node.input, node.output
    shapes, dtypes = [context.get_shape(y)], [context.get_dtype(y)]
    context.remove_node(node.name)
    erf = context.make_node("Erf", [x], shapes=shapes, dtypes=dtypes).output[0]
    one = context.make_const(f"{name}_one", np.ones((), np.float32)).output[0]
    context.make_node("Sub", [one, erf], outputs=[y], name=name, shapes=shapes, dtypes=dtypes)


def quantize_onnxruntime_int8(
    model: tf.keras.Model, calibration, path, *, keep_float: tuple = ()
) -> Path:
    """Write an ONNX file for `load_onnxruntime`: static int8, quantized by ONNX Runtime's own tool.

    keep_float: numbers of layers in the order in which they run, which stay in float32. Else as
    `keep_onnxruntime_float32`, but that outputs may be a relative `MOST_APART` off.
    Source: `onnxruntime.quantization.quantize_static` (QDQ).
    """
    from shared import onnx_quantization

    part = Path(f"{path}.part")
    with tempfile.TemporaryDirectory() as folder:
        whole = keep_onnxruntime_float32(model, calibration, Path(folder) / "whole.onnx")
        onnx_quantization.quantize(whole, part, _samples(calibration), keep_float=keep_float)
    return checks.keep_if_near(part, path, load_onnxruntime, model, calibration, MOST_APART)


def load_onnxruntime(path, *, threads: int = 0) -> Callable:
    """Return `predict(x) -> output` over an ONNX file in ONNX Runtime, on the CPU.

    x: as the calibration data. `predict.threads` is the number of the session's threads.

    Args:
        threads: 0: as many as TensorFlow has.

    Raises FileNotFoundError, and ValueError for a file that is damaged or something else.
    """
    from shared import onnx_quantization

    threads = threads or tf.config.threading.get_intra_op_parallelism_threads() or os.cpu_count()
    session = onnx_quantization.open_session(path, threads=threads)

    def predict(x):
        found = tuple(map(tf.constant, onnx_quantization.run(session, _arrays(x))))
        return found[0] if len(found) == 1 else found

    predict.threads = session.get_session_options().intra_op_num_threads
    return predict


def main() -> None:
    """Print time, size and accuracy of the trained digits CNN in float32 and in int8."""
    from tf_impl.kit import int8_files, training
    from tf_impl.kit.demo import Demo

    demo = Demo("digits-cnn", batch_size=32)
    model, optimizer, loss_fn = demo.build()
    demo.fit(training.make_train_step(model, optimizer, loss_fn), epochs=demo.task.recipe.epochs)
    x, path = demo.train[0][:256], Path(tempfile.mkdtemp()) / "model"
    print("                   ms for 32     KB  accuracy")
    for title, write, read in (
        ("float32", int8_files.keep_float32, int8_files.load_int8),
        (
            "int8",
            lambda *at: int8_files.save_int8(apply_static_int8(*at[:2]), *at),
            int8_files.load_int8,
        ),
        ("ONNX Runtime float32", keep_onnxruntime_float32, load_onnxruntime),
        ("ONNX Runtime int8", quantize_onnxruntime_int8, load_onnxruntime),
    ):
        predict = read(write(model, x, path))
        ms = demo.times({title: lambda x, y: predict(x)})[title]  # noqa: B023
        accuracy = training.evaluate(predict, *demo.test, metric="accuracy", batch_size=32)
        print(f"{title:20}{ms:8.2f}{path.stat().st_size / 1e3:7.0f}{accuracy:10.1f}")


if __name__ == "__main__":
    main()
